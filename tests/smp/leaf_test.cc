// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <ostream>
#include <tuple>

#include "tests/smp/training_case.h"

namespace smp::testing {
namespace {

constexpr int64_t kLeafWidth = 6;

torch::nn::Linear leaf_linear(int64_t in = kLeafWidth, int64_t out = kLeafWidth) {
  return torch::nn::Linear(in, out);
}

/// Calls a module as a leaf, or plainly.
template <class M, class... Arguments>
auto call(bool opaque, M& module, Arguments&&... arguments) {
  return opaque ? leaf(module)(std::forward<Arguments>(arguments)...)
                : module->forward(std::forward<Arguments>(arguments)...);
}

/// Sends each row to one of three experts; an expert without rows is not called.
struct MixtureImpl : torch::nn::Module {
  MixtureImpl() {
    router = register_module("router", leaf_linear(kLeafWidth, 3));
    for (int i = 0; i < 3; ++i) {
      experts.push_back(register_module("expert" + std::to_string(i), leaf_linear()));
    }
    frozen = register_parameter("frozen", torch::rand({kLeafWidth}), /*requires_grad=*/false);
  }

  torch::Tensor forward(torch::Tensor x) {
    const auto [gates, choices] = torch::softmax(router(x), 1).max(1);
    auto out = torch::zeros_like(x);
    for (int64_t i = 0; i < 3; ++i) {
      const auto rows = torch::nonzero(choices == i).flatten();
      if (rows.numel() == 0) continue;
      const auto gate = gates.index_select(0, rows).unsqueeze(1);
      out.index_add_(0, rows, torch::tanh(experts[i](x.index_select(0, rows))) * gate * frozen);
    }
    return out;
  }

  torch::nn::Linear router{nullptr};
  std::vector<torch::nn::Linear> experts;
  torch::Tensor frozen;
};
TORCH_MODULE(Mixture);

/// x^3 * weight, with a backward of its own.
struct CubeFunction : torch::autograd::Function<CubeFunction> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, torch::Tensor x,
                               torch::Tensor weight) {
    context->save_for_backward({x, weight});
    return x.pow(3) * weight;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0] * 3 * saved[0].pow(2) * saved[1], (gradients[0] * saved[0].pow(3)).sum(0)};
  }
};

struct CubeImpl : torch::nn::Module {
  explicit CubeImpl(torch::Tensor shared) { weight = register_parameter("weight", shared); }
  torch::Tensor forward(torch::Tensor x) { return CubeFunction::apply(x, weight); }
  torch::Tensor weight;
};
TORCH_MODULE(Cube);

/// A loop whose length depends on data; returns the state and the states on the way.
struct PonderImpl : torch::nn::Module {
  PonderImpl() { fc = register_module("fc", leaf_linear()); }

  std::tuple<torch::Tensor, std::vector<torch::Tensor>> forward(std::vector<torch::Tensor> terms,
                                                                double strength) {
    auto x = terms[0] + terms[1];
    auto first = x * 1;
    for (int i = 0; i < 8 && x.norm().item<double>() > 1; ++i) {
      x = torch::tanh(fc(x)) * strength;
    }
    return {x * 1, {first, x * 2}};
  }

  torch::nn::Linear fc{nullptr};
};
TORCH_MODULE(Ponder);

/// Depends on its parameters for some inputs only.
struct GateImpl : torch::nn::Module {
  GateImpl() { fc = register_module("fc", leaf_linear()); }
  torch::Tensor forward(torch::Tensor x) {
    return x.sum().item<double>() > 0 ? torch::zeros_like(x) : fc(x);
  }
  torch::nn::Linear fc{nullptr};
};
TORCH_MODULE(Gate);

struct NormImpl : torch::nn::Module {
  explicit NormImpl(double dropout) {
    norm = register_module("norm", torch::nn::BatchNorm1d(kLeafWidth));
    drop = register_module("drop", torch::nn::Dropout(dropout));
    gate = register_module("gate", Gate());
  }
  torch::Tensor forward(torch::Tensor x) {
    // A leaf inside a leaf is an ordinary call.
    return drop(norm(drop(x))) + leaf(gate)(x);
  }
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Dropout drop{nullptr};
  Gate gate{nullptr};
};
TORCH_MODULE(Norm);

/// Everything a leaf is for, between ordinary layers.
struct LeafNetImpl : torch::nn::Module {
  LeafNetImpl(bool leaves, double dropout) : opaque(leaves) {
    in = register_module("in", leaf_linear());
    mixture = register_module("mixture", Mixture());
    scale = register_parameter("scale", torch::rand({kLeafWidth}));
    cube = register_module("cube", Cube(scale));
    middle = register_module("middle", leaf_linear());
    ponder = register_module("ponder", Ponder());
    norm = register_module("norm", Norm(dropout));
    gate = register_module("gate", Gate());
    drop = register_module("drop", torch::nn::Dropout(dropout));
    head = register_module("head", leaf_linear(kLeafWidth, 1));
  }

