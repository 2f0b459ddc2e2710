// SPDX-License-Identifier: Apache-2.0
#include "runtime/update/state_pieces.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <mutex>

#include "comm/threads/run_ranks.h"
#include "core/check.h"

namespace smp::runtime {
namespace {

const std::vector<std::string> kNames{"weight", "turned", "scalar"};

std::vector<at::Tensor> make_parameters() {
  std::vector<at::Tensor> result{at::zeros({40, 11}), at::zeros({7, 30}).t(), at::zeros({})};
  for (auto& parameter : result) parameter.requires_grad_();
  return result;
}

dp::ParameterSlices make_slices(const comm::CommunicatorPtr& group) {
  return {make_parameters(), kNames, group, 1024};
}

/// A tensor with the sizes of each parameter, and numbers of its own.
OptimizerState make_state() {
  OptimizerState state;
  const auto parameters = make_parameters();
  for (size_t i = 0; i < kNames.size(); ++i) {
    const auto sizes = parameters[i].sizes();
    const auto numbers = at::arange(parameters[i].numel()).view(sizes);
    state.params[kNames[i]] = {sizes.vec(),
                               {{"average", numbers + 0.5}, {"count", numbers.to(at::kLong)}},
                               R"({"step":3})"};
  }
  return state;
}

TEST(StatePieces, ArePutTogetherAsTheyWere) {
  for (const int replicas : {1, 2, 3}) {
    OptimizerState joined;
    std::mutex mutex;
    comm::run_ranks(replicas, [&](const comm::CommunicatorPtr& group) {
      const auto slices = make_slices(group);
      auto state = make_state();
      cut_states(slices, state);
      for (size_t i = 0; i < kNames.size(); ++i) {
        const auto& piece = slices.pieces()[i];
        ASSERT_EQ(state.params.count(kNames[i]) > 0, piece.numel() > 0);
        if (piece.numel() == 0) continue;
        const auto& average = state.params[kNames[i]].tensors["average"];
        EXPECT_EQ(average.sizes(), at::IntArrayRef({piece.numel()}));
      }
      OptimizerState whole;
      join_states(slices, state, whole);
      const std::lock_guard lock(mutex);
      for (auto& [name, param] : whole.params) {
        EXPECT_TRUE(joined.params.emplace(name, param).second) << name << " on two replicas";
      }
    });
    const auto expected = make_state();
    ASSERT_EQ(joined.params.size(), expected.params.size());
    for (const auto& [name, param] : expected.params) {
      EXPECT_EQ(joined.params[name].shape, param.shape);
      EXPECT_EQ(joined.params[name].scalars, param.scalars);
      for (const auto& [field, tensor] : param.tensors) {
        EXPECT_TRUE(at::equal(joined.params[name].tensors[field], tensor)) << name << field;
      }
    }
  }
}

/// The error of joining when replica 1 has something else.
std::string join_error(const std::function<void(OptimizerState&)>& change) {
  std::string text;
  std::mutex mutex;
  comm::run_ranks(2, [&](const comm::CommunicatorPtr& group) {
    const auto slices = make_slices(group);
    auto state = make_state();
    cut_states(slices, state);
    change(state);
    OptimizerState whole;
    try {
      join_states(slices, state, whole);
    } catch (const UsageError& error) {
      const std::lock_guard lock(mutex);
      text = error.what();
    }
  });
  return text;
}

TEST(StatePieces, RefuseWhatIsNotElementwise) {
  const auto text = join_error(
      [](OptimizerState& state) { state.params["weight"].tensors["norm"] = at::zeros({}); });
  EXPECT_NE(text.find("each of its tensors has an element for each of the parameter's, but "
                      "\"norm\" has shape []"),
            std::string::npos)
      << text;
}

TEST(StatePieces, RefuseReplicasThatDiffer) {
  std::atomic<int> step = 0;
  const auto text = join_error([&](OptimizerState& state) {
    state.params["weight"].scalars = "{\"step\":" + std::to_string(++step) + "}";
  });
  EXPECT_NE(text.find("the optimizer's state of parameter \"weight\" differs between replicas: "
                      "expected {"),
            std::string::npos)
      << text;
}

TEST(StatePieces, RefuseOtherShapes) {
  comm::run_ranks(1, [](const comm::CommunicatorPtr& group) {
    const auto slices = make_slices(group);
    auto state = make_state();
    state.params["weight"].shape = {11, 40};
    try {
      cut_states(slices, state);
      FAIL() << "no error";
    } catch (const CheckpointError& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("the saved optimizer state does not fit this optimizer: weight: expected "
                          "shape [40, 11], got [11, 40]"),
                std::string::npos)
          << text;
    }
  });
}

}  // namespace
}  // namespace smp::runtime
