// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <optional>
#include <ostream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/process_entries.h"
#include "tests/smp/oracle.h"

/// Training on batches of many shapes, each of which is a graph of its own: compared with plain
/// libtorch, and the resources that it takes.
namespace smp::testing {

/// The resources of this process.
struct Usage {
  int64_t shared_bytes = 0;  ///< mapped, of memory that ranks share
  int64_t descriptors = open_descriptors();
  int64_t threads = running_threads();

  Usage() {
    for_each_shared([this](uintptr_t begin, uintptr_t end) {
      shared_bytes += static_cast<int64_t>(end - begin);
    });
  }

  /// Calls `look` with the first address of each mapping of shared memory and that behind it.
  template <class Look>
  static void for_each_shared(const Look& look) {
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
      if (line.find("/memfd:smp-") == std::string::npos) continue;
      char* rest = nullptr;
      const auto begin = std::strtoull(line.c_str(), &rest, 16);
      look(begin, std::strtoull(rest + 1, nullptr, 16));
    }
  }

  bool operator==(const Usage& other) const {
    return std::tie(shared_bytes, descriptors, threads) ==
           std::tie(other.shared_bytes, other.descriptors, other.threads);
  }
};

inline std::ostream& operator<<(std::ostream& out, const Usage& usage) {
  return out << usage.shared_bytes << " bytes shared, " << usage.descriptors << " descriptors, "
             << usage.threads << " threads";
}

/// Looked at by one rank after the other, since it takes a descriptor, while none of them computes.
inline Usage usage_at_rest() {
  std::optional<Usage> usage;
  for (int i = 0; i < size(); ++i) {
    barrier();
    if (i == rank()) usage.emplace();
  }
  barrier();
  return *usage;
}

inline bool is_in_shared_memory(const torch::Tensor& tensor) {
  const auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  bool found = false;
  Usage::for_each_shared([&](uintptr_t begin, uintptr_t end) {
    found = found || (begin <= address && address < end);
  });
  return found;
}

constexpr int64_t kWide = 1024, kMiB = 1 << 20;

/// 16 MiB of weights.
struct HeavyImpl : torch::nn::Module {
  HeavyImpl() {
    for (int i = 0; i < 4; ++i) {
      layers.push_back(
          register_module("layer" + std::to_string(i),
                          torch::nn::Linear(torch::nn::LinearOptions(kWide, kWide).bias(false))));
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& layer : layers) x = layer(x);
    return x.square().mean();
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Heavy);

/// The bytes of this process in memory, but for files.
inline int64_t resident_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("RssAnon:", 0) == 0) return std::stoll(line.substr(8)) << 10;
  }
  return 0;
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kHasHeapOfItsOwn = true;  // it keeps freed memory
#elif defined(__has_feature)
constexpr bool kHasHeapOfItsOwn =
    __has_feature(address_sanitizer) || __has_feature(thread_sanitizer);
#else
constexpr bool kHasHeapOfItsOwn = false;
#endif

/// That 30 and 100 sizes of batches take no more than 20 MiB of this process, beside the first, for
/// each of its ranks.
inline void expect_little_growth(int ranks_in_process) {
  DistributedModel<Heavy> model{Heavy()};
  auto train = step([&](torch::Tensor x) {
    const auto loss = model(x);
    model->backward(loss);
    return loss;
  });
  const auto train_on_size = [&](int size) {
    model->zero_grad();
    train(torch::ones({2 * size, kWide}));
  };
  for (int i = 0; i < 3; ++i) train_on_size(1);
  barrier();
  const int64_t before = resident_bytes();
  for (int size = 2; size <= 100; ++size) {
    train_on_size(size);
    if (size != 30 && size != 100) continue;
    barrier();
    const int64_t grown = resident_bytes() - before;
    EXPECT_LT(grown, kHasHeapOfItsOwn ? INT64_MAX : 20 * kMiB * ranks_in_process)
        << size << " sizes";
    barrier();
  }
}

/// Layers one after the other. The last one's input is a result too, as a view: where it came from
/// another rank, it lies where it was received.
struct RelayImpl : torch::nn::Module {
  explicit RelayImpl(int depth) {
    for (int i = 0; i < depth; ++i) {
      layers.push_back(
          register_module("layer" + std::to_string(i), torch::nn::Linear(kWidth, kWidth)));
    }
  }
  std::pair<torch::Tensor, torch::Tensor> forward(torch::Tensor x) {
    torch::Tensor received;
    for (auto& layer : layers) {
      received = x;
      x = layer(x);
    }
    return {x.square().mean(), received.transpose(0, 1)};
  }

