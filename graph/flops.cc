// SPDX-License-Identifier: Apache-2.0
#include "graph/flops.h"

#include <functional>
#include <map>
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

using Formula = std::function<double(const Call&)>;

const std::map<std::string, Formula>& formulas() {
  static const Formula left_first = [](const Call& call) { return product_flops(call, 0); };
  static const Formula left_second = [](const Call& call) { return product_flops(call, 1); };
  static const std::map<std::string, Formula> all = {
      {"aten::mm", left_first},
      {"aten::bmm", left_first},
      {"aten::mv", left_first},
      {"aten::dot", left_first},
      {"aten::matmul", left_first},
      {"aten::linear", left_first},
      {"aten::addmm", left_second},
      {"aten::addmm_", left_second},
      {"aten::addmv", left_second},
      {"aten::baddbmm", left_second},
      {"aten::baddbmm_", left_second},
      {"aten::conv1d", convolution_flops},
      {"aten::conv2d", convolution_flops},
      {"aten::conv3d", convolution_flops},
      {"aten::mkldnn_convolution", convolution_flops},
      {"aten::cudnn_convolution", convolution_flops},
      {"aten::conv_transpose1d", transposed_convolution_flops},
      {"aten::conv_transpose2d", transposed_convolution_flops},
      {"aten::conv_transpose3d", transposed_convolution_flops},
      {"aten::scaled_dot_product_attention", attention_flops},
      {"aten::_scaled_dot_product_attention_math", attention_flops},
      {"aten::_scaled_dot_product_flash_attention", attention_flops},
      {"aten::_scaled_dot_product_flash_attention_for_cpu", attention_flops},
      {"aten::_scaled_dot_product_efficient_attention", attention_flops},
      {"aten::_scaled_dot_product_cudnn_attention", attention_flops},
  };
  return all;
}

/// `aten::convolution` says in an argument whether it is transposed.
Formula formula_of(const Operator& op) {
  const std::string name = op.handle.schema().name();
  if (name == "aten::convolution" || name == "aten::_convolution") {
    const auto index = op.handle.schema().argumentIndexWithName("transposed");
    const bool transposed = op.arguments[*index].constant.toBool();
    return transposed ? transposed_convolution_flops : convolution_flops;
  }
  const auto found = formulas().find(name);
  return found == formulas().end() ? nullptr : found->second;
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
