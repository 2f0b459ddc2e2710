// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/refusal.h"
#include "graph/alias_analysis.h"
#include "graph/differentiate.h"
#include "graph/graph.h"
#include "graph/graph_map.h"
#include "graph/random.h"
#include "graph/region_run.h"
#include "graph/replay.h"
#include "graph/tensor_store.h"

namespace smp::graph {

/// The inputs that the regions of one run have put into a store until its backward. The history
/// holds it.
class RegionInputs {
 public:
  void add(const std::shared_ptr<RegionInput>& input) { inputs_.push_back(input); }
  /// Begins to bring it back, the last regions' first, without waiting.
  void prefetch() const;

 private:
  std::vector<std::weak_ptr<RegionInput>> inputs_;
};

/// The regions of some operators: the longest runs of neighbours with the same number, other than
/// -1, in `region_of_operator` (per operator of the graph; empty: none). Each as operator indices.
std::vector<std::vector<int>> find_regions(const std::vector<int>& operators,
                                           const std::vector<int>& region_of_operator);

/// Why operators that follow each other cannot run a second time with the same results and no other
/// effect. `differentiated`: the graph's `differentiated_ranges`.
core::Refusal why_not_repeatable(const Graph& graph,
                                 const std::vector<DifferentiatedRange>& differentiated,
                                 const std::vector<int>& region);
/// Throws `UsageError` unless each of some regions can.
void check_repeatable(const GraphFacts& facts, const std::vector<std::vector<int>>& regions);

/// A `Segment` some of whose operators, the *regions*, run a second time in the backward pass
/// instead of keeping until then the tensors that autograd saves.
///
/// The history is the one that a `Segment` records, to the last function; only the tensors that
/// functions of a region save are left out. The region's inputs from outside are kept instead, as
/// they were then. When the first saved tensor of a region is needed, its operators run again up to
/// the one that saves the last tensor needed: under the same modes, constants and random streams
/// and on operands that lie alike, so that all bits are the same. The tensors that they save are
/// then handed to the history, and freed as the backward goes through it. Saved tensors that lie on
/// the region's inputs, or on tensors kept by another region, are kept as they are; where there are
/// no others nothing runs twice.
///
/// Writes of the second run stay its own: memory that is written from the region's first operator
/// on is kept as a copy, so batch statistics are updated once.
///
/// A segment belongs to one thread at a time.
class CheckpointedSegment {
 public:
  /// Takes the arguments of `Segment`; `region_of_operator` as for `find_regions`. Throws
  /// `UsageError` for a region that is not repeatable. Without regions, and for a graph that does
  /// not train, it is a plain `Segment`.
  CheckpointedSegment(const GraphFacts& facts, const std::vector<int>& operators,
                      const std::vector<ValueId>& keep,
                      const std::vector<int>& region_of_operator = {});

  size_t size() const { return program_->segment.size(); }
  /// How many regions there are.
  size_t regions() const { return regions_.size(); }

  /// Runs all operators. The environment holds their inputs from outside. Inputs that regions keep
  /// go to `store`, unless it is null; but for tensors that are kept anyway, such as parameters.
  /// `observer`, unless it is null, is shown results, and not again those of second runs.
  RegionInputs run(Environment& environment, const RandomKey& key, TensorStore* store = nullptr,
                   const ResultObserver* observer = nullptr);

  /// Uses other constants from now on; backwards of earlier runs go on with theirs.
  void apply(const std::vector<ConstantOverride>& changes) { program_->apply(graph_, changes); }

  /// The same as of `Segment`; for the second runs, too.
  WeightCasts& casts() { return program_->segment.casts(); }

 private:
  struct Input {
    ValueId value;
    RegionInput::Kind kind;
  };
  struct Region {
    size_t first;  // positions in the segment
    size_t last;   // one past
    bool calls_leaf;
    std::vector<Input> inputs;
    std::vector<ValueId> kept_by_others;  // results that later regions read and do not copy
  };
  using InputsByValue = std::map<ValueId, std::weak_ptr<RegionInput>>;

  void add_region(const std::vector<int>& operators, const std::vector<int>& region,
                  const AliasAnalysis& aliases);
  void find_kept_by_others(const std::vector<int>& operators);
  void run_region(const Region& region, Segment::Run& run, Environment& environment,
                  const RandomKey& key, TensorStore* store, InputsByValue& known,
                  RegionInputs& stored);

  const Graph& graph_;
  std::vector<Region> regions_;
  std::shared_ptr<SegmentProgram> program_;  // histories may outlive the segment
};

}  // namespace smp::graph
