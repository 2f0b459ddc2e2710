// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "graph/autograd_entry.h"
#include "graph/graph.h"
#include "graph/graph_map.h"
#include "graph/replay.h"
#include "graph/saved_tensors.h"
#include "graph/tensor_store.h"

namespace smp::graph {

/// A tensor that regions read (see `CheckpointedSegment`), kept until their backward.
class RegionInput {
 public:
  enum class Kind {
    kAlias,  ///< no operator writes its memory before the backward
    kOther,  ///< the same, and others keep its memory anyway: not worth a store
    kCopy,   ///< an operator does
  };

  RegionInput(const at::Tensor& tensor, Kind kind);

  /// Moves it to a store, if that is worth it. Returns whether it is in a store now.
  bool store(TensorStore& store);
  /// Begins to bring it back from the store.
  void prefetch() const;

  /// An alias that operators treat as they treated the tensor; gradients go to a sink.
  at::Tensor enter(std::vector<GradientSinkPtr>& sinks);
  /// A view that lay `offset` elements from the start of the tensor's memory at first.
  at::Tensor view(c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset);
  /// Whether such a view lies between the first and the last element of the tensor.
  bool holds(c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset) const;

 private:
  const at::Tensor& fetched();

  const Kind kind_;
  const bool requires_grad_, is_leaf_;
  const int64_t offset_, span_;  // in elements
  at::Tensor tensor_;            // undefined while it is in the store
  std::shared_ptr<StoredTensor> stored_;
};

/// A segment with the constants of its runs: a second run uses those of the first.
struct SegmentProgram {
  using Overrides = std::vector<ConstantOverride>;

  SegmentProgram(const GraphFacts& facts, const std::vector<int>& operators,
                 const std::vector<ValueId>& keep)
      : values(facts.graph.values.size()), segment(facts, operators, keep) {}

  /// Uses other constants from now on.
  void apply(const Graph& graph, const Overrides& changes);
  /// Uses the constants that were `in_effect` once.
  void use(const Overrides* overrides);

  const size_t values;
  Segment segment;
  std::shared_ptr<const Overrides> in_effect;  // null: as captured
  Overrides captured;                          // those of every constant that was overridden once
  std::set<std::pair<int, int>> overridden;    // these, by operator and argument
};

/// One region in one run, from its forward to its backward. The history holds it: each function of
/// the region by the numbers of its saved tensors, in their order. The order is the same in the
/// second run.
class RegionRun final : public SavedTensorKeeper {
 public:
  struct Input {
    ValueId value;
    std::shared_ptr<RegionInput> kept;
  };

  /// `first` to `last` - 1 are positions in the segment. `early_end`: the second run may end inside
  /// an operator.
  RegionRun(std::shared_ptr<SegmentProgram> program, size_t first, size_t last, bool early_end,
            const RandomKey& key)
      : program_(std::move(program)),
        first_(first),
        last_(last),
        early_end_(early_end),
        key_(key),
        constants_(program_->in_effect) {}

  /// Notes an input of the region, before it runs. `unchanged`: saved tensors may lie on it.
  void add_input(ValueId value, const at::Tensor& tensor, std::shared_ptr<RegionInput> kept,
                 bool unchanged);

  /// Must be called when the region has run: lets go of tensors that its backward does not need,
  /// and moves those that it needs to the store, if there is one. `kept_by_others` are results on
  /// which saved tensors may lie. Returns the inputs in the store.
  std::vector<std::shared_ptr<RegionInput>> finish(const std::vector<at::Tensor>& kept_by_others,
                                                   TensorStore* store);

  size_t pack(const at::Tensor& tensor) override;
  at::Tensor unpack(size_t number) override;
  void release(size_t number) noexcept override;

 private:
  /// A tensor that a function saved.
  struct Saved {
    explicit Saved(const at::Tensor& tensor);

    /// Whether it is kept neither here nor on an input.
    bool is_missing() const { return !released && !value.defined() && input == nullptr; }
    /// If it lies on the memory of `tensor`, as it was saved: keeps it there.
    void keep_on(const at::Tensor& tensor);
    /// Keeps a view that lies like it.
    void keep(const at::Tensor& view);

    c10::SmallVector<int64_t, 5> sizes, strides;
    int64_t offset = 0;
    bool conjugate = false, negative = false;
    at::ScalarType dtype;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage{c10::intrusive_ptr<c10::StorageImpl>()};
    c10::VariableVersion counter;
    uint32_t version;
    at::Tensor value;
    std::shared_ptr<RegionInput> input;  // on which it lies
    bool released = false;
  };
  struct Memory {
    at::Tensor tensor;
    std::shared_ptr<RegionInput> kept;
  };
  using MemoryKey = std::pair<const c10::StorageImpl*, at::ScalarType>;
  class SecondRun;

  static MemoryKey memory_of(const at::Tensor& tensor);
  void move_to(TensorStore& store, std::vector<std::shared_ptr<RegionInput>>& stored);
  void run_again();
  void take(size_t number, const at::Tensor& tensor);

  const std::shared_ptr<SegmentProgram> program_;
  const size_t first_, last_;
  const bool early_end_;
  const RandomKey key_;
  const std::shared_ptr<const SegmentProgram::Overrides> constants_;
  std::vector<Input> inputs_;              // empty: no second run
  std::map<MemoryKey, Memory> unchanged_;  // while the region runs; the first input of each
  std::vector<Saved> saved_;
  size_t missing_ = 0;  // in the second run
};

}  // namespace smp::graph
