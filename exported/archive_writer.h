// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>

#include "checkpoint/file.h"

namespace caffe2::serialize {
class PyTorchStreamWriter;
}  // namespace caffe2::serialize

namespace smp::exported {

/// Writes an archive as torch.export.save does. The file has its name only when it is complete.
class ArchiveWriter {
 public:
  /// Creates a file of a `version` of libtorch's zip files, by default that of torch.export.save.
  /// Throws `CheckpointError` if that fails.
  explicit ArchiveWriter(const std::string& path, uint64_t version = 6);
  ~ArchiveWriter();
  ArchiveWriter(const ArchiveWriter&) = delete;
  ArchiveWriter& operator=(const ArchiveWriter&) = delete;

  void add(const std::string& record, const void* data, size_t size);
  void add(const std::string& record, const std::string& text);

  /// Ends the file. Call once, last. Throws `CheckpointError` if something could not be written.
  void commit();

 private:
  size_t append(const void* data, size_t size);

  checkpoint::FileWriter file_;
  // libtorch's writer is code in C, which no exception may cross: one waits for `commit`.
  std::exception_ptr error_;
  std::unique_ptr<caffe2::serialize::PyTorchStreamWriter> writer_;
};

}  // namespace smp::exported
