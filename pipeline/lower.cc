// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <vector>

#include "core/check.h"
#include "pipeline/generators.h"

namespace smp::pipeline {
namespace {

/// The other ends of a stage's transfers, nearest stage first.
struct Neighbours {
  std::vector<int> send_forward;
  std::vector<int> recv_forward;
  std::vector<int> send_backward;
  std::vector<int> recv_backward;
};

std::vector<Neighbours> find_neighbours(const Schedule& order, std::vector<StageEdge> edges) {
  std::sort(edges.begin(), edges.end(),
            [](const StageEdge& a, const StageEdge& b) { return a.to - a.from < b.to - b.from; });
  std::vector<Neighbours> result(static_cast<size_t>(order.stages()));
  for (const auto& edge : edges) {
    if (order.rank_of(edge.from) == order.rank_of(edge.to)) {
      continue;
    }
    auto& from = result[static_cast<size_t>(edge.from)];
    auto& to = result[static_cast<size_t>(edge.to)];
    from.send_forward.push_back(edge.to);
    to.recv_forward.push_back(edge.from);
    if (edge.needs_gradient) {
      to.send_backward.push_back(edge.from);
      from.recv_backward.push_back(edge.to);
    }
  }
  return result;
}

void append_lowered(const Action& compute, const Neighbours& near, std::vector<Action>& out) {
  using Kind = Action::Kind;
  const auto append = [&](Kind kind, const std::vector<int>& peers) {
    for (const int peer : peers) {
      out.push_back({kind, compute.stage, compute.microbatch, peer});
    }
  };
  const bool forward = compute.kind == Kind::kForward;
  if (forward) {
    append(Kind::kRecvForward, near.recv_forward);
  } else if (compute.makes_input_gradients()) {
    append(Kind::kRecvBackward, near.recv_backward);
  }
  out.push_back(compute);
  if (forward) {
    append(Kind::kSendForward, near.send_forward);
  } else if (compute.makes_input_gradients()) {
    append(Kind::kSendBackward, near.send_backward);
  }
}

/// The index of the last weight gradients of each stage in `actions`.
std::vector<size_t> last_weight_gradients(const std::vector<Action>& actions, int stages) {
  std::vector<size_t> last(static_cast<size_t>(stages), actions.size());
  for (size_t i = 0; i < actions.size(); ++i) {
    if (actions[i].makes_weight_gradients()) {
      last[static_cast<size_t>(actions[i].stage)] = i;
    }
  }
  return last;
}

}  // namespace

Schedule lower(const Schedule& order, const std::vector<StageEdge>& edges) {
  check_edges(edges, order.stages());
  const auto neighbours = find_neighbours(order, edges);
  Schedule result = order.without_actions();
  for (int rank = 0; rank < order.ranks(); ++rank) {
    const auto& actions = order.actions(rank);
    for (const auto& action : actions) {
      SMP_CHECK(action.is_compute() && action.stage >= 0 && action.stage < order.stages(),
                "lower: rank ", rank, " has ", to_string(action),
                "; expected only forwards and backwards of stages 0 to ", order.stages() - 1,
                ". Lower a compute order, once.");
    }
    const auto last = last_weight_gradients(actions, order.stages());
    auto& out = result.actions(rank);
    for (size_t i = 0; i < actions.size(); ++i) {
      const auto stage = static_cast<size_t>(actions[i].stage);
      append_lowered(actions[i], neighbours[stage], out);
      if (last[stage] == i) {
        out.push_back(reduce_of(actions[i].stage));
      }
    }
  }
  return result;
}

}  // namespace smp::pipeline
