// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "tests/smp/oracle.h"

// Work of programs on whole models between steps: averages over two, files and copies.
namespace smp {
namespace {

using namespace testing;

using Chain = torch::nn::Sequential;

Chain chain(uint64_t seed) {
  torch::manual_seed(seed);
  return Chain(torch::nn::Linear(4, 4), torch::nn::Tanh(), torch::nn::Linear(4, 1));
}

torch::Tensor chain_input() { return torch::linspace(-1, 1, 16).view({4, 4}); }

/// The text with which a rank's program is refused, or nothing.
std::string refusal_of(const std::function<void()>& program) {
  try {
    program();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

/// A rank has the gradient of one model's parameter and not that of the other's.
TEST(WholeModels, AveragesOverThoseOfOtherRanksAreRefused) {
  const auto x = chain_input();
  using Average = std::function<void(torch::Tensor, torch::Tensor)>;
  const Average assigned = [](auto p, auto q) { p.mutable_grad() = (p.grad() + q.grad()) / 2; };
  const Average in_place = [](auto p, auto q) { p.mutable_grad().add_(q.grad()).div_(2); };
  for (const Average& average : {assigned, in_place}) {
    std::vector<Chain> ones{chain(3), chain(3)}, others{chain(4), chain(4)};
    std::string text;
    run_as_threads(2, stages(2), [&] {
      const Chain one = ones[rank()], other = others[rank()];
      set_partition(one, 0);
      set_partition(other, 1);
      DistributedModel<Chain> first(one, ModelOptions().name("first"));
      DistributedModel<Chain> second(other, ModelOptions().name("second"));
      DistributedOptimizer<torch::optim::SGD> optimizer(first->parameters(), 0.1);
      step([&](torch::Tensor input) {
        first->backward((first(input) * second(input)).square().mean());
      })(x);
      const auto refused = refusal_of([&] {
        const auto p = one->parameters(), q = other->parameters();
        for (size_t i = 0; i < p.size(); ++i) average(p[i], q[i]);
        optimizer.step();
      });
      if (rank() == 0) text = refused;
    });
    expect_has(text, {"the gradient of parameter \"second.", "which pp rank 1 owns"});
  }
}

/// torch::load gives parameters memory of its own.
TEST(WholeModels, FilesAreLoadedWhereAllParametersAre) {
  std::ostringstream written;
  torch::save(chain(9), written);
  const auto options = torch::optim::SGDOptions(0.1).momentum(0.9);
  const auto train_with = [&](Chain net, torch::optim::Optimizer& optimizer,
                              const std::function<void()>& train) {
    for (int i = 0; i < 4; ++i) {
      if (i == 2) {
        std::istringstream file(written.str());
        torch::load(net, file);
      }
      optimizer.zero_grad();
      train();
      optimizer.step();
    }
  };
  const auto x = chain_input();
  auto plain = chain(5);
  torch::optim::SGD plain_optimizer(plain->parameters(), options);
  train_with(plain, plain_optimizer, [&] {
    plain_backward(plain->parameters(), 1, 2,
                   [&](int m) { return plain->forward(part(x, 2, m)).square().mean(); });
  });
  // Where each rank has all parameters.
  for (const bool sharded : {false, true}) {
    SCOPED_TRACE(sharded);
    const std::vector<Chain> nets{chain(5), chain(5)};
    run_as_threads(2, stages(1).microbatches(1).ddp(true).shard_optimizer_state(sharded), [&] {
      const Chain net = nets[rank()];
      DistributedModel<Chain> model(net);
      DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), options);
      auto train =
          step([&](torch::Tensor input) { model->backward(model(input).square().mean()); });
      train_with(net, optimizer, [&] { train(part(x, 2, rank())); });
      expect_equal(to_map(model->state_dict()), state_of(*plain), "value");
    });
  }
  // Elsewhere every rank is told.
  const std::vector<Chain> nets{chain(5), chain(5)};
  std::vector<std::string> texts(2);
  run_as_threads(2, stages(2), [&] {
    Chain net = nets[rank()];
    DistributedModel<Chain> model(net);
    step([&](torch::Tensor input) { model->backward(model(input).square().mean()); })(x);
    std::istringstream file(written.str());
    texts[rank()] = refusal_of([&] { torch::load(net, file); });
  });
  for (const auto& text : texts) {
    expect_has(text, {"operator aten::set_ needs parameter \"", "\", which pp rank ",
                      " owns: this rank does not have these numbers"});
  }
}

/// A copy has the numbers of this rank, and no others.
TEST(WholeModels, CopiesHaveWhatTheirRankHas) {
  const auto x = chain_input();
  std::vector<Chain> nets{chain(5), chain(5)};
  run_as_threads(2, stages(2), [&] {
    const Chain net = nets[rank()];
    DistributedModel<Chain> model(net);
    step([&](torch::Tensor input) { model->backward(model(input).square().mean()); })(x);
    const auto local = to_map(model->local_named_parameters());
    std::shared_ptr<torch::nn::Module> copy;
    const auto text = refusal_of([&] {
      copy = net->clone();
      for (const auto& item : copy->named_parameters()) {
        const auto found = local.find(item.key());
        if (found == local.end()) continue;
        expect_equal(item.value(), found->second, item.key());
      }
      for (const auto& item : copy->named_parameters()) {
        if (local.count(item.key()) == 0) item.value().sum().item<float>();
      }
      ADD_FAILURE() << "numbers of another rank were read";
    });
    expect_has(text, {"which pp rank ", "model->state_dict()"});
  });
}

}  // namespace
}  // namespace smp
