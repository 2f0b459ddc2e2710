// SPDX-License-Identifier: Apache-2.0
// Data, memory and state: reads of tensors that have no data, shapes that depend on it, tensors
// that were not made by operators of the step.
#include "tests/graph/refusal.h"

#include <future>

namespace smp::graph::testing {
namespace {

TEST_F(Refusal, HostReads) {
  const auto item = text([&](torch::Tensor x) { net_(x).sum().item<float>(); });
  EXPECT_CONTAINS(item, "step function \"train\", in or after module \"fc\": operator aten::item");
  EXPECT_CONTAINS(item, "return the tensor from the step and read it there");
  EXPECT_CONTAINS(text([&](torch::Tensor x) {
                    if (x.is_nonzero()) net_(x);
                  }),
                  "aten::is_nonzero");
  EXPECT_CONTAINS(text([&](torch::Tensor x) { torch::allclose(x, net_(x)); }), "aten::allclose");
  EXPECT_CONTAINS(item, "smp::leaf(module)(x)");
}

TEST_F(Refusal, EqualOfCopiesButNotOfTheSameTensorOrOfOthers) {
  const auto copies = [](const Tensors& in) -> Tensors {
    torch::equal(in[0], in[0].clone());
    return {};
  };
  EXPECT_CONTAINS(refusal(table_, {torch::randn({4, 4})}, copies), "aten::equal");
  const auto traced = trace(table_, {torch::randn({4, 4})}, [&](const Tensors& in) -> Tensors {
    EXPECT_TRUE(torch::equal(in[0], in[0]));
    EXPECT_FALSE(torch::equal(in[0], in[0][0]));
    EXPECT_FALSE(torch::equal(in[0], in[0] + 1));
    return {net_(in[0])};
  });
  EXPECT_GT(traced.recorded->operators.size(), 0u);
}

TEST_F(Refusal, ResultShapesThatDependOnData) {
  EXPECT_CONTAINS(text([](torch::Tensor x) { torch::nonzero(x); }), "aten::nonzero");
  EXPECT_CONTAINS(text([](torch::Tensor x) { x.nonzero_numpy(); }), "aten::nonzero_numpy");
  EXPECT_CONTAINS(text([](torch::Tensor x) {
                    x.tensor_split(torch::tensor({1, 3}));
                  }),
                  "aten::tensor_split");
  const auto counts = torch::tensor({2, 0, 1, 1});
  EXPECT_CONTAINS(text([&](torch::Tensor x) { x.repeat_interleave(counts, 0); }),
                  "the result shape of operator aten::repeat_interleave depends on data");
  const auto masked = text([](torch::Tensor x) { x.index({x > 0}); });
  EXPECT_CONTAINS(masked, "the result shape of operator aten::index depends on data");
  EXPECT_CONTAINS(masked, "smp::leaf(module)(x)");
}

TEST_F(Refusal, OperatorsOnAnotherThread) {
  EXPECT_CONTAINS(
      text([&](torch::Tensor x) {
        auto norm = std::async(std::launch::async, [&] { return net_->fc->weight.norm(); }).get();
        x.mul(norm);
      }),
      "that was computed outside the step function (or on another thread)");
  EXPECT_CONTAINS(error_of([&](torch::Tensor x) {
                    std::async(std::launch::async, [&] { return x * 2; }).get();
                  }),
                  "or that calls operators on another thread, a leaf: smp::leaf(module)(x)");
}

/// In the first run as in every other: the function never sees data.
TEST_F(Refusal, DataReadThroughPointers) {
  const std::vector<std::function<void(torch::Tensor)>> readers = {
      [](torch::Tensor x) { x.data_ptr<float>(); },
      [](torch::Tensor x) { x.accessor<float, 2>(); },
      [](torch::Tensor x) { (x * 2).const_data_ptr<float>(); },
      [](torch::Tensor) { torch::randn({2}).data_ptr<float>(); },
      [](torch::Tensor x) { torch::from_blob(x.data_ptr(), {16}); },
      // A tensor that the function may fill has no data either once an operator has written it.
      [](torch::Tensor x) {
        torch::empty({4, 4}).copy_(x).data_ptr<float>();
      },
      [](torch::Tensor x) {
        auto view = torch::zeros({4, 4})[0];
        view.add_(x[0]);
        view.mutable_data_ptr<float>()[0] = 1;
      },
      [](torch::Tensor x) {
        auto literal = torch::tensor(std::vector<float>{1, 2, 3, 4});
        literal.add_(x[0]);
        literal.accessor<float, 1>();
      },
  };
  for (size_t i = 0; i < readers.size(); ++i) {
    SCOPED_TRACE(i);
    for (const bool execute : {true, false}) {
      const std::string error = error_of(readers[i], execute);
      EXPECT_CONTAINS(
          error,
          "the data of a tensor of step function \"train\" was read where only its shape exists");
      EXPECT_EQ(error.rfind("[smp]"), 0u) << error;  // at the beginning, and nowhere else
    }
  }
}

/// The same where the operators are compared with recorded ones.
TEST_F(Refusal, DataReadThroughPointersInAGuardedRun) {
  const std::vector<std::function<torch::Tensor(torch::Tensor)>> writers = {
      [](torch::Tensor x) { return x * 2; },
      [](torch::Tensor x) {
        return torch::empty({4, 4}).copy_(x);
      },
      [](torch::Tensor x) { return torch::ones({4}).add_(x[0]); },
      [](torch::Tensor x) {
        return torch::tensor(std::vector<float>{1, 2, 3, 4}).add_(x[0]);
      },
  };
  const Tensors inputs{torch::randn({4, 4})};
  for (size_t i = 0; i < writers.size(); ++i) {
    SCOPED_TRACE(i);
    bool read = false;
    const auto function = [&](const Tensors& in) -> Tensors {
      const auto y = writers[i](in[0]);
      if (read) y.const_data_ptr<float>();
      return {y + 1};
    };
    read = false;
    const TraceResult first = trace(table_, inputs, function);
    const TraceResult again = trace(table_, inputs, function, false, {first.recorded.get()});
    EXPECT_EQ(again.match, first.recorded.get()) << again.difference;
    EXPECT_TRUE(again.contents.empty());
    read = true;
    try {
      trace(table_, inputs, function, false, {first.recorded.get()});
      ADD_FAILURE() << "the data was read";
    } catch (const c10::Error& error) {
      EXPECT_CONTAINS(std::string(error.what()), "was read where only its shape exists");
    }
  }
}

TEST_F(Refusal, MemorySharedByHand) {
  EXPECT_CONTAINS(
      text([&](torch::Tensor x) {
        auto& weight = net_->fc->weight;
        x.mul(torch::from_blob(weight.data_ptr(), {4, 4}));
      }),
      "shares memory with parameter \"fc.weight\" but was not made from it by an operator "
      "(from_blob). Make it with an operator, such as detach() or as_strided()");
  EXPECT_CONTAINS(text([&](torch::Tensor x) { (x * 2).set_data(x); }),
                  "aten::_has_compatible_shallow_copy_type replaces the storage");
  EXPECT_CONTAINS(
      text([&](torch::Tensor x) { (x * 2).resize_({2}); }),
      "operator aten::resize_ replaces the storage of a tensor (set_data, resize_). Make a "
      "new tensor instead, or make the module that does it a leaf: smp::leaf(module)(x)");
  EXPECT_CONTAINS(text([&](torch::Tensor x) {
                    auto y = x.data();
                    y.unsafeGetTensorImpl()->set_sizes_and_strides(c10::IntArrayRef{2},
                                                                   c10::IntArrayRef{1});
                    y.mul(2);
                  }),
                  "shares memory with another one of the step");
}

/// A registered tensor outlives the run: the next microbatch would find another shape.
TEST_F(Refusal, RegisteredTensorsThatAreViewedInPlace) {
  const auto state = torch::randn({4, 4}), row = torch::randn({4});
  table_.add(ValueKind::kBuffer, "state", state);
  table_.add(ValueKind::kBuffer, "row", row);
  const auto expect = [&](const std::string& name, const std::function<void()>& view) {
    EXPECT_CONTAINS(text([&](torch::Tensor) { view(); }),
                    "operator aten::" + name + " changes the shape of buffer \"state\" in place");
  };
  expect("unsqueeze_", [&] { state.unsqueeze_(0); });
  expect("squeeze_", [&] { state.squeeze_(); });
  expect("t_", [&] { state.t_(); });
  expect("transpose_", [&] { state.transpose_(0, 1); });
  expect("swapaxes_", [&] { state.swapaxes_(0, 1); });
  expect("as_strided_", [&] { state.as_strided_({2, 2}, {1, 2}); });
  EXPECT_EQ(state.sizes(), torch::IntArrayRef({4, 4}));
  const auto out = text([&](torch::Tensor x) {
    auto result = row;
    at::mul_out(result, x, x);
  });
  EXPECT_CONTAINS(out,
                  "operator aten::mul changes the shape of buffer \"row\" in place. Use "
                  "the operator that returns a view of it");
  EXPECT_EQ(row.sizes(), torch::IntArrayRef({4}));
  EXPECT_CONTAINS(text([&](torch::Tensor) {
                    const torch::NoGradGuard no_grad;
                    net_->fc->weight.t_();
                  }),
                  "aten::t_ changes the shape of parameter \"fc.weight\"");
  EXPECT_CONTAINS(text([&](torch::Tensor x) { state.set_data(x); }), "replaces the storage");
  EXPECT_CONTAINS(text([&](torch::Tensor) { state.resize_({2, 2}); }), "replaces the storage");
  EXPECT_CONTAINS(text([&](torch::Tensor) {
                    const torch::NoGradGuard no_grad;
                    net_->fc->weight.detach_();
                  }),
                  "aten::detach_ writes parameter \"fc.weight\"");
  expect_captured([&](torch::Tensor x) {
    x.unsqueeze_(0).squeeze_().t_().add_(state.unsqueeze(0).squeeze_());
    state.detach_();
  });
}

TEST_F(Refusal, StridedViewsBeyondTheirTensor) {
  EXPECT_CONTAINS(
      text([](torch::Tensor x) { x[1].as_strided({4}, {1}, 0); }),
      "operator aten::as_strided reaches elements of the storage that its argument does not show");
  EXPECT_CONTAINS(text([](torch::Tensor x) {
                    x[0].as_strided({2, 4}, {4, 1});
                  }),
                  "aten::as_strided");
  EXPECT_CONTAINS(text([](torch::Tensor x) { x.as_strided({2}, {1}, 3); }), "slice(), narrow()");
  // A tensor without elements shows none, and a view without elements needs none.
  EXPECT_CONTAINS(text([](torch::Tensor x) { x.narrow(0, 0, 0).as_strided({2}, {1}); }),
                  "aten::as_strided");
  expect_captured([](torch::Tensor x) { x.as_strided({0, 100}, {100, 1}); });
}

TEST_F(Refusal, SparseTensors) {
  const auto sparse = text([](torch::Tensor x) { x.to_sparse(); });
  EXPECT_CONTAINS(sparse,
                  "operator aten::to_sparse returns a tensor that is not dense. Convert it with "
                  "to_dense(), or make the module that uses it a leaf: smp::leaf(module)(x)");
  EXPECT_CONTAINS(
      text([](torch::Tensor x) {
        torch::sparse_coo_tensor(torch::zeros({1, 2}, torch::kLong), x[0].slice(0, 0, 2), {4});
      }),
      "returns a tensor that is not dense");
}

TEST_F(Refusal, HiddenStateAndForeignParameters) {
  auto state = torch::zeros({4, 4});
  EXPECT_CONTAINS(
      text([&](torch::Tensor x) { state.add_(x); }),
      "operator aten::add_.Tensor writes a tensor that was made outside the step function "
      "and is not registered (hidden state). Register it as a buffer of the module");
  auto weight = torch::randn({4, 4}).requires_grad_();
  EXPECT_CONTAINS(text([&](torch::Tensor x) { x.matmul(weight); }),
                  "a parameter of shape [4, 4] that belongs to no DistributedModel");
  auto computed = net_(torch::randn({4, 4}));
  EXPECT_CONTAINS(text([&](torch::Tensor x) { x.add(computed); }),
                  "computed outside the step function");
  // A member that was given another tensor than the registered one.
  net_->fc->weight = torch::randn({4, 4}).requires_grad_();
  EXPECT_CONTAINS(text([&](torch::Tensor x) { net_(x); }), "assign it to the member before that");
}

TEST_F(Refusal, WritesToParametersAndReadsOfGradients) {
  EXPECT_CONTAINS(
      text([&](torch::Tensor) {
        torch::NoGradGuard no_grad;
        net_->fc->weight.mul_(0.9);
      }),
      "aten::mul_.Scalar writes parameter \"fc.weight\". Parameters may be changed outside "
      "the step function only: call optimizer.step() after the step has returned");
  net_(torch::randn({4, 4})).sum().backward();
  EXPECT_CONTAINS(text([&](torch::Tensor x) { x.add(net_->fc->weight.grad()); }),
                  "reads the gradient of parameter \"fc.weight\"");
}

TEST_F(Refusal, ExplicitGenerators) {
  auto generator = at::detail::createCPUGenerator(3);
  EXPECT_CONTAINS(text([&](torch::Tensor x) {
                    x.add(torch::randn({4, 4}, generator));
                  }),
                  "draws from an explicit generator");
}

TEST_F(Refusal, TensorsThatEscaped) {
  torch::Tensor kept;
  const auto keep = [&](const Tensors& in) -> Tensors {
    kept = in[0] * 2;
    return {kept};
  };
  const Tensors inputs{torch::randn({4, 4})};
  trace(table_, inputs, keep, false);
  EXPECT_CONTAINS(
      text([&](torch::Tensor x) { x.add(kept); }),
      "uses a tensor that escaped from an earlier run of a step function (hidden state). "
      "What a microbatch leaves to the next one is a buffer: register it in the module "
      "and write it in place (state.copy_(h.detach()))");
}

TEST_F(Refusal, NamesOfNothing) {
  try {
    table_.at("nothing");
    ADD_FAILURE() << "something was found";
  } catch (const UsageError& error) {
    EXPECT_CONTAINS(std::string(error.what()), "no parameter or buffer is named \"nothing\"");
  }
}

}  // namespace
}  // namespace smp::graph::testing
