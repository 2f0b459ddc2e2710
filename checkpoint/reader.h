// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/index.h"
#include "checkpoint/safetensors.h"

namespace smp::checkpoint {

/// An open checkpoint folder. Tensors are read one at a time, by logical name, on the CPU, and
/// their hashes are compared with the index. All its files are open, so a save that replaces it
/// meanwhile, of this job or another, changes nothing here. Not thread-safe.
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

  /// Which of the tensors `find_damage` looks at.
  enum class Section { kModel, kAll };

  /// Compares the bytes of the stored tensors with the index, through a buffer of a few MiB:
  /// returns the damage, one line for each file header and tensor, which begins with the file's
  /// name; empty if there is none. Each of `parts` ranks that call it looks at an equal share of
  /// the bytes.
  std::vector<std::string> find_damage(Section section, int part = 0, int parts = 1);

 private:
  at::Tensor read(const std::string& name, const TensorEntry& entry);
  SafetensorsReader& shard(const std::string& file);
  void check_header(const std::string& file, const SafetensorsReader& shard) const;
  void open(const std::string& path);
  void open_files();

  std::string folder_;
  Index index_;
  std::map<std::string, std::shared_ptr<const FileReader>> files_;
  std::map<std::string, std::unique_ptr<SafetensorsReader>> shards_;  // those that were read
};

/// Throws one CheckpointError that shows the lines of `find_damage`, if there are any; `path` is
/// the checkpoint's.
void check_undamaged(const std::string& path, const std::vector<std::string>& damage);

}  // namespace smp::checkpoint
