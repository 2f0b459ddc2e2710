// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace smp::checkpoint {

// A folder of checkpoints, as `smp::save_checkpoint` keeps them:
//
//     step_100_partial/     a partial checkpoint, written by all ranks, with the optimizer
//     step_100/             a full one: the model as one file
//     newest                the name of the one that was saved last

/// The name of the subfolder of a checkpoint. Throws UsageError for a tag that cannot be one.
std::string folder_name(const std::string& tag, bool partial);

/// True for the name of a partial checkpoint's subfolder.
bool is_partial(const std::string& name);

/// A checkpoint of a folder.
struct CatalogEntry {
  std::string name;             ///< name of the subfolder
  std::optional<int64_t> step;  ///< training steps; none if its index cannot be read
};

/// The finished checkpoints of `folder`, by the step that their index names and by name; first
/// those whose index cannot be read. Throws CheckpointError if the folder cannot be read.
std::vector<CatalogEntry> list_checkpoints(const std::string& folder);

/// Records in the file `newest` of `folder` that its newest checkpoint is the subfolder `name`.
/// Throws CheckpointError.
void update_newest(const std::string& folder, const std::string& name);

/// The name of the newest checkpoint in `folder`, as `update_newest` recorded it. Throws
/// CheckpointError if there is no such record.
std::string read_newest(const std::string& folder);

/// Whether there is something for `find_checkpoint` to find, and be it damaged: the checkpoint of
/// `tag`, else any. Throws CheckpointError if the folder exists and cannot be read.
bool has_checkpoint(const std::string& folder, const std::optional<std::string>& tag, bool partial);

/// The subfolder to load: that of `tag`, else the newest. Throws CheckpointError if the newest is
/// not of the kind that is wanted.
std::string find_checkpoint(const std::string& folder, const std::optional<std::string>& tag,
                            bool partial);

/// Removes partial checkpoints of `folder`, those of the first steps first, until there are
/// `count`; never `current`, and none whose index cannot be read, which do not count. A crash
/// leaves each one whole or gone. Throws CheckpointError.
void keep_partial(const std::string& folder, size_t count, const std::string& current);

}  // namespace smp::checkpoint
