// SPDX-License-Identifier: Apache-2.0
// Writes after the backward pass: they reach nothing that it reads.

#include "graph/late_writes.h"

#include <gmock/gmock.h>

#include <algorithm>

#include "graph/leaf.h"
#include "tests/graph/numbers.h"

namespace smp::graph::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

using LateWrites = Numbers;

TEST_F(LateWrites, ALossIsRescaledAfterBackward) {
  expect_equals_eager([&](const Tensors& in) -> Tensors {
    auto loss = net_(in[0]).pow(2).mean();
    backward(loss);
    loss *= 16;
    return {loss};
  });
}

TEST_F(LateWrites, ALossIsRescaledWithoutGradientsAfterBackward) {
  expect_equals_eager([&](const Tensors& in) -> Tensors {
    auto loss = net_(in[0]).pow(2).mean();
    backward(loss);
    const torch::NoGradGuard no_grad;
    loss.mul_(16).add_(1);
    return {loss};
  });
}

TEST_F(LateWrites, ALossIsDetachedInPlaceAfterBackward) {
  expect_equals_eager([&](const Tensors& in) -> Tensors {
    auto loss = net_(in[0]).pow(2).mean();
    backward(loss);
    loss.detach_();
    return {loss};
  });
}

TEST_F(LateWrites, WhatALossIsAViewOfIsWrittenAfterBackward) {
  expect_equals_eager([&](const Tensors& in) -> Tensors {
    auto losses = net_(in[0]).pow(2).mean(1);
    backward(losses[2]);
    losses.mul_(3);
    return {losses};
  });
}

TEST_F(LateWrites, AGradientIsWrittenAfterBackward) {
  expect_equals_eager([&](const Tensors& in) -> Tensors {
    auto y = net_(in[0]);
    auto gradient = torch::ones_like(y) * 0.5;
    backward_with({y}, {gradient});
    gradient.zero_();
    return {y, gradient};
  });
}

TEST_F(LateWrites, ABufferThatWasAGradientIsWrittenAfterBackward) {
  expect_equals_eager([&](const Tensors& in) -> Tensors {
    auto y = net_(in[0]);
    backward_with({y}, {net_->scale});
    const torch::NoGradGuard no_grad;
    net_->scale.mul_(2);
    return {y};
  });
}

// Several backwards, which the pipeline runs as one.

TEST_F(LateWrites, BackwardIsCalledForEachOfSeveralPasses) {
  expect_equals_eager([&](const Tensors& in) -> Tensors {
    auto first = net_(in[0]).pow(2).mean();
    backward(first);
    auto second = net_(in[0] * 2).relu_().mean();
    backward(second);
    return {first, second};
  });
}

TEST_F(LateWrites, TheSecondBackwardHasAGradientAndTheResultOfTheFirstPass) {
  expect_equals_eager([&](const Tensors& in) -> Tensors {
    auto y = net_(in[0]);
    backward(y.square().mean());
    auto other = net_->fc(in[0]) * y.detach();
    backward_with({other}, {torch::full_like(other, 0.5)});
    return {y, other};
  });
}

TEST_F(LateWrites, WhatTheFirstBackwardNeedsIsWrittenBeforeTheSecond) {
  expect_equals_eager([&](const Tensors& in) -> Tensors {
    auto y = net_(in[0]) * net_->scale;
    backward(y.sum());
    {
      const torch::NoGradGuard no_grad;
      net_->scale.mul_(0.5).add_(1);
      y.mul_(3);
    }
    auto other = net_(in[0]) * net_->scale;
    backward(other.sum());
    const torch::NoGradGuard no_grad;
    net_->scale.zero_();
    return {y, other};
  });
}

TEST_F(LateWrites, ABufferMovesOnceForEachBackwardThatNeedsIt) {
  const auto function = [&](const Tensors& in) -> Tensors {
    for (int call = 0; call < 3; ++call) {
      backward((net_(in[0]) * net_->scale).sum());
      const torch::NoGradGuard no_grad;
      net_->scale.add_(1).mul_(2);
    }
    return {};
  };
  const TraceResult traced = trace(table_, {x_}, function);
  graph::LateWrites late(*traced.recorded);
  int moves = 0;
  for (const Operator& op : traced.recorded->operators) {
    moves += static_cast<int>(late.moved_by(op).size());
  }
  EXPECT_EQ(moves, 3);
}

// A tensor that an operator saved for its backward is written after it: seen by autograd ...

TEST_F(LateWrites, AnActivationIsWrittenAfterBackward) {
  expect_equals_eager([&](const Tensors& in) -> Tensors {
    auto h = torch::exp(net_(in[0]));  // needs its result
    auto rows = h.sum(1);
    backward(rows.square().sum());
    const torch::NoGradGuard no_grad;
    h.mul_(3);
    return {h, h + rows.unsqueeze(1)};
  });
}

TEST_F(LateWrites, AViewOfAnActivationIsWrittenAfterBackward) {
  expect_equals_eager([&](const Tensors& in) -> Tensors {
    auto h = torch::tanh(net_(in[0]));
    auto part = h.narrow(1, 1, 2);
    auto other = h.t()[3];
    backward(part.square().sum() + other.sum());
    part.add_(other[0]);
    other.zero_();
    h[0].sigmoid_();
    return {h, part, other};
  });
}

TEST_F(LateWrites, AnInputIsWrittenAfterBackward) {
  // Eager code writes the caller's tensor, so each run gets its own.
  expect_equals_eager([&](const Tensors& in) -> Tensors {
    auto x = in[0] * 1;
    auto y = net_->fc(x);
    backward(y.square().sum());
    x.zero_();
    return {x, y};
  });
}

