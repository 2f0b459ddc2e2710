// SPDX-License-Identifier: Apache-2.0
// Arguments of step functions: how they are cut, and that they stay as they are.
#include <functional>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/smp/step_fixture.h"

namespace smp::testing {
namespace {

/// The case of an autoencoder. A write to one of them would be seen in the other by plain libtorch.
TEST_F(StepTest, OneTensorForTwoArguments) {
  Tensors expected = plain(x_);
  for (int m = 0; m < 2; ++m) expected[m] = expected[m] + part(x_, 2, m);
  on_stages([&](DistributedModel<Mlp>& model) {
    auto reads = step([&](torch::Tensor x, torch::Tensor y) { return model(x) + y; });
    expect_equal(reads(x_, x_).outputs(), expected, "read");
  });
  const std::string error = error_of_run<UsageError>(1, stages(1), [&] {
    DistributedModel<Mlp> model(prototype_);
    auto writes = step([&](torch::Tensor x, torch::Tensor y) { return model(y) + x.mul_(2); },
                       StepOptions().name("train"));
    writes(x_, x_.view({8, -1}));
  });
  EXPECT_NE(error.find("step function \"train\": input tensor 0, which it writes in place, shares "
                       "memory with input tensor 1, which would not see that. Pass x.clone() for "
                       "one of them, or make a new tensor"),
            std::string::npos)
      << error;
}

TEST_F(StepTest, InputsInVectorsTuplesAndMaps) {
  const auto expected = plain(x_);
  on_stages([&](DistributedModel<Mlp>& model) {
    auto vector = step([&](std::vector<torch::Tensor> xs) { return model(xs[0] + xs[1]); });
    expect_equal(vector(std::vector<torch::Tensor>{x_ * 0.5, x_ * 0.5}).outputs(), expected,
                 "vector");

    auto tuple = step([&](std::tuple<torch::Tensor, int> x) {
      EXPECT_EQ(std::get<1>(x), 3);
      return model(std::get<0>(x));
    });
    expect_equal(tuple(std::make_tuple(x_, 3)).outputs(), expected, "tuple");

    auto map = step(
        [&](const std::map<std::string, torch::Tensor>& inputs) { return model(inputs.at("x")); });
    const std::map<std::string, torch::Tensor> inputs = {{"x", x_}, {"unused", y_}};
    expect_equal(map(inputs).outputs(), expected, "map");

    auto nested = step([&](std::pair<std::vector<torch::Tensor>, std::string> inputs) {
      return model(inputs.first.at(0));
    });
    expect_equal(nested(std::make_pair(std::vector<torch::Tensor>{x_}, "name")).outputs(), expected,
                 "nested");

    auto optional = step([&](torch::Tensor x, std::optional<torch::Tensor> more) {
      return model(more ? x + *more : x);
    });
    expect_equal(optional(x_, std::nullopt).outputs(), expected, "no optional tensor");
    expect_equal(optional(x_ * 0.5, std::optional<torch::Tensor>(x_ * 0.5)).outputs(), expected,
                 "optional tensor");
    expect_equal(optional(x_, std::nullopt).outputs(), expected, "no optional tensor again");

    auto none = step([&] { return model(torch::ones({2, MlpImpl::kWidth})); });
    torch::NoGradGuard no_grad;
    Mlp net = prototype_;
    const auto ones = net(torch::ones({2, MlpImpl::kWidth}));
    expect_equal(none().outputs(), {ones, ones}, "no arguments");
  });
}

TEST_F(StepTest, ScalarsAndStringsAsArguments) {
  on_stages([&](DistributedModel<Mlp>& model) {
    auto scaled = step([&](torch::Tensor x, double scale, std::string mode, bool twice) {
      auto y = model(x) * scale;
      if (twice) y = y * 2;
      return mode == "sum" ? y.sum() : y.mean();
    });
    const auto out = plain(x_);
    for (double scale : {0.5, 0.25, 0.5, -1.0}) {
      expect_equal(scaled(x_, scale, "sum", false).outputs()[1], (out[1] * scale).sum(), "sum");
      expect_equal(scaled(x_, scale, "mean", true).outputs()[0], (out[0] * scale * 2).mean(),
                   "mean");
    }
  });
}

/// The inputs of the first rank count, whatever the others pass, and with layers that are divided.
TEST_F(StepTest, InputsOfTheFirstRank) {
  for (const auto& [stage_count, degree] :
       {std::pair(1, 1), std::pair(2, 1), std::pair(3, 1), std::pair(2, 2)}) {
    const int tensor_ranks = degree;
    const auto config =
        stages(stage_count).input_source("first").ddp(true).tensor_parallel_degree(tensor_ranks);
    run_as_threads(2 * stage_count * tensor_ranks, config, [&] {
      const double replica = dp_rank();
      Mlp net(4);
      copy_values(*prototype_, *net);
      DistributedModel<Mlp> model(net);
      auto identity = step([&](torch::Tensor x, std::vector<torch::Tensor> rest) {
        return std::make_pair(model(x), x + rest[0]);
      });
      const bool first = pp_rank() == 0;
      const auto mine = x_ * (1 + replica), nothing = torch::zeros_like(x_);
      const auto one = torch::ones({8, 1}, torch::kLong), none = torch::zeros_like(one);
      for (int i = 0; i < 2; ++i) {
        auto [result, sum] =
            first ? identity(mine, Tensors{one}) : identity(nothing, Tensors{none});
        const auto expected = plain(mine);
        for (int m = 0; m < 2; ++m) {
          EXPECT_TRUE(torch::allclose(result.outputs()[m], expected[m], 1e-5, 1e-6));
          if (tensor_ranks == 1) expect_equal(result.outputs()[m], expected[m], "result");
          expect_equal(sum.outputs()[m], part(mine, 2, m) + 1, "sum");
        }
      }
    });
  }
}

/// Trained on dummies everywhere else, the weights are those of ranks that all have the batches.
TEST_F(StepTest, TrainsOnInputsOfTheFirstRank) {
  const auto train = [&](const Config& config, int ranks, bool dummies) {
    Named weights;
    std::mutex mutex;
    run_as_threads(ranks, config, [&] {
      Mlp net(4);
      copy_values(*prototype_, *net);
      DistributedModel<Mlp> model(net);
      DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), 0.1);
      auto run_step = step([&](torch::Tensor x, torch::Tensor y) {
        auto loss = (model(x) - y).square().mean();
        model->backward(loss);
        return loss;
      });
      const bool has_batches = pp_rank() == 0 || !dummies;
      for (int i = 0; i < 3; ++i) {
        const auto x = x_ * (1 + i), y = x_.sin();
        optimizer.zero_grad();
        has_batches ? run_step(x, y) : run_step(torch::zeros_like(x), torch::zeros_like(y));
        optimizer.step();
      }
      const auto state = to_map(model->state_dict());
      const std::lock_guard lock(mutex);
      weights = state;
    });
    return weights;
  };
  for (const int ranks : {2, 3}) {
    expect_equal(train(stages(ranks).input_source("first"), ranks, /*dummies=*/true),
                 train(stages(ranks), ranks, /*dummies=*/false), "weight");
  }
}

