// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "smp/smp.h"
#include "tests/smp/models.h"
#include "tests/smp/parity.h"
#include "tests/smp/sharded.h"
#include "tests/temp_folder.h"

// Parameters that few nets have, or that programs treat as few programs do, on two stages of two
// replicas. The bits of one process, however replicas divide states and parameters.
namespace smp {
namespace {

using namespace testing;

constexpr int kStages = 2, kReplicas = 2, kMicrobatches = 2;

enum class Divided { kNothing, kState, kParameters };

/// Training whose replicas divide the optimizer's state, the parameters too, or nothing.
template <class Net>
auto training_of(Divided divided, const std::string& pipeline, const std::function<Net()>& make,
                 int steps = 3) {
  const parity::Layout layout{kStages, kReplicas, kMicrobatches, pipeline, steps};
  if (divided == Divided::kParameters) {
    return sharded_pipelines<Net, torch::optim::AdamW>(
        layout, {kReplicas, kReplicas, kMicrobatches, /*threshold=*/2}, make, kAdamW);
  }
  auto result = parity::training<Net, torch::optim::AdamW>(layout, make, kAdamW);
  result.config.shard_optimizer_state(divided == Divided::kState);
  return result;
}

/// Freezes the layers whose names end with a digit, each by itself, in steps that follow no order.
void freeze_some(TinyGpt& net, int step) {
  for (const auto& item : net->named_parameters()) {
    const auto layer = item.key().find_first_of("0123456789");
    const int number = layer == std::string::npos ? 2 : item.key()[layer] - '0';
    item.value().set_requires_grad((step * (number + 1)) % 3 != number % 2);
  }
}

/// Each step after another one is a graph of its own. Some layers are frozen in the first.
TEST(UnusualParameters, AreFrozenAndTrainedAgain) {
  for (const auto divided : {Divided::kNothing, Divided::kParameters}) {
    for (const std::string pipeline : {"1f1b", "zbv"}) {
      SCOPED_TRACE(pipeline);
      auto tested = training_of<TinyGpt>(divided, pipeline, tied_gpt, /*steps=*/6);
      tested.before_step = freeze_some;
      expect_as_plain(tested);
    }
  }
}

/// A weight divided by its largest singular value, which each forward that trains approaches by a
/// step of the power method: it writes its own buffer.
struct SpectralLinearImpl : torch::nn::Module {
  SpectralLinearImpl() {
    weight = register_parameter("weight", torch::randn({8, 8}));
    left = register_buffer("left", torch::full({8}, 0.35));
  }
  torch::Tensor forward(torch::Tensor x) {
    torch::Tensor right;
    {
      const torch::NoGradGuard no_grad;
      right = torch::mv(weight.t(), left);
      right = right / right.norm();
      if (is_training()) left.copy_(torch::mv(weight, right)).div_(left.norm());
    }
    return torch::linear(x, weight / torch::dot(left.clone(), torch::mv(weight, right)));
  }
  torch::Tensor weight, left;
};
TORCH_MODULE(SpectralLinear);

struct SpectralNetImpl : torch::nn::Module {
  SpectralNetImpl() {
    for (int i = 0; i < 3; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), SpectralLinear()));
    }
  }
  torch::Tensor loss(torch::Tensor x, torch::Tensor y) {
    for (auto& layer : layers) x = x + (torch::tanh(layer(x)) * 1.5).add_(0.1);
    return torch::mse_loss(x, y);
  }
  static Tensors batch(int64_t size) { return {torch::randn({size, 8}), torch::randn({size, 8})}; }
  std::vector<SpectralLinear> layers;
};
TORCH_MODULE(SpectralNet);

/// A module that runs again in the backward writes its buffer once.
TEST(UnusualParameters, AreDividedByASingularValue) {
  for (const auto divided : {Divided::kNothing, Divided::kState, Divided::kParameters}) {
    auto tested = training_of<SpectralNet>(divided, "1f1b", [] { return SpectralNet(); });
    tested.prepare = [](SpectralNet& net) {
      for (auto& layer : net->layers) set_activation_checkpointing(layer);
    };
    expect_as_plain(tested);
  }
}

