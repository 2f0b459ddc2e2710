// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>

#include <string>
#include <vector>

#include "tests/partitioner/graph_builder.h"

namespace smp::partitioner::testing {

inline at::Tensor ones(int64_t rows, int64_t columns) { return at::ones({rows, columns}); }

/// A chain of linear layers that trains, "fc0" to "fc<n-1>", each in 10 us.
struct Chain {
  GraphBuilder b;
  std::vector<Ref> weights, results;

  explicit Chain(int layers, int64_t width = 4) {
    for (int i = 0; i < layers; ++i) {
      weights.push_back(b.parameter(name(i) + ".weight", ones(width, width)));
    }
    Ref x = b.input(ones(2, width));
    for (int i = 0; i < layers; ++i) {
      b.scope = name(i);
      x = layer(x, weights[i]);
      results.push_back(x);
    }
    b.scope = "";
    x = b.op("aten::mean", {x, c10::IValue()});
    b.backward(x);
    b.output(x);
  }

  Ref layer(Ref x, Ref weight) {
    const Ref y = b.op("aten::matmul", {x, b.op("aten::t", {weight})});
    b.cost(10, 20);
    return y;
  }

  static std::string name(int i) { return "fc" + std::to_string(i); }
};

}  // namespace smp::partitioner::testing
