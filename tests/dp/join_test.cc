// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <chrono>

#include "tests/dp/models.h"
#include "tests/dp/replicas.h"

namespace smp::dp {
namespace {

using namespace testing;

/// Rank r has `batches[r]` batches. One process computes the same: each step adds the gradients of
/// the ranks that have data, in rank order, and divides once.
State train_uneven_alone(Mlp module, const std::vector<int>& batches, bool divide_by_all) {
  auto optimizer = make_optimizer(module);
  const auto replicas = static_cast<double>(batches.size());
  for (int step = 0;; ++step) {
    std::vector<std::vector<torch::Tensor>> parts(module->parameters().size());
    double active = 0;
    for (size_t rank = 0; rank < batches.size(); ++rank) {
      const bool has_data = step < batches[rank];
      module->zero_grad();
      if (has_data) kOnePass(module, make_batch({}, static_cast<int>(rank), step, 0));
      if (has_data) ++active;
      const auto parameters = module->parameters();
      for (size_t i = 0; i < parts.size(); ++i) parts[i].push_back(parameters[i].grad());
    }
    if (active == 0) return state_of(module);
    const auto parameters = module->parameters();
    for (size_t i = 0; i < parts.size(); ++i) {
      parameters[i].mutable_grad() = mean(parts[i], divide_by_all ? replicas : active);
    }
    optimizer.step();
  }
}

std::vector<Mlp> make_modules(size_t count) {
  std::vector<Mlp> modules;
  for (size_t i = 0; i < count; ++i) modules.emplace_back(Mlp());
  return modules;
}

std::vector<State> train_uneven(const std::vector<Mlp>& modules, const std::vector<int>& batches,
                                const JoinOptions& join, const DDPOptions& options) {
  std::vector<State> states(batches.size());
  comm::run_ranks(static_cast<int>(batches.size()), [&](const comm::CommunicatorPtr& world) {
    world->set_timeout(std::chrono::seconds(20));
    const int rank = world->rank();
    DistributedDataParallel<Mlp> model(modules[rank],
                                       DDPOptions(options).process_group(group_of(world)));
    auto optimizer = make_optimizer(model);
    {
      const auto guard = model.join(join);
      for (int step = 0; step < batches[rank]; ++step) {
        optimizer.zero_grad();
        kOnePass(model, make_batch({}, rank, step, 0));
        optimizer.step();
      }
    }
    states[rank] = state_of(model);
  });
  return states;
}

class Join : public ::testing::TestWithParam<std::vector<int>> {};

INSTANTIATE_TEST_SUITE_P(Batches, Join,
                         ::testing::Values(std::vector<int>{3, 3}, std::vector<int>{1, 4},
                                           std::vector<int>{4, 2, 3}, std::vector<int>{0, 3, 2, 3},
                                           std::vector<int>{0, 0}, std::vector<int>{2}));

TEST_P(Join, EqualsOneProcess) {
  const auto& batches = GetParam();
  for (const bool divide_by_all : {true, false}) {
    for (const auto& options : {DDPOptions(), small_buckets().find_unused_parameters(true),
                                small_buckets().static_graph(true)}) {
      torch::manual_seed(7);
      const auto modules = make_modules(batches.size());
      Mlp alone;
      copy_all(modules[0]->parameters(), alone->parameters());
      const State expected = train_uneven_alone(alone, batches, divide_by_all);
      const auto got = train_uneven(
          modules, batches, JoinOptions().divide_by_initial_world_size(divide_by_all), options);
      for (const State& state : got) {
        for (size_t i = 0; i < expected.parameters.size(); ++i) {
          EXPECT_TRUE(torch::equal(state.parameters[i], expected.parameters[i])) << i;
        }
      }
    }
  }
}

/// Buffers come from the first rank that has data, and at the end from one that was last.
TEST(JoinBuffers, FollowWhoHasData) {
  std::vector<std::shared_ptr<ConvBlock>> modules{std::make_shared<ConvBlock>(),
                                                  std::make_shared<ConvBlock>()};
  Training images;
  images.x_shape = {4, 2, 4, 4};
  std::vector<State> states(2);
  comm::run_ranks(2, [&](const comm::CommunicatorPtr& world) {
    const int rank = world->rank();
    DistributedDataParallel<std::shared_ptr<ConvBlock>> model(
        modules[rank], DDPOptions().process_group(group_of(world)));
    {
      const auto guard = model.join();
      for (int step = 0; step < 1 + 2 * rank; ++step) {
        kPassOfPointer(model, make_batch(images, rank, step, 0));
      }
    }
    states[rank] = state_of(model);
  });
  expect_same(states[0], states[1], "model");
  for (size_t i = 0; i < states[0].buffers.size(); ++i) {
    EXPECT_TRUE(torch::equal(states[0].buffers[i], states[1].buffers[i])) << i;
  }
  // These are rank 0's one step and the two that rank 1 took alone.
  EXPECT_EQ(modules[0]->norm->num_batches_tracked.item<int64_t>(), 3);
}

/// The buckets of the others' steps take no memory from gradients that the program has kept.
TEST(JoinGradients, OfARankWithoutDataStay) {
  const auto modules = make_modules(2);
  comm::run_ranks(2, [&](const comm::CommunicatorPtr& world) {
    DistributedDataParallel<Mlp> model(modules[world->rank()],
                                       DDPOptions().process_group(group_of(world)));
    State kept;
    std::vector<torch::Tensor> gradients;
    {
      const auto guard = model.join();
      for (int step = 0; step < 1 + 2 * world->rank(); ++step) {
        kOnePass(model, make_batch({}, world->rank(), step, 0));
      }
      kept = state_of(model);
      for (const auto& parameter : model->parameters()) gradients.push_back(parameter.grad());
    }
    for (size_t i = 0; i < gradients.size(); ++i) {
      EXPECT_TRUE(torch::equal(gradients[i], kept.gradients[i])) << i;
    }
  });
}

TEST(JoinErrors, EarlyTerminationEndsTrainingEverywhere) {
  const auto modules = make_modules(2);
  std::vector<std::string> texts(2);
  comm::run_ranks(2, [&](const comm::CommunicatorPtr& world) {
    const int rank = world->rank();
    DistributedDataParallel<Mlp> model(modules[rank], DDPOptions().process_group(group_of(world)));
    texts[rank] = smp::testing::error_of<std::exception>([&] {
      const auto guard = model.join(JoinOptions().throw_on_early_termination(true));
      for (int step = 0; step < 2 + rank; ++step) kOnePass(model, make_batch({}, rank, step, 0));
    });
  });
  for (const auto& text : texts) {
    EXPECT_NE(text.find("1 of 2 replicas have no batches left, and throw_on_early_termination"),
              std::string::npos)
        << text;
  }
}

TEST(JoinErrors, OneInsideOfAnother) {
  const auto text = smp::testing::error_of<std::exception>([] {
    comm::run_ranks(1, [](const comm::CommunicatorPtr& world) {
      DistributedDataParallel<Mlp> model(Mlp(), DDPOptions().process_group(group_of(world)));
      const auto guard = model.join();
      const auto other = model.join();
    });
  });
  EXPECT_NE(text.find("join was called inside of another"), std::string::npos) << text;
}

}  // namespace
}  // namespace smp::dp
