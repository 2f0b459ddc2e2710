// SPDX-License-Identifier: Apache-2.0
#include "partitioner/pins.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <optional>

#include "core/check.h"
#include "partitioner/data_flow.h"
#include "partitioner/gradient_flow.h"
#include "partitioner/partition.h"

namespace smp::partitioner {
namespace {

using graph::Graph;
using graph::kUndefined;
using graph::Value;
using graph::ValueId;

class Finder {
 public:
  Finder(const Graph& graph, const PartitionOptions& options)
      : graph_(graph),
        options_(options),
        pins_(graph.operators.size()),
        tensor_of_set_(graph.alias_sets, kUndefined),
        first_user_(graph.alias_sets, -1) {
    for (size_t v = 0; v < graph.values.size(); ++v) {
      const Value& value = graph.values[v];
      if (has_owner(value) && value.alias_set >= 0) {
        tensor_of_set_[value.alias_set] = static_cast<ValueId>(v);
      }
    }
    for (size_t i = 0; i < graph.operators.size(); ++i) {
      for (int set : sets_of(static_cast<int>(i))) {
        if (first_user_[set] < 0) first_user_[set] = static_cast<int>(i);
      }
    }
  }

  Constraints run() {
    for (size_t i = 0; i < pins_.size(); ++i) pin_by_name(static_cast<int>(i));
    for (size_t i = 0; i < pins_.size(); ++i) pin_by_scope(static_cast<int>(i));
    pin_by_owner();
    if (!options_.auto_partition()) {
      for (size_t i = 0; i < pins_.size(); ++i) pin_by_default(static_cast<int>(i));
    }
    for (const std::optional<Pin>& pin : pins_) {
      if (pin) result_.pins.push_back(*pin);
    }
    return std::move(result_);
  }

 private:
  /// The alias sets of parameters and buffers that an operator reads or writes.
  std::vector<int> sets_of(int index) const {
    std::vector<int> sets;
    for_each_argument(graph_.operators[index], [&](ValueId value) {
      const int set = graph_.values[value].alias_set;
      if (set >= 0 && tensor_of_set_[set] != kUndefined) sets.push_back(set);
    });
    return sets;
  }

  /// The rank that a map names for a tensor, if it does.
  static std::optional<int> find(const Owners& ranks, const std::string& name) {
    const auto found = ranks.find(name);
    if (found == ranks.end()) return std::nullopt;
    return found->second;
  }

  void check_rank(const Pin& pin, const char* remedy) const {
    SMP_CHECK_WITH(PartitionError, pin.rank >= 0 && pin.rank < options_.partitions(),
                   "cannot partition: ", describe(graph_, pin), ", but the partitions are 0 to ",
                   options_.partitions() - 1, ". ", remedy);
  }

  [[noreturn]] void contradict(const Pin& a, const Pin& b, const char* remedy) const {
    core::fail<PartitionError>("cannot partition: ", describe(graph_, a), ", but ",
                               describe(graph_, b), ". ", remedy);
  }

  void pin_by_name(int index) {
    for (int set : sets_of(index)) {
      const ValueId value = tensor_of_set_[set];
      const auto rank = find(options_.pinned(), graph_.values[value].name);
      if (!rank) continue;
      const Pin pin{index, *rank, PinSource::kParameter, value};
      check_rank(pin, "Pin it to one of them, or ask for more partitions.");
      if (pins_[index] && pins_[index]->rank != pin.rank) {
        contradict(*pins_[index], pin,
                   "One operator runs on one partition: pin both tensors to the same.");
      }
      if (!pins_[index]) pins_[index] = pin;
    }
  }

  void pin_by_scope(int index) {
    const Pin scope{index, graph_.operators[index].mode.partition, PinSource::kScope, kUndefined};
    if (scope.rank < 0) return;
    check_rank(scope, "Name one of them, or ask for more partitions.");
    const std::optional<Pin>& named = pins_[index];
    if (named && named->rank != scope.rank &&
        first_user_[graph_.values[named->value].alias_set] == index) {
      contradict(*named, scope,
                 "The first operator to use a tensor runs where the tensor is: pin the tensor to "
                 "the scope's partition, or call its module outside of the scope.");
    }
    pins_[index] = scope;
  }

