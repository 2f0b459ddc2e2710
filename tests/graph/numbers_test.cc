// SPDX-License-Identifier: Apache-2.0
// Programs around a model that a graph once got wrong without a word: each equals plain libtorch,
// or is refused.

#include "tests/graph/numbers.h"

#include <ATen/autocast_mode.h>
#include <c10/core/DefaultDtype.h>
#include <c10/util/ScopeExit.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <sstream>

#include "tests/error_of.h"

namespace smp::graph::testing {
namespace {

using ::testing::HasSubstr;

// -- Numbers that change the results of an operator

TEST_F(Numbers, ADropoutThatBeginsAtZero) {
  double p = 0;
  const auto function = [&](const Tensors& in) -> Tensors {
    auto h = net_(in[0]);
    auto d = torch::dropout(h, p, true);
    backward((h + d).sum());
    return {h, h + d};
  };
  const TraceResult zero = trace(table_, {x_}, function);
  expect_equals_eager(function);
  p = 0.9;
  const TraceResult many = again(zero, function);
  ASSERT_NE(many.recorded, nullptr);
  EXPECT_THAT(many.difference, HasSubstr("has another constant as argument \"p\""));
  expect_equals_eager(function);
  p = 0.8;
  const TraceResult fewer = again(many, function);
  EXPECT_EQ(fewer.match, many.recorded.get());
  EXPECT_EQ(fewer.constants.size(), 1u);
  p = 0;
  EXPECT_EQ(again(many, function).match, nullptr);
}

TEST_F(Numbers, NoiseMayBeginAtZeroAndEndThere) {
  for (const char* what : {"alpha_dropout", "feature_dropout"}) {
    double p = 0.5;
    const auto function = [&](const Tensors& in) -> Tensors {
      auto h = net_(in[0]);
      auto d =
          what[0] == 'a' ? torch::alpha_dropout(h, p, true) : torch::feature_dropout(h, p, true);
      d.add_(1);
      return {h, d};
    };
    const TraceResult half = trace(table_, {x_}, function);
    p = 0;
    EXPECT_EQ(again(half, function).match, nullptr) << what;
    expect_equals_eager(function);
  }
}

// -- Modes

/// Autocast of the CPU, on or off.
class Autocast {
 public:
  explicit Autocast(bool on) : before_(at::autocast::is_autocast_enabled(at::kCPU)) {
    at::autocast::set_autocast_enabled(at::kCPU, on);
  }
  ~Autocast() {
    at::autocast::set_autocast_enabled(at::kCPU, before_);
    at::autocast::clear_cache();
  }

