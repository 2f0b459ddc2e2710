// SPDX-License-Identifier: Apache-2.0
#include "runtime/update/divided_states.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <functional>
#include <mutex>

#include "runtime/runtime.h"
#include "tests/smp/lying.h"
#include "tests/smp/sharded_state.h"

namespace smp::testing {
namespace {

using runtime::cut_states;
using runtime::join_states;
using runtime::Runtime;

/// Calls `body` on replicas that have taken a step with `shard_optimizer_state`.
void on_replicas(int replicas, const std::function<void(const Runtime&)>& body) {
  Training run;
  run.replicas = replicas;
  torch::set_num_threads(1);
  std::vector<ShardedNet> nets;
  for (int i = 0; i < replicas; ++i) {
    torch::manual_seed(5);
    nets.emplace_back();
  }
  run_as_threads(replicas, config_of(run), [&] {
    DistributedModel<ShardedNet> model(nets[rank()]);
    auto net = model.get_module();
    auto train = step([&](torch::Tensor x, torch::Tensor y) {
      auto loss = net->loss(x, y);
      model->backward(loss);
      return loss;
    });
    const auto batch = batch_of(0, replicas * run.microbatches);
    train(part(batch[0], replicas, dp_rank()), part(batch[1], replicas, dp_rank()));
    expect_lies_as_said(to_map(model->state_dict()));
    body(Runtime::get());
  });
}

/// A state for each parameter: two tensors of its sizes and numbers of their own, and a number.
OptimizerState make_state(const Runtime& runtime) {
  OptimizerState state;
  state.groups.emplace_back();
  for (const auto& entry : runtime.table().entries()) {
    if (!entry.is_parameter()) continue;
    const auto numbers = torch::arange(entry.tensor.numel()).view(entry.tensor.sizes());
    state.params[entry.name] = {
        entry.tensor.sizes().vec(),
        {{"average", numbers + 0.5}, {"count", numbers}, {"steps", torch::tensor(3)}},
        R"({"step":3})"};
    state.groups[0].params.push_back(entry.name);
  }
  return state;
}

TEST(DividedStates, ArePutTogetherAsTheyWere) {
  for (const int replicas : {1, 2, 3}) {
    std::map<std::string, OptimizerState::Param> joined, expected;
    std::mutex mutex;
    on_replicas(replicas, [&](const Runtime& runtime) {
      auto state = make_state(runtime);
      const auto whole = state;
      cut_states(runtime, {}, state);
      for (const auto& [name, param] : whole.params) {
        const auto& entry = runtime.table().at(name);
        ASSERT_EQ(state.params.count(name) > 0, entry.updated().defined()) << name;
        if (!entry.updated().defined()) continue;
        for (const char* field : {"average", "count"}) {
          EXPECT_TRUE(torch::equal(state.params[name].tensors[field],
                                   entry.sharding.cut(param.tensors.at(field), rank())));
        }
        EXPECT_TRUE(torch::equal(state.params[name].tensors["steps"], torch::tensor(3)));
        EXPECT_EQ(at::IntArrayRef(state.params[name].shape), entry.updated().sizes());
      }
      join_states(runtime, {}, runtime.topology().pieces(), state);
      EXPECT_EQ(state.groups[0].params.empty(), rank() > 0);
      const std::lock_guard lock(mutex);
      expected = whole.params;
      for (auto& [name, param] : state.params) {
        EXPECT_TRUE(joined.emplace(name, param).second) << name << " on two replicas";
      }
    });
    ASSERT_EQ(joined.size(), expected.size());
    for (const auto& [name, param] : expected) {
      EXPECT_EQ(joined[name].shape, param.shape);
      EXPECT_EQ(joined[name].scalars, param.scalars);
      for (const auto& [field, tensor] : param.tensors) {
        EXPECT_TRUE(torch::equal(joined[name].tensors[field], tensor)) << name << field;
      }
    }
  }
}

/// They stay as they are.
TEST(DividedStates, PiecesAreCutAlready) {
  on_replicas(2, [](const Runtime& runtime) {
    OptimizerState state;
    for (const auto& entry : runtime.table().entries()) {
      const std::string name = entry.name_on(rank());
      if (!entry.piece || name.empty()) continue;
      EXPECT_EQ(name.rfind(entry.name + "[", 0), 0u) << name;
      const int64_t numel = entry.updated().numel();
      state.params[entry.name] = {{numel}, {{"average", torch::full({numel}, 2.)}}, ""};
    }
    const size_t count = state.params.size();
    ASSERT_GT(count, 0u);
    cut_states(runtime, {}, state);
    EXPECT_EQ(state.params.size(), count);
    for (const auto& [name, param] : state.params) {
      EXPECT_EQ(param.tensors.at("average").sizes(), runtime.table().at(name).updated().sizes());
    }
  });
}

/// The error of joining on all replicas, when some have changed their states.
std::string join_error(const std::function<void(OptimizerState&)>& change) {
  std::string text;
  int errors = 0;
  std::mutex mutex;
  on_replicas(2, [&](const Runtime& runtime) {
    auto state = make_state(runtime);
    cut_states(runtime, {}, state);
    change(state);
    try {
      join_states(runtime, {}, runtime.topology().pieces(), state);
    } catch (const UsageError& error) {
      const std::lock_guard lock(mutex);
      text = error.what();
      ++errors;
    }
  });
  EXPECT_EQ(errors, 2);
  return text;
}

TEST(DividedStates, RefuseWhatIsNotElementwise) {
  const auto text = join_error([](OptimizerState& state) {
    for (auto& [name, param] : state.params) param.tensors["norm"] = torch::zeros({3});
  });
  expect_has(text, {"cannot put the optimizer's state of parameter \"",
                    "together: \"norm\" has an "
                    "element for each of the parameter's, here sizes [",
                    "], and is Float[3]"});
}

TEST(DividedStates, RefuseNumbersThatDiffer) {
  const auto text = join_error([](OptimizerState& state) {
    for (auto& [name, param] : state.params) param.tensors["steps"] = torch::tensor(rank());
  });
  expect_has(text, {"\"steps\" differs between the ranks 0 and 1"});
}

TEST(DividedStates, RefuseWhatOneReplicaHas) {
  const auto text = join_error([](OptimizerState& state) {
    if (rank() > 0) return;
    for (auto& [name, param] : state.params) param.tensors["other"] = param.tensors["average"];
  });
  EXPECT_NE(text.find("differs between ranks that divide it: expected {"), std::string::npos)
      << text;
}

TEST(DividedStates, RefuseReplicasThatDiffer) {
  std::atomic<int> step = 0;
  const auto text = join_error([&](OptimizerState& state) {
    const std::string scalars = "{\"step\":" + std::to_string(++step) + "}";
    for (auto& [name, param] : state.params) param.scalars = scalars;
  });
  EXPECT_NE(text.find("differs between ranks that divide it: expected {"), std::string::npos)
      << text;
  EXPECT_NE(text.find("Call optimizer.step() on all ranks alike"), std::string::npos) << text;
}

TEST(DividedStates, RefuseOtherShapes) {
  on_replicas(2, [](const Runtime& runtime) {
    OptimizerState state;
    for (const auto& entry : runtime.table().entries()) {
      if (!entry.piece || !entry.updated().defined()) continue;
      state.params[entry.name] = {{11, 40}, {}, ""};
    }
    const auto text = error_of<CheckpointError>([&] { cut_states(runtime, {}, state); });
    EXPECT_NE(text.find("the saved optimizer state does not fit this optimizer: "),
              std::string::npos)
        << text;
    EXPECT_NE(text.find("got [11, 40]"), std::string::npos) << text;
  });
}

}  // namespace
}  // namespace smp::testing
