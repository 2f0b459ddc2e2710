#include "tools/checkpoint_source.h"

#include <filesystem>

namespace smp::tools {

CheckpointSource::CheckpointSource(const std::string& path) : path_(path) {
  std::error_code ignored;
  if (std::filesystem::is_regular_file(path, ignored)) {
    file_ = std::make_unique<checkpoint::SafetensorsReader>(path);
    for (const auto& [name, entry] : file_->entries()) tensors_.emplace_back(name, entry.spec);
  } else {
    reader_ = std::make_unique<checkpoint::Reader>(path);
    for (const auto& [name, entry] : reader_->index().model)
      tensors_.emplace_back(name, entry.spec);
  }
}

std::map<std::string, std::string> CheckpointSource::aliases() const {
  return reader_ ? reader_->index().aliases : std::map<std::string, std::string>();
}

at::Tensor CheckpointSource::read(const std::string& name) {
  return reader_ ? reader_->read_model(name) : file_->read(name);
}

}  // namespace smp::tools
