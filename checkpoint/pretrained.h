// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/apply.h"
#include "checkpoint/safetensors.h"
#include "smp/name_map.h"
#include "smp/pretrained_options.h"

namespace smp::checkpoint {

/// "weight_map" of a Hugging Face index (model.safetensors.index.json): the file of each tensor, a
/// plain name without folders. `path` is the index's, for errors. Throws CheckpointError for JSON
/// of another form, and for names that could point out of the folder.
std::map<std::string, std::string> parse_weight_map(const std::string& text,
                                                    const std::string& path);

/// Safetensors files that together hold a model, as Hugging Face's libraries write them: a folder
/// with "model.safetensors", or with "model.safetensors.index.json", which says in "weight_map"
/// which file holds each tensor; or one file. Not thread-safe.
class PretrainedFiles {
 public:
  /// Opens all files. Throws CheckpointError for those that are missing or malformed, and where a
  /// file does not hold the tensors that "weight_map" names.
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

/// Which stored tensors go where.
class PretrainedPlan {
 public:
  /// Matches files with a model. Throws one CheckpointError that lists all other shapes and types,
  /// names that stored tensors with different contents are mapped to and, with `strict`, unused and
  /// missing ones.
  PretrainedPlan(std::shared_ptr<const PretrainedFiles> files,
                 const std::vector<ExpectedTensor>& expected, const PretrainedOptions& options);

  const PretrainedReport& report() const { return report_; }
  /// Whether there is something for the i-th of the expected tensors.
  bool has(size_t i) const { return !sources_[i].stored.empty(); }
  /// Its values, in the model's shape and type.
  at::Tensor read(size_t i) const;

 private:
  struct Source {
    std::vector<std::string> stored;  // in the order of `rule.theirs`; empty: not there
    NameMap::Match rule;
    TensorSpec spec;     // the model's tensor
    int64_t before = 0;  // rows of those of `rule.ours` that come before it
  };
  using Indices = std::map<std::string, size_t>;  // expected tensors by each name

  void match(const std::vector<ExpectedTensor>& expected, const PretrainedOptions& options,
             Problems& problems);
  void take(const std::string& stored, const NameMap::Match& rule, size_t i, Problems& problems);
  void check(size_t i, const std::vector<ExpectedTensor>& expected, const Indices& index_of,
             bool convert, Problems& problems);
  TensorSpec stored_spec(const Source& source, const std::string& stored) const;

  std::shared_ptr<const PretrainedFiles> files_;
  std::vector<Source> sources_;  // source of each expected tensor
  PretrainedReport report_;
};

/// The form that a model's tensors take in files of another program.
class OutwardPlan {
 public:
  /// Plans for tensors and their names. Throws one CheckpointError that lists those that the rules
  /// do not map to storable ones.
  OutwardPlan(const std::vector<ExpectedTensor>& tensors, const NameMap& names);

  /// The stored tensors.
  const std::vector<NamedSpec>& stored() const { return stored_; }
  /// The tensors of the model that the i-th stored one is made of.
  const std::vector<size_t>& sources(size_t i) const { return parts_[i].sources; }
  /// Its values, made of theirs.
  at::Tensor values(size_t i, const std::vector<at::Tensor>& sources) const;

 private:
  struct Part {
    std::vector<size_t> sources;
    Transform transform;
    int64_t begin;  // its first row in the sources, one after the other
    int64_t rows;   // how many; none: all
  };

  void divide(size_t i, const TensorSpec& spec, const NameMap::Match& rule, Problems& problems);
  void unite(const std::vector<ExpectedTensor>& tensors, const NameMap::Match& rule,
             Problems& problems);

  std::map<std::string, size_t> index_of_;  // indices of tensors, by each of their names
  std::vector<NamedSpec> stored_;
  std::vector<Part> parts_;
};

/// The file of `save_pretrained` in a folder, which is made if it is not there. Throws
/// CheckpointError.
std::string pretrained_file_in(const std::string& folder);

/// Loads pretrained files into a plain module: for fine-tuning. Everything is checked before a
/// tensor of the module changes. Throws CheckpointError.
PretrainedReport load_pretrained(torch::nn::Module& module, const std::string& path,
                                 const PretrainedOptions& options = {});

/// Writes a plain module as `folder`/model.safetensors, by the names of another program. Throws
/// CheckpointError.
void save_pretrained(const torch::nn::Module& module, const std::string& folder,
                     const NameMap& names);

}  // namespace smp::checkpoint
