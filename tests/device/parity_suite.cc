// SPDX-License-Identifier: Apache-2.0
#include "tests/device/parity_suite.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <functional>
#include <mutex>

#include "smp/smp.h"
#include "tests/chaos/chaos.h"
#include "tests/device/text_net.h"
#include "tests/smp/oracle.h"

namespace smp::testing {
namespace {

/// The variations of a run.
enum class Extra {
  kNone,
  kOffload,     ///< runs its blocks again in the backward pass and offloads their inputs
  kResume,      ///< is saved after a step and goes on as another one
  kOwnStream,   ///< computes on a stream that is not the default
  kOwnStreams,  ///< the same, with all ranks on one device
  kPlaced,      ///< is built on the CPU, and moved by the first step, as its inputs are by each
  kOneDevice,   ///< has all ranks on one device, which autograd has one thread for
  kDelays,      ///< has ranks that take as long as they like (tests/chaos/chaos.h), on one device
  kGraphs,      ///< launches its computations as graphs from the second step on
  kRegraphs,    ///< the same, on own streams, and runs its blocks again in the backward pass
};

struct Layout {
  int stages;
  int replicas;
  int microbatches;  // microbatches of one replica
  std::string pipeline;
  Extra extra = Extra::kNone;
};

std::ostream& operator<<(std::ostream& out, const Layout& layout) {
  constexpr const char* kExtras[] = {
      "",         ", offloading", ", resumed", ", own stream", ", own streams of one device",
      ", placed", ", one device", ", delays",  ", graphs",     ", again in graphs"};
  return out << layout.stages << " stages x " << layout.replicas << " replicas, "
             << layout.microbatches << " microbatches, " << layout.pipeline
             << kExtras[static_cast<int>(layout.extra)];
}

constexpr int kSteps = 3;
constexpr int kSavedAfter = 1;
const torch::optim::SGDOptions kSgd = torch::optim::SGDOptions(0.1).momentum(0.9);

struct Trained {
  std::vector<Tensors> losses;  // losses by step, by global microbatch
  Named weights;
};

TextNet make_net() {
  torch::manual_seed(5);
  return TextNet();
}

std::vector<Tensors> make_batches(const Layout& layout) {
  torch::manual_seed(7);
  const int64_t size = 2 * layout.replicas * layout.microbatches;
  std::vector<Tensors> batches;
  for (int i = 0; i < kSteps; ++i) {
    batches.push_back({torch::randint(TextNetImpl::kVocabulary, {size, TextNetImpl::kLength}),
                       torch::randint(TextNetImpl::kVocabulary, {size, TextNetImpl::kLength})});
  }
  return batches;
}

Trained run_plain(const Layout& layout) {
  const at::Device device = test_device(0);
  TextNet net = make_net();
  move(*net, device);
  torch::optim::SGD optimizer(unique_parameters(*net), kSgd);
  const int count = layout.replicas * layout.microbatches;
  Trained run;
  int i = 0;
  for (const Tensors& batch : make_batches(layout)) {
    optimizer.zero_grad();
    run.losses.push_back(
        plain_backward(unique_parameters(*net), layout.replicas, layout.microbatches, [&](int m) {
          const KeyedRandom random(kSeed, "step 0", i, m);
          return net->loss(part(batch[0], count, m).to(device),
                           part(batch[1], count, m).to(device));
        }));
    optimizer.step();
    ++i;
  }
  for (const auto& [name, tensor] : state_of(*net)) run.weights[name] = tensor.cpu();
  return run;
}

bool has_own_streams(const Layout& layout) {
  return layout.extra == Extra::kOwnStreams || layout.extra == Extra::kRegraphs;
}

bool is_on_one_device(const Layout& layout) {
  return layout.extra == Extra::kOneDevice || layout.extra == Extra::kDelays ||
         has_own_streams(layout);
}

/// Makes another stream the thread's current one where the layout says so.
c10::OptionalStreamGuard choose_stream(const Layout& layout, at::Device device) {
  if (layout.extra != Extra::kOwnStream && !has_own_streams(layout)) {
    return c10::OptionalStreamGuard();
  }
  return c10::OptionalStreamGuard(
      c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device));
}

bool has_graphs(const Layout& layout) {
  return layout.extra == Extra::kGraphs || layout.extra == Extra::kRegraphs;
}

Config config_of(const Layout& layout) {
  return Config()
      .partitions(layout.stages)
      .microbatches(layout.microbatches)
      .pipeline(layout.pipeline)
      .ddp(layout.replicas > 1)
      .offload_activations(layout.extra == Extra::kOffload)
      .activation_loading_horizon(1)
      .cuda_graphs(has_graphs(layout) ? "on" : "off")
      .seed(kSeed)
      .timeout_seconds(60);
}

void play_ranks(const Layout& layout, const std::function<void()>& program) {
  const int ranks = layout.stages * layout.replicas;
  if (layout.extra == Extra::kDelays) {
    Chaos chaos;
    chaos.seed = kSeed;
    run_in_chaos(ranks, config_of(layout), chaos, program);
  } else {
    run_as_threads(ranks, config_of(layout), program);
  }
}

/// Trains steps [first, last) into `run`, from the checkpoint in `folder` on unless first is 0, and
/// leaves one there unless the last step is done.
void train_steps(const Layout& layout, int first, int last, const std::string& folder,
                 Trained& run) {
  const auto batches = make_batches(layout);
  std::vector<TextNet> nets;
  for (int i = 0; i < layout.stages * layout.replicas; ++i) nets.push_back(make_net());
  std::mutex mutex;
  play_ranks(layout, [&] {
    const at::Device device = test_device(is_on_one_device(layout) ? 0 : rank());
    const auto stream = choose_stream(layout, device);
    TextNet net = nets[rank()];
    const bool placed = layout.extra == Extra::kPlaced;
    if (placed) {
      set_device(device.index());
    } else {
      move(*net, device);
    }
    DistributedModel<TextNet> model(net);
    DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), kSgd);
    if (layout.extra == Extra::kOffload || layout.extra == Extra::kRegraphs) {
      for (const TextBlock& block : net->blocks) set_activation_checkpointing(block);
    }
    auto train = step([&](torch::Tensor x, torch::Tensor y) {
      auto loss = net->loss(x, y);
      model->backward(loss);
      return loss;
    });
    if (first > 0) load(folder, model, optimizer);
    for (int i = first; i < last; ++i) {
      optimizer.zero_grad();
      const at::Device given_on = placed ? at::kCPU : device;
      const auto losses = train(part(batches[i][0], dp_size(), dp_rank()).to(given_on),
                                part(batches[i][1], dp_size(), dp_rank()).to(given_on));
      optimizer.step();
      const std::lock_guard<std::mutex> lock(mutex);
      for (int m = 0; m < layout.microbatches; ++m) {
        EXPECT_EQ(losses.outputs()[m].device(), device);
        run.losses[i][dp_rank() * layout.microbatches + m] = losses.outputs()[m].cpu();
      }
    }
    if (last < kSteps) save(folder, model, optimizer);
    for (const auto& parameter : model->local_parameters()) EXPECT_EQ(parameter.device(), device);
    const auto state = to_map(model->state_dict());
    const std::lock_guard<std::mutex> lock(mutex);
    if (dp_rank() == 0) run.weights = state;
  });
}

