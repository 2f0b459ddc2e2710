// SPDX-License-Identifier: Apache-2.0
#include "nn/rewrite/attention_form.h"

#include <set>
#include <utility>

#include "core/check.h"
#include "graph/visit.h"

namespace smp::nn::rewrite {

using graph::Graph;
using graph::ValueId;

using Options = std::map<std::string, TensorParallelismOptions>;

const TensorParallelismOptions* nearest_options(const Graph& graph, ValueId value,
                                                const Options& options) {
  std::set<ValueId> seen{value};
  std::vector<ValueId> level{value};
  while (!level.empty()) {
    bool any_parameter = false;
    std::vector<ValueId> next;
    for (const ValueId id : level) {
      const graph::Value& found = graph.values[id];
      if (found.kind == graph::ValueKind::kParameter) {
        any_parameter = true;
        const auto said = options.find(found.name);
        if (said != options.end()) return &said->second;
      }
      if (found.producer < 0) continue;
      graph::for_each_argument(graph.operators[found.producer], [&](ValueId argument) {
        if (seen.insert(argument).second) next.push_back(argument);
      });
    }
    if (any_parameter) return nullptr;
    level = std::move(next);
  }
  return nullptr;
}

std::vector<AttentionForm> attention_forms(const Graph& graph, const Options& options) {
  std::vector<AttentionForm> forms(graph.operators.size());
  if (options.empty()) return forms;
  int64_t number = 0;
  for (size_t i = 0; i < graph.operators.size(); ++i) {
    const graph::Operator& op = graph.operators[i];
    if (op.handle.operator_name().name != "aten::scaled_dot_product_attention") continue;
    const auto* said = nearest_options(graph, op.arguments[0].values[0], options);
    if (said == nullptr || !said->changes_attention()) continue;
    ++number;
    forms[i].in_fp32 = said->attention_in_fp32();
    forms[i].in_steps =
        said->query_key_layer_scaling() || said->use_alibi() || !said->flash_attention();
    if (said->query_key_layer_scaling()) forms[i].divisor = number;
    if (!said->use_alibi()) continue;
    SMP_CHECK_WITH(UsageError, said->alibi_bias_max() >= 1,
                   "alibi_bias_max must be 1 or more, got ", said->alibi_bias_max());
    forms[i].alibi_bias_max = said->alibi_bias_max();
  }
  return forms;
}

}  // namespace smp::nn::rewrite
