// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/writer.h"

#include <cstdio>
#include <filesystem>
#include <set>
#include <system_error>
#include <utility>
#include <vector>

#include "checkpoint/file.h"
#include "core/check.h"
#include "core/text.h"

namespace smp::checkpoint {
namespace {

namespace fs = std::filesystem;

std::string cannot_save(const std::string& path) {
  return c10::str("cannot save checkpoint \"", core::printable(path), "\"");
}

/// "dir/name/" would put the temporary folder inside the final one.
std::string without_slash(std::string path) {
  while (path.size() > 1 && path.back() == '/') {
    path.pop_back();
  }
  return path;
}

std::string parent_folder(const std::string& path) {
  const std::string parent = fs::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

/// Makes a folder and those above it, so that a crash does not take them away again.
void create_folders(const std::string& folder) {
  if (fs::exists(folder)) return;
  const std::string parent = parent_folder(folder);
  create_folders(parent);
  fs::create_directory(folder);
  sync_folder(parent);
}

std::string shard_file(const char* kind, int64_t shard_id, int64_t shard_count) {
  char name[80];
  std::snprintf(name, sizeof(name), "%s-%05lld-of-%05lld.safetensors", kind,
                static_cast<long long>(shard_id + 1), static_cast<long long>(shard_count));
  return name;
}

/// The folder that `path` names, which may be a link to it.
std::string resolve(const std::string& path) {
  std::error_code ignored;
  return fs::is_symlink(path, ignored) ? fs::weakly_canonical(path).string() : path;
}

/// Whether saves make files of that name.
bool is_part(const fs::directory_entry& entry) {
  fs::path name = entry.path().filename();
  if (name.extension() == ".tmp") name = name.stem();
  return entry.symlink_status().type() == fs::file_type::regular &&
         (name == kIndexFile || name.extension() == ".safetensors");
}

/// Whether `folder` is of a format that versions of this library write.
bool has_our_index(const fs::path& folder) {
  const fs::path index = folder / kIndexFile;
  return fs::exists(index) && names_format(read_file(index.string()));
}

/// The content of `folder` that no save has made, in words, or empty. One that is `unfinished` has
/// no index yet.
std::string foreign_content(const std::string& folder, bool unfinished) {
  const auto status = fs::symlink_status(folder);
  if (!fs::exists(status)) return "";
  if (!fs::is_directory(status)) return "something that is no folder";
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (!is_part(entry)) return c10::str("a folder with ", entry.path().filename());
  }
  const bool is_ours = unfinished || fs::is_empty(folder) || has_our_index(folder);
  return is_ours ? "" : c10::str("one without an ", kIndexFile, " of smp");
}

/// Saving removes `folder`, so whatever else has its name must stay.
void check_removable(const std::string& path, const std::string& folder, bool unfinished) {
  const std::string got = foreign_content(folder, unfinished);
  SMP_CHECK_WITH(CheckpointError, got.empty(), cannot_save(path), ": expected at \"",
                 core::printable(folder), "\" a new name or an existing checkpoint, got ", got,
                 ". Choose another path, or remove it first.");
}

/// Removes files of an overwritten checkpoint that this one has not.
void remove_others(const fs::path& folder, const std::set<std::string>& files) {
  std::vector<fs::path> others;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (files.count(entry.path().filename()) == 0) others.push_back(entry.path());
  }
  for (const fs::path& other : others) fs::remove(other);
}

constexpr const char* kMergedFile = "model.safetensors";

using TensorList = std::vector<std::pair<std::string, at::Tensor>>;

/// The other names of tied tensors. Tensor names themselves are checked by the file's writer.
std::map<std::string, std::string> aliases_of(const std::string& path,
                                              const std::vector<NamedTensor>& tensors) {
  std::set<std::string> names;
  for (const NamedTensor& tensor : tensors) {
    names.insert(tensor.name);
  }
  std::map<std::string, std::string> aliases;
  for (const NamedTensor& tensor : tensors) {
    for (const std::string& alias : tensor.aliases) {
      SMP_CHECK_WITH(CheckpointError, names.insert(alias).second, "cannot save checkpoint \"",
                     core::printable(path), "\": \"", core::printable(alias),
                     "\", listed as another name of \"", core::printable(tensor.name),
                     "\", names another tensor too. Give every tensor its own names.");
      aliases[alias] = tensor.name;
    }
  }
  return aliases;
}

/// Writes one file and enters it and its tensors into the index. No tensors, no file.
void write_tensors(const Writer& writer, const std::string& file, const TensorList& tensors,
                   Index& part, std::map<std::string, TensorEntry>& entries) {
  if (tensors.empty()) {
    return;
  }
  const SafetensorsSummary summary =
      write_safetensors(temporary_folder(writer.path()) + "/" + file, tensors, writer.medium());
  part.files[file] = summary.file_size;
  for (size_t i = 0; i < tensors.size(); ++i) {
    entries[tensors[i].first] = {spec_of(tensors[i].second), file, summary.hashes[i]};
  }
}

}  // namespace

MergedShard::MergedShard(const Writer& writer, std::vector<NamedSpec> tensors,
                         std::map<std::string, std::string> aliases)
    : tensors_(std::move(tensors)),
      file_(temporary_folder(writer.path()) + "/" + kMergedFile, tensors_) {
  part_.aliases = std::move(aliases);
}

