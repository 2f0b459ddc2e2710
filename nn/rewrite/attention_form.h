// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "graph/graph.h"
#include "smp/tensor_parallelism_options.h"

namespace smp::nn::rewrite {

/// How an operator of attention is computed.
struct AttentionForm {
  bool in_fp32 = false;
  bool in_steps = false;  ///< not by a fused kernel
  int64_t divisor = 1;    ///< products of queries and keys are divided, then multiplied by it
  /// Biases by distance are added to scores, with slopes that end at 2 ^ -alibi_bias_max; 0: none.
  int64_t alibi_bias_max = 0;

  bool is_as_captured() const { return !in_fp32 && !in_steps; }
};

/// The options of the parameters that fewest operators lie between and `value`, upwards in the
/// graph; null: nothing. `options` are by parameter.
const TensorParallelismOptions* nearest_options(
    const graph::Graph& graph, graph::ValueId value,
    const std::map<std::string, TensorParallelismOptions>& options);

/// The form of attention of each operator, from the options of the parameter nearest to the
/// queries.
std::vector<AttentionForm> attention_forms(
    const graph::Graph& graph, const std::map<std::string, TensorParallelismOptions>& options);

}  // namespace smp::nn::rewrite