TEST_F(StepTest, InputsOfTheFirstRankHaveTheShapesOfTheOthers) {
  const auto text = error_of_run<UsageError>(2, stages(2).input_source("first"), [&] {
    DistributedModel<Mlp> model(Mlp(4));
    auto evaluate = step([&](torch::Tensor x) { return model(x); });
    evaluate(pp_rank() == 0 ? x_ : x_.narrow(0, 0, 4));
  });
  expect_has(text,
             {"with \"input_source\": \"first\", pp rank 1 passes Float[4, 6], and pp rank 0, "
              "whose inputs count, Float[8, 6]. Pass dummies of the same shapes"});
}

TEST_F(StepTest, LvalueRvalueAndViewInputsStayAsTheyAre) {
  const auto before = x_.clone();
  const auto wide = torch::randn({MlpImpl::kWidth, 8});
  const auto columns = plain(wide.t());
  on_stages([&](DistributedModel<Mlp>& model) {
    auto in_place = step([&](torch::Tensor x) { return model(x.mul_(2)); });
    const auto expected = plain(before * 2);
    for (int i = 0; i < 3; ++i) expect_equal(in_place(x_).outputs(), expected, "in-place");
    expect_equal(x_, before, "the caller's tensor");
    auto forward = step([&](torch::Tensor x) { return model(x); });
    expect_equal(forward(wide.t()).outputs(), columns, "a transposed input");
  });
}

