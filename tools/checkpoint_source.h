// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/reader.h"
#include "checkpoint/safetensors.h"

namespace smp::tools {

/// The model of a checkpoint's folder, or the tensors of a safetensors file or a state dictionary.
class CheckpointSource {
 public:
  /// Throws CheckpointError if `path` is none of these.
  explicit CheckpointSource(const std::string& path);

  const std::string& path() const { return path_; }
  /// The tensors, each once, sorted by name.
  const std::vector<checkpoint::NamedSpec>& tensors() const { return tensors_; }
  /// Other names of tied tensors.
  const std::map<std::string, std::string>& aliases() const { return aliases_; }
  /// One of the tensors.
  at::Tensor read(const std::string& name);

  /// The checkpoint; null for a file.
  checkpoint::Reader* checkpoint() const { return reader_.get(); }

 private:
  std::string path_;
  std::unique_ptr<checkpoint::Reader> reader_;
  std::unique_ptr<checkpoint::SafetensorsReader> file_;
  std::map<std::string, at::Tensor> state_;  // tensors of a state dictionary
  std::map<std::string, std::string> aliases_;
  std::vector<checkpoint::NamedSpec> tensors_;
};

}  // namespace smp::tools