  void pin_by_owner() {
    if (options_.owner().empty()) return;
    const std::vector<std::vector<int>> uses = value_uses(graph_);
    const std::vector<int> writers = last_writers(graph_);
    const GradientFlow gradients(graph_);
    for (size_t v = 0; v < graph_.values.size(); ++v) {
      const Value& value = graph_.values[v];
      const auto rank = has_owner(value) ? find(options_.owner(), value.name) : std::nullopt;
      if (!rank || (uses[v].empty() && writers[v] < 0)) continue;
      const bool written = writers[v] >= 0;
      const Pin pin{written ? writers[v] : uses[v].front(), *rank, PinSource::kOwner,
                    static_cast<ValueId>(v)};
      check_rank(pin, "Use as many partitions as for the first step function.");
      if (written || !gradients.gradient_uses(pin.value).empty()) {
        pin_to_owner(pin);
      } else {
        result_.better_local.push_back(pin.value);
      }
    }
  }

  void pin_to_owner(const Pin& pin) {
    std::optional<Pin>& other = pins_[pin.operator_index];
    if (other && other->rank != pin.rank) {
      contradict(pin, *other,
                 "Call the step function that uses both as it does here first, so that it settles "
                 "who owns what.");
    }
    if (!other) other = pin;
  }

  void pin_by_default(int index) {
    if (pins_[index]) return;
    for (int set : sets_of(index)) {
      const ValueId value = tensor_of_set_[set];
      const auto owner = find(options_.owner(), graph_.values[value].name);
      pins_[index] = Pin{index, owner.value_or(options_.default_partition()),
                         owner ? PinSource::kOwner : PinSource::kDefault, value};
      return;
    }
  }

  const Graph& graph_;
  const PartitionOptions& options_;
  std::vector<std::optional<Pin>> pins_;  ///< per operator
  std::vector<ValueId> tensor_of_set_;    ///< the parameter or buffer of an alias set
  std::vector<int> first_user_;           ///< per alias set of one, an operator
  Constraints result_;
};

/// Puts the pins into the stages of a placement. False if there is none, or the pins go back to a
/// rank more often than it does.
bool follow(std::vector<Pin>& pins, const std::vector<int>& placement) {
  auto stage = placement.begin();
  for (Pin& pin : pins) {
    stage = std::find(stage, placement.end(), pin.rank);
    if (stage == placement.end()) return false;
    pin.stage = static_cast<int>(stage - placement.begin());
  }
  return !placement.empty();
}

}  // namespace

std::string reason(const Graph& graph, const Pin& pin) {
  const auto name = [&] { return graph.values[pin.value].name; };
  switch (pin.source) {
    case PinSource::kScope:
      return fmt::format("smp::partition({}) scope", pin.rank);
    case PinSource::kParameter:
      return fmt::format("{} {} is pinned to partition {}",
                         graph::to_string(graph.values[pin.value].kind), name(), pin.rank);
    case PinSource::kOwner:
      return fmt::format("owner of {}", name());
    default:
      if (pin.value == kUndefined) return "comes before all pins: default partition";
      return fmt::format("{} is not pinned: default partition", name());
  }
}

std::string describe(const Graph& graph, const Pin& pin) {
  const std::string op = describe_operator(graph, pin.operator_index);
  switch (pin.source) {
    case PinSource::kScope:
      return fmt::format("{} is called under smp::partition({})", op, pin.rank);
    case PinSource::kParameter:
      return fmt::format("{} is pinned to partition {}, where {} must run",
                         describe_value(graph, pin.value), pin.rank, op);
    case PinSource::kOwner:
      return fmt::format("{} belongs to partition {}, where {} must run",
                         describe_value(graph, pin.value), pin.rank, op);
    default:
      if (pin.value == kUndefined) {
        return fmt::format("{} comes before all pins, so it runs on the default partition {}", op,
                           pin.rank);
      }
      return fmt::format("{} is not pinned, so {} runs on the default partition {}",
                         describe_value(graph, pin.value), op, pin.rank);
  }
}

Constraints find_constraints(const Graph& graph, const PartitionOptions& options) {
  return Finder(graph, options).run();
}

std::vector<int> list_stages(std::vector<Pin>& pins, int ranks, const std::vector<int>& placement) {
  if (follow(pins, placement)) return placement;
  std::vector<int> stages;
  for (Pin& pin : pins) {
    if (stages.empty() || stages.back() != pin.rank) stages.push_back(pin.rank);
    pin.stage = static_cast<int>(stages.size()) - 1;
  }
  for (int rank = 0; rank < ranks; ++rank) {
    if (std::find(stages.begin(), stages.end(), rank) != stages.end()) continue;
    size_t place = 0;
    while (place < stages.size() &&
           !(stages[place] > rank && (place == 0 || stages[place - 1] < rank))) {
      ++place;
    }
    stages.insert(stages.begin() + static_cast<std::ptrdiff_t>(place), rank);
    for (Pin& pin : pins) pin.stage += pin.stage >= static_cast<int>(place) ? 1 : 0;
  }
  return stages;
}

}  // namespace smp::partitioner
