// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "graph/graph.h"

namespace smp::graph {

/// The axis of a value that has none.
constexpr int kNoAxis = -1;

/// The axis along which a tensor of several microbatches is longer than that of one: the only
/// dimension in which the sizes differ, and by `factor`; else `kNoAxis`.
int axis_between(const TensorMeta& one, const TensorMeta& many, int factor);

/// One operator as it was called on one microbatch and on several. "Batched" is a value that on
/// several microbatches is the concatenation, along its axis, of its values on each; all other
/// values are the same for every microbatch.
class BatchedCall {
 public:
  /// `axes`: per value the axis if it is batched, else `kNoAxis`.
  BatchedCall(const Graph& one, const Graph& many, const std::vector<int>& axes, size_t index,
              int factor);

  const Operator& op() const { return one_.operators[index_]; }
  /// The name without its overload, and without the underscore of an operator that works in place.
  const std::string& base_name() const { return base_name_; }
  std::string name() const { return op().name(); }

  /// The defined tensors among the arguments, and the defined results.
  const std::vector<ValueId>& tensors() const { return tensors_; }
  const std::vector<ValueId>& results() const { return results_; }
  /// The tensors of the argument of that name; none if it is undefined.
  std::vector<ValueId> tensors(const char* argument) const;
  /// The integers of a constant argument: of a number one, of None nothing.
  std::optional<std::vector<int64_t>> integers(const char* argument) const;
  /// A constant argument is true (or a number that is not 0).
  bool is_set(const char* argument) const;

  bool batched(ValueId value) const { return axes_[value] != kNoAxis; }
  int axis(ValueId value) const { return axes_[value]; }
  /// The axis of a result, by its sizes.
  int result_axis(ValueId result) const;
  int dim(ValueId value) const { return static_cast<int>(meta(value).sizes.size()); }
  /// On one microbatch.
  const TensorMeta& meta(ValueId value) const { return one_.values[value].meta; }

  /// Broadcast against a tensor that is batched `from_end` (-1: the last dimension), the value is
  /// batched there too, or one row that all samples share.
  bool broadcasts(ValueId value, int from_end) const;
  /// Tensors that are not batched have the same sizes on one and on several microbatches. (One that
  /// counts the samples, `arange(batch)`, has not.)
  bool shares_alike() const;
  /// Nothing but sizes differs between the constants on one and on several microbatches, or numbers
  /// that no shape depends on.
  bool same_constants() const;

 private:
  const Argument* find(const char* argument) const;

  const Graph& one_;
  const Graph& many_;
  const std::vector<int>& axes_;
  const size_t index_;
  const int factor_;
  std::string base_name_;
  std::vector<ValueId> tensors_;
  std::vector<ValueId> results_;
};

/// True if the operator is known to do the same on several microbatches as on each: every result on
/// several is the concatenation, along its axis, of the results on each, and so is every gradient
/// that it sends back to a batched argument. Random operators draw other numbers.
bool treats_samples_apart(const BatchedCall& call);

}  // namespace smp::graph
