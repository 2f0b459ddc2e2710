// SPDX-License-Identifier: Apache-2.0
#include "exported/same_program.h"

#include <algorithm>
#include <string>

#include "core/check.h"
#include "graph/content.h"
#include "graph/visit.h"

namespace smp::exported {
namespace {

using graph::Graph;
using graph::Operator;

/// Without the sizes, and the requirement of a gradient, which follows from its operator.
bool is_alike(const graph::Value& a, const graph::Value& b) {
  return a.kind == b.kind && a.name == b.name && a.alias_set == b.alias_set &&
         a.meta.dtype == b.meta.dtype && a.meta.device == b.meta.device &&
         a.meta.sizes.size() == b.meta.sizes.size();
}

bool is_alike(const Operator& a, const Operator& b) {
  return a.handle == b.handle && a.mode == b.mode && a.results == b.results &&
         a.result_is_argument == b.result_is_argument && a.list_lengths == b.list_lengths &&
         a.first_result == b.first_result && a.writes == b.writes && graph::same_arguments(a, b);
}

bool is_alike(const Graph& a, const Graph& b, size_t index) {
  const Operator& op = a.operators[index];
  return is_alike(op, b.operators[index]) &&
         std::all_of(op.results.begin(), op.results.end(), [&](graph::ValueId id) {
           return id == graph::kUndefined || is_alike(a.values[id], b.values[id]);
         });
}

std::string line_of(const Graph& graph, size_t index) {
  return index < graph.operators.size() ? graph.line(index) : "nothing";
}

/// The first operator that differs; that after the last one if none does.
size_t first_difference(const Graph& a, const Graph& b) {
  size_t index = 0;
  const size_t count = std::min(a.operators.size(), b.operators.size());
  while (index < count && is_alike(a, b, index)) ++index;
  return index;
}

void check_constants(const ExportRequest& request, const Graph& first, const Graph& other) {
  for (size_t id = 0; id < first.values.size(); ++id) {
    const at::Tensor& content = first.values[id].content;
    const bool same = !content.defined() || graph::same_content(content, other.values[id].content);
    SMP_CHECK_WITH(CaptureError, same, "cannot export \"", request.file, "\": a tensor ",
                   first.values[id].meta.to_string(),
                   " that the program makes from numbers of its own (torch::tensor) has other "
                   "content for other dynamic sizes. Make it by an operator on the sizes, such as "
                   "arange, or leave the size fixed");
  }
}

}  // namespace

void check_same_program(const ExportRequest& request) {
  const Graph& first = request.graph();
  for (size_t capture = 1; capture < request.graphs.size(); ++capture) {
    const Graph& other = *request.graphs[capture];
    const size_t at = first_difference(first, other);
    const bool same = at == first.operators.size() && at == other.operators.size() &&
                      first.outputs == other.outputs && first.values.size() == other.values.size();
    SMP_CHECK_WITH(CaptureError, same, "cannot export \"", request.file,
                   "\": it calls other operators for other dynamic sizes: for ",
                   request.grid.shown(0), " ", line_of(first, at), ", and for ",
                   request.grid.shown(capture), " ", line_of(other, at),
                   ". Write a program without branches and loops over these sizes, or leave them "
                   "fixed");
    check_constants(request, first, other);
  }
}

}  // namespace smp::exported