Trained run_distributed(const Layout& layout) {
  Trained run;
  run.losses.assign(kSteps, Tensors(layout.replicas * layout.microbatches));
  const std::string folder = ::testing::TempDir() + "smp_device_parity";
  const int saved_after = layout.extra == Extra::kResume ? kSavedAfter : 0;
  std::filesystem::remove_all(folder);
  if (saved_after > 0) train_steps(layout, 0, saved_after, folder, run);
  train_steps(layout, saved_after, kSteps, folder, run);
  std::filesystem::remove_all(folder);
  return run;
}

class DeviceParity : public ::testing::TestWithParam<Layout> {};

TEST_P(DeviceParity, EqualsPlainLibtorch) {
  torch::set_num_threads(1);
  const Layout& layout = GetParam();
  const Trained plain = run_plain(layout);
  const Trained distributed = run_distributed(layout);
  for (int i = 0; i < kSteps; ++i) {
    Tensors expected;
    for (const auto& loss : plain.losses[i]) expected.push_back(loss.cpu());
    expect_equal(distributed.losses[i], expected, "losses of step " + std::to_string(i));
  }
  // Each replica has buffers of its own.
  Named expected = plain.weights;
  expected["seen"] = torch::full({1}, static_cast<float>(kSteps * layout.microbatches));
  expect_equal(distributed.weights, expected, "values");
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, DeviceParity,
    ::testing::Values(
        Layout{1, 1, 1, "interleaved"}, Layout{1, 1, 3, "interleaved"}, Layout{2, 1, 4, "simple"},
        Layout{2, 1, 4, "1f1b"}, Layout{2, 1, 4, "zb_h1"}, Layout{3, 1, 6, "zbv"},
        Layout{1, 2, 2, "interleaved"}, Layout{2, 2, 3, "interleaved"},
        Layout{2, 1, 4, "simple", Extra::kOffload}, Layout{2, 2, 3, "1f1b", Extra::kOffload},
        Layout{1, 1, 3, "interleaved", Extra::kResume},
        Layout{2, 2, 3, "interleaved", Extra::kResume},
        Layout{2, 2, 3, "interleaved", Extra::kOwnStream},
        Layout{3, 1, 6, "zbv", Extra::kOwnStream}, Layout{1, 1, 3, "interleaved", Extra::kPlaced},
        Layout{2, 2, 3, "interleaved", Extra::kPlaced}, Layout{3, 1, 6, "zbv", Extra::kPlaced},
        Layout{2, 2, 3, "interleaved", Extra::kOneDevice},
        Layout{3, 1, 6, "zbv", Extra::kOneDevice}, Layout{2, 1, 4, "1f1b", Extra::kDelays},
        Layout{2, 2, 3, "interleaved", Extra::kDelays}, Layout{3, 1, 6, "zbv", Extra::kDelays},
        Layout{2, 2, 3, "interleaved", Extra::kOwnStreams},
        Layout{3, 1, 6, "zbv", Extra::kOwnStreams}, Layout{1, 1, 1, "interleaved", Extra::kGraphs},
        Layout{1, 1, 3, "interleaved", Extra::kGraphs}, Layout{2, 1, 4, "1f1b", Extra::kGraphs},
        Layout{2, 1, 4, "zb_h1", Extra::kGraphs}, Layout{3, 1, 6, "zbv", Extra::kGraphs},
        Layout{2, 2, 3, "interleaved", Extra::kGraphs},
        Layout{1, 1, 3, "interleaved", Extra::kRegraphs},
        Layout{2, 2, 3, "1f1b", Extra::kRegraphs}));

}  // namespace
}  // namespace smp::testing
