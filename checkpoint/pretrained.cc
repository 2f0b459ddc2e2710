// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/pretrained.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <filesystem>

#include "checkpoint/file.h"
#include "checkpoint/weight_map.h"
#include "core/check.h"

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

}  // namespace

PretrainedFiles::PretrainedFiles(const std::string& path) : path_(path) {
  std::error_code ignored;
  if (fs::is_regular_file(path, ignored)) {
    open_one(path);
  } else if (fs::exists(path + "/" + kIndex, ignored)) {
    open_all(path + "/" + kIndex);
  } else {
    SMP_CHECK_WITH(CheckpointError, fs::exists(path + "/" + kFile, ignored),
                   "cannot load pretrained files from \"", path, "\": expected a file, or a folder with ",
                   kFile, " or ", kIndex, ", got neither. Check the path.");
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
    SMP_CHECK_WITH(CheckpointError, entry != reader->entries().end(), "\"", path_, "/", file,
                   "\" lacks tensor \"", name, "\", which it holds by ", kIndex,
                   ". Fetch the files again.");
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
  std::string list;
  for (const auto& [name, problem] : problems) list += c10::str("\n  ", name, ": ", problem);
  SMP_CHECK_WITH(CheckpointError, problems.empty(), "pretrained files \"", files_->path(),
                 "\" do not fit the model:", list,
                 "\nMap stored names to the model's with a NameMap, leave out what is not needed with "
                 "its ignore(), or load with strict(false).");
}

void PretrainedPlan::match(const std::vector<ExpectedTensor>& expected,
                           const PretrainedOptions& options, Problems& problems) {
  std::map<std::string, size_t> index_of;
  for (size_t i = 0; i < expected.size(); ++i) {
    for (const std::string& name : expected[i].names) index_of[name] = i;
  }
  for (const auto& [stored, spec] : files_->tensors()) {
    const auto target = options.names().apply(stored);
    if (!target) {
      report_.ignored.push_back(stored);
    } else if (const auto found = index_of.find(target->name); found == index_of.end()) {
      report_.unused.push_back(stored);
    } else {
      take(stored, *target, found->second, expected[found->second], options.convert(), problems);
    }
  }
  for (size_t i = 0; i < expected.size(); ++i) {
    if (!has(i)) report_.missing.push_back(expected[i].names.front());
  }
  std::sort(report_.missing.begin(), report_.missing.end());
}

void PretrainedPlan::take(const std::string& stored, const NameMap::Target& target, size_t i,
                          const ExpectedTensor& expected, bool convert, Problems& problems) {
  const TensorSpec spec = transformed(files_->tensors().at(stored), target.transform);
  if (!fits(spec, expected.spec, convert)) {
    problems.emplace(stored, c10::str("expected ", to_string(expected.spec), " for \"", target.name,
                                      "\", got ", to_string(spec)));
  } else if (has(i) && files_->hash(sources_[i].stored) != files_->hash(stored)) {
    problems.emplace(stored, c10::str("mapped to \"", target.name, "\", as is \"",
                                      sources_[i].stored, "\", which has other contents"));
  }
  sources_[i] = {stored, target.transform, expected.spec.dtype};
  report_.used.emplace_back(stored, target.name);
}

at::Tensor PretrainedPlan::read(size_t i) const {
  at::Tensor values = files_->read(sources_[i].stored);
  if (sources_[i].transform == Transform::kTranspose && values.dim() == 2) values = values.t();
  return values.to(sources_[i].dtype).contiguous();
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

}  // namespace smp::checkpoint
