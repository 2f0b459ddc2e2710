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
  const auto constraint = call.constraint();
  const bool in_parts = constraint && constraint->is_divided() && constraint->blocks == 1;
  return in_parts ? constraint : std::nullopt;
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
  Treatment::Emit emit_sum = nullptr;       ///< where there is a bias, and `inner` is divided
  Treatment::Emit emit_gathered = nullptr;  ///< where `a` is divided by rows, and `b` by columns
};

/// Whatever has the factor of the product that one operand is divided along is divided so, too.
class ProductRule {
 public:
  ProductRule(const Call& call, const Product& product)
      : call_(call),
        product_(product),
        factors_(factors_of(call)),
        divided_(call.divided(product.b) ? product.b : product.a) {}

  Result run() {
    if (!factors_ || !call_.divided(divided_)) return std::nullopt;
    treatment_ = call_.all_shared();
    const Layout& layout = call_.layout(divided_);
    const int factor = factors_->arguments[divided_][layout.dim];
    if (factor == kAlong) return std::nullopt;
    if (factors_->summed.count(factor) > 0) return inner(factor, layout);
    const bool a_has_it = ask_along(product_.a, factor, layout);
    ask_along(product_.b, factor, layout);
    // Many products, and one that all of them have.
    const bool one_of_many = divided_ == product_.b && layout.dim < call_.dim(product_.b) - 2;
    if (one_of_many && !a_has_it && call_.divided(product_.a)) return std::nullopt;
    ask_along(product_.bias, factor, layout);
    treatment_.results[0] = layout.along(factor);  // factors are the result's dimensions
    if (divided_ == product_.b && gathers_inside()) {
      treatment_.arguments[product_.a] = call_.layout(product_.a);
      treatment_.gathered = product_.a;
      treatment_.emit = product_.emit_gathered;
    }
    return treatment_;
  }

 private:
  /// Asks for an operand in a layout; one that costs communication is wished otherwise.
  void ask(int position, const Layout& layout) {
    treatment_.arguments[position] = layout;
    const bool cheap = call_.layout(position) == layout || call_.may_become(position, layout) ||
                       call_.is_free_of_gradient(position);
    if (!cheap) treatment_.wishes.push_back({position, layout});
  }

  /// Asks for an operand in parts along a factor. Returns whether it has that.
  bool ask_along(int position, int factor, const Layout& layout) {
    if (position < 0) return false;
    const auto& dims = factors_->arguments[position];
    const auto at = std::find(dims.begin(), dims.end(), factor);
    if (at == dims.end()) return false;
    ask(position, layout.along(static_cast<int>(at - dims.begin())));
    return true;
  }

  Result refused() {
    Treatment whole = call_.all_whole();
    whole.wishes = treatment_.wishes;
    return whole;
  }

  /// Whether a rank keeps its part of the input for the weight's gradient, since its rows are a
  /// stream's.
  bool gathers_inside() const {
    const int a = product_.a, b = product_.b;
    return call_.in_stream(a) && call_.divided(a) && call_.layout(a).blocks == 1 &&
           call_.layout(a).dim != call_.dim(a) - 1 && call_.dim(b) == 2 && call_.has_gradient(b) &&
           (product_.bias < 0 || treatment_.arguments[product_.bias] == call_.layout(b).along(0)) &&
           product_.emit_gathered != nullptr;
  }

  /// Both operands are divided along the summed dimension, so every rank has a part of the sum.
  Result inner(int factor, const Layout& layout) {
    if (!comes_from_parameter(call_.graph(), call_.tensors()[product_.b]) &&
        !comes_from_parameter(call_.graph(), call_.tensors()[product_.a])) {
      return std::nullopt;  // the scores of attention, say: heads are not cut
    }
    ask_along(product_.a, factor, layout);
    ask_along(product_.b, factor, layout);
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
      ask_along(product_.bias, sum->dim, *sum);
    }
    treatment_.emit = product_.emit_sum;
    treatment_.reduced_bytes = call_.result_meta().nbytes();
    return treatment_;
  }

  const Call& call_;
  const Product product_;
  const std::optional<Factors> factors_;
  const int divided_;  // the operand by whose layout it goes
  Treatment treatment_;
};

/// The sum and a bias in its type, as autocast has it in the operator that adds both.
std::vector<ValueId> with_bias(Emitter& emitter, ValueId sum, ValueId bias) {
  bias = emitter.converted(bias, emitter.meta(sum).dtype);
  return {emitter.call("aten::add", "Tensor", {sum, bias}, {1})};
}

/// `linear` whose inner dimension is divided: the bias is added once, to the sum.
std::vector<ValueId> emit_linear_sum(Emitter& emitter, const Call& call,
                                     const Treatment& treatment) {
  const auto x = emitter.argument(0), weight = emitter.argument(1);
  const auto part = emitter.call("aten::linear", "", {x, weight, graph::kUndefined});
  const auto sum = sum_of(emitter, part, treatment);
  return with_bias(emitter, sum, emitter.argument(call.position("bias")));
}

