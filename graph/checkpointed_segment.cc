// SPDX-License-Identifier: Apache-2.0
#include "graph/checkpointed_segment.h"

#include <algorithm>
#include <set>
#include <utility>

#include "core/check.h"
#include "graph/leaf.h"
#include "graph/saved_tensors.h"
#include "graph/visit.h"

namespace smp::graph {
namespace {

/// How to keep an input from some memory of a region that begins with operator `first`. Memory that
/// outlives a run is written by other microbatches' runs, too.
RegionInput::Kind kind_of_input(const AliasAnalysis::Set& memory, int first) {
  if (memory.is_written_from(memory.outlives_run() ? 0 : first)) return RegionInput::Kind::kCopy;
  return memory.outlives_run() ? RegionInput::Kind::kOther : RegionInput::Kind::kAlias;
}

/// Inputs of a region: values that its operators read and none of them makes, ascending. A literal
/// is there before its operator.
std::set<ValueId> inputs_of(const Graph& graph, const std::vector<int>& region) {
  std::set<ValueId> inputs, made;
  for (int index : region) {
    const Operator& op = graph.operators[index];
    for_each_argument(op, [&](ValueId id) {
      if (made.count(id) == 0) inputs.insert(id);
    });
    if (graph.makes_literal(op)) {
      inputs.insert(op.results[0]);
    } else {
      for_each_result(op, [&](ValueId id) { made.insert(id); });
    }
  }
  return inputs;
}

}  // namespace

void RegionInputs::prefetch() const {
  for (auto it = inputs_.rbegin(); it != inputs_.rend(); ++it) {
    if (const auto kept = it->lock()) kept->prefetch();
  }
}

std::vector<std::vector<int>> find_regions(const std::vector<int>& operators,
                                           const std::vector<int>& region_of_operator) {
  std::vector<std::vector<int>> regions;
  if (region_of_operator.empty()) return regions;
  int before = -1;
  for (int index : operators) {
    const int region = region_of_operator[index];
    if (region >= 0 && region != before) regions.emplace_back();
    if (region >= 0) regions.back().push_back(index);
    before = region;
  }
  return regions;
}

core::Refusal why_not_repeatable(const Graph& graph,
                                 const std::vector<DifferentiatedRange>& differentiated,
                                 const std::vector<int>& region) {
  for (const DifferentiatedRange& range : differentiated) {
    if (range.last < region.front() || region.back() < range.first) continue;
    return c10::str("autograd::grad, operator ", range.last,
                    ", needs in the forward pass what operators ", range.first, " to ", range.last,
                    " save");
  }
  const std::set<ValueId> inputs = inputs_of(graph, region);
  for (int index : region) {
    const Operator& op = graph.operators[index];
    const auto operator_text = c10::str("operator ", index, " (", op.name(), ")");
    if (op.writes.empty()) continue;
    if (is_leaf(op.handle)) {
      return c10::str(operator_text,
                      " is a leaf module that updates buffers, and would update "
                      "them a second time");
    }
    for (int alias_set : op.writes) {
      const auto read = std::count_if(inputs.begin(), inputs.end(), [&](ValueId id) {
        return graph.values[id].alias_set == alias_set;
      });
      if (read > 1) {
        return c10::str(operator_text, " writes in place a tensor of which ", read,
                        " views come from outside, and copies of them would not share memory");
      }
    }
  }
  return std::nullopt;
}

void check_repeatable(const GraphFacts& facts, const std::vector<std::vector<int>>& regions) {
  for (const std::vector<int>& region : regions) {
    const core::Refusal refusal = why_not_repeatable(facts.graph, facts.differentiated, region);
    SMP_CHECK_WITH(UsageError, !refusal, "activation checkpointing: operators ", region.front(),
                   " to ", region.back(), ", in module \"",
                   facts.graph.operators[region.front()].scope,
                   "\", cannot run again in the backward "
                   "pass: ",
                   *refusal, ". Leave the module out");
  }
}

CheckpointedSegment::CheckpointedSegment(const GraphFacts& facts, const std::vector<int>& operators,
                                         const std::vector<ValueId>& keep,
                                         const std::vector<int>& region_of_operator)
    : graph_(facts.graph), program_(std::make_shared<SegmentProgram>(facts, operators, keep)) {
  if (!graph_.trains()) return;
  const auto regions = find_regions(operators, region_of_operator);
  if (regions.empty()) return;
  check_repeatable(facts, regions);
  for (const auto& region : regions) add_region(operators, region, facts.aliases);
  find_kept_by_others(operators);
}

void CheckpointedSegment::add_region(const std::vector<int>& operators,
                                     const std::vector<int>& region, const AliasAnalysis& aliases) {
  const auto first = std::find(operators.begin(), operators.end(), region.front());
  Region result;
  result.first = static_cast<size_t>(first - operators.begin());
  result.last = result.first + region.size();
  result.calls_leaf = std::any_of(region.begin(), region.end(), [&](int index) {
    return is_leaf(graph_.operators[index].handle);
  });
  for (ValueId id : inputs_of(graph_, region)) {
    result.inputs.push_back({id, kind_of_input(aliases.of(id), region.front())});
  }
  regions_.push_back(std::move(result));
}

void CheckpointedSegment::find_kept_by_others(const std::vector<int>& operators) {
  std::vector<int> region_of(graph_.operators.size(), -1);
  for (size_t r = 0; r < regions_.size(); ++r) {
    for (size_t i = regions_[r].first; i < regions_[r].last; ++i) {
      region_of[operators[i]] = static_cast<int>(r);
    }
  }
  for (size_t later = 1; later < regions_.size(); ++later) {
    for (const Input& input : regions_[later].inputs) {
      const int producer = graph_.values[input.value].producer;
      if (input.kind != RegionInput::Kind::kAlias || producer < 0) continue;
      const int maker = region_of[producer];
      const bool earlier = maker >= 0 && maker < static_cast<int>(later);
      if (earlier) regions_[maker].kept_by_others.push_back(input.value);
    }
  }
}

RegionInputs CheckpointedSegment::run(Environment& environment, const RandomKey& key,
                                      TensorStore* store, const ResultObserver* observer) {
  RegionInputs stored;
  InputsByValue known;
  Segment::Run run(program_->segment, observer);
  size_t next = 0;
  for (const Region& region : regions_) {
    run.part(next, region.first, environment, key);
    run_region(region, run, environment, key, store, known, stored);
    next = region.last;
  }
  run.part(next, size(), environment, key);
  return stored;
}

void CheckpointedSegment::run_region(const Region& region, Segment::Run& run,
                                     Environment& environment, const RandomKey& key,
                                     TensorStore* store, InputsByValue& known,
                                     RegionInputs& stored) {
  const auto keeper = std::make_shared<RegionRun>(program_, region.first, region.last,
                                                  /*early_end=*/!region.calls_leaf, key);
  for (const Input& input : region.inputs) {
    const bool unchanged = input.kind != RegionInput::Kind::kCopy;
    const at::Tensor& tensor = environment[input.value];
    if (!tensor.defined()) continue;
    // Regions that read the same tensor keep it together.
    std::shared_ptr<RegionInput> kept = unchanged ? known[input.value].lock() : nullptr;
    if (kept == nullptr) kept = std::make_shared<RegionInput>(tensor, input.kind);
    if (unchanged) known[input.value] = kept;
    keeper->add_input(input.value, tensor, std::move(kept), unchanged);
  }
  {
    const SavedTensorScope scope(keeper);
    run.part(region.first, region.last, environment, key);
  }
  std::vector<at::Tensor> kept_by_others;
  for (ValueId id : region.kept_by_others) {
    // Values that go to a store leave no memory behind.
    if (store == nullptr && environment[id].defined()) kept_by_others.push_back(environment[id]);
  }
  for (const auto& kept : keeper->finish(kept_by_others, store)) stored.add(kept);
}

}  // namespace smp::graph