TEST_F(LateWrites, ABufferThatAProductReadIsWrittenAfterBackward) {
  expect_equals_eager([&](const Tensors& in) -> Tensors {
    auto y = net_(in[0]) * net_->scale;
    backward(y.sum());
    const torch::NoGradGuard no_grad;
    net_->scale.mul_(0.5).add_(y, 0.5);
    return {y * net_->scale};
  });
}

TEST_F(LateWrites, AListThatReturnsNothingSavesAlso) {
  expect_equals_eager([&](const Tensors& in) -> Tensors {
    auto h = net_(in[0]);
    auto factor = in[0] + 2;
    at::_foreach_mul_(Tensors{h}, Tensors{factor});
    backward(h.sum());
    factor.zero_();
    return {factor};
  });
}

// ... and not seen by it.

TEST_F(LateWrites, StatisticsThatAProductReadAreUpdatedAfterBackward) {
  auto mean = net_->register_buffer("mean", torch::full({4}, 2.f));
  auto variance = net_->register_buffer("variance", torch::ones({4}));
  table_ = table_of(*net_);
  const auto norm = [&](const torch::Tensor& h) {
    return torch::batch_norm(h, {}, {}, mean, variance, /*training=*/true, 0.5, 1e-5, false);
  };
  expect_equals_eager([&](const Tensors& in) -> Tensors {
    auto h = norm(net_(in[0]));
    backward((h * mean).square().sum());
    return {norm(h), mean};
  });
}

TEST_F(LateWrites, WhereBackwardIsCalledIsPartOfTheGraph) {
  bool early = true;
  const auto function = [&](const Tensors& in) -> Tensors {
    auto h = torch::exp(net_(in[0]));
    auto loss = h.sum();
    if (early) backward(loss);
    auto metric = h.detach().mean();
    if (!early) backward(loss);
    return {metric};
  };
  const TraceResult first = trace(table_, {x_}, function);
  EXPECT_THAT(first.recorded->to_string(),
              HasSubstr("aten::detach(self=%10) : f32[4, 4] after_backward"));
  early = false;
  const TraceResult second = again(first, function);
  EXPECT_THAT(second.difference, HasSubstr("runs in another mode"));
  EXPECT_THAT(second.recorded->to_string(), Not(HasSubstr("after_backward")));
}

TEST_F(LateWrites, OnlyWhatABackwardMayNeedIsCopied) {
  const auto separate = [&](const Function& function) {
    const auto sets = sets_to_separate(*trace(table_, {x_}, function).recorded);
    return std::count(sets.begin(), sets.end(), true);
  };
  EXPECT_EQ(separate([&](const Tensors& in) -> Tensors {
              auto h = net_(in[0]);
              auto metric = h.detach() * 2;  // a tensor of another storage, without a history
              backward(h.sum());
              metric.mul_(2);
              h.clone().zero_();  // made after backward
              const torch::NoGradGuard no_grad;
              net_->scale.add_(metric);  // read by none
              return {metric};
            }),
            0);
  EXPECT_EQ(separate([&](const Tensors& in) -> Tensors {
              auto h = net_(in[0]);
              h.mul_(2);  // before backward: autograd judges
              backward(h.sum());
              h.zero_();
              return {h};
            }),
            1);
}

TEST_F(LateWrites, ABufferOfALeafIsNotWrittenAfterBackward) {
  const auto refusal_with = [&](bool late) {
    auto module = std::make_shared<torch::nn::BatchNorm1dImpl>(4);
    auto net = NumberNet();
    net->register_module("norm", module);
    const auto table = table_of(*net);
    const auto leaf = [&](const torch::Tensor& x) {
      auto call = c10::make_intrusive<LeafCall>();
      call->module = "norm";
      call->state = {module->weight, module->bias};
      call->written = {module->running_mean, module->running_var, module->num_batches_tracked};
      call->function = [=](LeafCall&, const Tensors& inputs) -> Tensors {
        return {module->forward(inputs[0])};
      };
      return call_leaf(call, {x})[0];
    };
    return refusal(table, {x_}, [&](const Tensors& in) -> Tensors {
      auto h = net(in[0]) * module->running_mean;
      if (!late) leaf(h);
      backward(h.sum());
      if (late)
        leaf(h);
      else
        module->running_mean.zero_();
      return {};
    });
  };
  for (const bool late : {true, false}) {
    EXPECT_THAT(refusal_with(late),
                HasSubstr("step function \"train\": buffer \"norm.running_mean\" of "
                          "leaf module \"norm\" is written after backward"));
    EXPECT_THAT(refusal_with(late),
                HasSubstr("Call model->backward after whatever writes the buffer, or read "
                          "a copy of it: buffer.clone()"));
  }
}

TEST_F(LateWrites, WritesToOtherTensorsAfterBackwardLeaveTheGraphAsItWas) {
  const auto plain = [&](const Tensors& in) -> Tensors {
    auto loss = net_(in[0]).pow(2).mean();
    auto metric = loss.detach() * 2;
    backward(loss);
    metric.mul_(2);
    return {metric};
  };
  const TraceResult first = trace(table_, {x_}, plain);
  EXPECT_EQ(first.recorded->to_string().find("aten::clone"), std::string::npos);
  expect_equals_eager(plain);
}

TEST_F(LateWrites, WhatALossThatIsGoneIsAViewOfIsWrittenMuchLater) {
  expect_equals_eager([&](const Tensors& in) -> Tensors {
    auto losses = net_(in[0]).pow(2).mean(1);
    auto gradients = torch::ones_like(losses) * 0.5;
    backward_with({losses[2]}, {gradients[2]});
    auto y = in[0];
    for (int i = 0; i < 150; ++i) y = y * 0.99;
    losses.mul_(3);
    gradients.mul_(3);
    return {losses, gradients, y};
  });
}

}  // namespace
}  // namespace smp::graph::testing