/// `addmm` likewise: bias + alpha * sum.
std::vector<ValueId> emit_addmm_sum(Emitter& emitter, const Call& call,
                                    const Treatment& treatment) {
  const auto a = emitter.argument(1), b = emitter.argument(2);
  const auto sum = sum_of(emitter, emitter.call("aten::mm", "", {a, b}), treatment);
  const auto bias = emitter.converted(emitter.argument(0), emitter.meta(sum).dtype);
  const auto result = emitter.call("aten::add", "Tensor", {bias, sum}, {call.constant("alpha")});
  emitter.follow("alpha", 2);
  emitter.require("beta");
  return {result};
}

/// The parts of the input, divided by rows, times this rank's columns of `weight` [columns, inner].
ValueId gathered_linear(Emitter& emitter, const Call& call, const Treatment& treatment, ValueId x,
                        ValueId weight, ValueId bias) {
  const Sizes sizes = local_sizes(call.result_meta().sizes, treatment.results[0], call.ranks());
  const int dim = treatment.arguments[treatment.gathered].dim;
  return emitter.call_own("smp::tp_gathered_linear", {x, weight, bias}, {int64_t{dim}}, sizes,
                          call.result_meta().dtype);
}

std::vector<ValueId> emit_gathered_linear(Emitter& emitter, const Call& call,
                                          const Treatment& treatment) {
  const auto x = emitter.argument(0), weight = emitter.argument(1);
  const auto bias = emitter.argument_or_none(call.position("bias"));
  return {gathered_linear(emitter, call, treatment, x, weight, bias)};
}

/// `mm`, and `matmul` with one matrix on the right: `torch::nn::Linear` calls it for more than two
/// dimensions.
std::vector<ValueId> emit_gathered_matmul(Emitter& emitter, const Call& call,
                                          const Treatment& treatment) {
  const auto x = emitter.argument(0);
  const auto weight = emitter.call("aten::t", "", {emitter.argument(1)});
  return {gathered_linear(emitter, call, treatment, x, weight, graph::kUndefined)};
}

std::vector<ValueId> emit_gathered_addmm(Emitter& emitter, const Call& call,
                                         const Treatment& treatment) {
  const auto x = emitter.argument(1);
  const auto weight = emitter.call("aten::t", "", {emitter.argument(2)});
  const auto result = gathered_linear(emitter, call, treatment, x, weight, emitter.argument(0));
  emitter.require("alpha");
  emitter.require("beta");
  return {result};
}

Result linear(const Call& call) {
  return ProductRule(call, {0, 1, call.position("bias"), emit_linear_sum, emit_gathered_linear})
      .run();
}

Result matmul(const Call& call) {
  return ProductRule(call, {0, 1, -1, nullptr, emit_gathered_matmul}).run();
}

Result addmm(const Call& call) {
  const auto is_one = [&](const char* name) {
    return call.constant(name).isInt() && call.constant(name).toInt() == 1;
  };
  const bool can_sum = is_one("beta") && !call.in_place();
  const bool plain = can_sum && is_one("alpha");
  return ProductRule(call, {1, 2, 0, can_sum ? emit_addmm_sum : nullptr,
                            plain ? emit_gathered_addmm : nullptr})
      .run();
}

Result baddbmm(const Call& call) {
  if (call.in_place() && !call.divided(0)) return std::nullopt;
  return ProductRule(call, {1, 2, 0}).run();
}

/// `conv1d` to `conv3d` without groups: divided by samples, by channels out or by channels in.
std::vector<ValueId> emit_convolution_sum(Emitter& emitter, const Call& call,
                                          const Treatment& treatment) {
  std::vector<graph::Argument> arguments = call.op().arguments;
  arguments[0] = Emitter::tensor(emitter.argument(0));
  arguments[1] = Emitter::tensor(emitter.argument(1));
  arguments[2] = graph::Argument();
  const std::string& overload = call.op().handle.operator_name().overload_name;
  const auto part =
      emitter.call_with(call.base_name().c_str(), overload.c_str(), std::move(arguments));
  const auto sum = sum_of(emitter, part, treatment);
  std::vector<int64_t> shape(call.dim(0), 1);
  shape[1] = -1;
  const auto bias = emitter.call("aten::view", "", {emitter.argument(2)}, {std::move(shape)});
  return with_bias(emitter, sum, bias);
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
  const auto weight = emitter.argument(0), indices = emitter.argument(1);
  return {emitter.call_own(
      "smp::tp_embedding", {weight, indices},
      {call.meta(0).sizes[0], call.constant("padding_idx"), call.constant("scale_grad_by_freq")},
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
  RuleTable rules;
  add_rules(rules, {"linear"}, linear);
  add_rules(rules, {"matmul", "mm", "bmm"}, matmul);
  add_rules(rules, {"addmm"}, addmm);
  add_rules(rules, {"baddbmm"}, baddbmm);
  add_rules(rules, {"embedding"}, embedding);
  add_rules(rules, {"conv1d", "conv2d", "conv3d"}, convolution);
  return rules;
}

}  // namespace smp::nn::rewrite
