#include "checkpoint/reader.h"

#include <cinttypes>
#include <cstdio>
#include <filesystem>
#include <system_error>

#include "checkpoint/file.h"
#include "checkpoint/writer.h"
#include "smp/core/error.h"

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
  const bool unfinished = fs::exists(temporary_folder(path), ignored);
  detail::fail<CheckpointError>(
      "cannot load checkpoint \"", path, "\": expected a folder with ", kIndexFile, ", got ",
      exists ? "no such file in it" : "no such folder",
      unfinished ? c10::str(" (an unfinished save is at \"", temporary_folder(path), "\")") : "",
      ". Check the path or use another checkpoint.");
}

std::string hex(uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof(text), "%016" PRIx64, value);
  return text;
}

}  // namespace

Reader::Reader(const std::string& path) : folder_(find_folder(path)) {
  const std::string file = folder_ + "/" + kIndexFile;
  index_ = Index::from_text(read_file(file), file);
  check_files();
}

void Reader::check_files() const {
  std::string problems;
  for (const auto& [name, expected] : index_.files) {
    std::error_code error;
    const uint64_t size = fs::file_size(folder_ + "/" + name, error);
    if (error) {
      problems += c10::str("\n  ", name, ": expected ", expected, " bytes, got no file");
    } else if (size != expected) {
      problems += c10::str("\n  ", name, ": expected ", expected, " bytes, got ", size);
    }
  }
  SMP_CHECK_WITH(CheckpointError, problems.empty(), "checkpoint \"", folder_,
                 "\" is incomplete:", problems, "\nUse another checkpoint.");
}

at::Tensor Reader::read_model(const std::string& name) {
  const TensorEntry* entry = index_.find_model(name);
  SMP_CHECK_WITH(CheckpointError, entry != nullptr, "checkpoint \"", folder_,
                 "\" has no model tensor \"", name, "\". Check the name against its ", kIndexFile,
                 ".");
  const auto alias = index_.aliases.find(name);
  return read(alias == index_.aliases.end() ? name : alias->second, *entry);
}

at::Tensor Reader::read_optimizer(const std::string& name) {
  const auto found = index_.optimizer_tensors.find(name);
  SMP_CHECK_WITH(CheckpointError, found != index_.optimizer_tensors.end(), "checkpoint \"",
                 folder_, "\" has no optimizer tensor \"", name, "\". Check the name against its ",
                 kIndexFile, ".");
  return read(name, found->second);
}

at::Tensor Reader::read(const std::string& name, const TensorEntry& entry) {
  std::unique_ptr<SafetensorsReader>& shard = shards_[entry.file];
  if (!shard) {
    shard = std::make_unique<SafetensorsReader>(folder_ + "/" + entry.file);
  }
  at::Tensor tensor = shard->read(name);
  SMP_CHECK_WITH(CheckpointError, spec_of(tensor) == entry.spec, "checkpoint \"", folder_,
                 "\": tensor \"", name, "\" of ", entry.file, ": expected ",
                 to_string(entry.spec), " as in ", kIndexFile, ", got ",
                 to_string(spec_of(tensor)), ". Use another checkpoint.");
  const uint64_t hash = hash_of(tensor);
  SMP_CHECK_WITH(CheckpointError, hash == entry.hash, "checkpoint \"", folder_, "\": tensor \"",
                 name, "\" of ", entry.file, " is damaged: expected xxh64 ", hex(entry.hash),
                 ", got ", hex(hash), ". Use another checkpoint.");
  return tensor;
}

std::string read_newest(const std::string& folder) {
  const std::string path = folder + "/newest";
  std::error_code ignored;
  SMP_CHECK_WITH(CheckpointError, fs::exists(path, ignored), "\"", folder,
                 "\" has no record of its newest checkpoint: expected a file \"", path,
                 "\", got none. Name the checkpoint to load.");
  std::string name = read_file(path);
  while (!name.empty() && (name.back() == '\n' || name.back() == '\r' || name.back() == ' ')) {
    name.pop_back();
  }
  return name;
}

}  // namespace smp::checkpoint
