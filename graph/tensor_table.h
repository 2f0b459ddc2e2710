// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/flat_hash_map.h>

#include <map>
#include <string>
#include <vector>

#include "core/node.h"
#include "graph/graph.h"

namespace smp::graph {

/// The parameters and buffers that a capture knows by name. A tensor registered under several
/// names (a tied weight) is one entry, under the name that came first.
class TensorTable {
 public:
  struct Entry {
    ValueKind kind;
    std::string name;
    at::Tensor tensor;
    std::vector<std::string> aliases;  ///< the other names it is registered under
    core::NodePtr end = nullptr;       ///< end of its history: `autograd::grad` needs one alive
  };

  /// Adds a parameter or buffer. Throws `UsageError` if another tensor has the name.
  void add(ValueKind kind, const std::string& name, const at::Tensor& tensor);

  /// Must be called when a registered tensor was given another storage.
  void renew_storage(const at::Tensor& tensor);

  /// The entry of this very tensor (by identity), or nullptr.
  const Entry* find(const at::Tensor& tensor) const;
  /// The first entry whose storage the tensor shares, or nullptr.
  const Entry* find_storage(const at::Tensor& tensor) const;
  /// The entry with this name (or alias); throws if there is none.
  const Entry& at(const std::string& name) const;

  /// All entries in the order they were added.
  const std::vector<Entry>& entries() const { return entries_; }

 private:
  std::vector<Entry> entries_;
  ska::flat_hash_map<const c10::TensorImpl*, size_t> by_impl_;
  ska::flat_hash_map<const c10::StorageImpl*, size_t> by_storage_;
  std::map<std::string, size_t> by_name_;
};

}  // namespace smp::graph