  torch::Tensor forward(torch::Tensor x) {
    x = drop(torch::tanh(in(x))) * scale;
    x = x * scale + call(opaque, mixture, x) * x.sin();
    x = call(opaque, gate, x) + x;
    x = torch::tanh(call(opaque, cube, x)) + x * scale;
    x = middle(x).relu_();
    const auto [last, steps] =
        call(opaque, ponder, std::vector<torch::Tensor>{x, x * scale}, strength);
    x = last + steps[0] * x - steps[1];
    x = drop(call(opaque, norm, x)) + x;
    return head(x);
  }

  torch::Tensor loss(torch::Tensor x, torch::Tensor y) { return torch::mse_loss(forward(x), y); }

  bool opaque;
  double strength = 0.5;
  torch::Tensor scale;
  torch::nn::Linear in{nullptr}, middle{nullptr}, head{nullptr};
  Mixture mixture{nullptr};
  Cube cube{nullptr};
  Ponder ponder{nullptr};
  Norm norm{nullptr};
  Gate gate{nullptr};
  torch::nn::Dropout drop{nullptr};
};
TORCH_MODULE(LeafNet);

struct LeafLayout {
  int stages;
  int64_t microbatches;
  std::string pipeline;
  double dropout;
};

std::ostream& operator<<(std::ostream& out, const LeafLayout& layout) {
  return out << layout.stages << " stages, " << layout.microbatches << " microbatches, "
             << layout.pipeline << ", dropout " << layout.dropout;
}

constexpr int kSteps = 3;
const torch::optim::SGDOptions kLeafSgd = torch::optim::SGDOptions(0.1).momentum(0.9);

class Leaves : public ::testing::TestWithParam<LeafLayout> {
 protected:
  Leaves() {
    torch::set_num_threads(1);
    torch::manual_seed(31);
    const int64_t count = GetParam().microbatches;
    for (int i = 0; i < kSteps; ++i) {
      x_.push_back(torch::randn({4 * count, kLeafWidth}));
      y_.push_back(torch::randn({4 * count, 1}));
      // Other shapes than in training, so the evaluation is recorded on shapes.
      evaluation_x_.push_back(torch::randn({5 * count, kLeafWidth}));
      evaluation_y_.push_back(torch::randn({5 * count, 1}));
    }
  }

  TrainingCase<LeafNet, Recipe<torch::optim::SGD, torch::optim::SGDOptions>> training() const {
    const LeafLayout& layout = GetParam();
    // One process calls leaves plainly unless there is dropout in them: a leaf draws from one
    // stream.
    TrainingCase<LeafNet, Recipe<torch::optim::SGD, torch::optim::SGDOptions>> result(
        [dropout = layout.dropout] { return LeafNet(dropout > 0, dropout); }, {kLeafSgd});
    result.prepare = [](LeafNet& net) { net->opaque = true; };
    result.config =
        stages(layout.stages).microbatches(layout.microbatches).pipeline(layout.pipeline);
    result.ranks = layout.stages;
    result.microbatches = static_cast<int>(layout.microbatches);
    result.steps = kSteps;
    result.batch = [this](int step) { return Tensors{x_[step], y_[step]}; };
    result.evaluation_batch = [this](int step) {
      return Tensors{evaluation_x_[step], evaluation_y_[step]};
    };
    result.before_step = [](LeafNet& net, int step) { net->strength = 0.5 + step; };
    result.at_end = [](auto& rank) {
      for (const auto& parameter : rank.model->parameters()) {
        EXPECT_TRUE(parameter.is_leaf());
        EXPECT_EQ(parameter.requires_grad(), !parameter.is_same(rank.net->mixture->frozen));
      }
    };
    return result;
  }

  Tensors x_, y_, evaluation_x_, evaluation_y_;
};

TEST_P(Leaves, GiveTheBitsOfOneProcess) {
  const auto tested = training();
  expect_same(tested.run_on_ranks(), tested.run_plain());
}

std::vector<LeafLayout> layouts() {
  std::vector<LeafLayout> result;
  for (int count : {1, 2, 3}) {
    for (int64_t microbatches : {1, 3}) {
      for (const char* pipeline : {"simple", "interleaved"}) {
        for (double dropout : {0.0, 0.3}) {
          result.push_back({count, microbatches, pipeline, dropout});
        }
      }
    }
  }
  return result;
}

INSTANTIATE_TEST_SUITE_P(Layouts, Leaves, ::testing::ValuesIn(layouts()));

