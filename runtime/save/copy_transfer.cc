// SPDX-License-Identifier: Apache-2.0
#include "runtime/save/copy_transfer.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "checkpoint/index.h"
#include "checkpoint/writer.h"
#include "core/check.h"
#include "core/log.h"
#include "runtime/together.h"
#include "smp/work.h"

namespace smp::runtime {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kPieceBytes = uint64_t{4} << 20;
constexpr comm::Tag kTag = 0;

/// A few bytes of a file.
struct Piece {
  const FileTransfer* of = nullptr;
  uint64_t offset = 0;
  uint64_t size = 0;

  bool is_last() const { return offset + size == of->size; }
};

/// Pieces by sender and receiver, in the order of sending.
using Streams = std::map<std::pair<int, int>, std::vector<Piece>>;

Streams streams_of(int rank, const std::vector<FileTransfer>& transfers) {
  Streams streams;
  for (const FileTransfer& transfer : transfers) {
    if (transfer.from != rank && transfer.to != rank) continue;
    auto& pieces = streams[{transfer.from, transfer.to}];
    for (uint64_t offset = 0; offset < transfer.size; offset += kPieceBytes) {
      pieces.push_back({&transfer, offset, std::min(kPieceBytes, transfer.size - offset)});
    }
  }
  return streams;
}

/// The files of this rank's streams. After an error nothing more is read or written.
class StreamFiles {
 public:
  StreamFiles(std::string folder, checkpoint::Medium medium)
      : folder_(std::move(folder)), medium_(medium) {}

  void read(const Piece& piece, const at::Tensor& into) {
    work_.attempt([&] {
      auto& file = readers_[piece.of->to];
      if (piece.offset == 0) file = std::make_unique<checkpoint::FileReader>(path_of(piece));
      file->read(piece.offset, into.mutable_data_ptr(), piece.size);
    });
  }

  void write(const Piece& piece, const at::Tensor& bytes) {
    work_.attempt([&] {
      auto& file = writers_[piece.of->from];
      if (piece.offset == 0) {
        file = std::make_unique<checkpoint::FileWriter>(path_of(piece), medium_);
      }
      file->append(bytes.const_data_ptr(), piece.size);
      if (piece.is_last()) file->commit();
    });
  }

  /// Throws the error.
  void finish() const { work_.finish(); }

 private:
  std::string path_of(const Piece& piece) const { return folder_ + "/" + piece.of->file; }

  const std::string folder_;
  const checkpoint::Medium medium_;
  std::map<int, std::unique_ptr<checkpoint::FileReader>> readers_;  // readers by receiver
  std::map<int, std::unique_ptr<checkpoint::FileWriter>> writers_;  // writers by sender
  FileWork work_;
};

/// The pieces of that number of all streams, at once.
void transfer_round(comm::Communicator& group, const Streams& streams, size_t round,
                    StreamFiles& files) {
  std::vector<WorkPtr> works;
  std::vector<std::pair<Piece, at::Tensor>> arriving;
  for (const auto& [ranks, pieces] : streams) {
    if (round >= pieces.size()) continue;
    const Piece& piece = pieces[round];
    const auto bytes = at::empty({static_cast<int64_t>(piece.size)}, at::TensorOptions(at::kByte));
    if (ranks.first == group.rank()) {
      files.read(piece, bytes);
      works.push_back(group.isend(bytes, ranks.second, kTag));
    } else {
      works.push_back(group.irecv(bytes, ranks.first, kTag));
      arriving.emplace_back(piece, bytes);
    }
  }
  for (const WorkPtr& work : works) work->wait();
  for (const auto& [piece, bytes] : arriving) files.write(piece, bytes);
}

/// A copy in a holder's folder, or the part of one there.
struct HeldCopy {
  std::string folder;
  bool is_replaced = false;  // there is a newer one in the same holder
  std::string checksum;      // checksum of the index: the copy's name
  int64_t step = 0;
  std::map<std::string, uint64_t> files;  // files of the whole copy
  std::set<std::string> missing;          // here

