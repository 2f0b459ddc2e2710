// SPDX-License-Identifier: Apache-2.0
// Rules of products of matrices and embeddings.

#include <algorithm>

#include "nn/rewrite/builtin_rules.h"
#include "nn/rewrite/emitter.h"

namespace smp::nn::rewrite {
namespace {

using graph::ValueId;
using Result = std::optional<Treatment>;

/// How a sum over the ranks is wanted, if in parts that can be had without the whole.
std::optional<Layout> layout_of_sum(const Call& call) {
  const auto pin = call.pin();
  const bool in_parts = pin && pin->is_divided() && pin->blocks == 1;
  return in_parts ? pin : std::nullopt;
}

/// That sum.
ValueId sum_of(Emitter& emitter, ValueId terms, const Treatment& treatment) {
  const Layout& layout = treatment.results[0];
  return layout.is_divided() ? emitter.reduce_scatter(terms, layout.dim) : emitter.reduce(terms);
}

/// `a` [.., rows, inner] times `b` [.., inner, columns], to which `bias` may be added.
struct Product {
  int a = 0;
  int b = 1;
  int bias = -1;
  bool transposed = false;                  ///< `b` is [columns, inner]
  Treatment::Emit emit_sum = nullptr;       ///< where there is a bias, and `inner` is divided
  Treatment::Emit emit_gathered = nullptr;  ///< where `a` is divided by rows, and `b` by columns
};

/// The role of an operand's dimension in the product.
enum class Role { kBatch, kRows, kInner, kColumns };

class ProductRule {
 public:
  ProductRule(const Call& call, const Product& product) : call_(call), product_(product) {}

  Result run() {
    const int a = product_.a, b = product_.b;
    if (call_.dim(a) < 1 || call_.dim(b) < 1) return std::nullopt;
    treatment_ = call_.all_shared();
    if (call_.divided(b)) {
      const Layout& layout = call_.layout(b);
      const Role role = role_in_b(layout.dim);
      if (role == Role::kColumns) return columns(layout);
      if (role == Role::kInner) return inner(layout);
      return batch(layout.dim - call_.dim(b), layout);
    }
    if (!call_.divided(a)) return std::nullopt;
    const Layout& layout = call_.layout(a);
    const Role role = role_in_a(layout.dim);
    if (role == Role::kInner) return inner(layout);
    if (role == Role::kRows) return rows(layout);
    return batch(layout.dim - call_.dim(a), layout);
  }

 private:
  bool has_columns() const { return call_.dim(product_.b) >= 2; }
  int result_dim() const { return static_cast<int>(call_.result_meta().sizes.size()); }

  int inner_of_a() const { return call_.dim(product_.a) - 1; }
  int inner_of_b() const {
    if (!has_columns()) return 0;
    return call_.dim(product_.b) - (product_.transposed ? 1 : 2);
  }

  /// If there is one matrix on the right, all but the last dimension of the left are rows.
  Role role_in_a(int dim) const {
    if (dim == inner_of_a()) return Role::kInner;
    if (call_.dim(product_.b) <= 2 || dim == call_.dim(product_.a) - 2) return Role::kRows;
    return Role::kBatch;
  }

  Role role_in_b(int dim) const {
    if (dim == inner_of_b()) return Role::kInner;
    return dim >= call_.dim(product_.b) - 2 ? Role::kColumns : Role::kBatch;
  }

  /// Asks for an operand in a layout; one that costs communication is wished otherwise.
  void ask(int position, const Layout& layout) {
    treatment_.arguments[position] = layout;
    const bool cheap = call_.layout(position) == layout || call_.may_become(position, layout) ||
                       call_.is_free_of_gradient(position);
    if (!cheap) treatment_.wishes.push_back({position, layout});
  }

  Result refused() {
    Treatment whole = call_.all_whole();
    whole.wishes = treatment_.wishes;
    return whole;
  }

  /// The bias, broadcast against a result that is divided so.
  void ask_bias(const Layout& result) {
    if (product_.bias < 0) return;
    const int dim = result.dim - result_dim() + call_.dim(product_.bias);
    const bool full = dim >= 0 && call_.meta(product_.bias).sizes[dim] > 1;
    if (full) ask(product_.bias, result.along(dim));
  }

  Result divided_result(const Layout& layout) {
    treatment_.results[0] = layout;
    ask_bias(layout);
    return treatment_;
  }

