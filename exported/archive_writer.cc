// SPDX-License-Identifier: Apache-2.0
#include "exported/archive_writer.h"

#include <caffe2/serialize/inline_container.h>

namespace smp::exported {

ArchiveWriter::ArchiveWriter(const std::string& path, uint64_t version)
    : file_(path),
      writer_(std::make_unique<caffe2::serialize::PyTorchStreamWriter>(
          [this](const void* data, size_t size) { return append(data, size); })) {
  writer_->setMinVersion(version);
}

ArchiveWriter::~ArchiveWriter() = default;

size_t ArchiveWriter::append(const void* data, size_t size) {
  try {
    if (error_ == nullptr) file_.append(data, size);
  } catch (...) {
    error_ = std::current_exception();
  }
  return size;
}

void ArchiveWriter::add(const std::string& record, const void* data, size_t size) {
  writer_->writeRecord(record, data, size);
}

void ArchiveWriter::add(const std::string& record, const std::string& text) {
  add(record, text.data(), text.size());
}

void ArchiveWriter::commit() {
  writer_->writeEndOfFile();
  if (error_ != nullptr) std::rethrow_exception(error_);
  file_.commit();
}

}  // namespace smp::exported
