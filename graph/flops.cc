// SPDX-License-Identifier: Apache-2.0
#include "graph/flops.h"

#include <set>
#include <string>
#include <vector>

#include "graph/visit.h"

namespace smp::graph {
namespace {

double product(const std::vector<int64_t>& sizes, size_t first = 0) {
  double result = 1;
  for (size_t i = first; i < sizes.size(); ++i) result *= static_cast<double>(sizes[i]);
  return result;
}

/// A call by the sizes of its tensors.
struct Call {
  std::vector<std::vector<int64_t>> arguments;
  std::vector<int64_t> result;
};

/// Each element of the result is a sum over the left factor's last dimension.
double product_flops(const Call& call, size_t left) {
  const auto& factor = call.arguments[left];
  return 2 * product(call.result) * (factor.empty() ? 1 : static_cast<double>(factor.back()));
}

/// Each element of the result is a sum over a filter, (out channels, in channels / groups, ...).
double convolution_flops(const Call& call) {
  return 2 * product(call.result) * product(call.arguments[1], 1);
}

/// Each element of the input is spread by a filter, (in channels, out channels / groups, ...).
double transposed_convolution_flops(const Call& call) {
  return 2 * product(call.arguments[0]) * product(call.arguments[1], 1);
}

/// Scores are products of query (..., L, E) and key (..., S, E), the result one of those and the
/// value (..., S, V).
double attention_flops(const Call& call) {
  const auto &key = call.arguments[1], &value = call.arguments[2];
  const double scores = product(call.arguments[0]) / static_cast<double>(call.arguments[0].back()) *
                        static_cast<double>(key[key.size() - 2]);
  return 2 * scores * static_cast<double>(key.back() + value.back());
}

using Formula = double (*)(const Call&);

double left_first(const Call& call) { return product_flops(call, 0); }
double left_second(const Call& call) { return product_flops(call, 1); }

struct NamedFormula {
  Formula formula;
  std::set<std::string> operators;
};

const std::vector<NamedFormula>& formulas() {
  static const std::vector<NamedFormula> all = {
      {left_first,
       {"aten::mm", "aten::bmm", "aten::mv", "aten::dot", "aten::matmul", "aten::linear"}},
      {left_second,
       {"aten::addmm", "aten::addmm_", "aten::addmv", "aten::baddbmm", "aten::baddbmm_"}},
      {convolution_flops,
       {"aten::conv1d", "aten::conv2d", "aten::conv3d", "aten::mkldnn_convolution",
        "aten::cudnn_convolution"}},
      {transposed_convolution_flops,
       {"aten::conv_transpose1d", "aten::conv_transpose2d", "aten::conv_transpose3d"}},
      {attention_flops,
       {"aten::scaled_dot_product_attention", "aten::_scaled_dot_product_attention_math",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention"}}};
  return all;
}

/// Null for an operator without a formula. `aten::convolution` says in an argument whether it is
/// transposed.
Formula formula_of(const Operator& op) {
  const std::string& name = op.handle.schema().name();
  if (name == "aten::convolution" || name == "aten::_convolution") {
    const auto index = op.handle.schema().argumentIndexWithName("transposed");
    const bool transposed = op.arguments[*index].constant.toBool();
    return transposed ? transposed_convolution_flops : convolution_flops;
  }
  for (const NamedFormula& named : formulas()) {
    if (named.operators.count(name) > 0) return named.formula;
  }
  return nullptr;
}

}  // namespace

double operator_flops(const Graph& graph, const Operator& op) {
  const Formula formula = formula_of(op);
  if (formula == nullptr || op.results.empty() || op.results[0] == kUndefined) return 0;
  Call call;
  for_each_argument(op, [&](ValueId id) {
    const auto& sizes = graph.values[id].meta.sizes;
    call.arguments.emplace_back(sizes.begin(), sizes.end());
  });
  const auto& result = graph.values[op.results[0]].meta.sizes;
  call.result.assign(result.begin(), result.end());
  return formula(call);
}

}  // namespace smp::graph
