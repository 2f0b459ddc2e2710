// SPDX-License-Identifier: Apache-2.0
#include "partitioner/weight_casts.h"

#include <ATen/core/DimVector.h>

#include <map>
#include <tuple>

#include "graph/alias_analysis.h"
#include "graph/autocast.h"

namespace smp::partitioner {

std::vector<WeightCast> weight_casts(const graph::Graph& graph) {
  constexpr int64_t kBytes = 2;  // an element in lower precision
  const auto weights = graph::weights_to_cast(graph);
  const graph::AliasAnalysis aliases(graph);
  // Views of a whole weight with the same layout share a cast; those of a part may show another.
  using Key = std::tuple<int, at::DimVector, at::DimVector, graph::ValueId>;
  const auto key_of = [&](graph::ValueId weight) {
    const graph::TensorMeta& meta = graph.values[weight].meta;
    const bool is_whole = meta.numel() == graph.values[aliases.of(weight).base].meta.numel();
    return Key(graph.values[weight].alias_set, at::DimVector(meta.sizes.begin(), meta.sizes.end()),
               at::DimVector(meta.strides.begin(), meta.strides.end()),
               is_whole ? graph::kUndefined : weight);
  };
  std::map<Key, WeightCast> casts;
  for (size_t i = 0; i < weights.size(); ++i) {
    for (const graph::ValueId weight : weights[i]) {
      WeightCast& cast = casts[key_of(weight)];
      cast.bytes = kBytes * graph.values[weight].meta.numel();
      cast.operators.push_back(static_cast<int>(i));
    }
  }
  std::vector<WeightCast> result;
  for (auto& [key, cast] : casts) result.push_back(std::move(cast));
  return result;
}

}  // namespace smp::partitioner
