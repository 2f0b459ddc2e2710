// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <memory>
#include <type_traits>
#include <utility>

#include "smp/optim/traits.h"
#include "smp/smp.h"
#include "tests/smp/tensor_parallel.h"

// Optimizers with tensors in their state that are not elementwise: with a right declaration of how
// these lie, with none, and with wrong ones.
namespace smp {
namespace testing {

namespace to = torch::optim;

constexpr int64_t kSquare = 8;  // sizes of the part of "down" on two ranks

/// A momentum, a number for each row and another for each column, a matrix that all elements share,
/// and a count.
struct FactoredState : to::OptimizerCloneableParamState<FactoredState> {
  TORCH_ARG(torch::Tensor, momentum);
  TORCH_ARG(torch::Tensor, rows);
  TORCH_ARG(torch::Tensor, columns);
  TORCH_ARG(torch::Tensor, shared);
  TORCH_ARG(torch::Tensor, count);

 public:
  void serialize(torch::serialize::OutputArchive& archive) const override {
    archive.write("momentum", momentum());
    if (rows().defined()) archive.write("rows", rows());
    if (columns().defined()) archive.write("columns", columns());
    archive.write("shared", shared());
    archive.write("count", count());
  }
  void serialize(torch::serialize::InputArchive& archive) override {
    archive.read("momentum", momentum());
    archive.try_read("rows", rows());
    archive.try_read("columns", columns());
    archive.read("shared", shared());
    archive.read("count", count());
  }
};

/// Updates each element by its momentum and, if it has them, by the factors of its row and column.
struct Factored : to::Optimizer {
  explicit Factored(Tensors parameters, bool has_factors = true)
      : Optimizer(std::move(parameters), std::make_unique<to::SGDOptions>(0.01)),
        has_factors_(has_factors) {}

  torch::Tensor step(LossClosure) override {
    torch::NoGradGuard no_grad;
    for (auto& group : param_groups()) {
      for (auto& parameter : group.params()) {
        if (parameter.grad().defined()) update(parameter);
      }
    }
    return {};
  }

 protected:
  FactoredState& state_of(const torch::Tensor& parameter) {
    auto& made = state()[parameter.unsafeGetTensorImpl()];
    if (made == nullptr) made = make_state(parameter);
    return static_cast<FactoredState&>(*made);
  }

 private:
  void update(torch::Tensor& parameter) {
    auto& of = state_of(parameter);
    of.count().add_(1);
    of.shared().mul_(0.5);
    of.momentum().mul_(0.9).add_(parameter.grad());
    torch::Tensor factor = of.shared()[0][1] / of.count();
    if (of.rows().defined()) factor = factor * of.rows().mul_(0.75);
    if (of.columns().defined()) factor = factor.unsqueeze(1) * of.columns().mul_(1.25);
    parameter.sub_(0.01 * factor * of.momentum());
  }

  std::unique_ptr<to::OptimizerParamState> make_state(const torch::Tensor& parameter) const {
    auto made = std::make_unique<FactoredState>();
    const auto ones = [&](torch::IntArrayRef sizes) {
      return torch::ones(sizes, parameter.options().requires_grad(false));
    };
    made->momentum(torch::zeros_like(parameter));
    if (has_factors_) made->rows(ones({parameter.size(0)}));
    if (has_factors_ && parameter.dim() == 2) made->columns(ones({parameter.size(1)}));
    made->shared(ones({kSquare, kSquare}));
    made->count(ones({}));
    return made;
  }

  const bool has_factors_;
};

/// One without factors, which updates pieces as well.
struct Counted : Factored {
  explicit Counted(Tensors parameters) : Factored(std::move(parameters), /*has_factors=*/false) {}
};

/// One that makes all states in its constructor, as Adagrad does.
struct Eager : Factored {
  explicit Eager(const Tensors& parameters) : Factored(parameters) {
    for (const auto& parameter : parameters) state_of(parameter);
  }
};

/// The same, without a declaration of how its state lies.
struct Undeclared : Factored {
  using Factored::Factored;
};

/// One that does not declare the factors that it has in the last stage only.
struct Forgetful : Factored {
  explicit Forgetful(Tensors parameters) : Factored(std::move(parameters), pp_rank() > 0) {}
};

/// One that is wrong about its matrix, which each rank has otherwise.
struct Mistaken : Factored {
  using Factored::Factored;
  torch::Tensor step(LossClosure closure) override {
    Factored::step(std::move(closure));
    for (auto& [key, made] : state()) static_cast<FactoredState&>(*made).shared().add_(tp_rank());
    return {};
  }
};

/// One that is wrong about its matrix where a rank has the second part of a parameter.
struct MistakenInPart : Counted {
  using Counted::Counted;
  torch::Tensor step(LossClosure closure) override {
    Counted::step(std::move(closure));
    for (auto& [key, made] : state()) {
      static_cast<FactoredState&>(*made).shared().add_(tp_rank() * dp_rank());
    }
    return {};
  }
};

}  // namespace testing

namespace optim {

template <>
struct IsElementwise<testing::Factored> : std::true_type {};
template <>
struct ParamStateOf<testing::Factored> {
  using type = testing::FactoredState;
};
template <>
struct StateLayout<testing::Factored> {
  static FieldLayouts fields() {
    return {{"rows", FieldLayout::along({0})},
            {"columns", FieldLayout::along({-1})},
            {"shared", FieldLayout::whole()},
            {"count", FieldLayout::whole()}};
  }
};

template <>
struct IsElementwise<testing::Counted> : std::true_type {};
template <>
struct ParamStateOf<testing::Counted> : ParamStateOf<testing::Factored> {};
template <>
struct StateLayout<testing::Counted> {
  static FieldLayouts fields() {
    return {{"shared", FieldLayout::whole()}, {"count", FieldLayout::whole()}};
  }
};

template <>
struct IsElementwise<testing::Eager> : std::true_type {};
template <>
struct ParamStateOf<testing::Eager> : ParamStateOf<testing::Factored> {};
template <>
struct StateLayout<testing::Eager> : StateLayout<testing::Factored> {};

template <>
struct IsElementwise<testing::Undeclared> : std::true_type {};
template <>
struct ParamStateOf<testing::Undeclared> : ParamStateOf<testing::Factored> {};

template <>
struct IsElementwise<testing::Forgetful> : std::true_type {};
template <>
struct ParamStateOf<testing::Forgetful> : ParamStateOf<testing::Factored> {};
template <>
struct StateLayout<testing::Forgetful> : StateLayout<testing::Counted> {};

template <>
struct IsElementwise<testing::MistakenInPart> : std::true_type {};
template <>
struct ParamStateOf<testing::MistakenInPart> : ParamStateOf<testing::Factored> {};
template <>
struct StateLayout<testing::MistakenInPart> : StateLayout<testing::Counted> {};

template <>
struct IsElementwise<testing::Mistaken> : std::true_type {};
template <>
struct ParamStateOf<testing::Mistaken> : ParamStateOf<testing::Factored> {};
template <>
struct StateLayout<testing::Mistaken> : StateLayout<testing::Factored> {
  static FieldLayouts fields() {
    auto result = StateLayout<testing::Factored>::fields();
    result["columns"] = FieldLayout::along({1});
    result["count"] = FieldLayout::along({});
    return result;
  }
};

}  // namespace optim

}  // namespace smp
