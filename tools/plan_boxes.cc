// SPDX-License-Identifier: Apache-2.0
#include "tools/plan_boxes.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include "partitioner/cost.h"
#include "partitioner/data_flow.h"

namespace smp::tools {
namespace {

using graph::Graph;
using graph::ValueId;
using partitioner::Plan;

/// A level with fewer boxes than this says too little: the next one is shown in ranges instead.
constexpr size_t kTooFew = 12;

/// The first `depth` components of a dotted path.
std::string truncated(const std::string& path, int depth) {
  size_t end = 0;
  for (; depth > 0; --depth) {
    end = path.find('.', end);
    if (end == std::string::npos) return path;
    ++end;
  }
  return path.substr(0, end - 1);
}

std::string parent_of(const std::string& path) {
  const size_t dot = path.rfind('.');
  return dot == std::string::npos ? "" : path.substr(0, dot);
}

int depth_of(const std::string& path) {
  return path.empty() ? 0 : 1 + static_cast<int>(std::count(path.begin(), path.end(), '.'));
}

/// Runs of operators of one stage whose modules are equal up to `depth`.
std::vector<Box> runs(const Graph& graph, const Plan& plan, int depth) {
  std::vector<Box> result;
  for (int i = 0; i < static_cast<int>(graph.operators.size()); ++i) {
    const int stage = plan.stage_of_operator[i];
    const std::string& scope = graph.operators[i].scope;
    std::string name = scope.empty() ? "(step function)" : truncated(scope, depth);
    if (result.empty() || result.back().stage != stage || result.back().name != name) {
      result.push_back({stage, std::move(name), i, i, 0});
    }
    result.back().last = i;
  }
  return result;
}

/// "blocks.0" and "blocks.2" make "blocks.0-2".
std::string range_name(const std::string& first, const std::string& last) {
  if (first == last) return first;
  const std::string parent = parent_of(last);
  return first + "-" + last.substr(parent.empty() ? 0 : parent.size() + 1);
}

/// Joins up to `length` neighbours of one stage and one parent.
std::vector<Box> joined(const std::vector<Box>& boxes, int length) {
  std::vector<Box> result;
  for (size_t begin = 0; begin < boxes.size();) {
    const Box& first = boxes[begin];
    size_t end = begin + 1;
    while (end < boxes.size() && end < begin + static_cast<size_t>(length) &&
           boxes[end].stage == first.stage && parent_of(boxes[end].name) == parent_of(first.name)) {
      ++end;
    }
    const Box& last = boxes[end - 1];
    result.push_back({first.stage, range_name(first.name, last.name), first.first, last.last, 0});
    begin = end;
  }
  return result;
}

/// Groups by as many levels of modules as fit; see `make_boxes`.
std::vector<Box> group(const Graph& graph, const Plan& plan, size_t limit) {
  int depth = 1;
  for (const auto& op : graph.operators) depth = std::max(depth, depth_of(op.scope));
  std::vector<Box> finer;
  for (; depth >= 1; --depth) {
    std::vector<Box> boxes = runs(graph, plan, depth);
    if (boxes.size() <= limit) {
      if (boxes.size() >= kTooFew || finer.empty()) return boxes;
      break;
    }
    finer = std::move(boxes);
  }
  const auto longest = static_cast<int>(finer.size());
  for (int length = 2; length < longest; ++length) {
    std::vector<Box> boxes = joined(finer, length);
    if (boxes.size() <= limit) return boxes;
  }
  return joined(finer, longest);
}

void add_shares(const Graph& graph, std::vector<Box>& boxes) {
  double total = 0;
  for (const auto& op : graph.operators) total += partitioner::operator_time_us(graph, op);
  for (Box& box : boxes) {
    for (int i = box.first; i <= box.last; ++i) {
      box.share += total > 0 ? partitioner::operator_time_us(graph, graph.operators[i]) / total
                             : 1.0 / static_cast<double>(graph.operators.size());
    }
  }
}

/// Sums up edges that have the same ends.
std::vector<BoxEdge> summed(const std::vector<BoxEdge>& edges) {
  std::map<std::pair<int, int>, BoxEdge> sums;
  for (const BoxEdge& edge : edges) {
    BoxEdge& sum =
        sums.try_emplace({edge.from, edge.to}, BoxEdge{edge.from, edge.to}).first->second;
    sum.tensors += edge.tensors;
    sum.bytes += edge.bytes;
    sum.gradient_bytes += edge.gradient_bytes;
  }
  std::vector<BoxEdge> result;
  for (const auto& [ends, sum] : sums) result.push_back(sum);
  return result;
}

std::vector<BoxEdge> edges_inside(const Graph& graph, const Boxes& boxes) {
  std::vector<BoxEdge> edges;
  const auto& box_of = boxes.box_of_operator;
  for (size_t i = 0; i < graph.operators.size(); ++i) {
    partitioner::for_each_argument(graph.operators[i], [&](ValueId value) {
      const int producer = graph.values[value].producer;
      if (producer < 0 || box_of[producer] == box_of[i]) return;
      if (boxes.boxes[box_of[producer]].stage != boxes.boxes[box_of[i]].stage) return;
      edges.push_back({box_of[producer], box_of[i], 1, graph.values[value].meta.nbytes(), 0});
    });
  }
  return summed(edges);
}

std::vector<BoxEdge> edges_between(const Graph& graph, const Plan& plan, const Boxes& boxes) {
  std::vector<BoxEdge> edges;
  for (const auto& hop : plan.transfers) {
    const std::vector<int> from = boxes.touching(graph, hop.value, hop.from);
    const std::vector<int> to = boxes.touching(graph, hop.value, hop.to);
    if (from.empty() || to.empty()) continue;  // a stage without operators
    const int64_t bytes = graph.values[hop.value].meta.nbytes();
    edges.push_back({from.front(), to.front(), 1, bytes, hop.needs_gradient ? bytes : 0});
  }
  return summed(edges);
}

}  // namespace

std::vector<int> Boxes::touching(const Graph& graph, ValueId value, int stage) const {
  std::vector<int> result;
  for (size_t b = 0; b < boxes.size(); ++b) {
    if (boxes[b].stage != stage) continue;
    bool touches = false;
    for (int i = boxes[b].first; i <= boxes[b].last && !touches; ++i) {
      const auto note = [&](ValueId used) { touches |= used == value; };
      partitioner::for_each_argument(graph.operators[i], note);
      partitioner::for_each_result(graph.operators[i], note);
    }
    if (touches) result.push_back(static_cast<int>(b));
  }
  if (!result.empty()) return result;
  // A stage may only return a value, or be asked to go backward from it.
  const auto last = std::find_if(boxes.rbegin(), boxes.rend(),
                                 [&](const Box& box) { return box.stage == stage; });
  if (last != boxes.rend()) result.push_back(static_cast<int>(boxes.rend() - last) - 1);
  return result;
}

Boxes make_boxes(const Graph& graph, const Plan& plan, size_t limit) {
  Boxes result;
  result.boxes = group(graph, plan, limit);
  add_shares(graph, result.boxes);
  result.box_of_operator.resize(graph.operators.size());
  for (size_t b = 0; b < result.boxes.size(); ++b) {
    const Box& box = result.boxes[b];
    for (int i = box.first; i <= box.last; ++i) result.box_of_operator[i] = static_cast<int>(b);
  }
  result.inside = edges_inside(graph, result);
  result.between = edges_between(graph, plan, result);
  return result;
}

}  // namespace smp::tools