  bool has(const std::string& file) const { return missing.count(file) == 0; }
};

/// The copies in a first rank's folder. Unreadable ones count as missing.
std::vector<HeldCopy> look(const CopyHolders& holders) {
  std::vector<HeldCopy> held;
  if (!holders.is_first()) return held;
  for (const std::string& folder : {holders.copy(), checkpoint::replaced_folder(holders.copy())}) {
    try {
      const std::string path = folder + "/" + checkpoint::kIndexFile;
      const auto index = checkpoint::Index::from_text(checkpoint::read_file(path), path);
      HeldCopy copy{folder, folder != holders.copy(), index.checksum, index.run.step, index.files,
                    {}};
      for (const auto& [name, size] : index.files) {
        std::error_code error;
        if (fs::file_size(folder + "/" + name, error) != size || error) copy.missing.insert(name);
      }
      held.push_back(std::move(copy));
    } catch (const CheckpointError&) {
      continue;
    }
  }
  return held;
}

std::string to_text(const std::vector<HeldCopy>& held) {
  auto json = nlohmann::json::array();
  for (const HeldCopy& copy : held) {
    json.push_back(
        {copy.folder, copy.is_replaced, copy.checksum, copy.step, copy.files, copy.missing});
  }
  return json.dump();
}

std::vector<HeldCopy> from_text(const std::string& text) {
  std::vector<HeldCopy> held;
  for (const auto& item : nlohmann::json::parse(text)) {
    held.push_back({item.at(0), item.at(1), item.at(2), item.at(3), item.at(4), item.at(5)});
  }
  return held;
}

using ByHolder = std::vector<const HeldCopy*>;  // null: it has nothing of that copy

/// The same copy, in each holder; of two that it has, the one that lacks less.
ByHolder of_copy(const std::string& checksum, const std::vector<std::vector<HeldCopy>>& all) {
  ByHolder found(all.size(), nullptr);
  for (size_t holder = 0; holder < all.size(); ++holder) {
    for (const HeldCopy& copy : all[holder]) {
      const HeldCopy*& best = found[holder];
      const bool is_better = best == nullptr || copy.missing.size() < best->missing.size();
      if (copy.checksum == checksum && is_better) best = &copy;
    }
  }
  return found;
}

/// The first holder that has a file, or -1.
int holder_with(const ByHolder& copies, const std::string& file) {
  const auto found = std::find_if(copies.begin(), copies.end(), [&](const HeldCopy* copy) {
    return copy != nullptr && copy->has(file);
  });
  return found == copies.end() ? -1 : static_cast<int>(found - copies.begin());
}

/// Files that no holder has.
std::vector<std::string> lost_files(const ByHolder& copies,
                                    const std::map<std::string, uint64_t>& files) {
  std::vector<std::string> lost;
  for (const auto& [file, size] : files) {
    if (holder_with(copies, file) < 0) lost.push_back(file);
  }
  return lost;
}

/// All copies, the newest first: those that some holder has ended last, then those that all have
/// replaced. A job may go back to an earlier checkpoint, so steps tell only those apart that some
/// holders have ended and others not yet.
std::vector<const HeldCopy*> by_age(const std::vector<std::vector<HeldCopy>>& all) {
  std::set<std::string> current;
  std::vector<const HeldCopy*> copies;
  for (const auto& held : all) {
    for (const HeldCopy& copy : held) {
      copies.push_back(&copy);
      if (!copy.is_replaced) current.insert(copy.checksum);
    }
  }
  const auto age = [&](const HeldCopy* copy) {
    return std::pair(current.count(copy->checksum), copy->step);
  };
  std::stable_sort(copies.begin(), copies.end(),
                   [&](const auto* a, const auto* b) { return age(a) > age(b); });
  return copies;
}

/// The newest copy of which all files are left somewhere.
const HeldCopy* newest_whole(const std::vector<std::vector<HeldCopy>>& all, bool tells) {
  std::set<std::string> told;
  for (const HeldCopy* copy : by_age(all)) {
    const auto lost = lost_files(of_copy(copy->checksum, all), copy->files);
    if (lost.empty()) return copy;
    if (!tells || !told.insert(copy->checksum).second) continue;
    core::log_warning(c10::str("the copy in memory of step ", copy->step, " is lost: no host has ",
                               lost.front(),
                               lost.size() > 1 ? c10::str(" and ", lost.size() - 1, " more") : "",
                               " of its ", copy->files.size(), " files"));
  }
  return nullptr;
}

std::vector<FileTransfer> transfers_of_missing(const CopyHolders& holders, const ByHolder& copies,
                                               const std::map<std::string, uint64_t>& files) {
  std::vector<FileTransfer> transfers;
  for (int to = 0; to < holders.count(); ++to) {
    for (const auto& [file, size] : files) {
      if (copies[to] != nullptr && copies[to]->has(file)) continue;
      const int from = holder_with(copies, file);
      transfers.push_back({file, size, holders.first(from), holders.first(to)});
    }
  }
  return transfers;
}

constexpr const char* kCannotRestore = "cannot restore the copy in memory";

/// The folder in which a first rank puts together its own files and those that it is sent.
std::string begin_collecting(const std::string& path, const HeldCopy* mine) {
  if (mine != nullptr) return mine->folder;
  const std::string folder = checkpoint::temporary_folder(path);
  checkpoint::on_disk(kCannotRestore, [&] {
    fs::remove_all(folder);
    fs::create_directories(folder);
  });
  return folder;
}

/// Gives it the copy's name.
void end_collecting(const std::string& folder, const std::string& path) {
  if (folder == path) return;
  checkpoint::on_disk(kCannotRestore, [&] {
    checkpoint::remove_checkpoint(path);
    fs::rename(folder, path);
  });
}

/// Removes received files; their senders may have failed to read them.
void forget(const std::vector<FileTransfer>& transfers, int rank, const std::string& folder) {
  std::error_code ignored;
  for (const FileTransfer& transfer : transfers) {
    if (transfer.to == rank) fs::remove(folder + "/" + transfer.file, ignored);
  }
}

}  // namespace

