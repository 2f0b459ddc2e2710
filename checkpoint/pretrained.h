// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/apply.h"
#include "checkpoint/safetensors.h"
#include "smp/name_map.h"
#include "smp/pretrained_options.h"

namespace smp::checkpoint {

/// Safetensors files that together hold a model, as Hugging Face's libraries write them: a folder
/// with "model.safetensors", or with "model.safetensors.index.json", which says in "weight_map"
/// which file holds each tensor; or one file. Not thread-safe.
class PretrainedFiles {
 public:
  /// Opens all files. Throws CheckpointError for those that are missing or malformed, and where a
  /// file does not hold what "weight_map" says.
  explicit PretrainedFiles(const std::string& path);

  const std::string& path() const { return path_; }
  const std::map<std::string, TensorSpec>& tensors() const { return tensors_; }
  at::Tensor read(const std::string& name) const;
  /// XXH64 of a tensor's bytes.
  uint64_t hash(const std::string& name) const;

 private:
  void open_one(const std::string& file);
  void open_all(const std::string& index);

  std::string path_;
  std::map<std::string, std::shared_ptr<SafetensorsReader>> files_;
  std::map<std::string, const SafetensorsReader*> file_of_;
  std::map<std::string, TensorSpec> tensors_;
};

/// Which stored tensor goes where.
class PretrainedPlan {
 public:
  /// Matches files with a model. Throws one CheckpointError that lists all other shapes and types,
  /// names that two stored tensors with different contents are mapped to and, with `strict`, what
  /// is unused or missing.
  PretrainedPlan(std::shared_ptr<const PretrainedFiles> files,
                 const std::vector<ExpectedTensor>& expected, const PretrainedOptions& options);

  const PretrainedReport& report() const { return report_; }
  /// Whether there is something for the i-th of the expected tensors.
  bool has(size_t i) const { return !sources_[i].stored.empty(); }
  /// Its values, in the model's shape and type.
  at::Tensor read(size_t i) const;

 private:
  struct Source {
    std::string stored;
    Transform transform = Transform::kNone;
    at::ScalarType dtype = at::kFloat;
  };
  using Problems = std::map<std::string, std::string>;

  void match(const std::vector<ExpectedTensor>& expected, const PretrainedOptions& options,
             Problems& problems);
  void take(const std::string& stored, const NameMap::Target& target, size_t i,
            const ExpectedTensor& expected, bool convert, Problems& problems);

  std::shared_ptr<const PretrainedFiles> files_;
  std::vector<Source> sources_;  // by expected tensor; without a name: none
  PretrainedReport report_;
};

/// Loads pretrained files into a plain module: for fine-tuning. Everything is checked before a
/// tensor of the module changes. Throws CheckpointError.
PretrainedReport load_pretrained(torch::nn::Module& module, const std::string& path,
                                 const PretrainedOptions& options = {});

}  // namespace smp::checkpoint
