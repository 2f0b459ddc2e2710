// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/catalog.h"

#include <c10/util/string_view.h>

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <tuple>
#include <utility>

#include "checkpoint/file.h"
#include "checkpoint/index.h"
#include "checkpoint/save_lock.h"
#include "checkpoint/writer.h"
#include "core/check.h"
#include "core/text.h"

namespace smp::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr const char* kPartial = "_partial";
constexpr const char* kRemoved = ".removed";
constexpr const char* kNewest = "newest";

/// Whether a folder is one that a save or a removal renames on its way.
bool is_transient(const std::string& name) {
  return c10::ends_with(name, temporary_folder("")) || c10::ends_with(name, replaced_folder("")) ||
         c10::ends_with(name, lock_file("")) || c10::ends_with(name, kRemoved);
}

/// None if the index cannot be read.
std::optional<int64_t> step_of(const std::string& index) {
  try {
    return Index::from_text(read_file(index), index).run.step;
  } catch (const CheckpointError&) {
    return std::nullopt;
  }
}

/// A folder without an index is no checkpoint, or an unfinished one.
std::vector<CatalogEntry> list(const std::string& folder) {
  std::vector<CatalogEntry> entries;
  for (const auto& item : fs::directory_iterator(folder)) {
    const fs::path index = item.path() / kIndexFile;
    const std::string name = item.path().filename().string();
    const bool finished = item.is_directory() && fs::exists(index) && !is_transient(name);
    if (finished) entries.push_back({name, step_of(index)});
  }
  std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) {
    return std::tie(a.step, a.name) < std::tie(b.step, b.name);
  });
  return entries;
}

/// Whether a removal has left `folder`, which takes the index last, though disks may keep other
/// files longer. Everything else that has such a name stays.
bool is_half_removed(const fs::path& folder) {
  if (!fs::is_directory(fs::symlink_status(folder))) return false;
  const fs::path index = folder / kIndexFile;
  const auto status = fs::symlink_status(index);
  if (!fs::exists(status)) return has_only_parts(folder.string());
  try {
    return fs::is_regular_file(status) && names_format(read_file(index.string()));
  } catch (const CheckpointError&) {
    return false;
  }
}

/// Renames first, so that no program takes a half removed folder for a checkpoint.
void remove_from_catalog(const fs::path& checkpoint) {
  const fs::path removed = checkpoint.string() + kRemoved;
  const bool is_free = !fs::exists(fs::symlink_status(removed)) || is_half_removed(removed);
  SMP_CHECK_WITH(CheckpointError, is_free, "cannot remove old checkpoint \"",
                 core::printable(checkpoint.string()), "\": expected at \"",
                 core::printable(removed.string()),
                 "\" nothing, or what a removal has left, got something else. Move it away.");
  remove_checkpoint(removed.string());
  fs::rename(checkpoint, removed);
  remove_checkpoint(removed.string());
}

}  // namespace

std::string folder_name(const std::string& tag, bool partial) {
  const bool usable = !tag.empty() && tag.find('/') == std::string::npos && tag != "." &&
                      tag != ".." && tag != kNewest && !is_partial(tag) && !is_transient(tag);
  SMP_CHECK_WITH(
      UsageError, usable, "\"", core::printable(tag),
      "\" cannot be the tag of a checkpoint: expected the name of a folder, not \"newest\""
      " and without the endings _partial, .tmp, .replaced, .lock and .removed.");
  return partial ? tag + kPartial : tag;
}

bool is_partial(const std::string& name) { return c10::ends_with(name, kPartial); }

std::vector<CatalogEntry> list_checkpoints(const std::string& folder) {
  return on_disk(c10::str("cannot list the checkpoints in \"", core::printable(folder), "\""),
                 [&] { return list(folder); });
}

void update_newest(const std::string& folder, const std::string& name) {
  write_file(folder + "/" + kNewest, name + "\n");
  sync_folder(folder);
}

std::string read_newest(const std::string& folder) {
  const std::string path = folder + "/" + kNewest;
  std::error_code ignored;
  SMP_CHECK_WITH(CheckpointError, fs::exists(path, ignored), "\"", core::printable(folder),
                 "\" has no record of its newest checkpoint: expected a file \"",
                 core::printable(path), "\", got none. ",
                 has_checkpoint(folder, {}, /*partial=*/true)
                     ? "Name the checkpoint to load."
                     : "It holds no checkpoint: name another folder, or begin a run without one, "
                       "LoadOptions().begin_anew(true).");
  std::string name = read_file(path);
  name.erase(name.find_last_not_of(" \r\n") + 1);
  SMP_CHECK_WITH(CheckpointError, !name.empty() && name.find('/') == std::string::npos, "\"",
                 core::printable(path), "\" is damaged: expected the name of a folder, got \"",
                 core::printable(name), "\". Name the checkpoint to load.");
  return name;
}

std::string find_checkpoint(const std::string& folder, const std::optional<std::string>& tag,
                            bool partial) {
  if (tag) return folder_name(*tag, partial);
  std::string name = read_newest(folder);
  SMP_CHECK_WITH(CheckpointError, is_partial(name) == partial, "the newest checkpoint in \"",
                 core::printable(folder), "\" is \"", core::printable(name), "\": expected a ",
                 partial ? "partial" : "full", " one, got a ", partial ? "full" : "partial",
                 " one. Give the tag of the checkpoint to load, or set "
                 "partial to ",
                 partial ? "false." : "true.");
  return name;
}

bool has_checkpoint(const std::string& folder, const std::optional<std::string>& tag,
                    bool partial) {
  const std::string wanted = tag ? folder_name(*tag, partial) : "";
  const fs::path newest = fs::path(folder) / kNewest;
  return on_disk(c10::str("cannot look for checkpoints in \"", core::printable(folder), "\""), [&] {
    if (!fs::exists(folder)) return false;
    if (tag) {
      const std::string path = folder + "/" + wanted;
      return fs::exists(path) || fs::exists(replaced_folder(path));
    }
    return fs::exists(newest) || !list(folder).empty();
  });
}

void keep_partial(const std::string& folder, size_t count, const std::string& current) {
  on_disk(c10::str("cannot remove old checkpoints in \"", core::printable(folder), "\""), [&] {
    std::vector<std::string> names;
    for (const CatalogEntry& entry : list(folder)) {
      const bool counts = entry.step && is_partial(entry.name) && entry.name != current;
      if (counts) names.push_back(entry.name);
    }
    for (size_t i = 0; i + count < names.size() + 1; ++i)
      remove_from_catalog(fs::path(folder) / names[i]);
    std::vector<fs::path> left;  // half removed
    for (const auto& item : fs::directory_iterator(folder)) {
      const bool is_named_so =
          c10::ends_with(item.path().string(), kPartial + std::string(kRemoved));
      if (is_named_so && is_half_removed(item.path())) left.push_back(item.path());
    }
    for (const fs::path& removed : left) remove_checkpoint(removed.string());
  });
}

}  // namespace smp::checkpoint
