// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/index.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "checkpoint/file.h"
#include "core/check.h"
#include "core/json.h"
#include "core/json_reader.h"
#include "core/text.h"

namespace smp::checkpoint {
namespace {

using core::JsonReader;
using nlohmann::json;
using nlohmann::ordered_json;

constexpr const char* kFormat = "smp-checkpoint";
constexpr size_t kLineWidth = 160;
constexpr int64_t kMaxGradientShards = int64_t{1} << 30;
constexpr const char* kChecksumKey = "\"checksum\": \"";
constexpr size_t kChecksumDigits = 16;
constexpr const char* kNoChecksum = "0000000000000000";

/// Where the digits of the checksum are; none if they are not there. The key stands before any text
/// that others chose.
size_t checksum_position(const std::string& text) {
  const size_t key = text.find(kChecksumKey);
  if (key == std::string::npos) return key;
  const size_t digits = key + std::strlen(kChecksumKey);
  return digits + kChecksumDigits <= text.size() ? digits : std::string::npos;
}

ordered_json to_json(const TensorEntry& entry) {
  return {{"dtype", dtype_name(entry.spec.dtype)},
          {"shape", entry.spec.shape},
          {"file", entry.file},
          {"xxh64", hash_text(entry.hash)}};
}

ordered_json to_json(const std::map<std::string, TensorEntry>& entries) {
  ordered_json result = ordered_json::object();
  for (const auto& [name, entry] : entries) {
    result[name] = to_json(entry);
  }
  return result;
}

std::string label(const ordered_json& parent, const std::string& key) {
  return parent.is_object() ? ordered_json(key).dump() + ": " : "";
}

std::string one_line(const ordered_json& value) {
  if (!value.is_structured()) {
    return value.dump();
  }
  std::string out;
  for (const auto& [key, element] : value.items()) {
    out += (out.empty() ? "" : ", ") + label(value, key) + one_line(element);
  }
  return value.is_object() ? "{" + out + "}" : "[" + out + "]";
}

void append_pretty(const ordered_json& value, size_t indent, size_t column, std::string& out) {
  const std::string line = one_line(value);
  if (!value.is_structured() || column + line.size() <= kLineWidth) {
    out += line;
    return;
  }
  const std::string margin(indent + 2, ' ');
  out += line.front();
  const char* separator = "\n";
  for (const auto& [key, element] : value.items()) {
    const std::string name = label(value, key);
    out += separator + margin + name;
    append_pretty(element, indent + 2, margin.size() + name.size(), out);
    separator = ",\n";
  }
  out += "\n" + std::string(indent, ' ') + line.back();
}

/// Indented JSON in which whatever fits into 160 columns stays on one line.
std::string pretty(const ordered_json& value) {
  std::string text;
  append_pretty(value, 0, 0, text);
  return text + "\n";
}

[[noreturn]] void fail_in(const std::string& file, const std::string& place,
                          const std::string& problem) {
  core::fail<CheckpointError>("\"", core::printable(file), "\" is malformed at ", place, ": ",
                              problem, ". Use another checkpoint.");
}

std::vector<int64_t> sizes_of(const JsonReader& node) {
  std::vector<int64_t> sizes;
  for (const JsonReader& element : node.elements()) sizes.push_back(element.integer(0));
  return sizes;
}

TensorSpec parse_spec(const JsonReader& node) {
  const std::string dtype = node.at("dtype").text();
  TensorSpec spec{at::kFloat, sizes_of(node.at("shape"))};
  try {
    spec.dtype = dtype_from_name(dtype);
    byte_size(spec);
  } catch (const CheckpointError& error) {
    node.fail(core::text_without_prefix(error));
  }
  return spec;
}

TensorEntry parse_entry(const JsonReader& node, const std::map<std::string, uint64_t>& files) {
  TensorEntry entry;
  entry.spec = parse_spec(node);
  const JsonReader file = node.at("file");
  entry.file = file.text();
  file.expect(files.count(entry.file) == 1, "a file listed under \"files\"");
  const JsonReader hash = node.at("xxh64");
  const std::string digits = hash.text();
  hash.expect(
      digits.size() == 16 && digits.find_first_not_of("0123456789abcdef") == std::string::npos,
      "16 hexadecimal digits");
  entry.hash = std::stoull(digits, nullptr, 16);
  return entry;
}

void parse_files(const JsonReader& node, Index& index) {
  for (const auto& [name, size] : node.members()) {
    // A name with a slash could point out of the folder.
    const bool plain = !name.empty() && name.find('/') == std::string::npos && name != "..";
    node.expect(plain, "plain file names");
    index.files[name] = size.count();
  }
}

void check_name(const std::string& name, const JsonReader& node) {
  if (name.size() <= kLongestName) return;
  node.fail(c10::str("expected a name of at most ", kLongestName, " bytes, got ", name.size()));
}

void parse_model(const JsonReader& node, Index& index) {
  for (const auto& [name, value] : node.members()) {
    check_name(name, value);
    if (const auto same_as = value.find("same_as")) {
      index.aliases[name] = same_as->text();
    } else {
      index.model[name] = parse_entry(value, index.files);
    }
  }
  for (const auto& [alias, name] : index.aliases) {
    node.at(alias).expect(index.model.count(name) == 1, "\"same_as\" to name a stored tensor");
  }
}

/// Checks the optimizer's part as far as this folder knows it: a parameter is in one group.
void check_optimizer(const JsonReader& node) {
  if (const auto state = node.find("state")) state->members();
  const auto groups = node.find("param_groups");
  if (!groups) return;
  std::set<std::string> names;
  for (const JsonReader& group : groups->elements()) {
    group.at("type").text();
    group.at("options").members();
    for (const JsonReader& name : group.at("params").elements()) {
      name.expect(names.insert(name.text()).second, "a parameter that is listed once");
    }
  }
}

RunState parse_run(const JsonReader& root) {
  RunState run;
  const JsonReader step = root.at("step");
  run.step = step.integer();
  step.expect(run.step >= 0, "a non-negative integer");
  const JsonReader shards = root.at("gradient_shards");
  run.gradient_shards = shards.integer();
  shards.expect(1 <= run.gradient_shards && run.gradient_shards <= kMaxGradientShards,
                "a positive number of replicas");
  run.random.seed = root.at("random").at("seed").count();
  for (const auto& [name, calls] : root.at("random").at("step_calls").members()) {
    run.random.step_calls[name] = calls.count();
  }
  run.user_content = root.at("user_content").value();
  const JsonReader extra = root.at("extra");
  extra.expect(extra.value().is_object(), "an object");
  run.extra = extra.value();
  return run;
}

void check_version(const JsonReader& root, const std::string& path) {
  const JsonReader format = root.at("format");
  format.expect(format.value() == kFormat, c10::str("\"", kFormat, "\""));
  const int64_t version = root.at("format_version").integer();
  SMP_CHECK_WITH(CheckpointError, version == kFormatVersion, "cannot read \"",
                 core::printable(path), "\": expected format_version ", kFormatVersion, ", got ",
                 version, ". Read it with the version of smp that wrote it.");
}

void check_checksum(const std::string& text, const std::string& path) {
  const size_t position = checksum_position(text);
  const std::string stamped = position == std::string::npos ? "" : with_checksum(text);
  SMP_CHECK_WITH(CheckpointError, stamped == text, "\"", core::printable(path),
                 "\" is damaged or was edited: expected checksum ",
                 stamped.empty() ? "of 16 digits" : stamped.substr(position, kChecksumDigits),
                 ", got ",
                 stamped.empty() ? "none" : core::printable(text.substr(position, kChecksumDigits)),
                 ". Use another checkpoint.");
}

/// In which order the ranks brought the parameters of a group is the layout's, and no part of the
/// saved state.
json with_sorted_params(json optimizer) {
  if (!optimizer.contains("param_groups")) return optimizer;
  for (json& group : optimizer["param_groups"]) {
    std::sort(group["params"].begin(), group["params"].end());
  }
  return optimizer;
}

template <class Map>
void merge_disjoint(Map& into, const Map& from, const char* what) {
  for (const auto& [name, value] : from) {
    SMP_CHECK_WITH(CheckpointError, into.emplace(name, value).second,
                   "cannot merge the parts of a checkpoint: ", what, " \"", core::printable(name),
                   "\" was written by two ranks. Let only the owner of a tensor write it.");
  }
}

/// Group i of every rank is the same group, of which each rank holds some parameters.
void merge_groups(json& into, const json& from) {
  for (size_t i = 0; i < from.size(); ++i) {
    if (i == into.size()) {
      into.push_back(from[i]);
      continue;
    }
    json ours = into[i];
    json theirs = from[i];
    ours.erase("params");
    theirs.erase("params");
    SMP_CHECK_WITH(CheckpointError, ours == theirs,
                   "cannot merge the parts of a checkpoint: param group ", i,
                   " differs between ranks: ", core::printable(ours.dump()), " and ",
                   core::printable(theirs.dump()), ". Set the same options on every rank.");
    for (const json& name : from[i].at("params")) {
      into[i]["params"].push_back(name);
    }
  }
}

void merge_optimizer(json& into, const json& from) {
  for (const auto& [key, value] : from.items()) {
    if (!into.contains(key)) {
      into[key] = value;
    } else if (key == "param_groups") {
      merge_groups(into[key], value);
    } else if (key == "state") {
      auto& states = into[key].get_ref<json::object_t&>();
      merge_disjoint(states, value.get_ref<const json::object_t&>(), "optimizer state of");
    } else {
      SMP_CHECK_WITH(CheckpointError, into[key] == value,
                     "cannot merge the parts of a checkpoint: optimizer \"", core::printable(key),
                     "\" differs between ranks: ", core::printable(into[key].dump()), " and ",
                     core::printable(value.dump()), ". Give the same on every rank.");
    }
  }
}

}  // namespace

bool names_format(const std::string& text) {
  return text.find(c10::str("\"", kFormat, "\"")) != std::string::npos;
}

std::string with_checksum(std::string text) {
  const size_t position = checksum_position(text);
  SMP_INTERNAL_ASSERT(position != std::string::npos, "the text of an index has no checksum");
  text.replace(position, kChecksumDigits, kNoChecksum);
  Hasher hasher;
  hasher.update(text.data(), text.size());
  return text.replace(position, kChecksumDigits, hash_text(hasher.digest()));
}

const TensorEntry* Index::find_model(const std::string& name) const {
  const auto alias = aliases.find(name);
  const auto found = model.find(alias == aliases.end() ? name : alias->second);
  return found == model.end() ? nullptr : &found->second;
}

std::string Index::to_text(uint64_t most) const {
  ordered_json root;
  root["format"] = kFormat;
  root["format_version"] = kFormatVersion;
  root["checksum"] = kNoChecksum;
  root["step"] = run.step;
  root["gradient_shards"] = run.gradient_shards;
  root["random"] = {{"seed", run.random.seed}, {"step_calls", run.random.step_calls}};
  root["user_content"] = run.user_content;
  root["extra"] = run.extra;
  root["files"] = files;
  ordered_json& tensors = root["model"] = to_json(model);
  for (const auto& [alias, name] : aliases) {
    tensors[alias] = {{"same_as", name}};
  }
  ordered_json& optimizer_section = root["optimizer"] = with_sorted_params(optimizer);
  optimizer_section["tensors"] = to_json(optimizer_tensors);
  try {
    std::string text = with_checksum(pretty(root));
    SMP_CHECK_WITH(CheckpointError, text.size() <= most,
                   "cannot write the index of a checkpoint: "
                   "expected at most ",
                   most, " bytes of names, options and user_content, got ", text.size(),
                   ". Keep large values in tensors.");
    return text;
  } catch (const json::exception& error) {
    core::fail<CheckpointError>("cannot write the index of a checkpoint: expected UTF-8 text in ",
                                "names and in user_content, got: ", error.what());
  }
}

Index Index::from_text(const std::string& text, const std::string& path) {
  const json parsed = core::parse_untrusted(text);
  SMP_CHECK_WITH(CheckpointError, parsed.is_object(), "\"", core::printable(path),
                 "\" is malformed: expected a JSON object with each key once, got ", text.size(),
                 " bytes that are none. Use another checkpoint.");
  const JsonReader root(parsed, path, fail_in);
  check_version(root, path);
  check_checksum(text, path);
  Index index;
  index.checksum = root.at("checksum").text();
  index.run = parse_run(root);
  parse_files(root.at("files"), index);
  parse_model(root.at("model"), index);
  for (const auto& [name, value] : root.at("optimizer").at("tensors").members()) {
    check_name(name, value);
    index.optimizer_tensors[name] = parse_entry(value, index.files);
  }
  check_optimizer(root.at("optimizer"));
  index.optimizer = parsed.at("optimizer");
  index.optimizer.erase("tensors");
  return index;
}

void Index::merge(const Index& part) {
  merge_disjoint(files, part.files, "file");
  merge_disjoint(model, part.model, "tensor");
  merge_disjoint(aliases, part.aliases, "tensor");
  for (const auto& [alias, name] : aliases) {
    SMP_CHECK_WITH(CheckpointError, model.count(alias) == 0,
                   "cannot merge the parts of a checkpoint: tensor \"", core::printable(alias),
                   "\" is written by one rank and tied to \"", core::printable(name),
                   "\" on another. Let only the owner of a tensor write it.");
  }
  merge_optimizer(optimizer, part.optimizer);
  merge_disjoint(optimizer_tensors, part.optimizer_tensors, "optimizer tensor");
}

}  // namespace smp::checkpoint