TEST_F(StepTest, AxesAndWholeInputs) {
  const auto wide = x_.t().contiguous();
  const auto offset = torch::randn({MlpImpl::kWidth});
  Tensors expected, expected_with_offset;
  {
    // The layout of the input decides which kernels run: it has to be the same here.
    torch::NoGradGuard no_grad;
    Mlp net = prototype_;
    for (int m = 0; m < 2; ++m) {
      expected.push_back(net(part(wide, 2, m, 1).t()));
      expected_with_offset.push_back(net(part(wide, 2, m, 1).t() + offset));
    }
  }
  on_stages([&](DistributedModel<Mlp>& model) {
    auto transposed = step([&](torch::Tensor x) { return model(x.t()); },
                           StepOptions().input_split_axes({{0, 1}}));
    expect_equal(transposed(wide).outputs(), expected, "axis 1");

    auto whole = step(
        [&](torch::Tensor x, torch::Tensor added) {
          EXPECT_EQ(added.size(0), MlpImpl::kWidth);
          return model(x + added);
        },
        StepOptions().non_split_inputs({1}));
    expect_equal(whole(x_, offset).outputs(), plain(x_ + offset), "whole input");

    auto lists = step([&](std::vector<torch::Tensor> xs,
                          std::vector<torch::Tensor> added) { return model(xs[0].t() + added[0]); },
                      StepOptions().non_split_inputs({1}).input_split_axes({{0, 1}}));
    expect_equal(lists(Tensors{wide}, Tensors{offset}).outputs(), expected_with_offset,
                 "inside vectors");
  });
}

/// The microbatch on memory of its own, in which it lies as in the batch.
torch::Tensor strided_part(const torch::Tensor& batch, int64_t count, int64_t microbatch) {
  const int64_t size = batch.size(0) / count;
  const auto view = batch.narrow(0, microbatch * size, size);
  int64_t span = 1;
  for (int64_t d = 0; d < view.dim(); ++d) span += (view.size(d) - 1) * view.stride(d);
  return view.as_strided({span}, {1}).clone().as_strided(view.sizes(), view.strides());
}

/// Batches of 8 samples of 6 numbers that lie in memory in other ways than `contiguous()`.
struct Batch {
  const char* name;
  std::function<torch::Tensor()> make;
  bool shares_elements = false;  // libtorch refuses to write it
};

const std::vector<Batch>& batches() {
  static const std::vector<Batch> all = {
      {"all but the last token",
       [] {
         return torch::randn({8, 7}).slice(1, 0, -1);
       }},
      {"all but the first token",
       [] {
         return torch::randn({8, 7}).slice(1, 1);
       }},
      {"every second column",
       [] {
         return torch::randn({8, 12}).slice(1, 1, 12, 2);
       }},
      {"part of wide rows",
       [] {
         return torch::randn({8, 100}).slice(1, 20, 26);
       }},
      {"transposed",
       [] {
         return torch::randn({6, 8}).t();
       }},
      {"channels last",
       [] {
         return torch::randn({8, 3, 1, 2}).contiguous(torch::MemoryFormat::ChannelsLast);
       }},
      {"one sample",
       [] {
         return torch::randn({1, 6}).expand({8, 6});
       },
       true},
      {"one number a sample",
       [] {
         return torch::randn({8, 1}).expand({8, 6});
       },
       true},
      {"windows", [] { return torch::randn({13}).unfold(0, 6, 1); }, true},
  };
  return all;
}

