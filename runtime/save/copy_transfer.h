// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/file.h"
#include "comm/communicator.h"
#include "runtime/save/copy_holders.h"

// Copies that several holders keep together: from holder to holder, and back after one is lost.
namespace smp::runtime {

/// A file that one rank has and another is to have, under the same name in its own folder.
struct FileTransfer {
  std::string file;
  uint64_t size = 0;
  int from = 0;
  int to = 0;

  bool operator==(const FileTransfer& other) const {
    return file == other.file && size == other.size && from == other.from && to == other.to;
  }
};

/// The files that each rank has written, with their sizes.
using WrittenFiles = std::vector<std::map<std::string, uint64_t>>;

/// Lists the files in the ranks' parts of the index, which are empty where nothing was written.
WrittenFiles written_files(const std::vector<std::string>& parts);

/// The transfers when all ranks have written, and the files that a holder then has.
std::vector<FileTransfer> transfers_to_next(const CopyHolders& holders,
                                            const WrittenFiles& written);
std::set<std::string> files_of_holder(const CopyHolders& holders, int holder,
                                      const WrittenFiles& written);

/// Sends and receives the files that concern this rank, in its `folder`, a few MiB of each pair of
/// ranks at a time. All ranks give the same transfers; one whose files fail goes on sending, as far
/// as it can, and receiving, and throws a CheckpointError at the end: then its files on other ranks
/// are of no use. Collective over the ranks of `group`.
void transfer_files(comm::Communicator& group, const std::vector<FileTransfer>& transfers,
                    const std::string& folder, checkpoint::Medium medium);

/// Brings every holder to the newest copy of which all files exist: holders send each other the
/// missing ones. Returns the steps that are in it; nothing if there is none, and then nothing has
/// changed. Throws a CheckpointError on all ranks if files cannot be read or written; then a
/// later call may try again. Collective over `world`.
std::optional<int64_t> collect_copy(comm::Communicator& world, const CopyHolders& holders);

}  // namespace smp::runtime