 private:
  bool before_;
};

TEST_F(Numbers, AnOuterAutocastDoesNotReachAnInnerBlockWithout) {
  const auto function = [&](const Tensors& in) -> Tensors {
    auto h = net_->fc(in[0]);
    torch::Tensor y;
    {
      const Autocast off(false);
      y = net_->out(torch::tanh(h.to(torch::kFloat)));
    }
    auto loss = y.pow(2).mean();
    backward(loss);
    return {y, loss};
  };
  const Autocast on(true);
  expect_equals_eager(function);
}

TEST_F(Numbers, ABlockBelowAutogradHasNoGradient) {
  for (const bool views : {true, false}) {
    expect_equals_eager([&](const Tensors& in) -> Tensors {
      auto h = net_(in[0]);
      torch::Tensor t;
      if (views) {
        const at::AutoDispatchBelowADInplaceOrView below;
        t = h * 3;
      } else {
        const at::AutoDispatchBelowAutograd below;
        t = h * 3;
      }
      backward((h * t).sum());
      return {t};
    });
  }
}

TEST_F(Numbers, ABlockBelowAutogradIsAnotherGraph) {
  bool below = false;
  const auto function = [&](const Tensors& in) -> Tensors {
    auto h = net_(in[0]).detach();
    std::optional<at::AutoDispatchBelowADInplaceOrView> guard;
    if (below) guard.emplace();
    return {h * 3};
  };
  const TraceResult first = trace(table_, {x_}, function);
  below = true;
  EXPECT_THAT(again(first, function).difference, HasSubstr("runs in another mode"));
}

TEST_F(Numbers, TheDefaultTypeIsPartOfTheMode) {
  const auto before = c10::get_default_dtype();
  const auto restore = c10::make_scope_exit([&] { c10::set_default_dtype(before); });
  const auto function = [&](const Tensors& in) -> Tensors {
    auto y = in[0] * torch::arange(4).div(3);
    return {y, torch::zeros({2}) + y.sum()};
  };
  const TraceResult single = trace(table_, {x_}, function);
  EXPECT_EQ(replay(*single.recorded, table_, {x_}).outputs[1].scalar_type(), torch::kFloat);
  c10::set_default_dtype(caffe2::TypeMeta::Make<double>());
  const TraceResult twice = again(single, function);
  EXPECT_THAT(twice.difference, HasSubstr("runs in another mode"));
  expect_equals_eager(function);
  // Values that were recorded under the other type keep it.
  EXPECT_EQ(replay(*single.recorded, table_, {x_}).outputs[1].scalar_type(), torch::kFloat);
  EXPECT_EQ(c10::get_default_dtype_as_scalartype(), torch::kDouble);
}

// -- Types

TEST_F(Numbers, TheRealPartOfAComplexTensorUnderAutocast) {
  const auto function = [&](const Tensors& in) -> Tensors {
    const Autocast on(true);
    const auto z = torch::complex(in[0], in[0] + 1);
    return {torch::real(z), torch::imag(z).mul(2), torch::view_as_real(z)};
  };
  const TraceResult shapes = trace(table_, {x_}, function, /*execute=*/false);
  EXPECT_EQ(shapes.recorded->to_string(), trace(table_, {x_}, function).recorded->to_string());
  EXPECT_TRUE(torch::equal(replay(*shapes.recorded, table_, {x_}).outputs[0], x_));
}

/// On shapes an operator that is made of others runs on zeros under autocast; its effects in place
/// are seen all the same.
TEST_F(Numbers, OperatorsMadeOfOthersWorkInPlaceUnderAutocast) {
  const auto function = [&](const Tensors& in) -> Tensors {
    const Autocast on(true);
    auto state = in[0] * 1;
    auto row = state[1];
    auto wide = in[0].slice(1, 0, 2) * 1;
    state.multiply_(net_->fc->weight);
    wide.swapaxes_(0, 1);
    auto loss = (row * wide.sum()).sum();
    backward(loss);
    return {loss, wide};
  };
  const Graph shapes = *trace(table_, {x_}, function, /*execute=*/false).recorded;
  const Graph data = *trace(table_, {x_}, function).recorded;
  ASSERT_EQ(shapes.to_string(), data.to_string());
  for (size_t id = 0; id < data.values.size(); ++id) {
    EXPECT_EQ(shapes.values[id].meta.requires_grad, data.values[id].meta.requires_grad) << id;
  }
  expect_equals_eager(function);
}

TEST_F(Numbers, AResultOfAnotherTypeThanRecordedIsRefused) {
  const TraceResult traced =
      trace(table_, {x_}, [&](const Tensors& in) -> Tensors { return {in[0] * 2}; });
  traced.recorded->values.back().meta.dtype = torch::kDouble;
  try {
    replay(*traced.recorded, table_, {x_});
    ADD_FAILURE() << "another type was taken";
  } catch (const CaptureError& error) {
    EXPECT_THAT(error.what(),
                HasSubstr("operator 0 (aten::mul) gave a result of Float[4, 4], and was recorded "
                          "with one of Double[4, 4]: its result type is not the one that all after "
                          "it was planned for. Give it arguments of one type (x.to(dtype))"));
  }
}

// -- Shapes that depend on data

TEST_F(Numbers, ASizeThatDependsOnDataIsRefusedWhenItChanges) {
  const std::vector<std::function<int64_t(torch::Tensor)>> sizes = {
      [](torch::Tensor x) { return torch::where(x > 0)[0].size(0); },
      [](torch::Tensor x) { return x.gt(0).nonzero_numpy()[0].size(0); },
      [](torch::Tensor x) { return std::get<0>(at::_unique(x.gt(0).sum(0))).size(0); },
      [](torch::Tensor x) { return x[0].repeat_interleave(x[0].gt(0).to(torch::kLong)).size(0); },
  };
  const auto all = torch::ones({4, 4});
  auto some = torch::ones({4, 4});
  some[0][0] = -1;
  for (const auto& size : sizes) {
    const auto function = [&](const Tensors& in) -> Tensors {
      auto loss = net_(in[0]).pow(2).mean() * size(in[0]);
      backward(loss);
      return {loss};
    };
    TraceResult first;
    try {
      first = trace(table_, {all}, function);
    } catch (const CaptureError& error) {
      EXPECT_THAT(error.what(), HasSubstr("depends on data"));
      continue;
    }
    EXPECT_NO_THROW(replay(*first.recorded, table_, {all}));
    try {
      replay(*first.recorded, table_, {some});
      ADD_FAILURE() << "another size was frozen\n" << first.recorded->to_string();
    } catch (const CaptureError& error) {
      EXPECT_THAT(error.what(), HasSubstr("its result shape depends on data"));
      EXPECT_THAT(error.what(), HasSubstr("and was recorded with one of "));
      EXPECT_THAT(error.what(), HasSubstr("smp::leaf(module)(x)"));
    }
  }
}

// -- Tensors that host code fills

/// Three numbers, made by a factory and filled through a pointer unless `values` is empty.
torch::Tensor filled(const std::vector<float>& values) {
  auto tensor = torch::zeros({4});
  std::copy(values.begin(), values.end(), tensor.data_ptr<float>());
  return tensor;
}

TEST_F(Numbers, AMaskThatIsFilledInALaterStepOnly) {
  std::vector<float> values;
  const auto function = [&](const Tensors& in) -> Tensors {
    auto loss = (net_(in[0]) * (1 - filled(values))).pow(2).mean();
    backward(loss);
    return {loss};
  };
  const TraceResult empty = trace(table_, {x_}, function);
  values = {0, 1, 0, 0};
  const TraceResult one = again(empty, function);
  ASSERT_NE(one.recorded, nullptr);
  EXPECT_THAT(one.difference, HasSubstr("which host code has filled"));
  EXPECT_TRUE(torch::equal(replay(*one.recorded, table_, {x_}).outputs[0], function({x_})[0]));
  values = {1, 0, 1, 0};
  const TraceResult two = again(one, function);
  EXPECT_EQ(two.match, one.recorded.get());
  ASSERT_EQ(two.contents.size(), 1u);
  EXPECT_TRUE(torch::equal(two.contents[0].content, torch::tensor({1.f, 0.f, 1.f, 0.f})));
  // Not filled again: either graph will do, if the content follows.
  values = {};
  const TraceResult none = again(one, function);
  EXPECT_EQ(none.match, one.recorded.get());
  ASSERT_EQ(none.contents.size(), 1u);
  EXPECT_TRUE(torch::equal(none.contents[0].content, torch::zeros({4})));
  const auto both =
      trace(table_, {x_}, function, false, {one.recorded.get(), empty.recorded.get()});
  EXPECT_NE(both.match, nullptr);
}

TEST_F(Numbers, OfTwoGraphsTheOneWithTheFilledMaskIsFound) {
  std::vector<float> values;
  const auto function = [&](const Tensors& in) -> Tensors { return {in[0] * filled(values)}; };
  const TraceResult empty = trace(table_, {x_}, function);
  values = {0, 1, 2, 3};
  const TraceResult full = again(empty, function);
  for (const bool first : {true, false}) {
    const Graph* a = first ? empty.recorded.get() : full.recorded.get();
    const Graph* b = first ? full.recorded.get() : empty.recorded.get();
    values = {5, 6, 7, 8};
    const TraceResult found = trace(table_, {x_}, function, false, {a, b});
    EXPECT_EQ(found.match, full.recorded.get());
    ASSERT_EQ(found.contents.size(), 1u);
    EXPECT_TRUE(torch::equal(found.contents[0].content, torch::tensor({5.f, 6.f, 7.f, 8.f})));
  }
}

TEST_F(Numbers, AFilledTensorMayBeReturnedOrBeTheGradient) {
  std::vector<float> values;
  const auto function = [&](const Tensors& in) -> Tensors {
    auto y = net_(in[0]).sum(0);
    auto gradient = filled(values);
    backward_with({y}, {gradient});
    return {filled(values)};
  };
  const TraceResult empty = trace(table_, {x_}, function);
  values = {0, 1, 2, 3};
  const TraceResult full = again(empty, function);
  ASSERT_NE(full.recorded, nullptr);
  EXPECT_THAT(full.difference, HasSubstr("host code has filled %"));
  EXPECT_TRUE(torch::equal(replay(*full.recorded, table_, {x_}).outputs[0], filled(values)));
  expect_equals_eager(function);
}

TEST_F(Numbers, HostCodeMayReadAFactoryInEveryStep) {
  int64_t sum = 0;
  const auto function = [&](const Tensors& in) -> Tensors {
    auto positions = torch::arange(4);
    sum += positions.accessor<int64_t, 1>()[3];
    return {in[0] * positions};
  };
  const TraceResult first = trace(table_, {x_}, function);
  EXPECT_EQ(again(first, function).match, first.recorded.get());
  EXPECT_EQ(sum, 6);
}

TEST_F(Numbers, WhatHostCodeChangesAfterAReadIsRefused) {
  int change = 0;
  std::vector<std::function<torch::Tensor()>> kinds = {
      [] {
        return filled({1, 2, 3, 4});
      },                                                 // a literal
      [] { return torch::ones({4}); },                   // a factory's result as it was
      [outside = torch::ones({4})] { return outside; },  // a constant
  };
  for (size_t kind = 0; kind < kinds.size(); ++kind) {
    const auto function = [&](const Tensors& in) -> Tensors {
      auto table = kinds[kind]();
      auto y = net_(in[0]) * table;
      if (change > 0) table.data_ptr<float>()[1] = static_cast<float>(10 * change);
      y = y * table;
      return {y};
    };
    change = 0;
    const TraceResult first = trace(table_, {x_}, function);
    for (const bool execute : {true, false}) {
      ++change;
      const std::string text = refusal(table_, {x_}, function, execute);
      EXPECT_THAT(text, HasSubstr("changes the data of a tensor of shape [4] on the host after an "
                                  "operator has read it"))
          << kind;
    }
    ++change;
    const std::string text = refusal(table_, {x_}, function, false, {first.recorded.get()});
    EXPECT_THAT(text, HasSubstr("make another tensor for other data")) << kind;
  }
}

TEST_F(Numbers, ALargeTensorThatHostCodeChangesAfterAReadIsRefused) {
  float second = 1;
  bool written = false;
  const auto function = [&](const Tensors& in) -> Tensors {
    auto table = torch::zeros({2048});
    table.data_ptr<float>()[0] = 1;
    auto y = in[0].sum() * table;
    table.data_ptr<float>()[0] = second;
    y = y * table;
    if (written) table.add_(y);
    return {y};
  };
  const TraceResult first = trace(table_, {x_}, function);
  EXPECT_EQ(again(first, function).match, first.recorded.get());
  second = 2;
  for (const bool writes : {false, true}) {
    written = writes;
    const std::string known = refusal(table_, {x_}, function, false, {first.recorded.get()});
    for (const std::string& text :
         {refusal(table_, {x_}, function, true), refusal(table_, {x_}, function, false), known}) {
      EXPECT_THAT(text, HasSubstr("changes the data of a tensor of shape [2048] on the host"));
    }
  }
}

TEST_F(Numbers, AConstantThatIsChangedAfterItsLastReadIsNewInTheNextRun) {
  auto counter = torch::zeros({1});
  const auto function = [&](const Tensors& in) -> Tensors {
    auto y = in[0] + counter;
    counter.data_ptr<float>()[0] += 1;
    return {y};
  };
  const TraceResult first = trace(table_, {x_}, function);
  const TraceResult second = again(first, function);
  EXPECT_EQ(second.match, first.recorded.get());
  ASSERT_EQ(second.contents.size(), 1u);
  EXPECT_EQ(second.contents[0].content.item<float>(), 1);
}

TEST_F(Numbers, WhatWasReadAndIsThenWrittenByAnOperatorHoldsNoDataForTheHost) {
  const auto function = [&](const Tensors& in) -> Tensors {
    auto sum = torch::zeros({4});
    auto y = in[0] + sum;
    sum.add_(in[0][0]);
    sum.accessor<float, 1>();
    return {y};
  };
  EXPECT_ANY_THROW(trace(table_, {x_}, function));
  EXPECT_ANY_THROW(trace(table_, {x_}, function, false));
}

// -- Another way from the middle of a known graph on

TEST_F(Numbers, AViewThatWasMadeBeforeABranchIsOneAfterIt) {
  bool branch = false;
  const auto function = [&](const Tensors& in) -> Tensors {
    auto h = net_(in[0]);
    auto base = torch::zeros_like(h);
    auto row = base[0];
    if (branch) row.copy_(h[0]);
    auto y = base * 2 + (branch ? 0 : 1) * h;
    backward(y.sum());
    return {y};
  };
  const TraceResult straight = trace(table_, {x_}, function);
  branch = true;
  const TraceResult branched = again(straight, function);
  ASSERT_NE(branched.recorded, nullptr);
  const TraceResult whole = trace(table_, {x_}, function);
  EXPECT_EQ(branched.recorded->to_string(), whole.recorded->to_string());
  const Replayed replayed = replay(*branched.recorded, table_, {x_});
  net_->zero_grad();
  EXPECT_TRUE(torch::equal(replayed.outputs[0], function({x_})[0]));
  EXPECT_TRUE(torch::equal(replayed.gradients.at("fc.weight"), net_->fc->weight.grad()));
}

/// Everything that a run has done before it leaves the known graphs is as in a run of its own.
TEST_F(Numbers, ARunThatLeavesAKnownGraphIsRecordedAsOneFromTheStart) {
  bool branch = false;
  std::vector<float> early = {1, 2, 3, 4}, late = {1, 1, 1, 1};
  double factor = 2;
  const auto outside = torch::ones({4}), first_read_late = torch::ones({4});
  const auto function = [&](const Tensors& in) -> Tensors {
    const auto table = filled(late);
    auto h = torch::dropout(net_(in[0]) * filled(early) * factor + outside, 0.5, true);
    h = branch ? torch::dropout(h.relu(), 0.5, true) * first_read_late : h.tanh();
    const auto y = h + table;
    backward(y.sum());
    return {y};
  };
  const TraceResult known = trace(table_, {x_}, function);
  branch = true;
  early = {5, 6, 7, 8};
  late = {};  // not filled in this run
  factor = 3;
  outside.fill_(9);
  const TraceResult left = again(known, function);
  const TraceResult whole = trace(table_, {x_}, function, false);
  ASSERT_NE(left.recorded, nullptr);
  EXPECT_EQ(left.recorded->to_string(), whole.recorded->to_string());
  EXPECT_EQ(left.recorded->constants_fingerprint(), whole.recorded->constants_fingerprint());
  ASSERT_EQ(left.recorded->operators.size(), whole.recorded->operators.size());
  for (size_t i = 0; i < whole.recorded->operators.size(); ++i) {
    const Operator& a = left.recorded->operators[i];
    const Operator& b = whole.recorded->operators[i];
    EXPECT_EQ(a.random_ordinal, b.random_ordinal) << left.recorded->line(i);
    EXPECT_EQ(a.first_result, b.first_result) << left.recorded->line(i);
    EXPECT_EQ(a.result_is_argument, b.result_is_argument) << left.recorded->line(i);
  }
  const Replayed replayed = replay(*left.recorded, table_, {x_});
  const Replayed expected = replay(*whole.recorded, table_, {x_});
  EXPECT_TRUE(torch::equal(replayed.outputs[0], expected.outputs[0]));
  EXPECT_TRUE(torch::equal(replayed.gradients.at("fc.weight"), expected.gradients.at("fc.weight")));
  EXPECT_EQ(again(left, function).match, left.recorded.get());
}

// -- Data that the host reads

TEST_F(Numbers, AttentionOverASequenceOfTheLengthOfItsQuery) {
  torch::manual_seed(5);
  torch::nn::Transformer net(torch::nn::TransformerOptions(8, 2)
                                 .num_encoder_layers(1)
                                 .num_decoder_layers(1)
                                 .dim_feedforward(8)
                                 .dropout(0.1));
  const auto function = [&](const Tensors& in) -> Tensors {
    auto y = net(in[0], in[1]);
    backward(y.square().mean());
    return {y};
  };
  const Tensors inputs{torch::randn({3, 2, 8}), torch::randn({3, 2, 8})};
  const Tensors fresh{torch::randn({3, 2, 8}), torch::randn({3, 2, 8})};
  expect_replay_equals_eager(*net, inputs, fresh, function);
  const TensorTable table = table_of(*net);
  const TraceResult first = trace(table, inputs, function);
  EXPECT_EQ(trace(table, inputs, function, false, {first.recorded.get()}).match,
            first.recorded.get());
  EXPECT_EQ(trace(table, inputs, function, false).recorded->to_string(),
            first.recorded->to_string());
}

TEST_F(Numbers, TensorsThatAreEqualInAMicrobatchAreRefusedThere) {
  const auto function = [&](const Tensors& in) -> Tensors {
    auto y = net_(in[0]);
    if (torch::equal(in[0], in[1])) return {y * 2};
    return {y};
  };
  const TraceResult first = trace(table_, {x_, x_ + 1}, function);
  EXPECT_TRUE(torch::equal(replay(*first.recorded, table_, {x_, x_ * 3}).outputs[0], net_(x_)));
  try {
    replay(*first.recorded, table_, {x_, x_.clone()});
    ADD_FAILURE() << "they are equal";
  } catch (const CaptureError& error) {
    EXPECT_THAT(error.what(), HasSubstr("torch::equal was called on two tensors of shape [4, 4] "
                                        "that are equal in this microbatch"));
    EXPECT_THAT(error.what(),
                HasSubstr("Pass the very same tensor where they are meant to be one"));
  }
  EXPECT_THAT(refusal(table_, {x_, x_.clone()}, function),
              HasSubstr("operator aten::equal reads the data of a tensor on the host"));
}

TEST_F(Numbers, OperatorsThatTakeNoZerosAreRecordedOnShapes) {
  const auto function = [&](const Tensors& in) -> Tensors {
    auto drawn = torch::multinomial(torch::softmax(net_(in[0]), 1), 2);
    auto inverse = torch::cholesky_inverse(in[0].mm(in[0].t()) + torch::eye(4));
    return {drawn, inverse};
  };
  const TraceResult shapes = trace(table_, {x_}, function, /*execute=*/false);
  EXPECT_EQ(shapes.recorded->to_string(), trace(table_, {x_}, function).recorded->to_string());
}

// -- Data that the program has

TEST_F(Numbers, HostCodeReadsAConstant) {
  auto lengths = torch::tensor({3.0, 2.0, 4.0, 1.0});
  const Function function = [&](const Tensors& in) -> Tensors {
    auto h = net_(in[0]) * lengths.max();
    if (torch::tensor(1.5).item<double>() > 1) h = h * 2;
    const auto scale = torch::full({1}, 3).item<int64_t>() + (lengths[0] > 0).defined();
    auto loss = (h * scale).sum();
    backward(loss);
    return {loss};
  };
  expect_equals_eager(function);
  const torch::Tensor flag = torch::ones({});
  const Function branch = [&](const Tensors& in) -> Tensors {
    return {flag.item<float>() > 0 ? net_(in[0]) : in[0] * 2};
  };
  expect_equals_eager(branch);
  const TraceResult first = trace(table_, {x_}, branch);
  flag.zero_();
  EXPECT_EQ(again(first, branch).match, nullptr);
  for (const torch::Tensor& state : {net_->scale, net_->fc->weight}) {
    EXPECT_THAT(refusal(table_, {x_},
                        [&](const Tensors& in) -> Tensors {
                          return {in[0] * state.detach().sum().item<float>()};
                        }),
                HasSubstr("reads the data of a tensor on the host"));
    EXPECT_THAT(refusal(table_, {x_},
                        [&](const Tensors& in) -> Tensors {
                          return {in[0] * torch::equal(state, state.clone())};
                        }),
                HasSubstr("reads the data of a tensor on the host"));
  }
}

TEST_F(Numbers, AnEmptyTensorIsGivenAsOut) {
  for (const bool given : {true, false}) {
    expect_equals_eager([&](const Tensors& in) -> Tensors {
      auto out = given ? torch::empty({0}) : torch::empty({4, 4});
      torch::mm_out(out, in[0], in[0]);
      auto loss = (net_(in[0]) * out).sum();
      backward(loss);
      return {loss, out};
    });
  }
}

TEST_F(Numbers, PrintingSaysWhere) {
  for (const bool execute : {true, false}) {
    std::ostringstream out;
    const Function print = [&](const Tensors& in) -> Tensors {
      auto h = net_(in[0]);
      out << h;
      return {h};
    };
    const std::string text =
        smp::testing::error_of<Error>([&] { trace(table_, {x_}, print, execute); });
    EXPECT_THAT(text, HasSubstr("step function \"train\", in or after module \"out\": "));
    EXPECT_THAT(
        text,
        HasSubstr("was read where only its shape exists (by data_ptr, an accessor or printing)"));
  }
}

}  // namespace
}  // namespace smp::graph::testing
