#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>

#include "checkpoint/index.h"
#include "checkpoint/safetensors.h"

namespace smp::checkpoint {

/// An open checkpoint folder. Tensors are read one at a time, by logical name, on the CPU, and
/// their hashes are compared with the index. Not thread-safe.
class Reader {
 public:
  /// Opens the checkpoint `path`; if a save crashed while it was replacing `path`, the previous
  /// checkpoint. Throws CheckpointError if it is missing, its index is malformed or of another
  /// version, or files are missing or of another size (one error lists them all).
  explicit Reader(const std::string& path);

  const Index& index() const { return index_; }

  /// The folder that is read.
  const std::string& folder() const { return folder_; }

  /// A model tensor by any of its names. Throws CheckpointError if there is none of this name
  /// or its bytes are not those that were written.
  at::Tensor read_model(const std::string& name);

  /// An optimizer tensor by "parameter/field". Throws like `read_model`.
  at::Tensor read_optimizer(const std::string& name);

 private:
  at::Tensor read(const std::string& name, const TensorEntry& entry);
  void check_files() const;

  std::string folder_;
  Index index_;
  std::map<std::string, std::unique_ptr<SafetensorsReader>> shards_;  // opened on first use
};

/// The name of the newest checkpoint in `folder`, as `update_newest` recorded it. Throws
/// CheckpointError if there is no such record.
std::string read_newest(const std::string& folder);

}  // namespace smp::checkpoint
