// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/smp/api.h"

// A step function that calls `backward` several times: gradients add up.
namespace smp::testing {
namespace {

using SeveralBackwards = ApiTest;

constexpr int kMicrobatches = 2;

/// Two forward passes of a model, each with its loss.
auto make_two_passes(DistributedModel<Mlp>& model) {
  return step([&model](torch::Tensor x, torch::Tensor y) {
    auto first = torch::mse_loss(model(x), y);
    model->backward(first);
    auto second = torch::l1_loss(model(x * 2).relu_(), y);
    model->backward(second);
    return std::make_pair(first, second);
  });
}

/// Plain libtorch: the gradients and the losses by pass and microbatch.
Tensors plain_in_two_passes(Mlp net, const torch::Tensor& x, const torch::Tensor& y) {
  Tensors first, second;
  plain_microbatches(unique_parameters(*net), 1, kMicrobatches, [&](int m) {
    const auto data = part(x, kMicrobatches, m), target = part(y, kMicrobatches, m);
    first.push_back(torch::mse_loss(net(data), target));
    first.back().backward();
    second.push_back(torch::l1_loss(net(data * 2).relu_(), target));
    second.back().backward();
  });
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

TEST_F(SeveralBackwards, OfTwoPassesAddUp) {
  Mlp plain = make_net();
  const auto losses = plain_in_two_passes(plain, x_, y_);
  for (const std::string pipeline : {"simple", "interleaved", "1f1b", "zb_h1"}) {
    for (int count : {1, 2, 3}) {
      SCOPED_TRACE(pipeline + ", stages: " + std::to_string(count));
      std::vector<Mlp> nets;
      for (int rank = 0; rank < count; ++rank) nets.push_back(make_net());
      run_as_threads(count, Config(stages(count)).pipeline(pipeline), [&] {
        DistributedModel<Mlp> model(nets[rank()]);
        auto train = make_two_passes(model);
        for (const std::string graph : {"new", "known"}) {
          SCOPED_TRACE(graph + " graph");
          model->zero_grad();
          auto [first, second] = train(x_, y_);
          Tensors got = first.outputs();
          got.insert(got.end(), second.outputs().begin(), second.outputs().end());
          expect_equal(got, losses, "loss");
          const auto expected = plain->named_parameters();
          for (const auto& item : model->local_named_parameters()) {
            expect_equal(item.value().grad(), expected[item.key()].grad(), item.key());
          }
        }
      });
    }
  }
}

/// The second model learns from the first's outputs, and the first from the second's answer.
TEST_F(SeveralBackwards, OfTwoModelsThatPlayAgainstEachOther) {
  const auto play = [](auto& generator, auto& judge, const torch::Tensor& x, const auto& backward) {
    const auto fake = generator(x);
    const auto told = judge(torch::cat({fake.detach().expand({x.size(0), MlpImpl::kWidth}), x}));
    backward(torch::softplus(told).mean());
    backward(-judge(fake.expand({x.size(0), MlpImpl::kWidth})).mean());
  };
  Mlp plain_generator = make_net(), plain_judge = make_net();
  Tensors all = unique_parameters(*plain_generator);
  const Tensors others = unique_parameters(*plain_judge);
  all.insert(all.end(), others.begin(), others.end());
  plain_microbatches(all, 1, kMicrobatches, [&](int m) {
    play(plain_generator, plain_judge, part(x_, kMicrobatches, m),
         [](const torch::Tensor& loss) { loss.backward(); });
  });
  for (int count : {1, 2}) {
    std::vector<Mlp> nets;
    for (int i = 0; i < 2 * count; ++i) nets.push_back(make_net());
    run_as_threads(count, stages(count), [&] {
      DistributedModel<Mlp> generator(nets[2 * rank()], ModelOptions().name("generator"));
      DistributedModel<Mlp> judge(nets[2 * rank() + 1], ModelOptions().name("judge"));
      auto train = step([&](torch::Tensor x) {
        play(generator, judge, x, [&](const torch::Tensor& loss) { generator->backward(loss); });
      });
      train(x_);
      const auto expect_gradients = [](const auto& model, Mlp& plain) {
        const auto expected = plain->named_parameters();
        for (const auto& item : model->local_named_parameters()) {
          expect_equal(item.value().grad(), expected[item.key()].grad(), item.key());
        }
      };
      expect_gradients(generator, plain_generator);
      expect_gradients(judge, plain_judge);
    });
  }
}

/// More than two meet in the order of one pass over all losses, whatever the number of stages.
TEST_F(SeveralBackwards, OfManyPassesAreOnePassOverAll) {
  const auto losses = [](auto& model, const torch::Tensor& x) {
    Tensors result;
    for (int i = 1; i <= 4; ++i) result.push_back(model(x * i).square().mean());
    return result;
  };
  Mlp together = make_net(), apart = make_net();
  plain_microbatches(unique_parameters(*together), 1, kMicrobatches, [&](int m) {
    torch::autograd::backward(losses(together, part(x_, kMicrobatches, m)));
  });
  plain_microbatches(unique_parameters(*apart), 1, kMicrobatches, [&](int m) {
    for (const auto& loss : losses(apart, part(x_, kMicrobatches, m))) loss.backward();
  });
  for (int count : {1, 2}) {
    std::vector<Mlp> nets;
    for (int rank = 0; rank < count; ++rank) nets.push_back(make_net());
    run_as_threads(count, stages(count), [&] {
      DistributedModel<Mlp> model(nets[rank()]);
      auto train = step([&](torch::Tensor x) {
        for (int i = 1; i <= 4; ++i) model->backward(model(x * i).square().mean());
      });
      train(x_);
      const auto expected = together->named_parameters(), summed = apart->named_parameters();
      for (const auto& item : model->local_named_parameters()) {
        expect_equal(item.value().grad(), expected[item.key()].grad(), item.key());
        EXPECT_TRUE(torch::allclose(item.value().grad(), summed[item.key()].grad())) << item.key();
      }
    });
  }
}

struct LookupImpl : torch::nn::Module {
  LookupImpl() {
    rows = register_module("rows", torch::nn::Embedding(3, 8));
    hidden = register_module("hidden", torch::nn::Linear(8, 8));
    head = register_module("head", torch::nn::Linear(8, 1));
  }
  torch::Tensor forward(torch::Tensor ids) { return head(torch::tanh(hidden(rows(ids)))); }

  torch::nn::Embedding rows{nullptr};
  torch::nn::Linear hidden{nullptr}, head{nullptr};
};
TORCH_MODULE(Lookup);

/// Passes lie on stages of their own, where rows that occur several times are added up before they
/// meet the other pass's; on one stage each could be added to the sum itself.
TEST_F(SeveralBackwards, FusedSumsAreTheSameOnAnyStages) {
  const torch::Tensor first = torch::randint(3, {8, 16}), second = torch::randint(3, {8, 16});
  Named expected;
  for (int count : {1, 2, 3}) {
    SCOPED_TRACE("stages: " + std::to_string(count));
    std::vector<Lookup> nets;
    for (int rank = 0; rank < count; ++rank) {
      torch::manual_seed(5);
      nets.emplace_back();
    }
    run_as_threads(count, Config(stages(count)).gradient_accumulation_fusion(true), [&] {
      DistributedModel<Lookup> model(nets[rank()]);
      auto train = step([&](torch::Tensor x, torch::Tensor y) {
        model->backward(model(x).square().mean());
        model->backward(model(y).sin().mean());
      });
      train(first, second);
      for (const auto& item : model->local_named_parameters()) {
        const std::lock_guard lock(mutex_);
        const auto one = expected.emplace(item.key(), item.value().grad().clone()).first->second;
        expect_equal(item.value().grad(), one, item.key());
      }
    });
  }
  EXPECT_EQ(expected.size(), 5u);
}

}  // namespace
}  // namespace smp::testing