  Result columns(const Layout& layout) {
    treatment_.arguments[product_.b] = layout;
    divided_result(layout.along(result_dim() - 1));
    if (gathers_inside()) {
      treatment_.arguments[product_.a] = call_.layout(product_.a);
      treatment_.gathered = product_.a;
      treatment_.emit = product_.emit_gathered;
    }
    return treatment_;
  }

  /// Whether a rank keeps its part of the input for the weight's gradient, since its rows are a
  /// stream's.
  bool gathers_inside() const {
    const int a = product_.a, b = product_.b;
    return call_.in_stream(a) && call_.divided(a) && call_.layout(a).blocks == 1 &&
           call_.layout(a).dim != inner_of_a() && call_.dim(b) == 2 && call_.has_gradient(b) &&
           (product_.bias < 0 || treatment_.arguments[product_.bias] == call_.layout(b).along(0)) &&
           product_.emit_gathered != nullptr;
  }

  Result rows(const Layout& layout) {
    treatment_.arguments[product_.a] = layout;
    const bool aligned_at_end = call_.dim(product_.b) > 2;
    const int dim = aligned_at_end ? layout.dim - call_.dim(product_.a) + result_dim() : layout.dim;
    return divided_result(layout.along(dim));
  }

  /// Both operands are divided along the summed dimension, so every rank has a part of the sum.
  Result inner(const Layout& layout) {
    if (!comes_from_parameter(call_.graph(), call_.tensors()[product_.b]) &&
        !comes_from_parameter(call_.graph(), call_.tensors()[product_.a])) {
      return std::nullopt;  // the scores of attention, say: heads are not cut
    }
    ask(product_.a, layout.along(inner_of_a()));
    ask(product_.b, layout.along(inner_of_b()));
    // Cutting a weight that cannot be divided would move it: the other operand is joined instead.
    const auto& wishes = treatment_.wishes;
    const auto is_of_b = [&](const Treatment::Wish& wish) { return wish.position == product_.b; };
    if (std::any_of(wishes.begin(), wishes.end(), is_of_b)) return refused();
    if (product_.bias < 0) {
      treatment_.results[0] = Layout::partial();
      return treatment_;
    }
    if (product_.emit_sum == nullptr) return std::nullopt;
    treatment_.arguments[product_.bias] = Layout::whole();
    if (const auto sum = layout_of_sum(call_)) {
      treatment_.results[0] = *sum;
      treatment_.arguments[product_.bias] = Layout::shared();
      ask_bias(*sum);
    }
    treatment_.emit = product_.emit_sum;
    treatment_.reduced_bytes = call_.result_meta().nbytes();
    return treatment_;
  }

  /// Many products: those at `place` from the end of the operands belong to ranks.
  Result batch(int place, const Layout& layout) {
    for (int position : {product_.a, product_.b}) {
      const int dim = place + call_.dim(position);
      const bool broadcast = dim < 0 || call_.meta(position).sizes[dim] == 1;
      if (!broadcast) ask(position, layout.along(dim));
      if (broadcast && call_.divided(position)) return std::nullopt;
    }
    const int rows_left_out = call_.dim(product_.a) == 1 ? 1 : 0;
    return divided_result(layout.along(place + result_dim() + rows_left_out));
  }