/// A module whose `forward` the test gives, with one parameter.
struct CustomImpl : torch::nn::Module {
  using Body = std::function<Tensors(CustomImpl&, torch::Tensor)>;
  explicit CustomImpl(Body function) : body(std::move(function)) {
    weight = register_parameter("weight", torch::ones({kLeafWidth}));
  }
  Tensors forward(torch::Tensor x) { return body(*this, x); }
  Body body;
  torch::Tensor weight;
};
TORCH_MODULE(Custom);

class LeafCalls : public ::testing::Test {
 protected:
  LeafCalls() {
    torch::set_num_threads(1);
    torch::manual_seed(3);
  }

  struct NetImpl : torch::nn::Module {
    explicit NetImpl(const CustomImpl::Body& body) {
      custom = register_module("custom", Custom(body));
      fc = register_module("fc", leaf_linear());
    }
    torch::Tensor forward(torch::Tensor x) { return leaf(custom)(fc(x))[0]; }
    Custom custom{nullptr};
    torch::nn::Linear fc{nullptr};
  };
  TORCH_MODULE(Net);

  /// The text of the error of a step on `x`, then of an evaluation on the rows of it.
  template <class E = CaptureError>
  static std::string refusal(const CustomImpl::Body& body,
                             const torch::Tensor& x = torch::randn({4, kLeafWidth})) {
    return error_of_run<E>(1, stages(1), [&] {
      DistributedModel<Net> model(Net{body});
      auto train = step([&](torch::Tensor input) {
        auto loss = model(input).sum();
        model->backward(loss);
        return loss;
      });
      train(x);
      auto evaluate = step([&](torch::Tensor input) { return model(input); });
      evaluate(x.repeat({2, 1}));
    });
  }
};

TEST_F(LeafCalls, OutsideOfAStepAreOrdinaryCalls) {
  Mixture mixture;
  const auto x = torch::randn({5, kLeafWidth});
  expect_equal(leaf(mixture)(x), mixture->forward(x), "result");
  std::shared_ptr<MixtureImpl> pointer = mixture.ptr();
  expect_equal(leaf(pointer)(x), mixture->forward(x), "result");
}

TEST_F(LeafCalls, OfASeedDrawFromOneStream) {
  // Two dropouts inside, one random operator outside: the stream of ordinal 1 follows.
  Custom twice([](CustomImpl&, torch::Tensor x) {
    return Tensors{torch::dropout(torch::dropout(x, 0.5, true), 0.5, true)};
  });
  const auto x = torch::ones({50});
  torch::Tensor after_leaf, after_one;
  {
    const KeyedRandom random(kSeed, "step 0", 0, 0);
    leaf(twice)(x);
    after_leaf = torch::rand({4});
  }
  {
    const KeyedRandom random(kSeed, "step 0", 0, 0);
    torch::dropout(x, 0.5, true);
    after_one = torch::rand({4});
  }
  expect_equal(after_leaf, after_one, "draw");
}

TEST_F(LeafCalls, WithAnotherIntegerAreAnotherGraph) {
  struct RepeatImpl : torch::nn::Module {
    RepeatImpl() { weight = register_parameter("weight", torch::ones({kLeafWidth})); }
    torch::Tensor forward(torch::Tensor x, int64_t times, const std::string& how) {
      const auto y = x * weight;
      return how == "rows" ? y.repeat({times, 1}) : y.repeat({1, times});
    }
    torch::Tensor weight;
  };
  const auto x = torch::randn({4, kLeafWidth});
  run_as_threads(2, stages(2), [&] {
    auto repeat = std::make_shared<RepeatImpl>();
    DistributedModel<std::shared_ptr<RepeatImpl>> model(repeat);
    int64_t times = 2;
    std::string how = "rows";
    auto evaluate =
        step([&](torch::Tensor input) { return leaf(repeat)(input, times, how).tanh(); });
    const auto check = [&] {
      const auto outputs = evaluate(x).outputs();
      for (int64_t m = 0; m < 2; ++m) {
        const auto rows = part(x, 2, m);
        const auto expected = how == "rows" ? rows.repeat({times, 1}) : rows.repeat({1, times});
        expect_equal(outputs[m], expected.tanh(), "result");
      }
    };
    check();
    times = 3;
    check();
    how = "columns";
    check();
  });
}

TEST_F(LeafCalls, RefuseToWriteTheirInput) {
  expect_has(refusal([](CustomImpl&, torch::Tensor x) {
               x.mul_(2);
               return Tensors{x * 2};
             }),
             {"leaf module \"", "CustomImpl\" writes an input in place",
              "Write into a copy: x = x.clone()"});
}