/// One number, one element; in double beside float; in the memory of images with channels
/// last; one that does not train and one that no operator reads.
struct OddNetImpl : torch::nn::Module {
  OddNetImpl() {
    images = register_module("images", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 8, 3)));
    images->weight.set_data(images->weight.to(torch::MemoryFormat::ChannelsLast));
    scale = register_parameter("scale", torch::tensor(1.5));
    one = register_parameter("one", torch::full({1}, 0.5));
    turned = register_parameter("turned", torch::randn({4, 32}).t());
    wide = register_parameter("wide", torch::randn({4, 130}, torch::kDouble));
    fixed = register_parameter("fixed", torch::randn({4}), /*requires_grad=*/false);
    unused = register_parameter("unused", torch::ones({100}));
  }
  torch::Tensor loss(torch::Tensor x, torch::Tensor y) {
    x = torch::relu(images(x)).flatten(1).matmul(turned) * scale + fixed + one;
    return torch::mse_loss(x.to(torch::kDouble).matmul(wide).tanh(), y);
  }
  static Tensors batch(int64_t size) {
    return {torch::randn({size, 3, 4, 4}), torch::randn({size, 130}, torch::kDouble)};
  }
  torch::nn::Conv2d images{nullptr};
  torch::Tensor scale, one, turned, wide, fixed, unused;
};
TORCH_MODULE(OddNet);

TEST(UnusualParameters, HaveAllSizesTypesAndLayouts) {
  for (const auto divided : {Divided::kNothing, Divided::kState, Divided::kParameters}) {
    expect_as_plain(training_of<OddNet>(divided, "1f1b", [] { return OddNet(); }));
  }
}

TEST(UnusualParameters, GoOnFromACheckpoint) {
  for (const auto divided : {Divided::kNothing, Divided::kState, Divided::kParameters}) {
    const auto tested = training_of<OddNet>(divided, "1f1b", [] { return OddNet(); });
    const TempFolder folder;
    expect_equal(save_and_resume(tested, tested, 2, folder.file("checkpoint")).weights,
                 tested.run_plain().weights, "value");
  }
}

struct WithoutElementsImpl : torch::nn::Module {
  WithoutElementsImpl() {
    full = register_parameter("full", torch::arange(200, torch::kFloat) / 200);
    empty = register_parameter("empty", torch::zeros({0, 4}));
  }
  torch::Tensor forward(torch::Tensor x) { return (x * full).square().mean() + empty.sum(); }
  torch::Tensor full, empty;
};
TORCH_MODULE(WithoutElements);

/// No replica has a piece of one without elements, so none has its average.
TEST(UnusualParameters, WithoutElementsHaveNoAverage) {
  for (const auto divided : {Divided::kNothing, Divided::kState, Divided::kParameters}) {
    const TempFolder folder;
    const auto config = divided == Divided::kParameters
                            ? sharded_config({kReplicas, kReplicas, 1, /*threshold=*/0})
                            : Config().ddp(true).shard_optimizer_state(divided == Divided::kState);
    const auto path = folder.file("checkpoint");
    const auto train = [&](bool resumes) {
      Named state;
      run_as_threads(kReplicas, config, [&] {
        DistributedModel<WithoutElements> model(WithoutElements{});
        DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), 0.5);
        Ema average(model, optimizer);
        auto step = smp::step([&](torch::Tensor x) {
          auto loss = model(x);
          model->backward(loss);
          return loss;
        });
        if (resumes) load(path, model, optimizer);
        for (int i = resumes ? 1 : 0; i < 3; ++i) {
          optimizer.zero_grad();
          step(torch::ones({2, 200}));
          optimizer.step();
          average.update();
          if (i == 0) save(path, model, optimizer);
        }
        const auto scope = average.averaged();
        const Named averaged = to_map(model->state_dict());
        if (rank() == 0) state = averaged;
      });
      return state;
    };
    const Named expected = train(/*resumes=*/false);
    expect_equal(train(/*resumes=*/true), expected, "average");
  }
}

}  // namespace
}  // namespace smp
