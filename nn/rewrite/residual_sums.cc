// SPDX-License-Identifier: Apache-2.0
#include "nn/rewrite/residual_sums.h"

#include <algorithm>
#include <optional>
#include <unordered_map>

#include "graph/visit.h"
#include "nn/rewrite/emitter.h"

namespace smp::nn::rewrite {
namespace {

using graph::Graph;
using graph::Operator;
using graph::ValueId;

class ResidualSums {
 public:
  explicit ResidualSums(const Graph& graph) : graph_(graph), written_(graph.alias_sets) {
    for (const Operator& op : graph.operators) {
      for (int set : op.writes) written_[set] = true;
    }
  }

  /// The value that a residual sum adds to the residual; nothing for other operators. Operators
  /// must be asked in their order.
  std::optional<ValueId> branch(const Operator& op) {
    if (!is_sum_of_like(op)) return std::nullopt;
    const ValueId a = op.arguments[0].values[0], b = op.arguments[1].values[0];
    for (const auto& [residual, added] : {std::pair(a, b), std::pair(b, a)}) {
      if (!is_sum_[residual] && !is_made_of(added, residual)) continue;
      is_sum_[op.results[0]] = true;
      return added;
    }
    return std::nullopt;
  }

 private:
  bool is_sum_of_like(const Operator& op) const {
    const auto& name = op.handle.operator_name();
    if (name.name != "aten::add" || name.overload_name != "Tensor" || !op.writes.empty()) {
      return false;
    }
    const graph::Value& result = graph_.values[op.results[0]];
    const auto is_like = [&](int argument) {
      const auto& values = op.arguments[argument].values;
      if (values.empty()) return false;
      const graph::TensorMeta& meta = graph_.values[values[0]].meta;
      return meta.dtype == result.meta.dtype && meta.sizes == result.meta.sizes;
    };
    return is_half(result.meta.dtype) && is_like(0) && is_like(1) && !written_[result.alias_set];
  }

  /// Whether products of matrices lie on a way from `origin` to `value`.
  bool is_made_of(ValueId value, ValueId origin) const {
    const int last = graph_.values[value].producer;
    // Whether the way from the origin to each reached value went through a product.
    std::unordered_map<ValueId, bool> reached{{origin, false}};
    for (int i = graph_.values[origin].producer + 1; i <= last; ++i) {
      const Operator& op = graph_.operators[i];
      bool comes_from_origin = false, through_product = false;
      graph::for_each_argument(op, [&](ValueId argument) {
        const auto found = reached.find(argument);
        if (found == reached.end()) return;
        comes_from_origin = true;
        through_product |= found->second;
      });
      if (!comes_from_origin) continue;
      through_product |= is_product(op.handle.operator_name().name);
      graph::for_each_result(op, [&](ValueId result) { reached[result] = through_product; });
    }
    const auto found = reached.find(value);
    return found != reached.end() && found->second;
  }

  const Graph& graph_;
  std::vector<bool> written_;  // whether each alias set is written
  std::unordered_map<ValueId, bool> is_sum_;
};

}  // namespace

std::vector<bool> residual_sums(const Graph& graph,
                                const std::map<std::string, TensorParallelismOptions>& options) {
  std::vector<bool> result(graph.operators.size());
  const bool any = std::any_of(options.begin(), options.end(), [](const auto& of_parameter) {
    return of_parameter.second.fp32_residual_addition();
  });
  if (!any) return result;
  ResidualSums sums(graph);
  for (size_t i = 0; i < graph.operators.size(); ++i) {
    const std::optional<ValueId> added = sums.branch(graph.operators[i]);
    if (!added) continue;
    const auto* said = nearest_options(graph, *added, options);
    result[i] = said != nullptr && said->fp32_residual_addition();
  }
  return result;
}

std::vector<ValueId> emit_residual_sum(Emitter& emitter, const Call& call, const Treatment&) {
  const ValueId first = emitter.widened(emitter.argument(0));
  const ValueId second = emitter.widened(emitter.argument(1));
  const ValueId sum =
      emitter.call("aten::add", "Tensor", {first, second}, {call.constant("alpha")});
  emitter.follow("alpha", 2);
  return {emitter.rounded(sum, call.result_meta().dtype)};
}

}  // namespace smp::nn::rewrite
