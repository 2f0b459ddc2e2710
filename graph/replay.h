// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/node.h"
#include "graph/graph.h"
#include "graph/graph_facts.h"
#include "graph/graph_map.h"
#include "graph/random.h"
#include "graph/weight_casts.h"

namespace smp::graph {

/// The tensors of one microbatch by ValueId; undefined where not (yet, or no longer) alive.
using Environment = std::vector<at::Tensor>;

/// Sees the results of operators as they run: of operator `index` of the graph the `number`-th.
using ResultObserver = std::function<void(int index, size_t number, const at::Tensor& result)>;

/// Whether the bits of a defined result are computed by its operator. Those of a view are others',
/// and memory that is not initialised holds anything.
bool computes(const Graph& graph, int index, size_t number);

class CastCacheScope;

/// Some operators of a graph, in program order, ready to run again and again.
///
/// Its operators' writes after `backward` to memory that a backward may need (`late_writes.h`) go
/// to a copy: all tensors of the environment on that memory move there together, as though they had
/// come from another rank. So a buffer has its new content in the environment only.
///
/// A segment belongs to one thread at a time.
class Segment {
  struct Instruction;

 public:
  /// `operators` are indices into `graph.operators`, ascending. Values in `keep` stay in the
  /// environment; others are released after their last use in the segment.
  Segment(const GraphFacts& facts, const std::vector<int>& operators,
          const std::vector<ValueId>& keep);

  size_t size() const { return instructions_.size(); }

  /// A run of some of the operators, which may be in parts: while it lives, autocast casts each
  /// tensor once. One at a time.
  class Run {
   public:
    /// `observer`, which may be null, is shown each defined result of an operator that runs; it
    /// outlives the run.
    explicit Run(Segment& segment, const ResultObserver* observer = nullptr);
    ~Run();
    Run(const Run&) = delete;
    Run& operator=(const Run&) = delete;

    /// Runs the operators at positions `first` to `last` - 1. The environment holds their inputs
    /// from outside.
    void part(size_t first, size_t last, Environment& environment, const RandomKey& key);

   private:
    void execute(const Instruction& instruction, Environment& environment, const RandomKey& key);

    Segment& segment_;
    const ResultObserver* observer_;
    std::unique_ptr<CastCacheScope> casts_;
  };

  /// Runs all operators. The environment holds their inputs from outside.
  void run(Environment& environment, const RandomKey& key);
  /// Runs the `index`-th operator only, and releases nothing.
  void run_one(size_t index, Environment& environment, const RandomKey& key);

  /// Uses other constants from now on; changes to operators of other segments are ignored.
  void apply(const std::vector<ConstantOverride>& changes);

  /// The casts of its parameters, which its owner begins to share among its runs.
  WeightCasts& casts() { return casts_of_weights_; }

 private:
  struct Instruction {
    Operator op;  // its constants are those of the run
    int operator_index;
    int autocast_scope;                            // -1: none
    std::vector<std::pair<ValueId, int>> weights;  // arguments to cast, and their alias sets
    ValueId literal;  // instead of running: the literal's value; else -1
    std::vector<std::optional<TensorMeta>> recorded;  // results; nothing where undefined
    bool is_leaf;
    bool has_written_results;
    c10::SmallVector<ValueId, 4> dead;  // released afterwards
    std::vector<ValueId> moves;         // values that move to memory of their own before
  };

  /// The tensor that stands for a leaf in an autocast scope.
  struct ScopeAlias {
    at::Tensor of;  // held, since its address must not be used again
    at::Tensor tensor;
    core::NodePtr end;  // end of both; tensors hold it weakly, a variable's nothing else
  };

  static std::string text_of(const Instruction& instruction);
  void execute(const Instruction& instruction, Environment& environment, const RandomKey& key);
  void push_arguments(const Instruction& instruction, const Environment& environment);
  at::Tensor for_scope(int autocast_scope, const at::Tensor& tensor);
  WeightCasts::Scope::Weights weights_of(const Instruction& instruction,
                                         const Environment& environment);
  void check_result(const Instruction& instruction, size_t index, const at::Tensor& result) const;
  void pop_results(const Instruction& instruction, Environment& environment);

  std::vector<Instruction> instructions_;
  torch::jit::Stack stack_;
  WeightCasts casts_of_weights_;
  bool casts_ = false;          // some operator runs under autocast
  bool casts_in_leaf_ = false;  // one of them is a leaf
  // While running, by scope and leaf.
  std::map<std::pair<int, const at::TensorImpl*>, ScopeAlias> aliases_;
};

/// A copy at a multiple of 64 bytes, made by `copy_to`; the tensor itself if it starts at one
/// already. Kernels round differently on operands that do not.
at::Tensor aligned(const at::Tensor& tensor);

/// A copy on `device` with the same sizes, strides and `requires_grad`, without history.
at::Tensor copy_to(at::Device device, const at::Tensor& tensor);

}  // namespace smp::graph