/// Kernels and the program find the same strides in all steps.
TEST_F(StepTest, BatchesInAnyLayoutAreCapturedOnce) {
  constexpr int kSteps = 3;
  for (const Batch& batch : batches()) {
    for (const int64_t count : {1, 2}) {
      SCOPED_TRACE(c10::str(batch.name, ", ", count, " microbatches"));
      const auto loss_of = [](const auto& model, const torch::Tensor& x, const torch::Tensor& y) {
        return torch::mse_loss(model(x.flatten(1)) + 0.01 * x.stride(0), y) + 0.1 * x.sum(-1).std();
      };
      Tensors inputs;
      for (int i = 0; i < kSteps; ++i) inputs.push_back(batch.make());
      Mlp net = make_net();
      torch::optim::SGD plain_optimizer(net->parameters(), kSgd);
      std::vector<Tensors> losses;
      for (const auto& x : inputs) {
        plain_optimizer.zero_grad();
        losses.push_back(plain_backward(net->parameters(), 1, count, [&](int m) {
          return loss_of([&](auto in) { return net(in); }, strided_part(x, count, m),
                         part(y_, count, m));
        }));
        plain_optimizer.step();
      }
      for (const int ranks : {1, 2}) {
        SCOPED_TRACE(c10::str(ranks, " stages"));
        run_as_threads(ranks, stages(ranks).microbatches(count), [&] {
          DistributedModel<Mlp> model(make_net());
          DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), kSgd);
          auto train = step([&](torch::Tensor x, torch::Tensor y) {
            auto loss = loss_of(model, x, y);
            model->backward(loss);
            return loss;
          });
          for (int i = 0; i < kSteps; ++i) {
            optimizer.zero_grad();
            expect_equal(train(inputs[i], y_).outputs(), losses[i], c10::str("loss ", i));
            optimizer.step();
          }
          expect_equal(to_map(model->state_dict()), state_of(*net), "weight");
        });
        // Throws where the steps are captured more than once.
        run_as_threads(ranks, stages(ranks).microbatches(count), [&] {
          DistributedModel<Mlp> model(make_net(), ModelOptions().backward_passes_per_step(kSteps));
          auto train = step([&](torch::Tensor x, torch::Tensor y) {
            auto loss = loss_of(model, x, y);
            model->backward(loss);
            return loss;
          });
          const auto first = train(inputs[0], y_).outputs();
          expect_equal(first, losses[0], "loss of the first pass");
          for (int i = 1; i < kSteps; ++i) train(inputs[i], y_);
        });
      }
    }
  }
}

/// The copy that each microbatch gets lies as the argument does.
TEST_F(StepTest, BatchesInAnyLayoutThatAreWritten) {
  for (const Batch& batch : batches()) {
    if (batch.shares_elements) continue;
    SCOPED_TRACE(batch.name);
    const auto x = batch.make(), before = x.clone();
    const auto function = [](const auto& model, torch::Tensor in) {
      in.mul_(2);
      return model(in.flatten(1)) + 0.01 * in.stride(0) + in.sum(-1).std();
    };
    Tensors expected;
    {
      torch::NoGradGuard no_grad;
      Mlp net = make_net();
      for (int m = 0; m < 2; ++m) {
        expected.push_back(function([&](auto in) { return net(in); }, strided_part(x, 2, m)));
      }
    }
    on_stages([&](DistributedModel<Mlp>& model) {
      auto writes = step([&](torch::Tensor in) { return function(model, in); });
      for (int i = 0; i < 3; ++i) expect_equal(writes(x).outputs(), expected, "output");
      expect_equal(x, before, "the caller's tensor");
    });
  }
}

