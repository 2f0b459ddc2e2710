// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/sharding.h"
#include "graph/tensor_table.h"
#include "runtime/parameters/scope_notes.h"
#include "smp/comm_group.h"
#include "smp/nn/parameter_split.h"

namespace smp::dp {
class ParameterPieces;
}  // namespace smp::dp

namespace smp::runtime {

/// All that is known of the parameters and buffers of a program's models: one entry for each
/// tensor, from its registration to its place in a checkpoint. The same names, owners and splits in
/// the same order on all ranks. Internal; belongs to the rank's thread.
class ParameterTable {
 public:
  /// The place of a parameter that replicas divide, and of this one's piece of it.
  struct Piece {
    std::shared_ptr<dp::ParameterPieces> pieces;
    size_t index = 0;  ///< among those of `pieces`

    /// This replica's piece; undefined where it has none.
    const at::Tensor& tensor() const;
    bool has_gradient() const;
  };

  /// An entry is written by the calls of the table, whose comments say when.
  struct Entry : graph::TensorTable::Entry {
    explicit Entry(graph::TensorTable::Entry registered)
        : graph::TensorTable::Entry(std::move(registered)),
          sharding{tensor.sizes().vec(), {}, {}} {}

    /// How that which this rank updates of it lies on ranks. Once partitioned, one of the pipeline
    /// owns it. Ranks of a tensor-parallel group have parts, of which `tensor` is this rank's;
    /// replicas have ranges of their part.
    comm::Sharding sharding;

    /// Its values in host memory, while `tensor` is shown on this rank's device without data
    /// (placement.h); undefined otherwise.
    at::Tensor waiting;
    std::string owner_reason;  ///< why its owner has it, for people
    /// The user's code was captured on the whole, and is shown the whole's sizes when it is
    /// captured or guarded again.
    bool captured_whole = false;
    /// The memory of its ranges, where replicas divide it.
    std::optional<Piece> piece;
    /// A buffer that some graph writes.
    bool is_written = false;

    /// The tensor that has its values, or has yet to be given them.
    const at::Tensor& values() const { return waiting.defined() ? waiting : tensor; }
    bool is_parameter() const { return kind == graph::ValueKind::kParameter; }
    /// The rank of the pipeline that owns it; none before partitioning, when all have it.
    std::optional<int> owner() const;
    /// How the ranks that have some of it divide it: `sharding` without the owner.
    comm::Sharding within_owner() const { return sharding.only<comm::Blocks, comm::Range>(); }
    /// How `tensor` lies on ranks that have it: in blocks, of which replicas have the same.
    comm::Sharding part() const { return sharding.only<comm::Blocks>(); }
    /// Whether the ranks of a tensor-parallel group divide it.
    bool is_divided() const { return !part().cuts.empty(); }
    /// The tensor that this rank updates: it or its piece, undefined where it has none.
    const at::Tensor& updated() const { return piece ? piece->tensor() : tensor; }
    /// The name of that, such as "fc.weight[0:64]" of a piece; empty where it has none.
    std::string name_on(int rank) const;
    /// The partition that the program pinned it to.
    std::optional<int> pin() const;
    /// The program's setting for dividing it among a tensor-parallel group.
    std::optional<TensorParallelismMark> tensor_parallelism_mark() const;
    /// Its sizes before ranks divided it.
    std::vector<int64_t> whole_sizes() const;
    /// Its index among the parameters that sharded data parallelism divides, if it is there.
    std::optional<size_t> shard() const;
    /// Whether its memory is also another entry's, which cannot be divided or freed alone.
    bool shares_storage_in(const ParameterTable& table) const;
  };

  /// A tensor of a model that is wrapped; a further name of one that is there is an alias. Throws
  /// `UsageError` if another tensor has the name.
  void add(graph::ValueKind kind, const std::string& name, const at::Tensor& tensor);
  /// A parameter that holds its part already: by its module, or by the first step that divides it.
  /// Throws `UsageError` where it is no part of `split`, or is divided in another way already.
  void divide(const std::string& name, const nn::ParameterSplit& split, const core::Axis& over,
              bool captured_whole);
  /// In the first step: `values` as `Entry::waiting`, for a tensor that has been given another
  /// storage.
  void set_waiting(const std::string& name, at::Tensor values);
  /// In the first step; `rank` is the owner's position along the axis of the pipeline.
  void set_owner(const std::string& name, const core::Axis& over, int rank, std::string reason);
  /// When the replicas along an axis have divided parameters.
  void set_pieces(const std::shared_ptr<dp::ParameterPieces>& pieces, const core::Axis& over);
  /// When a graph is found to write a buffer.
  void set_written(const std::string& name);

  /// The entry of this very tensor (by identity), or nullptr.
  const Entry* find(const at::Tensor& tensor) const;
  /// The entry of a tensor of a model; throws `UsageError` if it was registered after its module
  /// was wrapped.
  const Entry& at(const at::Tensor& tensor) const;
  /// The entry with this name or alias; throws `UsageError` if there is none.
  const Entry& at(const std::string& name) const;
  /// All entries in the order they were added.
  const std::vector<Entry>& entries() const { return entries_; }
  /// Those that a tensor-parallel group divides.
  std::vector<const Entry*> divided() const;
  bool any_divided() const { return !divided().empty(); }

  /// The table that captures need: kinds, names and tensors.
  const graph::TensorTable& tensors() const { return tensors_; }

 private:
  size_t index_of(const graph::TensorTable::Entry& registered) const {
    return static_cast<size_t>(&registered - tensors_.entries().data());
  }
  Entry& entry_of(const std::string& name) { return entries_[index_of(tensors_.at(name))]; }

  graph::TensorTable tensors_;
  std::vector<Entry> entries_;  // in the order of those of `tensors_`
};

}  // namespace smp::runtime
