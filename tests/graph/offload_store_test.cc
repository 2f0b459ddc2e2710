// SPDX-License-Identifier: Apache-2.0
// Tensors that leave the memory and come back as they were.

#include "graph/offload_store.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <torch/torch.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "core/check.h"
#include "graph/memory_layout.h"
#include "graph/scratch_file.h"
#include "tests/error_of.h"

namespace smp::graph {
namespace {

using smp::testing::error_of;

uintptr_t misalignment(const at::Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 64;
}

TEST(OffloadStore, TensorsComeBackAsTheyLay) {
  torch::manual_seed(1);
  const auto base = torch::randn({6, 35});
  const auto numbers = torch::randn({3, 4}, torch::kComplexFloat);
  const std::vector<at::Tensor> tensors = {
      base,
      base.narrow(1, 3, 5),                 // gaps, and no multiple of 64 bytes
      base.t(),                             // another order
      torch::randn({4, 1}).expand({4, 7}),  // one element for several
      torch::arange(11).to(torch::kByte).narrow(0, 3, 8),
      torch::randn({}),
      torch::zeros({0, 3}),
      base.to(torch::kBFloat16).narrow(0, 1, 2),
      numbers.conj(),               // shows other numbers than its memory holds
      torch::imag(numbers.conj()),  // likewise
  };
  OffloadStore store;
  std::vector<std::shared_ptr<StoredTensor>> stored;
  for (const auto& tensor : tensors) stored.push_back(store.put(tensor.detach()));
  store.wait();
  EXPECT_GT(store.bytes_out(), 0);
  EXPECT_EQ(store.bytes_back(), 0);
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (i % 2 == 0) stored[i]->prefetch();
    const at::Tensor back = stored[i]->get();
    EXPECT_TRUE(torch::equal(back, tensors[i])) << i;
    EXPECT_EQ(back.strides(), tensors[i].strides()) << i;
    EXPECT_EQ(back.scalar_type(), tensors[i].scalar_type()) << i;
    EXPECT_EQ(back.is_conj(), tensors[i].is_conj()) << i;
    EXPECT_EQ(back.is_neg(), tensors[i].is_neg()) << i;
    if (back.numel() == 0) continue;
    EXPECT_EQ(misalignment(back), misalignment(tensors[i])) << i;
    EXPECT_FALSE(back.storage().is_alias_of(tensors[i].storage())) << i << " never left";
  }
  EXPECT_EQ(store.bytes_back(), store.bytes_out());
}

TEST(OffloadStore, MemoryIsFreeWhenATensorHasLeft) {
  OffloadStore store;
  at::Tensor tensor = torch::randn({100});
  const auto weak = tensor.storage().getWeakStorageImpl();
  const auto stored = store.put(tensor);
  tensor = at::Tensor();
  store.wait();
  EXPECT_TRUE(weak.expired());
}

TEST(OffloadStore, TensorsOutliveTheStore) {
  const auto tensor = torch::randn({1000});
  std::shared_ptr<StoredTensor> away, waiting;
  {
    OffloadStore store;
    away = store.put(tensor);
    store.wait();
    waiting = store.put(tensor);
  }
  EXPECT_TRUE(torch::equal(away->get(), tensor));
  EXPECT_TRUE(torch::equal(waiting->get(), tensor));
}

TEST(OffloadStore, ManyTensorsInAnyOrder) {
  std::mt19937 random(1);
  OffloadStore store;
  std::map<int, std::pair<at::Tensor, std::shared_ptr<StoredTensor>>> stored;
  for (int i = 0; i < 2000; ++i) {
    const auto tensor = torch::full({static_cast<int64_t>(1 + random() % 5000)}, i);
    stored[i] = {tensor, store.put(tensor.clone())};
    if (i % 3 == 0) continue;
    auto one = stored.begin();
    std::advance(one, random() % stored.size());
    if (random() % 2 == 0) one->second.second->prefetch();
    EXPECT_TRUE(torch::equal(one->second.second->get(), one->second.first));
    stored.erase(one);
  }
  for (const auto& [i, both] : stored) EXPECT_TRUE(torch::equal(both.second->get(), both.first));
}

/// While it lives, no file may be larger.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{bytes, before_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }

 private:
  void (*handler_)(int);
  rlimit before_;
};

TEST(OffloadStore, AFileThatCannotGrowIsAnErrorThatSaysWhatToDo) {
  OffloadStore store;
  const FileSizeLimit limit(4096);
  const auto fits = store.put(torch::zeros({1024}));
  const auto stored = store.put(torch::zeros({2048}));
  store.wait();
  EXPECT_TRUE(torch::equal(fits->get(), torch::zeros({1024})));
  for (const std::string& text : {error_of<ConfigError>([&] { stored->get(); }),
                                  error_of<ConfigError>([&] { store.put(torch::zeros({3})); })}) {
    EXPECT_NE(text.find("cannot write 8192 bytes of activations in a file in "), std::string::npos)
        << text;
    EXPECT_NE(text.find("File too large. Make room there, set \"offload_directory\" to a directory "
                        "with more of it, or switch \"offload_activations\" off"),
              std::string::npos)
        << text;
  }
}

TEST(OffloadStore, AMissingDirectoryIsAnError) {
  const std::string missing = ::testing::TempDir() + "no_offload_store";
  OffloadStore store(missing);
  const std::string text = error_of<ConfigError>([&] { store.put(torch::randn({3})); });
  EXPECT_NE(text.find("cannot make a file in " + missing), std::string::npos) << text;
}

TEST(ScratchFile, LeavesNothingBehindAndReusesBlocks) {
  const auto directory =
      std::filesystem::temp_directory_path() / ("scratch_test_" + std::to_string(getpid()));
  std::filesystem::create_directory(directory);
  {
    ScratchFile file(directory);
    EXPECT_TRUE(std::filesystem::is_empty(directory));
    const int64_t a = file.allocate(5000), b = file.allocate(1), c = file.allocate(4096);
    EXPECT_EQ(file.size(), 4 * 4096);
    file.free(a, 5000);
    file.free(c, 4096);
    file.free(b, 1);
    EXPECT_EQ(file.allocate(4 * 4096), 0) << "free neighbours are one";
    EXPECT_EQ(file.allocate(1), 4 * 4096);
    EXPECT_EQ(file.size(), 5 * 4096);
  }
  EXPECT_TRUE(std::filesystem::is_empty(directory));
  std::filesystem::remove(directory);
}

}  // namespace
}  // namespace smp::graph
