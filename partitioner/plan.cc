// SPDX-License-Identifier: Apache-2.0
#include "partitioner/plan.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <iterator>

namespace smp::partitioner {
namespace {

/// "stage 0: operators 0-11", a line for each run of operators of one stage.
void append_operators(std::string& text, const std::vector<int>& stage_of_operator) {
  for (size_t first = 0; first < stage_of_operator.size();) {
    size_t last = first;
    while (last + 1 < stage_of_operator.size() &&
           stage_of_operator[last + 1] == stage_of_operator[first]) {
      ++last;
    }
    fmt::format_to(std::back_inserter(text), "stage {}: operators {}-{}\n",
                   stage_of_operator[first], first, last);
    first = last + 1;
  }
}

}  // namespace

bool Transfer::operator==(const Transfer& other) const {
  return value == other.value && from == other.from && to == other.to &&
         needs_gradient == other.needs_gradient;
}

bool Replica::operator==(const Replica& other) const {
  return value == other.value && owner == other.owner && stage == other.stage &&
         gradient_to == other.gradient_to && needs_gradient == other.needs_gradient;
}

bool Recomputed::operator==(const Recomputed& other) const {
  return operator_index == other.operator_index && stage == other.stage;
}

std::string Plan::to_string() const {
  std::string text =
      fmt::format("plan of {} stages on ranks {}\n", stages(), fmt::join(rank_of_stage, ", "));
  const auto out = std::back_inserter(text);
  if (!order.empty()) fmt::format_to(out, "order {}\n", fmt::join(order, ", "));
  append_operators(text, stage_of_operator);
  for (const Transfer& transfer : transfers) {
    fmt::format_to(out, "transfer %{}: {} -> {}{}\n", transfer.value, transfer.from, transfer.to,
                   transfer.needs_gradient ? ", gradient back" : "");
  }
  for (const Recomputed& again : recomputed) {
    fmt::format_to(out, "stage {} recomputes operator {}\n", again.stage, again.operator_index);
  }
  for (const Replica& replica : replicas) {
    fmt::format_to(out, "replica %{}: {} -> {}", replica.value, replica.owner, replica.stage);
    if (replica.needs_gradient) fmt::format_to(out, ", gradient to {}", replica.gradient_to);
    text += '\n';
  }
  for (const auto& [name, stage] : owner) fmt::format_to(out, "owner of {}: {}\n", name, stage);
  for (size_t i = 0; i < stage_of_output.size(); ++i) {
    fmt::format_to(out, "output {}: {}\n", i, stage_of_output[i]);
  }
  for (size_t i = 0; i < stage_of_root.size(); ++i) {
    fmt::format_to(out, "root {}: {}\n", i, stage_of_root[i]);
  }
  return text;
}

}  // namespace smp::partitioner
