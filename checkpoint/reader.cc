// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/reader.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>

#include "checkpoint/file.h"
#include "checkpoint/writer.h"
#include "core/check.h"
#include "core/text.h"

namespace smp::checkpoint {
namespace {

namespace fs = std::filesystem;

bool has_index(const std::string& folder) {
  std::error_code ignored;  // "cannot tell" is "no"
  return fs::exists(folder + "/" + kIndexFile, ignored);
}

/// Reading renames nothing: a save by another process may be between its two renames just now.
std::string find_folder(const std::string& path) {
  std::error_code ignored;
  if (has_index(path)) {
    return path;
  }
  const bool exists = fs::exists(path, ignored);
  if (!exists && has_index(replaced_folder(path))) {
    return replaced_folder(path);
  }
  if (has_index(path)) return path;  // renamed while this looked elsewhere
  const bool unfinished = fs::exists(temporary_folder(path), ignored);
  core::fail<CheckpointError>("cannot load checkpoint \"", core::printable(path),
                              "\": expected a folder with ", kIndexFile, ", got ",
                              exists ? "no such file in it" : "no such folder",
                              unfinished ? c10::str(" (an unfinished save is at \"",
                                                    core::printable(temporary_folder(path)), "\")")
                                         : "",
                              ". Check the path or use another checkpoint.");
}

/// A tensor of a file.
using Place = std::pair<std::string, const TensorEntry*>;

/// The tensors of a checkpoint by file, in the order of their names.
std::vector<Place> places(const Index& index, Reader::Section section) {
  std::vector<Place> result;
  for (const auto& [name, entry] : index.model) result.emplace_back(name, &entry);
  if (section == Reader::Section::kAll) {
    for (const auto& [name, entry] : index.optimizer_tensors) result.emplace_back(name, &entry);
  }
  std::stable_sort(result.begin(), result.end(),
                   [](const Place& a, const Place& b) { return a.second->file < b.second->file; });
  return result;
}

/// The `part`-th of `parts` shares of about the same number of bytes.
std::vector<Place> share(const std::vector<Place>& all, int part, int parts) {
  uint64_t total = 0;
  for (const Place& place : all) total += byte_size(place.second->spec);
  std::vector<Place> mine;
  uint64_t begin = 0;
  for (const Place& place : all) {
    if (share_of(begin, total, parts) == part) mine.push_back(place);
    begin += byte_size(place.second->spec);
  }
  return mine;
}

constexpr size_t kShownLines = 10;
constexpr int kMostSaves = 20;  // that may replace a checkpoint while it is being opened

/// Where the checkpoint `path` is and the text of its index, of which each save has another; or
/// empty.
std::string state_at(const std::string& path) {
  try {
    const std::string folder = find_folder(path);
    return folder + "\n" + read_file(folder + "/" + kIndexFile);
  } catch (const CheckpointError&) {
    return "";
  }
}

}  // namespace

Reader::Reader(const std::string& path) {
  for (int saves = 0;; ++saves) {
    const std::string before = state_at(path);
    const auto is_replaced = [&] { return saves < kMostSaves && state_at(path) != before; };
    try {
      open(path);
      if (!is_replaced()) return;
    } catch (const CheckpointError&) {
      if (!is_replaced()) throw;
    }
  }
}

void Reader::open(const std::string& path) {
  folder_ = find_folder(path);
  const std::string file = folder_ + "/" + kIndexFile;
  index_ = Index::from_text(read_file(file), file);
  open_files();
}

void Reader::open_files() {
  files_.clear();
  allow_open_files(index_.files.size());
  std::vector<std::string> problems;
  for (const auto& [name, expected] : index_.files) {
    std::error_code error;
    const uint64_t size = fs::file_size(folder_ + "/" + name, error);
    if (error || size != expected) {
      problems.push_back(c10::str(core::printable(name), ": expected ", expected, " bytes, got ",
                                  error ? "no file" : std::to_string(size)));
    } else {
      files_[name] = std::make_shared<FileReader>(folder_ + "/" + name);
    }
  }
  SMP_CHECK_WITH(CheckpointError, problems.empty(), "checkpoint \"", core::printable(folder_),
                 "\" is incomplete:", core::indented(problems), "\nUse another checkpoint.");
}

at::Tensor Reader::read_model(const std::string& name) {
  const TensorEntry* entry = index_.find_model(name);
  SMP_CHECK_WITH(CheckpointError, entry != nullptr, "checkpoint \"", core::printable(folder_),
                 "\" has no model tensor \"", core::printable(name),
                 "\". Check the name against its ", kIndexFile, ".");
  const auto alias = index_.aliases.find(name);
  return read(alias == index_.aliases.end() ? name : alias->second, *entry);
}

at::Tensor Reader::read_optimizer(const std::string& name) {
  const auto found = index_.optimizer_tensors.find(name);
  SMP_CHECK_WITH(CheckpointError, found != index_.optimizer_tensors.end(), "checkpoint \"",
                 core::printable(folder_), "\" has no optimizer tensor \"", core::printable(name),
                 "\". Check the name against its ", kIndexFile, ".");
  return read(name, found->second);
}

/// Compares the tensors that a file says it holds with those that the index says it does: another
/// file may have its name.
void Reader::check_header(const std::string& file, const SafetensorsReader& shard) const {
  size_t expected = 0;
  for (const auto* entries : {&index_.model, &index_.optimizer_tensors}) {
    for (const auto& [name, entry] : *entries) {
      if (entry.file != file) continue;
      ++expected;
      const auto found = shard.entries().find(name);
      const bool is_there = found != shard.entries().end();
      SMP_CHECK_WITH(CheckpointError, is_there && found->second.spec == entry.spec, "\"",
                     core::printable(folder_ + "/" + file),
                     "\" is not the file that was written: expected tensor \"",
                     core::printable(name), "\" of ", to_string(entry.spec), " as in ", kIndexFile,
                     ", got ", is_there ? to_string(found->second.spec) : "none",
                     ". Use another checkpoint.");
    }
  }
  SMP_CHECK_WITH(CheckpointError, expected == shard.entries().size(), "\"",
                 core::printable(folder_ + "/" + file),
                 "\" is not the file that was written: expected ", expected, " tensors as in ",
                 kIndexFile, ", got ", shard.entries().size(), ". Use another checkpoint.");
}

SafetensorsReader& Reader::shard(const std::string& file) {
  std::unique_ptr<SafetensorsReader>& shard = shards_[file];
  if (!shard) {
    auto opened = std::make_unique<SafetensorsReader>(files_.at(file));
    check_header(file, *opened);
    shard = std::move(opened);
  }
  return *shard;
}

at::Tensor Reader::read(const std::string& name, const TensorEntry& entry) {
  at::Tensor tensor = shard(entry.file).read(name);
  const uint64_t hash = hash_of(tensor);
  SMP_CHECK_WITH(CheckpointError, hash == entry.hash, "checkpoint \"", core::printable(folder_),
                 "\": tensor \"", core::printable(name), "\" of ", core::printable(entry.file),
                 " is damaged: expected xxh64 ", hash_text(entry.hash), ", got ", hash_text(hash),
                 ". Use another checkpoint.");
  return tensor;
}

std::vector<std::string> Reader::find_damage(Section section, int part, int parts) {
  std::vector<std::string> damage;
  std::string unreadable;  // the file whose header is wrong
  for (const auto& [name, entry] : share(places(index_, section), part, parts)) {
    if (entry->file == unreadable) continue;
    try {
      const uint64_t hash = shard(entry->file).hash(name);
      if (hash != entry->hash) {
        damage.push_back(c10::str(core::printable(entry->file), ": tensor \"",
                                  core::printable(name), "\": expected xxh64 ",
                                  hash_text(entry->hash), ", got ", hash_text(hash)));
      }
    } catch (const CheckpointError& error) {
      unreadable = entry->file;
      damage.push_back(
          c10::str(core::printable(entry->file), ": ", core::text_without_prefix(error)));
    }
  }
  return damage;
}

void check_undamaged(const std::string& path, const std::vector<std::string>& damage) {
  if (damage.empty()) return;
  core::fail<CheckpointError>("checkpoint \"", core::printable(path),
                              "\" is damaged:", core::indented(damage, kShownLines),
                              "\nNothing was loaded. Use another checkpoint.");
}

}  // namespace smp::checkpoint
