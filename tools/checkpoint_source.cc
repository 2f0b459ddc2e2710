// SPDX-License-Identifier: Apache-2.0
#include "tools/checkpoint_source.h"

#include <filesystem>

#include "checkpoint/state_file.h"

namespace smp::tools {

CheckpointSource::CheckpointSource(const std::string& path) : path_(path) {
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored)) {
    reader_ = std::make_unique<checkpoint::Reader>(path);
    for (const auto& [name, entry] : reader_->index().model)
      tensors_.emplace_back(name, entry.spec);
    aliases_ = reader_->index().aliases;
  } else if (checkpoint::is_state_file(path)) {
    for (const auto& tensor : checkpoint::read_state_file(path)) {
      tensors_.emplace_back(tensor.name, checkpoint::spec_of(tensor.tensor));
      for (const std::string& alias : tensor.aliases) aliases_[alias] = tensor.name;
      state_[tensor.name] = tensor.tensor;
    }
  } else {
    file_ = std::make_unique<checkpoint::SafetensorsReader>(path);
    for (const auto& [name, entry] : file_->entries()) tensors_.emplace_back(name, entry.spec);
  }
}

at::Tensor CheckpointSource::read(const std::string& name) {
  if (reader_) return reader_->read_model(name);
  return file_ ? file_->read(name) : state_.at(name);
}

}  // namespace smp::tools
