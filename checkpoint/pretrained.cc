// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/pretrained.h"

#include <ATen/ops/cat.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

#include "checkpoint/file.h"
#include "core/check.h"
#include "core/json.h"
#include "core/text.h"

namespace smp::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFile = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

TensorSpec transformed(TensorSpec spec, Transform transform) {
  if (transform == Transform::kTranspose && spec.shape.size() == 2) {
    std::swap(spec.shape[0], spec.shape[1]);
  }
  return spec;
}

at::Tensor transformed(const at::Tensor& values, Transform transform) {
  return transform == Transform::kTranspose && values.dim() == 2 ? values.t() : values;
}

/// Tensors one after the other along their first dimension; nothing if they do not fit each other.
std::optional<TensorSpec> united(const std::vector<TensorSpec>& parts) {
  TensorSpec whole = parts.front();
  for (size_t i = 1; i < parts.size(); ++i) {
    TensorSpec part = parts[i];
    if (part.shape.empty() || whole.shape.empty()) return std::nullopt;
    const int64_t rows = std::exchange(part.shape[0], whole.shape[0]);
    const bool fits = part == whole && rows <= std::numeric_limits<int64_t>::max() - whole.shape[0];
    if (!fits) return std::nullopt;
    whole.shape[0] += rows;
  }
  return whole;
}

at::Tensor united(const std::vector<at::Tensor>& parts) {
  return parts.size() == 1 ? parts.front() : at::cat(parts);
}

/// How many rows they have together, as far as they have any.
int64_t rows_of(const std::vector<TensorSpec>& parts) {
  int64_t rows = 0;
  for (const TensorSpec& part : parts) rows += part.shape.empty() ? 0 : part.shape[0];
  return rows;
}

std::string listed(const std::vector<TensorSpec>& specs) {
  std::vector<std::string> texts;
  for (const TensorSpec& spec : specs) texts.push_back(to_string(spec));
  return c10::Join(", ", texts);
}

/// The map's rule for a tensor of the model: by the first of its names that the files have.
NameMap::Match rule_of(const ExpectedTensor& tensor, const NameMap& names) {
  NameMap::Match rule;
  for (const std::string& name : tensor.names) {
    rule = names.of_ours(name);
    if (!rule.theirs.empty()) break;
  }
  return rule;
}

}  // namespace

std::map<std::string, std::string> parse_weight_map(const std::string& text,
                                                    const std::string& path) {
  const nlohmann::json index = core::parse_untrusted(text);
  const bool has_map =
      index.is_object() && index.contains("weight_map") && index["weight_map"].is_object();
  SMP_CHECK_WITH(CheckpointError, has_map, "\"", core::printable(path),
                 "\" is malformed: expected an object \"weight_map\" with the file of each tensor, "
                 "got none. Fetch the files again.");
  std::map<std::string, std::string> files;
  for (const auto& [name, file] : index["weight_map"].items()) {
    const std::string file_name = file.is_string() ? file.get<std::string>() : "";
    // A name with a slash could point out of the folder.
    const bool is_plain = !file_name.empty() && file_name.find('/') == std::string::npos;
    SMP_CHECK_WITH(CheckpointError, is_plain, "\"", core::printable(path),
                   "\" is malformed: expected the file of tensor \"", core::printable(name),
                   "\" as a plain file name, got ", file.dump(), ". Fetch the files again.");
    files[name] = file_name;
  }
  return files;
}

PretrainedFiles::PretrainedFiles(const std::string& path) : path_(path) {
  std::error_code ignored;
  if (fs::is_regular_file(path, ignored)) {
    open_one(path);
  } else if (fs::exists(path + "/" + kIndex, ignored)) {
    open_all(path + "/" + kIndex);
  } else {
    SMP_CHECK_WITH(CheckpointError, fs::exists(path + "/" + kFile, ignored),
                   "cannot load pretrained files from \"", core::printable(path),
                   "\": expected a file, or a folder with ", kFile, " or ", kIndex,
                   ", got neither. Check the path.");
    open_one(path + "/" + kFile);
  }
}

void PretrainedFiles::open_one(const std::string& file) {
  const auto reader = files_[file] = std::make_shared<SafetensorsReader>(file);
  for (const auto& [name, entry] : reader->entries()) {
    tensors_[name] = entry.spec;
    file_of_[name] = reader.get();
  }
}

void PretrainedFiles::open_all(const std::string& index) {
  for (const auto& [name, file] : parse_weight_map(read_file(index), index)) {
    auto& reader = files_[file];
    if (!reader) reader = std::make_shared<SafetensorsReader>(path_ + "/" + file);
    const auto entry = reader->entries().find(name);
    SMP_CHECK_WITH(CheckpointError, entry != reader->entries().end(), "\"",
                   core::printable(path_ + "/" + file), "\" lacks tensor \"", core::printable(name),
                   "\", which it holds by ", kIndex, ". Fetch the files again.");
    tensors_[name] = entry->second.spec;
    file_of_[name] = reader.get();
  }
}