void MergedShard::append(const at::Tensor& tensor) {
  const auto& [name, spec] = tensors_[order()[next_++]];
  part_.model[name] = {spec, kMergedFile, file_.append(tensor)};
}

std::string MergedShard::finish() {
  part_.files[kMergedFile] = file_.commit();
  return part_.to_text();
}

void remove_checkpoint(const std::string& folder) {
  if (!fs::exists(folder)) return;
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(folder)) files.push_back(entry.path());
  for (const fs::path& file : files) {
    if (file.filename() != kIndexFile) fs::remove_all(file);
  }
  fs::remove_all(folder);
}

bool has_only_parts(const std::string& folder) {
  return fs::is_directory(fs::symlink_status(folder)) &&
         foreign_content(folder, /*unfinished=*/true).empty();
}

std::string temporary_folder(const std::string& path) { return without_slash(path) + ".tmp"; }

std::string replaced_folder(const std::string& path) { return without_slash(path) + ".replaced"; }

std::string lock_of_writer(const std::string& path) {
  return lock_file(resolve(without_slash(path)));
}

Writer::Writer(std::string path) : Writer(std::move(path), nullptr) {}

Writer::Writer(std::string path, std::shared_ptr<SaveLock> lock, Medium medium)
    : path_(resolve(without_slash(std::move(path)))),
      medium_(medium),
      owns_lock_(lock == nullptr),
      lock_(owns_lock_ ? std::make_shared<SaveLock>(lock_file(path_)) : std::move(lock)) {
  SMP_CHECK_WITH(CheckpointError, !path_.empty(), "cannot save a checkpoint: its path is empty.");
}

void Writer::unlock() const noexcept {
  if (owns_lock_) lock_->release();
}

void Writer::begin() const {
  on_disk(cannot_save(path_), [&] {
    create_folders(parent_folder(path_));
    lock_->take(path_);
    const std::string replaced = replaced_folder(path_), temporary = temporary_folder(path_);
    check_removable(path_, replaced, /*unfinished=*/false);
    check_removable(path_, temporary, /*unfinished=*/true);
    if (!fs::exists(path_) && fs::exists(replaced)) {
      fs::rename(replaced, path_);  // a save crashed between its two renames
    }
    check_removable(path_, path_, /*unfinished=*/false);
    fs::remove_all(temporary);
    if (medium_ == Medium::kMemory && fs::exists(replaced)) {
      fs::rename(replaced, temporary);
      fs::remove(fs::path(temporary) / kIndexFile);
    } else {
      fs::create_directory(temporary);
    }
  });
}

std::string Writer::write_shard(int64_t shard_id, int64_t shard_count, const Shard& shard) const {
  SMP_CHECK_WITH(CheckpointError, 0 <= shard_id && shard_id < shard_count,
                 "cannot save checkpoint \"", core::printable(path_),
                 "\": expected a shard id from 0 to ", shard_count - 1, ", got ", shard_id, ".");
  Index part;
  part.aliases = aliases_of(path_, shard.model);
  TensorList model;
  for (const NamedTensor& tensor : shard.model) {
    model.emplace_back(tensor.name, tensor.tensor);
  }
  write_tensors(*this, shard_file("model", shard_id, shard_count), model, part, part.model);
  const TensorList optimizer(shard.optimizer_tensors.begin(), shard.optimizer_tensors.end());
  write_tensors(*this, shard_file("optimizer", shard_id, shard_count), optimizer, part,
                part.optimizer_tensors);
  part.optimizer = shard.optimizer;
  return part.to_text();
}

void Writer::abandon() const noexcept {
  std::error_code ignored;
  fs::remove_all(temporary_folder(path_), ignored);
  unlock();
}

Index Writer::index_of(const std::vector<std::string>& parts, const RunState& run) const {
  Index index;
  for (size_t i = 0; i < parts.size(); ++i) {
    index.merge(Index::from_text(parts[i], c10::str("part ", i, " of checkpoint ", path_)));
  }
  index.run = run;
  return index;
}

void Writer::commit(const std::vector<std::string>& parts, const RunState& run) const {
  const Index index = index_of(parts, run);
  std::set<std::string> files;
  for (const auto& [name, size] : index.files) files.insert(name);
  install(index.to_text(), files, /*keeps_replaced=*/medium_ == Medium::kMemory);
}

void Writer::commit_one_of_several(const std::string& index,
                                   const std::set<std::string>& files) const {
  install(index, files, /*keeps_replaced=*/true);
}

void Writer::install(const std::string& index, const std::set<std::string>& files,
                     bool keeps_replaced) const {
  const std::string folder = temporary_folder(path_);
  on_disk(cannot_save(path_), [&] { remove_others(folder, files); });
  write_file(folder + "/" + kIndexFile, index);
  sync_folder(folder);

  const std::string replaced = replaced_folder(path_);
  on_disk(cannot_save(path_), [&] {
    if (fs::exists(path_)) {
      remove_checkpoint(replaced);
      fs::rename(path_, replaced);
    }
    fs::rename(folder, path_);
  });
  sync_folder(parent_folder(path_));
  if (!keeps_replaced) on_disk(cannot_save(path_), [&] { remove_checkpoint(replaced); });
  unlock();
}

}  // namespace smp::checkpoint
