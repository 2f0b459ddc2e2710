// SPDX-License-Identifier: Apache-2.0
// Damage to the files of a checkpoint is found, with the file's name, before anything is used.

#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include "checkpoint/apply.h"
#include "checkpoint/reader.h"
#include "tests/checkpoint/test_util.h"

namespace smp::checkpoint {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr const char* kModel1 = "model-00001-of-00002.safetensors";
constexpr const char* kModel2 = "model-00002-of-00002.safetensors";
constexpr const char* kOptimizer1 = "optimizer-00001-of-00002.safetensors";
constexpr const char* kOptimizer2 = "optimizer-00002-of-00002.safetensors";

/// A net of two weights on two ranks, whose files are of equal size.
void save_net(const std::string& path, double value) {
  const Writer writer(path);
  writer.begin();
  std::vector<std::string> parts;
  const char* names[] = {"one.weight", "two.weight"};
  for (int i = 0; i < 2; ++i) {
    Shard shard;
    shard.model = {{names[i], at::full({2, 3}, value + i), {}}};
    shard.optimizer_tensors[names[i] + std::string("/exp_avg")] = at::full({2, 3}, value + i);
    parts.push_back(writer.write_shard(i, 2, shard));
  }
  writer.commit(parts, {});
}

struct DamagedNetImpl : torch::nn::Module {
  DamagedNetImpl() {
    const auto options = torch::nn::LinearOptions(3, 2).bias(false);
    one = register_module("one", torch::nn::Linear(options));
    two = register_module("two", torch::nn::Linear(options));
  }
  torch::nn::Linear one{nullptr}, two{nullptr};
};
TORCH_MODULE(DamagedNet);

class DamageTest : public FolderTest {
 protected:
  void SetUp() override { save_net(path("c"), 1); }

  std::string file(const std::string& name) const { return path("c/" + name); }

  void flip(const std::string& name, size_t byte, int bit = 0) {
    std::string bytes = slurp(file(name));
    bytes.at(byte) = static_cast<char>(bytes[byte] ^ (1 << bit));
    spill(file(name), bytes);
  }

  void swap(const std::string& a, const std::string& b) {
    fs::rename(file(a), file("other"));
    fs::rename(file(b), file(a));
    fs::rename(file("other"), file(b));
  }

  /// Everything that is wrong, as `check_undamaged` says it; empty if nothing is.
  std::string damage() {
    try {
      Reader reader(path("c"));
      check_undamaged(path("c"), reader.find_damage(Reader::Section::kAll));
    } catch (const CheckpointError& error) {
      return error.what();
    }
    return "";
  }