at::Tensor PretrainedFiles::read(const std::string& name) const {
  return file_of_.at(name)->read(name);
}

uint64_t PretrainedFiles::hash(const std::string& name) const {
  return file_of_.at(name)->hash(name);
}

PretrainedPlan::PretrainedPlan(std::shared_ptr<const PretrainedFiles> files,
                               const std::vector<ExpectedTensor>& expected,
                               const PretrainedOptions& options)
    : files_(std::move(files)), sources_(expected.size()) {
  Problems problems;
  match(expected, options, problems);
  if (options.strict()) {
    for (const std::string& name : report_.unused) {
      problems.emplace(name,
                       "stored, but the model has no tensor of that name or what it is mapped to");
    }
    for (const std::string& name : report_.missing)
      problems.emplace(name, "missing from the files");
  }
  SMP_CHECK_WITH(
      CheckpointError, problems.empty(), "pretrained files \"", core::printable(files_->path()),
      "\" do not fit the model:", list_problems(problems),
      "\nMap stored names to the model's with a NameMap, leave out what is not needed with "
      "its ignore(), or load with strict(false).");
}

void PretrainedPlan::match(const std::vector<ExpectedTensor>& expected,
                           const PretrainedOptions& options, Problems& problems) {
  Indices index_of;
  for (size_t i = 0; i < expected.size(); ++i) {
    for (const std::string& name : expected[i].names) index_of[name] = i;
  }
  for (const auto& [stored, spec] : files_->tensors()) {
    const NameMap::Match rule = options.names().of_theirs(stored);
    bool used = false;
    for (const std::string& ours : rule.ours) {
      const auto found = index_of.find(ours);
      if (found == index_of.end()) continue;
      report_.used.emplace_back(stored, ours);
      take(stored, rule, found->second, problems);
      used = true;
    }
    if (!used) (rule.ours.empty() ? report_.ignored : report_.unused).push_back(stored);
  }
  for (size_t i = 0; i < expected.size(); ++i) {
    if (has(i)) {
      check(i, expected, index_of, options.convert(), problems);
    } else if (!rule_of(expected[i], options.names()).theirs.empty()) {
      report_.missing.push_back(expected[i].names.front());
    }
  }
  std::sort(report_.missing.begin(), report_.missing.end());
}

void PretrainedPlan::take(const std::string& stored, const NameMap::Match& rule, size_t i,
                          Problems& problems) {
  Source& source = sources_[i];
  if (has(i) && source.rule.theirs != rule.theirs) {
    const bool comparable = rule.theirs.size() == 1 && source.stored.size() == 1;
    if (!comparable || files_->hash(source.stored.front()) != files_->hash(stored)) {
      problems.emplace(stored, c10::str("mapped to \"", core::printable(rule.ours.front()),
                                        "\", as is \"", core::printable(source.rule.theirs.front()),
                                        "\", which has other contents"));
    }
    return;
  }
  source.stored.resize(rule.theirs.size());
  source.stored[rule.index] = stored;
  source.rule = rule;
}

TensorSpec PretrainedPlan::stored_spec(const Source& source, const std::string& stored) const {
  return transformed(files_->tensors().at(stored), source.rule.transform);
}

/// Whether the stored tensor has the expected shape and type.
void PretrainedPlan::check(size_t i, const std::vector<ExpectedTensor>& expected,
                           const Indices& index_of, bool convert, Problems& problems) {
  Source& source = sources_[i];
  source.spec = expected[i].spec;
  const std::string name = core::printable(c10::Join("\", \"", source.rule.ours));
  std::vector<TensorSpec> stored, ours;
  for (size_t k = 0; k < source.stored.size(); ++k) {
    if (source.stored[k].empty()) {
      problems.emplace(source.rule.theirs[k],
                       c10::str("missing from the files, a part of \"", name, "\""));
      return;
    }
    stored.push_back(stored_spec(source, source.stored[k]));
  }
  for (const std::string& part : source.rule.ours) {
    const auto found = index_of.find(part);
    if (found == index_of.end()) {
      problems.emplace(source.stored.front(),
                       c10::str("the model lacks \"", core::printable(part), "\", a part of it"));
      return;
    }
    if (found->second == i) source.before = rows_of(ours);
    ours.push_back(expected[found->second].spec);
  }
  const auto whole = united(stored), wanted = united(ours);
  if (!whole || !wanted || !fits(*whole, *wanted, convert)) {
    problems.emplace(source.stored.front(), c10::str("expected ", listed(ours), " for \"", name,
                                                     "\", got ", listed(stored)));
  }
}

