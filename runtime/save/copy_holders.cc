// SPDX-License-Identifier: Apache-2.0
#include "runtime/save/copy_holders.h"

#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <map>
#include <system_error>
#include <utility>

#include "core/check.h"

namespace smp::runtime {
namespace {

/// Only its user can read it. False, and `errno`, if there can be none.
bool make_folder(const std::string& folder) {
  std::error_code ignored;  // an error that matters fails next
  std::filesystem::create_directories(std::filesystem::path(folder).parent_path(), ignored);
  return ::mkdir(folder.c_str(), 0700) == 0 || errno == EEXIST;
}

/// A file that a rank makes in its folder for others to see. Its name is new, so that no file
/// system has remembered that there is none.
class Token {
 public:
  Token(const std::string& folder, int rank) : path_(c10::str(folder, "/seen-", rank, "-XXXXXX")) {
    const int fd = make_folder(folder) ? mkstemp(path_.data()) : -1;
    if (fd < 0) {
      error_ = c10::str(folder, ": ", std::strerror(errno));
    } else {
      ::close(fd);
    }
  }
  ~Token() {
    if (error_.empty()) ::unlink(path_.c_str());
  }
  Token(const Token&) = delete;
  Token& operator=(const Token&) = delete;

  std::string name() const { return std::filesystem::path(path_).filename().string(); }
  /// Why it could not be made; empty: it was.
  const std::string& error() const { return error_; }

 private:
  std::string path_, error_;
};

/// For each rank, of which ranks it sees the tokens in its folder: "+" or "-" for each.
std::vector<std::string> who_sees_whom(const std::string& folder, comm::Communicator& world) {
  const Token token(folder, world.rank());
  const auto errors = comm::all_gather_bytes(world, token.error());
  for (size_t rank = 0; rank < errors.size(); ++rank) {
    SMP_CHECK_WITH(ConfigError, errors[rank].empty(), "config key \"recovery\": rank ", rank,
                   " cannot write to ", errors[rank], ". Set ", core::kRecoveryDirVariable,
                   " to a folder that the ranks of each host can write to");
  }
  std::string seen;
  for (const std::string& name : comm::all_gather_bytes(world, token.name())) {
    seen += ::access((folder + "/" + name).c_str(), F_OK) == 0 ? '+' : '-';
  }
  return comm::all_gather_bytes(world, seen);  // all have looked
}

}  // namespace

CopyHolders::CopyHolders(std::string folder, int rank, const std::vector<std::string>& seen,
                         checkpoint::Medium medium)
    : folder_(std::move(folder)), rank_(rank), medium_(medium) {
  std::map<std::string, int> holder_that_sees;
  for (const std::string& what : seen) {
    const int holder = holder_that_sees.emplace(what, count()).first->second;
    if (holder == count()) ranks_.emplace_back();
    ranks_[holder].push_back(static_cast<int>(holder_of_.size()));
    holder_of_.push_back(holder);
  }
  for (size_t a = 0; a < seen.size(); ++a) {
    for (size_t b = 0; b < seen.size(); ++b) {
      SMP_CHECK_WITH(ConfigError, (seen[a][b] == '+') == (holder_of_[a] == holder_of_[b]),
                     "config key \"recovery\": rank ", a, " sees files of rank ", b,
                     " in the folder for copies, but not those of all ranks that rank ", b,
                     " sees there. Set ", core::kRecoveryDirVariable,
                     " to a folder that either all ranks see, or those of one host");
    }
  }
}

CopyHolders CopyHolders::find(const std::string& folder, comm::Communicator& world) {
  const auto seen = who_sees_whom(folder, world);
  const bool on_disk = checkpoint::medium_of(folder) == checkpoint::Medium::kDisk;
  const auto media = comm::all_gather_bytes(world, on_disk ? "disk" : "");
  const bool all_in_memory = std::count(media.begin(), media.end(), "") == world.size();
  return CopyHolders(folder, world.rank(), seen,
                     all_in_memory ? checkpoint::Medium::kMemory : checkpoint::Medium::kDisk);
}

int CopyHolders::number() const {
  const auto& ranks = ranks_[mine()];
  return static_cast<int>(std::find(ranks.begin(), ranks.end(), rank_) - ranks.begin());
}

int CopyHolders::keeper_of(int rank) const {
  const auto& mine = ranks_[of(rank)];
  const auto& next = ranks_[(of(rank) + 1) % count()];
  const auto place = std::find(mine.begin(), mine.end(), rank) - mine.begin();
  return next[static_cast<size_t>(place) % next.size()];
}

}  // namespace smp::runtime