TEST_F(LeafCalls, RefuseToWriteAParameter) {
  expect_has(refusal([](CustomImpl& self, torch::Tensor x) {
               const torch::NoGradGuard no_grad;
               self.weight.mul_(2);
               return Tensors{x * 2};
             }),
             {"writes a parameter", "Change parameters outside the step function"});
}

TEST_F(LeafCalls, RefuseToReturnSharedMemory) {
  expect_has(refusal([](CustomImpl&, torch::Tensor x) { return Tensors{x.view({-1})}; }),
             {"returns as tensor 0 of its result one that shares memory with an input",
              "Return a copy: result.clone()"});
  expect_has(refusal([](CustomImpl& self, torch::Tensor) { return Tensors{self.weight}; }),
             {"shares memory with a parameter or buffer"});
  expect_has(refusal([](CustomImpl&, torch::Tensor x) { return (x * 2).chunk(2); }),
             {"returns as tensor 1 of its result one that shares memory with another one"});
}

TEST_F(LeafCalls, RefuseShapesThatDependOnData) {
  int calls = 0;
  expect_has(refusal([&](CustomImpl& self, torch::Tensor x) {
               const int64_t rows = ++calls < 3 ? 2 : 1;
               return Tensors{x.narrow(0, 0, rows) * self.weight};
             }),
             {"returned f32[1, 6] as tensor 0 of its result where f32[2, 6] was recorded",
              "may not depend on data"});
}

TEST_F(LeafCalls, RefuseANumberOfResultsThatDependsOnData) {
  int calls = 0;
  expect_has(refusal([&](CustomImpl& self, torch::Tensor x) {
               return ++calls < 3 ? Tensors{x * self.weight} : Tensors{x * self.weight, x * 2};
             }),
             {"returned [tensor, tensor, ] where [tensor, ] was recorded",
              "How many tensors a leaf returns may not depend on data"});
}

TEST_F(LeafCalls, RefuseResultsThatAreNotDense) {
  expect_has(refusal([](CustomImpl& self, torch::Tensor x) {
               return Tensors{(x * self.weight).to_sparse()};
             }),
             {"CustomImpl\" returns a tensor that is not dense. Convert it with to_dense()"});
}

TEST_F(LeafCalls, SayWhenTheyFailOnZeros) {
  expect_has(refusal([](CustomImpl& self, torch::Tensor x) {
               TORCH_CHECK(x.abs().sum().item<double>() > 0, "nothing to route");
               return Tensors{x * self.weight};
             }),
             {"CustomImpl\" failed on zeros. A step that takes a new way is recorded on shapes",
              "It threw: nothing to route"});
}

TEST_F(LeafCalls, RefuseAParameterThatIsNotTheirs) {
  const auto x = torch::randn({4, kLeafWidth});
  const auto text = error_of_run<CaptureError>(1, stages(1), [&] {
    auto net = Net{[](CustomImpl&, torch::Tensor) { return Tensors{}; }};
    const auto weight = net->fc->weight;
    net->custom->body = [weight](CustomImpl& self, torch::Tensor y) {
      return Tensors{torch::matmul(y, weight) * self.weight};
    };
    DistributedModel<Net> model(net);
    auto train = step([&](torch::Tensor input) {
      auto loss = model(input).sum();
      model->backward(loss);
    });
    train(x);
  });
  expect_has(text,
             {"uses parameter \"fc.weight\", which is not its own", "Register it in the leaf too"});
}

TEST_F(LeafCalls, RefuseAModuleThatBelongsToNoModel) {
  Custom stray([](CustomImpl& self, torch::Tensor x) { return Tensors{x * self.weight}; });
  const auto x = torch::randn({4, kLeafWidth});
  const auto text = error_of_run<CaptureError>(1, stages(1), [&] {
    DistributedModel<torch::nn::Linear> model(leaf_linear());
    auto train = step([&](torch::Tensor input) {
      auto loss = leaf(stray)(model(input))[0].sum();
      model->backward(loss);
    });
    train(x);
  });
  expect_has(text, {"uses a parameter of shape [6] that belongs to no DistributedModel"});
}

TEST_F(LeafCalls, RefuseBackwardInside) {
  const auto x = torch::randn({4, kLeafWidth});
  const auto text = error_of_run<UsageError>(1, stages(1), [&] {
    const ModelCore* core = nullptr;
    DistributedModel<Net> model(Net{[&](CustomImpl& self, torch::Tensor y) {
      auto loss = (y * self.weight).sum();
      core->backward(loss);
      return Tensors{loss};
    }});
    core = model.operator->();
    auto train = step([&](torch::Tensor input) { model(input); });
    train(x);
  });
  expect_has(text, {"step function \"step 0\"", "backward was called inside a leaf module",
                    "on what the leaf returns"});
}

}  // namespace
}  // namespace smp::testing
