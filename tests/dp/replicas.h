// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "comm/group_core.h"
#include "comm/threads/run_ranks.h"
#include "smp/ddp.h"
#include "tests/error_of.h"

/// Trains replicas as threads and compares them, bit for bit, with one process that computes the
/// same shards one after the other and adds their gradients in rank order.
namespace smp::dp::testing {

/// The ranks of a communicator as replicas.
inline Group group_of(const comm::CommunicatorPtr& world) {
  std::vector<int> ranks(world->size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return comm::make_public_group(world, ranks);
}

/// The data from which one rank computes in one pass.
struct Batch {
  torch::Tensor x, y;
  int rank, step, pass;
};

/// The training: model, replicas and options.
struct Training {
  int replicas = 2;
  int steps = 3;
  int passes = 1;               ///< backward passes of a step
  bool set_to_none = true;      ///< see zero_grad
  bool keep_gradients = false;  ///< never calls zero_grad
  std::vector<int64_t> x_shape = {4, 6};
  std::vector<int64_t> y_shape = {4, 3};
  torch::Dtype dtype = torch::kFloat;
};

inline Batch make_batch(const Training& run, int rank, int step, int pass) {
  auto generator = at::detail::createCPUGenerator(1000 * step + 10 * rank + pass + 1);
  const auto options = torch::TensorOptions(torch::kFloat);
  return {torch::randn(run.x_shape, generator, options).to(run.dtype),
          torch::randn(run.y_shape, generator, options).to(run.dtype), rank, step, pass};
}

struct State {
  std::vector<torch::Tensor> parameters, gradients, buffers;
};

template <class Module>
State state_of(Module& module) {
  State state;
  for (const auto& parameter : module->parameters()) {
    state.parameters.push_back(parameter.detach().clone());
    const auto gradient = parameter.grad();
    state.gradients.push_back(gradient.defined() ? gradient.clone() : torch::Tensor());
  }
  for (const auto& buffer : module->buffers()) state.buffers.push_back(buffer.clone());
  return state;
}

/// The mean of the ranks' tensors, as documented: added in rank order, half precision in float32
/// and divided once, and rounded then. A rank without a gradient adds zero.
inline torch::Tensor mean(const std::vector<torch::Tensor>& parts, double divisor) {
  torch::Tensor like;
  for (const auto& part : parts) like = part.defined() ? part : like;
  if (!like.defined()) return {};
  const bool half = like.scalar_type() == torch::kHalf || like.scalar_type() == torch::kBFloat16;
  torch::Tensor sum;
  for (const auto& part : parts) {
    auto term = part.defined() ? part : torch::zeros_like(like);
    if (half) term = term.to(torch::kFloat);
    sum = sum.defined() ? sum + term : term;
  }
  return (sum / divisor).to(like.scalar_type());
}

inline void copy_all(const std::vector<torch::Tensor>& from, const std::vector<torch::Tensor>& to) {
  torch::NoGradGuard no_grad;
  for (size_t i = 0; i < from.size(); ++i) to[i].copy_(from[i]);
}

/// A tied parameter is listed under each name; the optimizer takes it once.
template <class Module>
torch::optim::SGD make_optimizer(Module& module) {
  std::vector<torch::Tensor> once;
  for (const auto& parameter : module->parameters()) {
    bool known = false;
    for (const auto& other : once) known = known || other.is_same(parameter);
    if (!known) once.push_back(parameter);
  }
  return torch::optim::SGD(once, torch::optim::SGDOptions(0.1).momentum(0.9));
}

/// One process. `pass(module, batch)` computes a loss and calls backward.
template <class Module, class Pass>
State train_alone(Module module, const Training& run, const Pass& pass) {
  auto optimizer = make_optimizer(module);
  for (int step = 0; step < run.steps; ++step) {
    const auto parameters = module->parameters();
    const State before = state_of(module);
    State after;
    std::vector<std::vector<torch::Tensor>> parts(parameters.size());
    for (int rank = 0; rank < run.replicas; ++rank) {
      copy_all(before.buffers, module->buffers());
      for (size_t i = 0; i < parameters.size(); ++i) {
        const auto& gradient = before.gradients[i];
        const bool keeps = run.keep_gradients && gradient.defined();
        parameters[i].mutable_grad() = keeps ? gradient.clone() : torch::Tensor();
      }
      for (int p = 0; p < run.passes; ++p) pass(module, make_batch(run, rank, step, p));
      if (rank == 0) after = state_of(module);
      for (size_t i = 0; i < parameters.size(); ++i) parts[i].push_back(parameters[i].grad());
    }
    copy_all(after.buffers, module->buffers());
    for (size_t i = 0; i < parameters.size(); ++i) {
      parameters[i].mutable_grad() = mean(parts[i], run.replicas);
    }
    optimizer.step();
  }
  return state_of(module);
}

/// Replicas as threads; modules[r] is rank r's. `prepare` is given each replica before training.
template <class Module, class Pass>
std::vector<State> train_replicas(
    const std::vector<Module>& modules, const Training& run, const Pass& pass, DDPOptions options,
    const std::function<void(DistributedDataParallel<Module>&)>& prepare = nullptr) {
  std::vector<State> states(run.replicas);
  comm::run_ranks(run.replicas, [&](const comm::CommunicatorPtr& world) {
    DistributedDataParallel<Module> model(modules[world->rank()],
                                          DDPOptions(options).process_group(group_of(world)));
    if (prepare) prepare(model);
    auto optimizer = make_optimizer(model);
    for (int step = 0; step < run.steps; ++step) {
      if (!run.keep_gradients) optimizer.zero_grad(run.set_to_none);
      for (int p = 0; p < run.passes; ++p) pass(model, make_batch(run, world->rank(), step, p));
      optimizer.step();
    }
    states[world->rank()] = state_of(model);
  });
  return states;
}

inline bool same(const torch::Tensor& a, const torch::Tensor& b) {
  return a.defined() == b.defined() && (!a.defined() || torch::equal(a, b));
}

inline void expect_same(const State& got, const State& expected, const std::string& what) {
  for (size_t i = 0; i < expected.parameters.size(); ++i) {
    EXPECT_TRUE(same(got.parameters[i], expected.parameters[i])) << what << " parameter " << i;
    EXPECT_TRUE(same(got.gradients[i], expected.gradients[i])) << what << " gradient " << i;
  }
}

/// `make()` makes the module of a rank; the seed differs between ranks, and all take rank 0's.
template <class Make, class Pass>
void expect_as_alone(const Make& make, Training run, const Pass& pass,
                     const DDPOptions& options = {}) {
  at::set_num_threads(1);
  std::vector<decltype(make())> modules;
  for (int rank = 0; rank < run.replicas; ++rank) {
    torch::manual_seed(5 + rank);
    modules.push_back(make());
  }
  torch::manual_seed(5);
  const State expected = train_alone(make(), run, pass);
  const auto got = train_replicas(modules, run, pass, options);
  for (int rank = 0; rank < run.replicas; ++rank) {
    expect_same(got[rank], expected, c10::str(run.replicas, " replicas, rank ", rank));
  }
  for (size_t i = 0; i < expected.buffers.size(); ++i) {
    EXPECT_TRUE(same(got[0].buffers[i], expected.buffers[i])) << "buffer " << i;
  }
}

}  // namespace smp::dp::testing
