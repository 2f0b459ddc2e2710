// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <tuple>

#include "tests/error_of.h"
#include "tests/smp/step_fixture.h"

namespace smp::testing {
namespace {

template <class Expected, class Got>
void expect_type(const Got&) {
  static_assert(std::is_same_v<Expected, Got>);
}

TEST_F(StepTest, ResultsOfEveryStructure) {
  const auto out = plain(x_);
  const Tensors twice = {out[0] * 2, out[1] * 2};
  on_stages([&](DistributedModel<Mlp>& model) {
    auto one = step([&](torch::Tensor x) { return model(x); });
    expect_type<StepOutput>(one(x_));
    expect_equal(one(x_).outputs(), out, "tensor");

    auto tuple = step([&](torch::Tensor x) {
      auto y = model(x);
      return std::make_tuple(y, y * 2, 7);
    });
    auto got = tuple(x_);
    expect_type<std::tuple<StepOutput, StepOutput, std::vector<int>>>(got);
    expect_equal(std::get<0>(got).outputs(), out, "tuple");
    expect_equal(std::get<1>(got).outputs(), twice, "tuple");
    EXPECT_EQ(std::get<2>(got), (std::vector<int>{7, 7}));

    auto pair = step([&](torch::Tensor x) { return std::make_pair(std::string("a"), model(x)); });
    auto [text, tensor] = pair(x_);
    EXPECT_EQ(text, (std::vector<std::string>{"a", "a"}));
    expect_equal(tensor.outputs(), out, "pair");

    auto vector = step([&](torch::Tensor x) {
      auto y = model(x);
      return std::vector<torch::Tensor>{y * 2, y};
    });
    auto list = vector(x_);
    expect_type<std::vector<StepOutput>>(list);
    ASSERT_EQ(list.size(), 2u);
    expect_equal(list[0].outputs(), twice, "vector");
    expect_equal(list[1].outputs(), out, "vector");

    auto map = step([&](torch::Tensor x) {
      auto y = model(x);
      return std::map<std::string, torch::Tensor>{{"twice", y * 2}, {"once", y}};
    });
    auto named = map(x_);
    expect_type<std::map<std::string, StepOutput>>(named);
    ASSERT_EQ(named.size(), 2u);
    expect_equal(named["twice"].outputs(), twice, "map");
    expect_equal(named["once"].outputs(), out, "map");

    // More numbers than a compiler lists types of.
    using Numbers = std::array<float, 5000>;
    auto array = step([&](torch::Tensor x, const Numbers& numbers) {
      auto y = model(x);
      return std::make_tuple(std::array<torch::Tensor, 2>{y * 2, y}, std::array<torch::Tensor, 0>(),
                             numbers);
    });
    Numbers numbers{};
    numbers.back() = 3;
    const auto [two, none, many] = array(x_, numbers);
    expect_type<std::array<StepOutput, 2>>(two);
    expect_equal(two[0].outputs(), twice, "array");
    expect_equal(two[1].outputs(), out, "array");
    expect_type<std::array<StepOutput, 0>>(none);
    EXPECT_EQ(many, (std::vector<Numbers>{numbers, numbers}));

    auto nested = step([&](torch::Tensor x) {
      auto y = model(x);
      std::map<int, std::pair<torch::Tensor, double>> inner = {{3, {y, 0.5}}};
      return std::make_tuple(std::vector<torch::Tensor>{y * 2}, inner);
    });
    auto deep = nested(x_);
    expect_equal(std::get<0>(deep)[0].outputs(), twice, "nested");
    expect_equal(std::get<1>(deep)[3].first.outputs(), out, "nested");
    EXPECT_EQ(std::get<1>(deep)[3].second, (std::vector<double>{0.5, 0.5}));

    auto number = step([&](torch::Tensor x) {
      model(x);
      return x.size(0);
    });
    EXPECT_EQ(number(x_), (std::vector<int64_t>{4, 4}));

    int calls = 0;
    auto nothing = step([&](torch::Tensor x) {
      ++calls;
      model(x);
    });
    static_assert(std::is_void_v<decltype(nothing(x_))>);
    nothing(x_);
    nothing(x_);
    EXPECT_EQ(calls, 2);
  });
}

TEST_F(StepTest, ReturnsInputsParametersAndConstants) {
  on_stages([&](DistributedModel<Mlp>& model) {
    auto echo = step([&](torch::Tensor x) {
      auto y = model(x);
      return std::make_tuple(x, y, model.get_module()->in->bias, torch::ones({2}));
    });
    for (int i = 0; i < 2; ++i) {
      auto got = echo(x_);
      expect_equal(std::get<0>(got).concat(), x_, "the input itself");
      expect_equal(std::get<1>(got).outputs(), plain(x_), "the output");
      expect_equal(std::get<2>(got).outputs()[1], prototype_->in->bias.detach(), "a parameter");
      expect_equal(std::get<3>(got).reduce_sum(), torch::full({2}, 2.0), "a constant");
    }
  });
}

TEST_F(StepTest, ReductionsOfOutputs) {
  const auto out = plain(x_, 4);
  on_stages([&](DistributedModel<Mlp>& model) {
    auto forward = step(
        [&](torch::Tensor x) {
          auto y = model(x);
          return std::make_pair(y, y.sum());
        },
        StepOptions().microbatches(4));
    EXPECT_EQ(forward.microbatches(), 4);
    auto [y, sum] = forward(x_);
    ASSERT_EQ(y.outputs().size(), 4u);
    expect_equal(y.concat(), torch::cat(out), "concat");
    expect_equal(y.stack(), torch::stack(out), "stack");
    expect_equal(y.reduce_sum(), ((out[0] + out[1]) + out[2]) + out[3], "sum");
    expect_equal(y.reduce_mean(), (((out[0] + out[1]) + out[2]) + out[3]) / 4, "mean");
    EXPECT_EQ(sum.stack().sizes(), torch::IntArrayRef({4}));
    EXPECT_EQ(sum.reduce_mean().dim(), 0);
    expect_has(error_of<UsageError>([&, &sum = sum] { std::ignore = sum.concat(); }),
               {"concat", "stack()"});
  });
}

TEST_F(StepTest, ReductionsChangeNoOutput) {
  const StepOutput output({torch::ones({2}), torch::full({2}, 2.0)});
  expect_equal(output.reduce_sum(), torch::full({2}, 3.0), "sum");
  expect_equal(output.reduce_mean(), torch::full({2}, 1.5), "mean");
  expect_equal(output.reduce_mean(), torch::full({2}, 1.5), "mean again");
  expect_equal(output.outputs()[0], torch::ones({2}), "first microbatch");
  const StepOutput whole({torch::full({1}, 1, torch::kLong), torch::full({1}, 2, torch::kLong)});
  EXPECT_EQ(whole.reduce_sum().item<int64_t>(), 3);
  EXPECT_DOUBLE_EQ(whole.reduce_mean().item<double>(), 1.5);
  EXPECT_TRUE(StepOutput().outputs().empty());
  error_of<c10::Error>([] { std::ignore = StepOutput().reduce_mean(); });
  error_of<c10::Error>([] { std::ignore = StepOutput().concat(); });
  error_of<c10::Error>([] { std::ignore = StepOutput().stack(); });
}

TEST_F(StepTest, ReductionsCountTruthValuesAndDoNotWrapIntegers) {
  const StepOutput right(torch::tensor({true, true, true, false}).unbind());
  EXPECT_EQ(right.reduce_sum().item<int64_t>(), 3);
  EXPECT_DOUBLE_EQ(right.reduce_mean().item<double>(), 0.75);
  for (const auto type : {torch::kByte, torch::kChar, torch::kShort, torch::kInt, torch::kLong}) {
    const auto bytes = torch::full({4}, 100, type);
    const StepOutput output(bytes.unbind());
    expect_equal(output.reduce_sum(), bytes.sum(), "sum");
    EXPECT_DOUBLE_EQ(output.reduce_mean().item<double>(), 100);
  }
}

TEST_F(StepTest, MicrobatchesOfOneStepFunction) {
  on_stages([&](DistributedModel<Mlp>& model) {
    auto train = make_training(model);
    EXPECT_EQ(train.microbatches(), 2);
    auto sample = step([&](torch::Tensor x) { return model(x); }, StepOptions().microbatches(1));
    EXPECT_EQ(sample.microbatches(), 1);
    EXPECT_EQ(train(x_, y_).outputs().size(), 2u);
    const auto one = x_.narrow(0, 0, 1);
    expect_equal(sample(one).outputs(), plain(one, 1), "one sequence");
  });
}

TEST_F(StepTest, OutputsAreDetachedUnlessAskedFor) {
  for (int count : {1, 2}) {
    std::mutex mutex;
    int with_history = 0;
    run_as_threads(count, stages(count), [&] {
      Mlp net(4);
      copy_values(*prototype_, *net);
      DistributedModel<Mlp> model(net);
      const auto function = [&](torch::Tensor x, torch::Tensor y) {
        auto loss = torch::mse_loss(model(x), y);
        model->backward(loss);
        return loss;
      };
      auto train = step(function);
      auto keep = step(function, StepOptions().detach_outputs(false));
      const auto detached = train(x_, y_);
      for (const auto& output : detached.outputs()) EXPECT_FALSE(output.requires_grad());
      const auto kept = keep(x_, y_);
      expect_equal(kept.outputs()[1].detach(), detached.outputs()[1], "loss");
      const std::lock_guard<std::mutex> lock(mutex);
      with_history += kept.outputs()[0].grad_fn() != nullptr;
    });
    EXPECT_EQ(with_history, 1) << count << " stages: the rank that computed the loss";
  }
}

/// Neither parameters nor other stages take its gradients.
TEST_F(StepTest, NoBackwardFromKeptOutputs) {
  for (int count : {1, 2}) {
    std::mutex mutex;
    int refused = 0;
    Named expected, got;
    run_as_threads(count, stages(count), [&] {
      Mlp net(4);
      copy_values(*prototype_, *net);
      DistributedModel<Mlp> model(net);
      const auto function = [&](torch::Tensor x, torch::Tensor y) {
        const auto out = model(x);
        model->backward(torch::mse_loss(out, y));
        return torch::mse_loss(model(x), y * 2);
      };
      auto train = step(function);
      auto keep = step(function, StepOptions().detach_outputs(false));
      train(x_, y_);
      const auto gradients = [&] {
        Named own;
        for (const auto& item : model->local_named_parameters()) {
          own[item.key()] = item.value().grad().clone();
          item.value().mutable_grad().reset();
        }
        return own;
      };
      const Named plain = gradients();
      const auto kept = keep(x_, y_);
      gradients();
      if (kept.outputs()[0].grad_fn() != nullptr) {
        const std::string error = error_of<UsageError>([&] { kept.outputs()[0].backward(); });
        const std::lock_guard<std::mutex> lock(mutex);
        EXPECT_NE(error.find("a tensor that the step function returned with its history "
                             "(detach_outputs(false)) was differentiated"),
                  std::string::npos)
            << error;
        ++refused;
      }
      for (const auto& item : model->local_named_parameters()) {
        EXPECT_FALSE(item.value().grad().defined()) << item.key();
      }
      keep(x_, y_);
      const Named again = gradients();
      const std::lock_guard<std::mutex> lock(mutex);
      expected.insert(plain.begin(), plain.end());
      got.insert(again.begin(), again.end());
    });
    EXPECT_EQ(refused, 1) << count << " stages: the rank that computed the output";
    expect_equal(got, expected, "gradients of the next step");
  }
}

TEST_F(StepTest, BackwardOfSeveralTensorsAndWithGradients) {
  const auto gradient = torch::randn({4, 1});
  const auto check_against =
      [&](const std::function<torch::Tensor(torch::Tensor, torch::Tensor)>& plain_loss,
          const std::function<void(const ModelCore&, torch::Tensor, torch::Tensor)>& backward) {
        Mlp net(4);
        copy_values(*prototype_, *net);
        plain_backward(net->parameters(), 1, 2,
                       [&](int m) { return plain_loss(net(part(x_, 2, m)), part(y_, 2, m)); });
        Named expected;
        for (const auto& item : net->named_parameters()) expected[item.key()] = item.value().grad();
        std::mutex mutex;
        for (int count : {1, 2}) {
          Named got;
          run_as_threads(count, stages(count), [&] {
            Mlp own(4);
            copy_values(*prototype_, *own);
            DistributedModel<Mlp> model(own);
            auto train =
                step([&](torch::Tensor x, torch::Tensor y) { backward(model, model(x), y); });
            train(x_, y_);
            const std::lock_guard<std::mutex> lock(mutex);
            for (const auto& item : model->local_named_parameters()) {
              got[item.key()] = item.value().grad().clone();
            }
          });
          expect_equal(got, expected, "gradient");
        }
      };
  check_against([&](torch::Tensor out, torch::Tensor) { return (out * gradient).sum(); },
                [&](const ModelCore& core, torch::Tensor out, torch::Tensor) {
                  core.backward({out}, {gradient});
                });
  check_against(
      [](torch::Tensor out, torch::Tensor y) { return torch::mse_loss(out, y) + out.abs().sum(); },
      [](const ModelCore& core, torch::Tensor out, torch::Tensor y) {
        core.backward(torch::mse_loss(out, y) + out.abs().sum());
      });
}

TEST_F(StepTest, CopiesShareTheFunctionAndMayBeMovedAround) {
  on_stages([&](DistributedModel<Mlp>& model) {
    std::vector<decltype(make_training(model))> functions;
    functions.push_back(make_training(model));
    functions.push_back(functions[0]);
    const auto first = functions[0](x_, y_).outputs();
    expect_equal(functions[1](x_, y_).outputs(), first, "loss");
  });
}

/// Two models, two step functions, two optimizers.
TEST_F(StepTest, GenerativeAdversarialNetwork) {
  torch::manual_seed(5);
  const Mlp generator(2), discriminator(3);
  const auto noise = torch::randn({4, 8, MlpImpl::kWidth});
  const auto adam = torch::optim::AdamOptions(0.01);
  const auto real_loss = [](torch::Tensor score) {
    return torch::binary_cross_entropy_with_logits(score, torch::ones_like(score));
  };
  const auto fake_loss = [](torch::Tensor score) {
    return torch::binary_cross_entropy_with_logits(score, torch::zeros_like(score));
  };
  // The generator's single output becomes a sample of the discriminator's width.
  const auto widen = [](torch::Tensor out) { return out.expand({-1, MlpImpl::kWidth}); };

  Mlp g(2), d(3);
  copy_values(*generator, *g);
  copy_values(*discriminator, *d);
  Tensors all = g->parameters();
  for (const auto& parameter : d->parameters()) all.push_back(parameter);
  torch::optim::Adam g_optimizer(g->parameters(), adam), d_optimizer(d->parameters(), adam);
  std::vector<Tensors> expected;
  for (int i = 0; i < 4; ++i) {
    d_optimizer.zero_grad();
    expected.push_back(plain_backward(all, 1, 2, [&](int m) {
      const auto fake = widen(g(part(noise[i], 2, m))).detach();
      return real_loss(d(part(x_, 2, m))) + fake_loss(d(fake));
    }));
    d_optimizer.step();
    g_optimizer.zero_grad();
    expected.push_back(plain_backward(
        all, 1, 2, [&](int m) { return real_loss(d(widen(g(part(noise[i], 2, m))))); }));
    g_optimizer.step();
  }

  for (int count : {1, 2}) {
    SCOPED_TRACE(std::to_string(count) + " stages");
    run_as_threads(count, stages(count), [&] {
      Mlp own_g(2), own_d(3);
      copy_values(*generator, *own_g);
      copy_values(*discriminator, *own_d);
      DistributedModel<Mlp> model_g(own_g, ModelOptions().name("generator"));
      DistributedModel<Mlp> model_d(own_d, ModelOptions().name("discriminator"));
      DistributedOptimizer<torch::optim::Adam> optimize_g(model_g->parameters(), adam);
      DistributedOptimizer<torch::optim::Adam> optimize_d(model_d->parameters(), adam);
      auto train_d = step([&](torch::Tensor real, torch::Tensor z) {
        const auto fake = widen(model_g(z)).detach();
        auto loss = real_loss(model_d(real)) + fake_loss(model_d(fake));
        model_d->backward(loss);
        return loss;
      });
      auto train_g = step([&](torch::Tensor z) {
        auto loss = real_loss(model_d(widen(model_g(z))));
        model_g->backward(loss);
        return loss;
      });
      for (int i = 0; i < 4; ++i) {
        optimize_d.zero_grad();
        expect_equal(train_d(x_, noise[i]).outputs(), expected[2 * i], "loss of d");
        optimize_d.step();
        optimize_g.zero_grad();
        expect_equal(train_g(noise[i]).outputs(), expected[2 * i + 1], "loss of g");
        optimize_g.step();
      }
      expect_equal(to_map(model_g->state_dict()), state_of(*g), "generator");
      expect_equal(to_map(model_d->state_dict()), state_of(*d), "discriminator");
    });
  }
}

/// In plain libtorch each microbatch would draw the numbers of the seed.
TEST_F(StepTest, SeedsInsideAreRefused) {
  for (const uint64_t seed : {3, 4}) {
    torch::manual_seed(3);
    const auto text = error_of_run<CaptureError>(1, stages(1), [&] {
      DistributedModel<Mlp> model(make_net());
      auto train = step(
          [&](torch::Tensor x) {
            torch::manual_seed(seed);
            return torch::dropout(model(x), 0.5, true);
          },
          StepOptions().name("seeds"));
      train(x_);
    });
    expect_has(text,
               "step function \"seeds\" calls torch::manual_seed, which its random operators "
               "do not heed: each draws from a stream of its own (docs/capture.md, \"Random "
               "numbers\"). Call it outside of the step function, or set \"seed\"; for the "
               "same numbers in each microbatch draw them outside and pass them by "
               "smp::whole");
  }
}

}  // namespace
}  // namespace smp::testing
