// SPDX-License-Identifier: Apache-2.0
#include "tools/checkpoint_text.h"

#include <cstdio>
#include <filesystem>
#include <set>
#include <sstream>

#include "checkpoint/catalog.h"
#include "core/check.h"
#include "core/text.h"

namespace smp::tools {
namespace {

using checkpoint::NamedSpec;
using checkpoint::TensorEntry;
using nlohmann::ordered_json;

constexpr size_t kWrittenValue = 4000;  // bytes

std::string mebibytes(uint64_t bytes) {
  char text[40];
  std::snprintf(text, sizeof(text), "%.1f MiB", static_cast<double>(bytes) / (1 << 20));
  return text;
}

uint64_t size_of_files(const checkpoint::Index& index) {
  uint64_t bytes = 0;
  for (const auto& [name, size] : index.files) bytes += size;
  return bytes;
}

std::string newest_in(const std::string& folder) {
  const bool recorded = std::filesystem::exists(folder + "/newest");
  return recorded ? checkpoint::read_newest(folder) : "";
}

ordered_json summary_of(const std::vector<NamedSpec>& tensors) {
  uint64_t elements = 0, bytes = 0;
  std::set<std::string> dtypes;
  for (const auto& [name, spec] : tensors) {
    bytes += checkpoint::byte_size(spec);
    elements += checkpoint::byte_size(spec) / c10::elementSize(spec.dtype);
    dtypes.insert(checkpoint::dtype_name(spec.dtype));
  }
  return {
      {"tensors", tensors.size()}, {"elements", elements}, {"bytes", bytes}, {"dtypes", dtypes}};
}

ordered_json entries_of(const std::map<std::string, TensorEntry>& entries) {
  ordered_json result = ordered_json::object();
  for (const auto& [name, entry] : entries) {
    result[name] = {{"dtype", checkpoint::dtype_name(entry.spec.dtype)},
                    {"shape", entry.spec.shape},
                    {"file", entry.file}};
  }
  return result;
}

ordered_json describe_run(const checkpoint::Index& index) {
  ordered_json result;
  result["step"] = index.run.step;
  result["gradient_shards"] = index.run.gradient_shards;
  result["seed"] = index.run.random.seed;
  result["user_content"] = index.run.user_content;
  result["extra"] = index.run.extra;
  result["files"] = index.files;
  return result;
}

ordered_json describe_optimizer(const checkpoint::Index& index) {
  std::vector<NamedSpec> tensors;
  for (const auto& [name, entry] : index.optimizer_tensors) tensors.emplace_back(name, entry.spec);
  ordered_json result = summary_of(tensors);
  result["param_groups"] = ordered_json::array();
  if (!index.optimizer.contains("param_groups")) return result;
  for (const auto& group : index.optimizer["param_groups"]) {
    result["param_groups"].push_back({{"type", group["type"]},
                                      {"options", group["options"]},
                                      {"params", group["params"].size()}});
  }
  return result;
}

void append(std::ostream& out, const std::string& what, const ordered_json& summary) {
  out << "  " << what << ": " << summary["tensors"] << " tensors, " << summary["elements"]
      << " elements, " << mebibytes(summary["bytes"]);
  for (const auto& dtype : summary["dtypes"]) out << " " << dtype.get<std::string>();
  out << "\n";
}

/// A text as it is, other values as JSON.
std::string shown(const ordered_json& value) {
  return core::printable(value.is_string() ? value.get<std::string>() : value.dump(),
                         kWrittenValue);
}

}  // namespace

std::string list_checkpoints(const std::string& folder) {
  std::ostringstream out;
  const std::string newest = newest_in(folder);
  for (const auto& entry : checkpoint::list_checkpoints(folder)) {
    out << core::printable(entry.name) << ": ";
    try {
      const checkpoint::Reader reader(folder + "/" + entry.name);
      const auto& index = reader.index();
      out << "step " << index.run.step << ", " << mebibytes(size_of_files(index)) << " in "
          << index.files.size() << (index.files.size() == 1 ? " file" : " files") << ", "
          << (index.optimizer.contains("state") ? "model and optimizer" : "model");
    } catch (const CheckpointError& error) {
      out << core::text_without_prefix(error);
    }
    out << (entry.name == newest ? " (newest)\n" : "\n");
  }
  return out.str();
}

ordered_json describe(CheckpointSource& source, bool tensors) {
  ordered_json result;
  result["path"] = source.path();
  result["model"] = summary_of(source.tensors());
  result["model"]["tied"] = source.aliases();
  const checkpoint::Reader* reader = source.checkpoint();
  if (reader == nullptr) {
    if (!tensors) return result;
    for (const auto& [name, spec] : source.tensors()) {
      result["model_tensors"][name] = {{"dtype", checkpoint::dtype_name(spec.dtype)},
                                       {"shape", spec.shape}};
    }
    return result;
  }
  result["optimizer"] = describe_optimizer(reader->index());
  result.update(describe_run(reader->index()));
  if (tensors) {
    result["model_tensors"] = entries_of(reader->index().model);
    result["optimizer_tensors"] = entries_of(reader->index().optimizer_tensors);
  }
  return result;
}

std::string to_text(const ordered_json& description) {
  std::ostringstream out;
  out << shown(description["path"]) << "\n";
  append(out, "model", description["model"]);
  for (const auto& [alias, name] : description["model"]["tied"].items()) {
    out << "    " << core::printable(alias) << " is " << shown(name) << "\n";
  }
  if (description.contains("optimizer")) {
    append(out, "optimizer", description["optimizer"]);
    for (const auto& group : description["optimizer"]["param_groups"]) {
      out << "    " << group["params"] << " parameters, " << shown(group["type"]) << " "
          << shown(group["options"]) << "\n";
    }
    for (const char* key : {"step", "gradient_shards", "seed", "user_content", "extra"}) {
      out << "  " << key << ": " << shown(description[key]) << "\n";
    }
    for (const auto& [name, size] : description["files"].items()) {
      out << "  " << core::printable(name) << ": " << size << " bytes\n";
    }
  }
  for (const char* section : {"model_tensors", "optimizer_tensors"}) {
    if (!description.contains(section)) continue;
    out << "  " << section << ":\n";
    for (const auto& [name, entry] : description[section].items()) {
      out << "    " << core::printable(name) << ": " << shown(entry["dtype"]) << " "
          << shown(entry["shape"]) << (entry.contains("file") ? " in " + shown(entry["file"]) : "")
          << "\n";
    }
  }
  return out.str();
}

}  // namespace smp::tools