  const Call& call_;
  const Product product_;
  Treatment treatment_;
};

/// The bias in the type of the sum, as autocast has it in the operator that adds both.
ValueId bias_like(Emitter& emitter, ValueId bias, ValueId sum) {
  const at::ScalarType dtype = emitter.meta(sum).dtype;
  if (emitter.meta(bias).dtype == dtype) return bias;
  return emitter.call("aten::to", "dtype",
                      {Emitter::tensor(bias), Emitter::constant(dtype), Emitter::constant(false),
                       Emitter::constant(false), Emitter::constant(c10::IValue())});
}

/// `linear` whose inner dimension is divided: the bias is added once, to the sum.
std::vector<ValueId> emit_linear_sum(Emitter& emitter, const Call& call,
                                     const Treatment& treatment) {
  const auto part =
      emitter.call("aten::linear", "",
                   {Emitter::tensor(emitter.argument(0)), Emitter::tensor(emitter.argument(1)),
                    Emitter::constant(c10::IValue())});
  const auto sum = sum_of(emitter, part, treatment);
  const auto bias = bias_like(emitter, emitter.argument(call.position("bias")), sum);
  return {emitter.call("aten::add", "Tensor",
                       {Emitter::tensor(sum), Emitter::tensor(bias), Emitter::constant(1)})};
}

/// `addmm` likewise: bias + alpha * sum.
std::vector<ValueId> emit_addmm_sum(Emitter& emitter, const Call& call,
                                    const Treatment& treatment) {
  const auto part = emitter.call(
      "aten::mm", "", {Emitter::tensor(emitter.argument(1)), Emitter::tensor(emitter.argument(2))});
  const auto sum = sum_of(emitter, part, treatment);
  const auto bias = bias_like(emitter, emitter.argument(0), sum);
  const auto result = emitter.call(
      "aten::add", "Tensor",
      {Emitter::tensor(bias), Emitter::tensor(sum), Emitter::constant(call.constant("alpha"))});
  emitter.follow("alpha", 2);
  emitter.require("beta");
  return {result};
}

/// The parts of the input, divided by rows, times this rank's columns of `weight` [columns, inner].
ValueId gathered_linear(Emitter& emitter, const Call& call, const Treatment& treatment, ValueId x,
                        ValueId weight, const graph::Argument& bias) {
  const Sizes sizes = local_sizes(call.result_meta().sizes, treatment.results[0], call.ranks());
  const int dim = treatment.arguments[treatment.gathered].dim;
  return emitter.call(
      "smp::tp_gathered_linear",
      {Emitter::tensor(x), Emitter::tensor(weight), bias, Emitter::constant(int64_t{dim})}, sizes,
      call.result_meta().dtype);
}

std::vector<ValueId> emit_gathered_linear(Emitter& emitter, const Call& call,
                                          const Treatment& treatment) {
  const int bias = call.position("bias");
  const auto x = emitter.argument(0), weight = emitter.argument(1);
  return {gathered_linear(
      emitter, call, treatment, x, weight,
      bias < 0 ? Emitter::constant(c10::IValue()) : Emitter::tensor(emitter.argument(bias)))};
}

/// `mm`, and `matmul` with one matrix on the right: `torch::nn::Linear` calls it for more than two
/// dimensions.
std::vector<ValueId> emit_gathered_matmul(Emitter& emitter, const Call& call,
                                          const Treatment& treatment) {
  const auto x = emitter.argument(0);
  const auto weight = emitter.call("aten::t", "", {Emitter::tensor(emitter.argument(1))});
  return {gathered_linear(emitter, call, treatment, x, weight, Emitter::constant(c10::IValue()))};
}

std::vector<ValueId> emit_gathered_addmm(Emitter& emitter, const Call& call,
                                         const Treatment& treatment) {
  const auto x = emitter.argument(1);
  const auto weight = emitter.call("aten::t", "", {Emitter::tensor(emitter.argument(2))});
  const auto result =
      gathered_linear(emitter, call, treatment, x, weight, Emitter::tensor(emitter.argument(0)));
  emitter.require("alpha");
  emitter.require("beta");
  return {result};
}

Result linear(const Call& call) {
  return ProductRule(call,
                     {0, 1, call.position("bias"), true, emit_linear_sum, emit_gathered_linear})
      .run();
}

Result matmul(const Call& call) {
  return ProductRule(call, {0, 1, -1, false, nullptr, emit_gathered_matmul}).run();
}

Result addmm(const Call& call) {
  const auto is_one = [&](const char* name) {
    return call.constant(name).isInt() && call.constant(name).toInt() == 1;
  };
  const bool can_sum = is_one("beta") && !call.in_place();
  const bool plain = can_sum && is_one("alpha");
  return ProductRule(call, {1, 2, 0, false, can_sum ? emit_addmm_sum : nullptr,
                            plain ? emit_gathered_addmm : nullptr})
      .run();
}

Result baddbmm(const Call& call) {
  Product product;
  product.a = 1;
  product.b = 2;
  product.bias = 0;
  if (call.in_place() && !call.divided(0)) return std::nullopt;
  return ProductRule(call, product).run();
}

/// `conv1d` to `conv3d` without groups: divided by samples, by channels out or by channels in.
std::vector<ValueId> emit_convolution_sum(Emitter& emitter, const Call& call,
                                          const Treatment& treatment) {
  std::vector<graph::Argument> arguments = call.op().arguments;
  arguments[0] = Emitter::tensor(emitter.argument(0));
  arguments[1] = Emitter::tensor(emitter.argument(1));
  arguments[2] = Emitter::constant(c10::IValue());
  const std::string& overload = call.op().handle.operator_name().overload_name;
  const auto part = emitter.call(call.base_name().c_str(), overload.c_str(), std::move(arguments));
  const auto sum = sum_of(emitter, part, treatment);
  std::vector<int64_t> shape(call.dim(0), 1);
  shape[1] = -1;
  const auto bias = bias_like(
      emitter,
      emitter.call("aten::view", "",
                   {Emitter::tensor(emitter.argument(2)), Emitter::constant(std::move(shape))}),
      sum);
  return {emitter.call("aten::add", "Tensor",
                       {Emitter::tensor(sum), Emitter::tensor(bias), Emitter::constant(1)})};
}

Result convolution(const Call& call) {
  const auto groups = call.integers("groups");
  const bool has_bias = call.position("bias") >= 0;
  if (call.dim(0) != call.dim(1) || !groups || (*groups)[0] != 1) return std::nullopt;
  Treatment treatment = call.all_shared();
  if (call.divided(1) && call.layout(1).dim == 0) {
    treatment.arguments[1] = call.layout(1);
    if (has_bias) treatment.arguments[2] = call.layout(1);
    treatment.results[0] = call.layout(1).along(1);
    return treatment;
  }
  const int position = call.divided(1) ? 1 : 0;
  const Layout& layout = call.layout(position);
  if (!layout.is_divided() || layout.dim > 1) return std::nullopt;
  if (layout.dim == 0) {
    treatment.arguments[0] = treatment.results[0] = layout;
    return treatment;
  }
  if (call.layout(1) != layout && !call.may_become(1, layout)) return std::nullopt;
  treatment.arguments[0] = treatment.arguments[1] = layout;
  if (call.layout(0) != layout && call.has_gradient(0)) treatment.wishes.push_back({0, layout});
  if (!has_bias) {
    treatment.results[0] = Layout::partial();
    return treatment;
  }
  treatment.arguments[2] = Layout::whole();
  const auto sum = layout_of_sum(call);
  if (sum && sum->dim != 1) {
    treatment.results[0] = *sum;
    treatment.arguments[2] = Layout::shared();
  }
  treatment.emit = emit_convolution_sum;
  treatment.reduced_bytes = call.result_meta().nbytes();
  return treatment;
}

/// Rows of the local part of the vocabulary, zero for others: terms of a sum.
std::vector<ValueId> emit_embedding(Emitter& emitter, const Call& call, const Treatment&) {
  return {emitter.call(
      "smp::tp_embedding",
      {Emitter::tensor(emitter.argument(0)), Emitter::tensor(emitter.argument(1)),
       Emitter::constant(call.meta(0).sizes[0]), Emitter::constant(call.constant("padding_idx")),
       Emitter::constant(call.constant("scale_grad_by_freq"))},
      call.result_meta().sizes, call.result_meta().dtype)};
}

Result embedding(const Call& call) {
  Treatment treatment = call.all_shared();
  if (!call.divided(0)) {
    if (!call.divided(1)) return std::nullopt;
    // How often an index occurs is not known of parts.
    if (call.is_set("scale_grad_by_freq") && call.has_gradient(0)) return std::nullopt;
    treatment.arguments[1] = treatment.results[0] = call.layout(1);
    return treatment;
  }
  const Layout& layout = call.layout(0);
  treatment.arguments[0] = layout;
  if (layout.dim == 1) {
    const auto last = static_cast<int>(call.result_meta().sizes.size()) - 1;
    treatment.results[0] = layout.along(last);
    return treatment;
  }
  if (layout.blocks != 1) return std::nullopt;
  treatment.results[0] = Layout::partial();
  treatment.emit = emit_embedding;
  return treatment;
}

}  // namespace

RuleTable product_rules() {
  RuleTable rules = {{"aten::linear", linear},      {"aten::matmul", matmul},
                     {"aten::mm", matmul},          {"aten::bmm", matmul},
                     {"aten::addmm", addmm},        {"aten::baddbmm", baddbmm},
                     {"aten::embedding", embedding}};
  for (const char* name : {"conv1d", "conv2d", "conv3d"}) {
    rules[std::string("aten::") + name] = convolution;
  }
  return rules;
}

}  // namespace smp::nn::rewrite