  /// The error of loading into a module, which stays as it was.
  std::string load_error() {
    DamagedNet net;
    std::vector<at::Tensor> before;
    for (const auto& item : state_dict(*net)) before.push_back(item.value().clone());
    const std::string text = checkpoint_error([&] { load_into_module(*net, path("c")); });
    const auto after = state_dict(*net).values();
    for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(at::equal(before[i], after[i])) << i;
    return text;
  }
};

TEST_F(DamageTest, AWholeCheckpointHasNone) {
  EXPECT_EQ(damage(), "");
  Reader reader(path("c"));
  for (int parts = 1; parts <= 5; ++parts) {
    for (int part = 0; part < parts; ++part) {
      EXPECT_THAT(reader.find_damage(Reader::Section::kAll, part, parts), IsEmpty());
    }
  }
}

/// The strongest of these: whatever bit changes anywhere, it is found, or nothing depends on it.
TEST_F(DamageTest, AnyFlippedBitIsFound) {
  size_t harmless = 0, found = 0;
  for (const std::string name : {"index.json", kModel1, kOptimizer2}) {
    const std::string whole = slurp(file(name));
    for (size_t byte = 0; byte < whole.size(); ++byte) {
      flip(name, byte, static_cast<int>(byte % 8));
      const std::string text = damage();
      if (text.empty()) {
        ++harmless;
        Reader reader(path("c"));
        EXPECT_TRUE(at::equal(reader.read_model("one.weight"), at::full({2, 3}, 1.0)));
        EXPECT_TRUE(at::equal(reader.read_model("two.weight"), at::full({2, 3}, 2.0)));
        EXPECT_TRUE(at::equal(reader.read_optimizer("two.weight/exp_avg"), at::full({2, 3}, 2.0)));
      } else {
        ++found;
        EXPECT_THAT(text, HasSubstr(name)) << byte;
      }
      spill(file(name), whole);
    }
  }
  // Only letters of the header's metadata and spaces behind it are harmless.
  EXPECT_LT(harmless, 100u);
  EXPECT_GT(found, 1000u);
}

TEST_F(DamageTest, EachTensorIsLookedAtByOneOfManyRanks) {
  flip(kModel1, fs::file_size(file(kModel1)) - 1);
  flip(kModel2, fs::file_size(file(kModel2)) - 1);
  flip(kOptimizer1, fs::file_size(file(kOptimizer1)) - 1);
  Reader reader(path("c"));
  EXPECT_EQ(reader.find_damage(Reader::Section::kModel).size(), 2u);
  for (int parts = 1; parts <= 9; ++parts) {
    std::vector<std::string> all;
    for (int part = 0; part < parts; ++part) {
      for (auto& line : reader.find_damage(Reader::Section::kAll, part, parts)) all.push_back(line);
    }
    EXPECT_THAT(all, ElementsAre(HasSubstr(kModel1), HasSubstr(kModel2), HasSubstr(kOptimizer1)));
  }
}

TEST_F(DamageTest, LoadingNamesTheFileAndChangesNothing) {
  flip(kModel2, fs::file_size(file(kModel2)) - 1);
  EXPECT_THAT(load_error(), AllOf(HasSubstr("checkpoint \"" + path("c") + "\" is damaged:\n  " +
                                            kModel2 + ": tensor \"two.weight\": expected xxh64 "),
                                  HasSubstr("\nNothing was loaded. Use another checkpoint.")));
}

TEST_F(DamageTest, ExchangedFilesAreFound) {
  ASSERT_EQ(fs::file_size(file(kModel1)), fs::file_size(file(kModel2)));
  swap(kModel1, kModel2);
  EXPECT_THAT(
      load_error(),
      AllOf(HasSubstr(file(kModel1) + "\" is not the file that was written: expected tensor "
                                      "\"one.weight\" of F32 [2, 3] as in index.json, got none."),
            HasSubstr(file(kModel2) + "\" is not the file that was written")));
}

TEST_F(DamageTest, FilesOfAnotherCheckpointAreFound) {
  save_net(path("d"), 5);
  fs::copy_file(path("d/") + kOptimizer1, file(kOptimizer1), fs::copy_options::overwrite_existing);
  EXPECT_THAT(damage(), HasSubstr(std::string("\n  ") + kOptimizer1 +
                                  ": tensor \"one.weight/exp_avg\": expected xxh64 "));
}

TEST_F(DamageTest, IndexOfAnotherCheckpointIsFound) {
  save_net(path("d"), 5);
  fs::copy_file(path("d/index.json"), file("index.json"), fs::copy_options::overwrite_existing);
  EXPECT_THAT(load_error(), AllOf(HasSubstr(kModel1), HasSubstr(kModel2)));
}

TEST_F(DamageTest, AFileWithMoreTensorsIsNotTheOneThatWasWritten) {
  // The file is as large as the one that was written, and holds its tensor.
  const uint64_t size = fs::file_size(file(kModel1));
  write_safetensors(path("bigger"), {{"one.weight", at::full({2, 3}, 1.0)}, {"e", at::ones({0})}});
  std::string bytes = slurp(path("bigger"));
  std::string index = slurp(file("index.json"));
  const std::string listed = std::string("\"") + kModel1 + "\": ";
  const size_t position = index.find(listed + std::to_string(size));
  ASSERT_NE(position, std::string::npos);
  index.replace(position + listed.size(), std::to_string(size).size(),
                std::to_string(bytes.size()));
  spill(file("index.json"), with_checksum(index));
  spill(file(kModel1), bytes);
  EXPECT_THAT(damage(), HasSubstr("is not the file that was written: expected 1 tensors as in "
                                  "index.json, got 2. Use another checkpoint."));
}

TEST_F(DamageTest, LongListsAreCut) {
  std::vector<std::string> lines;
  for (int i = 0; i < 25; ++i) lines.push_back("file " + std::to_string(i));
  EXPECT_THAT(checkpoint_error([&] { check_undamaged("c", lines); }),
              AllOf(HasSubstr("\n  file 9\n  and 15 more\nNothing was loaded.")));
}

}  // namespace
}  // namespace smp::checkpoint
