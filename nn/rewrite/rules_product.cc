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

/// Whether a rank keeps its part of the input for the weight's gradient, since its rows are a
/// stream's.
bool gathers_inside(const Call& call, const Product& product, const Treatment& treatment) {
  const auto& [a, b, bias, emit_sum, emit_gathered] = product;
  return emit_gathered != nullptr && call.divided(b) && call.in_stream(a) && call.divided(a) &&
         call.layout(a).blocks == 1 && call.layout(a).dim != call.dim(a) - 1 && call.dim(b) == 2 &&
         call.has_gradient(b) && (bias < 0 || treatment.arguments[bias] == call.layout(b).along(0));
}

/// Both operands are divided along the summed dimension, so every rank has a part of the sum.
Result inner_product(const Call& call, const Product& product, const Factors& factors,
                     Treatment treatment) {
  const auto& [a, b, bias, emit_sum, emit_gathered] = product;
  if (!comes_from_parameter(call.graph(), call.tensors()[b]) &&
      !comes_from_parameter(call.graph(), call.tensors()[a])) {
    return std::nullopt;  // the scores of attention, say: heads are not cut
  }
  // Cutting a weight that cannot be divided would move it: the other operand is joined instead.
  for (const Treatment::Wish& wish : treatment.wishes) {
    if (wish.position == b) return refused(call, treatment);
  }
  if (bias < 0) {
    treatment.results[0] = Layout::partial();
    return treatment;
  }
  if (emit_sum == nullptr) return std::nullopt;
  treatment.arguments[bias] = Layout::whole();
  if (const auto sum = layout_of_sum(call)) {
    const auto& dims = factors.arguments[bias];
    const auto at = std::find(dims.begin(), dims.end(), factors.results[0][sum->dim]);
    treatment.results[0] = *sum;
    treatment.arguments[bias] = Layout::shared();
    if (at != dims.end()) {
      ask(call, bias, sum->along(static_cast<int>(at - dims.begin())), treatment);
    }
  }
  treatment.emit = emit_sum;
  treatment.reduced_bytes = call.result_meta().nbytes();
  return treatment;
}

/// Whatever has the factor of the product that one operand is divided along is divided so, too.
Result product_of(const Call& call, const Product& product) {
  const int divided = call.divided(product.b) ? product.b : product.a;
  const std::optional<Factors> factors = factors_of(call);
  if (!factors || !call.divided(divided)) return std::nullopt;
  const int factor = factors->arguments[divided][call.layout(divided).dim];
  if (factors->summed.count(factor) > 0) {
    return inner_product(call, product, *factors, *ask_along(call, *factors, divided));
  }
  Result treatment = follow_factors(call, *factors, divided);
  if (treatment && gathers_inside(call, product, *treatment)) {
    treatment->arguments[product.a] = call.layout(product.a);
    treatment->gathered = product.a;
    treatment->emit = product.emit_gathered;
  }
  return treatment;
}

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
  return product_of(call, {0, 1, call.position("bias"), emit_linear_sum, emit_gathered_linear});
}

Result matmul(const Call& call) {
  const Result treatment = product_of(call, {0, 1, -1, nullptr, emit_gathered_matmul});
  // Many products, and one operand that all of them have.
  const bool one_of_many = call.divided(1) && call.layout(1).dim < call.dim(1) - 2 && treatment &&
                           !treatment->arguments[0].is_divided();
  return one_of_many && call.divided(0) ? std::nullopt : treatment;
}

Result addmm(const Call& call) {
  const auto is_one = [&](const char* name) {
    return call.constant(name).isInt() && call.constant(name).toInt() == 1;
  };
  const bool can_sum = is_one("beta") && !call.in_place();
  const bool plain = can_sum && is_one("alpha");
  return product_of(
      call, {1, 2, 0, can_sum ? emit_addmm_sum : nullptr, plain ? emit_gathered_addmm : nullptr});
}

Result baddbmm(const Call& call) {
  if (call.in_place() && !call.divided(0)) return std::nullopt;
  return product_of(call, {1, 2, 0});
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
  auto bias = emitter.argument(2);
  for (int d = 2; d < call.dim(0); ++d) bias = emitter.call("aten::unsqueeze", "", {bias}, {-1});
  return with_bias(emitter, sum, bias);
}

Result convolution(const Call& call) {
  const auto groups = call.integers("groups");
  if (!groups || (*groups)[0] != 1) return std::nullopt;
  return product_of(call, {0, 1, call.position("bias"), emit_convolution_sum});
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
  if (!call.divided_along(0, 0)) return follow_from(call, call.first_divided());
  if (call.layout(0).blocks != 1) return std::nullopt;
  Treatment treatment = call.all_shared();
  treatment.arguments[0] = call.layout(0);
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