/// Kernels of the first step, which reads the constant itself, and of replays, which read a copy,
/// find the same strides.
TEST_F(StepTest, ConstantsInAnyLayout) {
  for (const Batch& batch : batches()) {
    SCOPED_TRACE(batch.name);
    const auto constant = batch.make();
    const auto function = [&](const auto& model, const torch::Tensor& in) {
      const auto kept = whole(constant);
      return model(in) + 0.01 * kept.stride(0) + kept.sum() + kept.norm();
    };
    Tensors expected;
    {
      torch::NoGradGuard no_grad;
      Mlp net = make_net();
      for (int m = 0; m < 2; ++m) {
        expected.push_back(function([&](auto in) { return net(in); }, part(x_, 2, m)));
      }
    }
    on_stages([&](DistributedModel<Mlp>& model) {
      auto reads = step([&](torch::Tensor in) { return function(model, in); });
      for (int i = 0; i < 3; ++i) expect_equal(reads(x_).outputs(), expected, "output");
    });
  }
}

/// Multiplies by a buffer, which each microbatch writes first: the backward pass needs what it
/// wrote, while later ones go on.
struct ScaledImpl : torch::nn::Module {
  torch::nn::Linear layer{nullptr};
  torch::Tensor scale;

  explicit ScaledImpl(torch::Tensor buffer) {
    layer = register_module("layer", torch::nn::Linear(6, 1));
    scale = register_buffer("scale", std::move(buffer));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    {
      torch::NoGradGuard no_grad;
      scale.mul_(1.1).add_(x.detach().sum());
    }
    return (layer(x).sum() * scale).sum() + scale.sum() + scale.norm();
  }
};
TORCH_MODULE(Scaled);

TEST_F(StepTest, BuffersInAnyLayoutThatAreWritten) {
  for (const Batch& batch : batches()) {
    if (batch.shares_elements) continue;
    SCOPED_TRACE(batch.name);
    const auto make = [&] {
      torch::manual_seed(kSeed);
      return Scaled(batch.make());
    };
    Scaled net = make();
    std::vector<Tensors> losses;
    for (int i = 0; i < 3; ++i) {
      losses.push_back(
          plain_backward(net->parameters(), 1, 2, [&](int m) { return net(part(x_, 2, m)); }));
    }
    run_as_threads(1, stages(1), [&] {
      DistributedModel<Scaled> model(make());
      auto train = step([&](torch::Tensor x) {
        auto loss = model(x);
        model->backward(loss);
        return loss;
      });
      for (int i = 0; i < 3; ++i) expect_equal(train(x_).outputs(), losses[i], "loss");
      expect_equal(to_map(model->state_dict()), state_of(*net), "buffer");
    });
  }
}

TEST_F(StepTest, AViewThatStridesForbidIsRefusedAsByLibtorch) {
  const std::string reason = "view size is not compatible with input tensor's size and stride";
  const auto x = torch::randn({8, 7}).slice(1, 0, -1);
  EXPECT_NE(error_of<c10::Error>([&] { x.view({-1}); }).find(reason), std::string::npos);
  for (const int64_t count : {1, 2}) {
    const auto text = error_of_run<c10::Error>(1, stages(1).microbatches(count), [&] {
      DistributedModel<Mlp> model(make_net());
      auto flattens = step([&](torch::Tensor in) { return model(in.view({-1, 6}).view({-1})); });
      flattens(x);
    });
    EXPECT_NE(text.find(reason), std::string::npos) << text;
  }
}

/// Ranks get the inputs of the first by a message, which makes a small part of wide rows dense.
TEST_F(StepTest, BatchesInAnyLayoutOfTheFirstRank) {
  for (const Batch& batch : batches()) {
    SCOPED_TRACE(batch.name);
    const auto x = batch.make();
    Tensors expected;
    {
      torch::NoGradGuard no_grad;
      Mlp net = make_net();
      for (int m = 0; m < 2; ++m) expected.push_back(net(strided_part(x, 2, m).flatten(1)));
    }
    run_as_threads(2, stages(2).input_source("first"), [&] {
      DistributedModel<Mlp> model(make_net());
      auto evaluate = step([&](torch::Tensor in) { return model(in.flatten(1)); });
      for (int i = 0; i < 2; ++i) {
        const auto outputs = evaluate(x).outputs();
        for (int m = 0; m < 2; ++m) {
          EXPECT_TRUE(torch::allclose(outputs.at(m), expected[m], 1e-5, 1e-6));
        }
      }
    });
  }
}

