#include "tests/device/parity_suite.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <mutex>

#include "smp/smp.h"
#include "tests/device/text_net.h"
#include "tests/smp/oracle.h"

namespace smp::testing {
namespace {

struct Layout {
  int stages;
  int replicas;
  int microbatches;  // of one replica
  std::string pipeline;
};

std::ostream& operator<<(std::ostream& out, const Layout& layout) {
  return out << layout.stages << " stages x " << layout.replicas << " replicas, "
             << layout.microbatches << " microbatches, " << layout.pipeline;
}

constexpr int kSteps = 3;
const torch::optim::SGDOptions kSgd = torch::optim::SGDOptions(0.1).momentum(0.9);

struct Trained {
  std::vector<Tensors> losses;  // by step, by global microbatch
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
          const KeyedRandom random(kSeed, 0, i, m);
          return net->loss(part(batch[0], count, m).to(device),
                           part(batch[1], count, m).to(device));
        }));
    optimizer.step();
    ++i;
  }
  for (const auto& [name, tensor] : state_of(*net)) run.weights[name] = tensor.cpu();
  return run;
}

Trained run_distributed(const Layout& layout) {
  const auto batches = make_batches(layout);
  const int ranks = layout.stages * layout.replicas;
  std::vector<TextNet> nets;
  for (int i = 0; i < ranks; ++i) nets.push_back(make_net());
  Trained run;
  run.losses.assign(kSteps, Tensors(layout.replicas * layout.microbatches));
  std::mutex mutex;
  const Config config = Config()
                            .partitions(layout.stages)
                            .microbatches(layout.microbatches)
                            .pipeline(layout.pipeline)
                            .ddp(layout.replicas > 1)
                            .seed(kSeed)
                            .timeout_seconds(60);
  run_as_threads(ranks, config, [&] {
    const at::Device device = test_device(rank());
    TextNet net = nets[rank()];
    move(*net, device);
    DistributedModel<TextNet> model(net);
    DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), kSgd);
    auto train = step([&](torch::Tensor x, torch::Tensor y) {
      auto loss = net->loss(x, y);
      model->backward(loss);
      return loss;
    });
    for (int i = 0; i < kSteps; ++i) {
      optimizer.zero_grad();
      const auto losses = train(part(batches[i][0], dp_size(), dp_rank()).to(device),
                                part(batches[i][1], dp_size(), dp_rank()).to(device));
      optimizer.step();
      const std::lock_guard<std::mutex> lock(mutex);
      for (int m = 0; m < layout.microbatches; ++m) {
        EXPECT_EQ(losses.outputs()[m].device(), device);
        run.losses[i][dp_rank() * layout.microbatches + m] = losses.outputs()[m].cpu();
      }
    }
    for (const auto& parameter : model->local_parameters()) EXPECT_EQ(parameter.device(), device);
    const auto state = to_map(model->state_dict());
    const std::lock_guard<std::mutex> lock(mutex);
    if (dp_rank() == 0) run.weights = state;
  });
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

INSTANTIATE_TEST_SUITE_P(Layouts, DeviceParity,
                         ::testing::Values(Layout{1, 1, 1, "interleaved"},
                                           Layout{1, 1, 3, "interleaved"},
                                           Layout{2, 1, 4, "simple"}, Layout{2, 1, 4, "1f1b"},
                                           Layout{2, 1, 4, "zb_h1"}, Layout{3, 1, 6, "zbv"},
                                           Layout{1, 2, 2, "interleaved"},
                                           Layout{2, 2, 3, "interleaved"}));

}  // namespace
}  // namespace smp::testing