WrittenFiles written_files(const std::vector<std::string>& parts) {
  WrittenFiles written;
  for (const std::string& part : parts) {
    written.emplace_back();
    if (!part.empty()) {
      written.back() = checkpoint::Index::from_text(part, "a part of a copy").files;
    }
  }
  return written;
}

std::vector<FileTransfer> transfers_to_next(const CopyHolders& holders,
                                            const WrittenFiles& written) {
  std::vector<FileTransfer> transfers;
  for (size_t rank = 0; rank < written.size(); ++rank) {
    const int from = static_cast<int>(rank);
    for (const auto& [file, size] : written[rank]) {
      transfers.push_back({file, size, from, holders.keeper_of(from)});
    }
  }
  return transfers;
}

std::set<std::string> files_of_holder(const CopyHolders& holders, int holder,
                                      const WrittenFiles& written) {
  std::set<std::string> files;
  for (const int other : {holder, holders.before(holder)}) {
    for (const int rank : holders.ranks(other)) {
      for (const auto& [file, size] : written[static_cast<size_t>(rank)]) files.insert(file);
    }
  }
  return files;
}

void transfer_files(comm::Communicator& group, const std::vector<FileTransfer>& transfers,
                    const std::string& folder, checkpoint::Medium medium) {
  const Streams streams = streams_of(group.rank(), transfers);
  StreamFiles files(folder, medium);
  size_t rounds = 0;
  for (const auto& [ranks, pieces] : streams) rounds = std::max(rounds, pieces.size());
  for (size_t round = 0; round < rounds; ++round) {
    alone(group, [&] { transfer_round(group, streams, round, files); });
  }
  files.finish();
}

std::optional<int64_t> collect_copy(comm::Communicator& world, const CopyHolders& holders) {
  const auto texts = together(world, [&] { return to_text(look(holders)); });
  std::vector<std::vector<HeldCopy>> all;
  for (int holder = 0; holder < holders.count(); ++holder) {
    all.push_back(from_text(texts[holders.first(holder)]));
  }
  const HeldCopy* newest = newest_whole(all, world.rank() == 0);
  if (newest == nullptr) return std::nullopt;
  const ByHolder copies = of_copy(newest->checksum, all);
  const auto transfers = transfers_of_missing(holders, copies, newest->files);
  const HeldCopy* mine = copies[holders.mine()];
  const auto has_index = std::find_if(copies.begin(), copies.end(),
                                      [](const HeldCopy* copy) { return copy != nullptr; });
  const int source = holders.first(static_cast<int>(has_index - copies.begin()));
  std::string folder, index;
  together(world, [&] {
    if (holders.is_first()) folder = begin_collecting(holders.copy(), mine);
    if (world.rank() == source)
      index = checkpoint::read_file(folder + "/" + checkpoint::kIndexFile);
    return "";
  });
  index = comm::broadcast_bytes(world, index, source);
  try {
    together_for_long(world, [&] {
      transfer_files(world, transfers, folder, holders.medium());
      return "";
    });
  } catch (const CheckpointError&) {
    forget(transfers, world.rank(), folder);
    throw;
  }
  together(world, [&] {
    if (!holders.is_first()) return "";
    if (mine == nullptr) checkpoint::write_file(folder + "/" + checkpoint::kIndexFile, index);
    end_collecting(folder, holders.copy());
    return "";
  });
  return newest->step;
}

}  // namespace smp::runtime