/// Wherever its microbatches begin in memory, which decides whether they are copied.
TEST_F(StepTest, BatchesWithAHistoryAreRefused) {
  for (const int64_t begin : {0, 1}) {
    const auto text = error_of_run<CaptureError>(1, stages(1), [&] {
      DistributedModel<Mlp> model(make_net());
      auto evaluate = step([&](torch::Tensor x) { return model(x); });
      evaluate(torch::randn({8, 7}).requires_grad_().slice(1, begin, begin + 6));
    });
    EXPECT_NE(text.find("input 0 requires a gradient"), std::string::npos) << text;
  }
}

TEST_F(StepTest, ANegativeAxisCountsFromTheEndOrIsRefused) {
  run_as_threads(1, stages(1), [&] {
    DistributedModel<Mlp> model(Mlp(4));
    try {
      auto last = step(
          [&](torch::Tensor x) {
            model(x.t());
            return x * 1;
          },
          StepOptions().input_split_axes({{0, -1}}));
      const auto wide = x_.t().contiguous();
      expect_equal(last(wide).outputs(), {part(wide, 2, 0, 1), part(wide, 2, 1, 1)}, "last axis");
    } catch (const UsageError& error) {
      expect_has(error.what(), {"-1", "axis"});
    }
  });
}

/// Weights of the samples' microbatches, which cut themselves.
struct Weights {
  std::vector<double> values;
  Weights smp_slice(int64_t num_microbatches, int64_t microbatch, int64_t axis) const {
    EXPECT_EQ(axis, 0);
    const size_t size = values.size() / num_microbatches;
    const auto begin = values.begin() + microbatch * size;
    return {std::vector<double>(begin, begin + size)};
  }
};

TEST_F(StepTest, TypesThatCutThemselves) {
  const auto out = plain(x_);
  on_stages([&](DistributedModel<Mlp>& model) {
    int calls = 0;
    const auto function = [&](torch::Tensor x, Weights weights) {
      ++calls;
      return std::make_pair(model(x) * weights.values[0], weights.values.size());
    };
    auto weighted = step(function);
    for (double last : {3.0, 5.0, 3.0}) {
      calls = 0;
      auto [y, sizes] = weighted(x_, Weights{{2.0, 1.0, last, 1.0}});
      EXPECT_EQ(calls, 2);  // once for each microbatch
      expect_equal(y.outputs(), {out[0] * 2.0, out[1] * last}, "weighted");
      EXPECT_EQ(sizes, (std::vector<size_t>{2, 2}));
    }
    auto whole = step(function, StepOptions().non_split_inputs({1}));
    auto [y, sizes] = whole(x_, Weights{{2.0, 1.0, 3.0, 1.0}});
    expect_equal(y.outputs(), {out[0] * 2.0, out[1] * 2.0}, "whole");
    EXPECT_EQ(sizes, (std::vector<size_t>{4, 4}));
  });
}

TEST_F(StepTest, TrainingWithTypesThatCutThemselves) {
  Mlp net(4);
  copy_values(*prototype_, *net);
  torch::optim::SGD plain_optimizer(net->parameters(), kSgd);
  const std::vector<Weights> weights = {{{1, 2}}, {{3, 4}}, {{1, 2}}};
  for (const auto& weight : weights) {
    plain_optimizer.zero_grad();
    plain_backward(net->parameters(), 1, 2, [&](int m) {
      return torch::mse_loss(net(part(x_, 2, m)), part(y_, 2, m)) * weight.values[m];
    });
    plain_optimizer.step();
  }
  on_stages([&](DistributedModel<Mlp>& model) {
    DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), kSgd);
    auto train = step([&](torch::Tensor x, torch::Tensor y, Weights weight) {
      auto loss = torch::mse_loss(model(x), y) * weight.values[0];
      model->backward(loss);
      return loss;
    });
    for (const auto& weight : weights) {
      optimizer.zero_grad();
      train(x_, y_, weight);
      optimizer.step();
    }
    expect_equal(to_map(model->state_dict()), state_of(*net), "weight");
  });
}

}  // namespace
}  // namespace smp::testing
