// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "graph/graph.h"
#include "graph/shapes.h"

namespace smp::graph {

/// A tensor by its place in a storage of a recording; or a tensor that has data.
struct DeferredRef {
  int storage = -1;      ///< index of the storage; -1: `known`
  TensorMeta meta;       ///< the rest is for a tensor on a storage of the recording
  int64_t offset = 0;    ///< in elements
  at::Tensor known;      ///< may be undefined
  uint32_t version = 0;  ///< version of `known`, when the operator was called
};

/// An operator that was called during deferred construction and is run when its results are needed.
struct DeferredOperator {
  explicit DeferredOperator(c10::OperatorHandle handle) : handle(std::move(handle)) {}

  c10::OperatorHandle handle;
  torch::jit::Stack arguments;      ///< arguments of the call; tensors are taken from `refs`
  std::vector<DeferredRef> refs;    ///< one for each tensor in the arguments, in order
  c10::SmallVector<int, 1> writes;  ///< storages that it changes or makes
  /// Which result (counted over lists too) lies on which new storage.
  c10::SmallVector<std::pair<int, int>, 1> makes;
  /// libtorch's default type when it was called, if it decides the type of results from integers.
  std::optional<at::ScalarType> default_dtype;
  bool random = false;
  at::Tensor state;   ///< the CPU's default generator before the call; undefined in fast mode
  uint64_t seed = 0;  ///< in fast mode, once it is known
  bool has_seed = false;
};

/// The operators that made the tensors of deferred construction, and those tensors' storages.
/// Storages hold no data; each is made on its own by replaying the operators that led to it, from
/// the recorded states of the generator. Each keeps the recording alive until it has data.
class Recording : public std::enable_shared_from_this<Recording> {
 public:
  /// Gives the value of a tensor.
  using Source = std::function<at::Tensor()>;

  /// A storage without data that will have `nbytes` bytes, and its number.
  std::pair<int, c10::Storage> add_storage(size_t nbytes);
  size_t nbytes(int storage) const { return storages_[storage].nbytes; }
  /// Adds an operator, which was called after all that were added before.
  void add(DeferredOperator op) { operators_.push_back(std::move(op)); }
  /// The tensor's place, or a copy of it (a reference to it, above `copied_bytes`) if it has data.
  DeferredRef ref(const at::Tensor& tensor, int64_t copied_bytes);

  /// The value of a tensor of this recording, in new memory. Throws `UsageError` if a tensor that
  /// an operator read has been changed since.
  at::Tensor evaluate(const at::Tensor& tensor) const;
  /// Gives the storage of a tensor its data.
  void materialize(const at::Tensor& tensor);
  /// Gives data to all storages that are still in use, but for those of `except`.
  void materialize_all(const std::vector<at::Tensor>& except);
  /// The tensor's value is to be the result of `source` when it is needed, not of the recording.
  void set_source(const at::Tensor& tensor, Source source);

  /// Fast mode: keys random operators by the first of the named tensors that depends on them and by
  /// their number in its history.
  void assign_seeds(const std::vector<std::pair<std::string, at::Tensor>>& named, uint64_t seed);

  /// Claims this recording for a maker: the first that asks, until it is gone. Returns whether it
  /// is `maker`. Thread-safe.
  bool is_made_by(const std::shared_ptr<const void>& maker);

  /// All operators, one a line, with their constants: equal on ranks that construct the same model.
  /// The generator's states are left out.
  std::string describe() const;
  /// The recorded states of the generator as one byte string, and back.
  std::string states() const;
  void set_states(const std::string& bytes);

 private:
  struct StorageInfo {
    size_t nbytes;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    /// Values set since, in order, and where in the storage.
    std::vector<std::pair<DeferredRef, Source>> sources;
  };
  using Storages = std::map<int, c10::Storage>;

  std::vector<int> history(int storage) const;
  c10::Storage make(int storage) const;
  void replay(const DeferredOperator& op, Storages& storages) const;
  void materialize(int storage);

  std::vector<DeferredOperator> operators_;
  std::vector<StorageInfo> storages_;
  std::mutex maker_mutex_;
  std::weak_ptr<const void> maker_;
};

/// The recording that the tensor's storage belongs to and its number there; null and -1 for a
/// tensor that has data, or never had any.
std::pair<std::shared_ptr<Recording>, int> recording_of(const at::Tensor& tensor);

/// True for a tensor of deferred construction that has no data yet.
bool is_deferred(const at::Tensor& tensor);

/// How large the tensor's storage is, or will be once it has data.
size_t storage_bytes(const at::Tensor& tensor);

/// The tensor, or its value in new memory if it is deferred.
at::Tensor value_of(const at::Tensor& tensor);

}  // namespace smp::graph
