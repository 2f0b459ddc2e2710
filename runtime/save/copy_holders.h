// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "checkpoint/file.h"
#include "comm/communicator.h"
#include "core/restart.h"

namespace smp::runtime {

/// The ranks that keep a job's copies (`smp::keep_copy`): a *holder* is the ranks that see one
/// folder, those of a host, or all where hosts share a file system. Holders are numbered by their
/// lowest ranks. Where there are several, each keeps the files of its own ranks and of the holder
/// before it, so that the loss of one loses nothing. Internal.
class CopyHolders {
 public:
  /// `folder` is that of this rank, `rank`; `seen[r]` has a character for each rank, '+' if rank r
  /// sees its files. Throws a `ConfigError` if the ranks that see each other do not see the same.
  CopyHolders(std::string folder, int rank, const std::vector<std::string>& seen,
              checkpoint::Medium medium);
  /// Finds the holders of the ranks of `world`, each of which gives its folder
  /// (`core::kRecoveryDirVariable`), which is made where it is missing. Throws a `ConfigError` on
  /// all ranks if one cannot write there, or as above. Collective.
  static CopyHolders find(const std::string& folder, comm::Communicator& world);

  const std::string& folder() const { return folder_; }
  /// The checkpoint in it.
  std::string copy() const { return core::kept_copy_path(folder_); }

  /// The medium of all folders; on a disk if one does.
  checkpoint::Medium medium() const { return medium_; }

  int count() const { return static_cast<int>(ranks_.size()); }
  /// This rank's.
  int mine() const { return of(rank_); }
  int of(int rank) const { return holder_of_[rank]; }
  /// Ascending.
  const std::vector<int>& ranks(int holder) const { return ranks_[holder]; }
  /// The first rank of a holder begins and ends its copies, and notes how far the job has come.
  int first(int holder) const { return ranks_[holder].front(); }
  bool is_first() const { return rank_ == first(mine()); }
  /// This rank's number among those of its holder.
  int number() const;

  int before(int holder) const { return (holder + count() - 1) % count(); }
  /// The rank of the next holder that keeps the files of `rank`, too.
  int keeper_of(int rank) const;

 private:
  std::string folder_;
  const int rank_;
  checkpoint::Medium medium_;
  std::vector<int> holder_of_;           // holder of each rank
  std::vector<std::vector<int>> ranks_;  // ranks of each holder
};

}  // namespace smp::runtime