  static constexpr int64_t kWidth = 64;
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Relay);

/// Takes the step's number and the last layer's inputs, by microbatch: here and, as a copy of its
/// own, in plain libtorch.
using LookAtStep = std::function<void(size_t step, const Tensors& got, const Tensors& expected)>;

/// Trains and evaluates a model of two layers for each rank, or of one that is pinned to it, with a
/// step for each number of samples. Compares losses, gradients, evaluations and the last layer's
/// inputs with plain libtorch, to the bit.
inline void train_on(const std::vector<int64_t>& sizes, bool pinned, const LookAtStep& look) {
  constexpr int kMicrobatches = 2;
  const auto waves = [](int64_t count, size_t phase) {
    return torch::sin(torch::arange(count, torch::kFloat) + static_cast<double>(phase));
  };
  const int layers = pinned ? size() : 2 * size();
  Relay plain(layers), net(layers);
  for (auto& parameter : plain->parameters()) {
    parameter.set_data(0.1 * waves(parameter.numel(), 0).view(parameter.sizes()));
  }
  copy_values(*plain, *net);
  for (int i = 0; pinned && i < layers; ++i) set_partition(net->layers[i], i);
  DistributedModel<Relay> model(net);
  auto train = step([&](torch::Tensor x) {
    const auto [loss, received] = net(x);
    model->backward(loss);
    return std::make_pair(loss, received);
  });
  auto evaluate = step([&](torch::Tensor x) { return net(x).first; });
  for (size_t i = 0; i < sizes.size(); ++i) {
    SCOPED_TRACE("step " + std::to_string(i) + ", " + std::to_string(sizes[i]) + " samples");
    const auto x = waves(sizes[i] * RelayImpl::kWidth, i).view({sizes[i], RelayImpl::kWidth});
    plain->zero_grad();
    Tensors expected;
    const auto losses = plain_backward(plain->parameters(), 1, kMicrobatches, [&](int m) {
      const auto [loss, received] = plain(part(x, kMicrobatches, m));
      expected.push_back(received.detach().clone());
      return loss;
    });
    model->zero_grad();
    const auto [loss, received] = train(x);
    expect_equal(loss.outputs(), losses, "loss");
    expect_equal(received.outputs(), expected, "received");
    const auto plain_named = to_map(plain->named_parameters());
    for (const auto& item : model->local_named_parameters()) {
      expect_equal(item.value().grad(), plain_named.at(item.key()).grad(), item.key());
    }
    look(i, received.outputs(), expected);
    expect_equal(evaluate(x).outputs(), losses, "evaluation");
  }
}

/// That channels grow once where a large batch comes between small ones, and leave tensors kept of
/// the steps before as they were; and that the process holds the same however many shapes follow.
inline void expect_one_growth(int64_t shapes) {
  std::vector<int64_t> sizes = {4, 256, 4, 256, 4};
  const size_t keeps = sizes.size();
  for (int64_t i = 0; i < shapes; ++i) sizes.push_back(6 + 2 * i);
  std::vector<Tensors> kept, wanted;
  std::vector<Usage> usages;
  train_on(sizes, /*pinned=*/true, [&](size_t step, const Tensors& got, const Tensors& expected) {
    if (step >= keeps && step + 1 < sizes.size()) return;
    usages.push_back(usage_at_rest());
    if (step >= keeps) return;
    kept.push_back(got);
    wanted.push_back(expected);
    // It lies on the channel of the last rank; the others were given copies.
    const auto received = torch::tensor(is_in_shared_memory(got[0]) ? 1 : 0);
    if (step < 2) {
      EXPECT_EQ(all_reduce(received, CommGroup::kWorld).item<int>(), 1);
    }
  });
  constexpr int64_t kManyDescriptors = 200;
  EXPECT_LT(usages.back().descriptors, kManyDescriptors);
  EXPECT_GT(usages[1].shared_bytes, usages[0].shared_bytes);
  for (size_t i = 2; i < usages.size(); ++i) EXPECT_EQ(usages[i], usages[1]) << i;
  for (size_t i = 0; i < kept.size(); ++i) {
    expect_equal(kept[i], wanted[i], "kept of step " + std::to_string(i));
  }
}

}  // namespace smp::testing
