#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/flat_hash_map.h>

#include <cstdint>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "smp/nn/parameter_split.h"

namespace smp::runtime {

/// The parameters that the ranks of a tensor-parallel group have divided among them: each rank's
/// tensor holds its part, and this knows the whole. The same names and splits, in the same order,
/// on all ranks. Internal.
class DividedParameters {
 public:
  struct Entry {
    std::string name;  ///< full, as in the table of tensors
    at::Tensor tensor;
    nn::ParameterSplit split;
    /// The user's code was captured on the whole, and is shown the whole's sizes when it is
    /// captured or guarded again.
    bool captured_whole = false;
  };

  /// Adds a parameter that holds a part already, and is not there yet.
  void add(const std::string& name, const at::Tensor& tensor, const nn::ParameterSplit& split,
           bool captured_whole);

  /// How a parameter is divided; null: it is whole.
  const nn::ParameterSplit* find(const at::Tensor& tensor) const;
  /// The sizes of the whole of a parameter.
  std::vector<int64_t> whole_sizes(const at::Tensor& tensor) const;

  const std::vector<Entry>& entries() const { return entries_; }
  bool empty() const { return entries_.empty(); }

 private:
  std::vector<Entry> entries_;
  ska::flat_hash_map<const c10::TensorImpl*, size_t> by_impl_;
};

/// The whole of what has the sizes of a part on each rank of a tensor-parallel group, on all of
/// them. Collective over the group.
at::Tensor join_on_all(comm::Communicator& group, const nn::ParameterSplit& split,
                       const at::Tensor& part);

/// The same on rank `root` of the group, undefined on the others.
at::Tensor join_on(int root, comm::Communicator& group, const nn::ParameterSplit& split,
                   const at::Tensor& part);

}  // namespace smp::runtime
