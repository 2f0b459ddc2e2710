// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/index.h"
#include "checkpoint/save_lock.h"

namespace smp::checkpoint {

/// A model tensor to write; `aliases` are the other names of a tied one.
struct NamedTensor {
  std::string name;
  at::Tensor tensor;
  std::vector<std::string> aliases;
};

/// The contribution of one rank to a checkpoint. Every tensor is given by exactly one rank.
struct Shard {
  std::vector<NamedTensor> model;
  /// The optimizer of this rank's parameters, see `Index::optimizer`.
  nlohmann::json optimizer = nlohmann::json::object();
  std::map<std::string, at::Tensor> optimizer_tensors;  ///< Tensors by "parameter/field".
};

/// Writes a checkpoint folder from several ranks that share a file system. The caller puts a
/// barrier between the phases and carries the parts to the committing rank:
///
///     Writer writer("checkpoints/step_100");
///     if (first) writer.begin();
///     barrier();
///     part = writer.write_shard(i, n, shard);        // every rank that has something to write
///     if (first) writer.commit(gathered_parts, run);
///
/// Nothing under the final name changes before `commit`, and `commit` replaces an existing
/// checkpoint by renames only, so a crash anywhere leaves the previous one loadable (`Reader`
/// looks at the moved-aside folder too).
///
/// One in memory that is replaced stays, and the next one is written over it: to have the memory
/// costs more than to fill it.
class Writer {
 public:
  /// `path` is the final name of the folder, or a symbolic link to it. Copies write the same
  /// checkpoint.
  explicit Writer(std::string path);
  /// One that takes `lock`, and leaves it to who else has it when to let go.
  Writer(std::string path, std::shared_ptr<SaveLock> lock, Medium medium = Medium::kDisk);

  /// Phase 1, on one rank: locks the checkpoint until `commit`, `abandon` or the end of the last
  /// copy of this writer, unless a lock was given; removes the leftovers of a crashed save and
  /// makes the temporary folder. Throws CheckpointError, also if another save has the lock, or if
  /// `path`, or an entry with the name of a folder of saves, has anything in it that is no part of
  /// a checkpoint.
  void begin() const;

  /// Phase 2: writes this rank's files, "model-00001-of-00002.safetensors" and the same for
  /// "optimizer", with `shard_id` counted from 0. Returns this rank's part of the index as text.
  /// Throws CheckpointError.
  std::string write_shard(int64_t shard_id, int64_t shard_count, const Shard& shard) const;

  /// After a phase has failed, on one rank: removes the written files, which may have filled the
  /// disk.
  void abandon() const noexcept;

  /// The final name of the folder.
  const std::string& path() const { return path_; }
  Medium medium() const { return medium_; }

  /// Phase 3, on one rank: merges the parts, writes the index last and moves the folder into
  /// place. Throws CheckpointError, and then the previous checkpoint can still be loaded.
  void commit(const std::vector<std::string>& parts, const RunState& run) const;
  /// The same of a checkpoint that lies in several folders, on a rank of each: this one has only
  /// `files` of those in `index`, the text that `index_of` returned on one rank. The checkpoint
  /// before stays, since other folders may not come so far.
  void commit_one_of_several(const std::string& index, const std::set<std::string>& files) const;

  /// The parts as one.
  Index index_of(const std::vector<std::string>& parts, const RunState& run) const;

 private:
  void install(const std::string& index, const std::set<std::string>& files,
               bool keeps_replaced) const;
  void unlock() const noexcept;

  std::string path_;
  Medium medium_;
  bool owns_lock_;
  std::shared_ptr<SaveLock> lock_;
};

/// Phase 2 of a checkpoint that holds the model as one file, "model.safetensors", on one rank,
/// which appends the tensors as it gets hold of them.
class MergedShard {
 public:
  /// `tensors` are the model's, each once; `aliases` gives other names of tied ones. Throws
  /// CheckpointError.
  MergedShard(const Writer& writer, std::vector<NamedSpec> tensors,
              std::map<std::string, std::string> aliases);

  /// The indices of the tensors in the order in which `append` takes them.
  const std::vector<size_t>& order() const { return file_.order(); }
  void append(const at::Tensor& tensor);

  /// Call once, when all tensors were appended. Returns the part for `Writer::commit`.
  std::string finish();

 private:
  std::vector<NamedSpec> tensors_;
  Index part_;
  SafetensorsWriter file_;
  size_t next_ = 0;
};

/// The file that a writer of the checkpoint `path` locks.
std::string lock_of_writer(const std::string& path);

/// Removes a checkpoint, its index last: one that is half removed can be told from other folders.
/// Does nothing where there is none. Throws std::filesystem::filesystem_error.
void remove_checkpoint(const std::string& folder);

/// Whether `folder` is one that has nothing but files that saves make.
bool has_only_parts(const std::string& folder);

/// Where `Writer` assembles a checkpoint that will be called `path`.
std::string temporary_folder(const std::string& path);

/// Where `Writer` keeps the previous checkpoint `path` while it moves a new one into place.
std::string replaced_folder(const std::string& path);

}  // namespace smp::checkpoint