at::Tensor PretrainedPlan::read(size_t i) const {
  const Source& source = sources_[i];
  std::vector<at::Tensor> parts;
  for (const std::string& stored : source.stored) {
    parts.push_back(transformed(files_->read(stored), source.rule.transform));
  }
  at::Tensor values = united(parts);
  if (source.rule.ours.size() > 1) values = values.narrow(0, source.before, source.spec.shape[0]);
  return values.to(source.spec.dtype).contiguous();
}

OutwardPlan::OutwardPlan(const std::vector<ExpectedTensor>& tensors, const NameMap& names) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    for (const std::string& name : tensors[i].names) index_of_[name] = i;
  }
  Problems problems;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto rule = rule_of(tensors[i], names);
    if (rule.ours.size() == 1) {
      divide(i, tensors[i].spec, rule, problems);
    } else if (rule.index == 0 && !rule.theirs.empty()) {
      unite(tensors, rule, problems);
    }
  }
  SMP_CHECK_WITH(CheckpointError, problems.empty(),
                 "the model's tensors cannot be stored by the name map:", list_problems(problems),
                 "\nCorrect the rules for these names.");
}

/// Stores one tensor of the model, in as many parts as the rule has.
void OutwardPlan::divide(size_t i, const TensorSpec& spec, const NameMap::Match& rule,
                         Problems& problems) {
  const auto count = static_cast<int64_t>(rule.theirs.size());
  TensorSpec part = spec;
  if (count > 1) {
    if (spec.shape.empty() || spec.shape[0] % count != 0) {
      problems.emplace(rule.ours.front(),
                       c10::str("expected ", count, " equal parts, got ", to_string(spec)));
      return;
    }
    part.shape[0] /= count;
  }
  for (int64_t k = 0; k < count; ++k) {
    stored_.emplace_back(rule.theirs[k], transformed(part, rule.transform));
    const int64_t rows = count > 1 ? part.shape[0] : 0;
    parts_.push_back({{i}, rule.transform, k * rows, rows});
  }
}

/// Stores several tensors of the model as one.
void OutwardPlan::unite(const std::vector<ExpectedTensor>& tensors, const NameMap::Match& rule,
                        Problems& problems) {
  std::vector<size_t> sources;
  std::vector<TensorSpec> specs;
  for (const std::string& name : rule.ours) {
    const auto found = index_of_.find(name);
    if (found == index_of_.end()) {
      problems.emplace(rule.theirs.front(),
                       c10::str("the model lacks \"", core::printable(name), "\", a part of it"));
      return;
    }
    sources.push_back(found->second);
    specs.push_back(tensors[found->second].spec);
  }
  const auto whole = united(specs);
  if (!whole) {
    problems.emplace(rule.theirs.front(),
                     c10::str("expected parts that differ in rows only, got ", listed(specs)));
    return;
  }
  stored_.emplace_back(rule.theirs.front(), transformed(*whole, rule.transform));
  parts_.push_back({std::move(sources), rule.transform, 0, 0});
}

at::Tensor OutwardPlan::values(size_t i, const std::vector<at::Tensor>& sources) const {
  const Part& part = parts_[i];
  at::Tensor values = united(sources);
  if (part.rows > 0) values = values.narrow(0, part.begin, part.rows);
  return transformed(values, part.transform);
}

std::string pretrained_file_in(const std::string& folder) {
  on_disk(c10::str("cannot write pretrained files to \"", core::printable(folder), "\""),
          [&] { fs::create_directories(folder); });
  return folder + "/" + kFile;
}

PretrainedReport load_pretrained(torch::nn::Module& module, const std::string& path,
                                 const PretrainedOptions& options) {
  const std::vector<NamedTensor> targets = named_tensors(state_dict(module));
  const PretrainedPlan plan(std::make_shared<PretrainedFiles>(path), expectations(targets),
                            options);
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < targets.size(); ++i) {
    if (plan.has(i)) at::Tensor(targets[i].tensor).copy_(plan.read(i));
  }
  return plan.report();
}

void save_pretrained(const torch::nn::Module& module, const std::string& folder,
                     const NameMap& names) {
  const std::vector<NamedTensor> tensors = named_tensors(state_dict(module));
  const OutwardPlan plan(expectations(tensors), names);
  SafetensorsWriter file(pretrained_file_in(folder), plan.stored());
  const at::NoGradGuard no_grad;
  for (const size_t i : file.order()) {
    std::vector<at::Tensor> sources;
    for (const size_t source : plan.sources(i)) sources.push_back(tensors[source].tensor);
    file.append(plan.values(i, sources));
  }
  file.commit();
}

}  // namespace smp::checkpoint
