// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <string>
#include <vector>

#include "graph/graph.h"
#include "nn/rewrite/call.h"
#include "smp/tensor_parallelism_options.h"

namespace smp::nn::rewrite {

/// Whether each operator is a residual sum of half precision to be kept in float32, since the
/// parameters nearest to the added value say so.
///
/// A residual sum adds to a value the results of products of matrices from that value, or adds to
/// such a sum: x + f(x), and (x + f(x)) + g(x). Its sizes are those of both. One whose memory is
/// written later is none.
std::vector<bool> residual_sums(const graph::Graph& graph,
                                const std::map<std::string, TensorParallelismOptions>& options);

/// Adds in float32, where sums that it adds to are kept so, and rounds the sums that others read.
/// Emits residual sums.
std::vector<graph::ValueId> emit_residual_sum(Emitter& emitter, const Call& call,
                                              const Treatment& treatment);

}  // namespace smp::nn::rewrite
