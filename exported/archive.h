// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <map>
#include <memory>
#include <string>

namespace caffe2::serialize {
class PyTorchStreamReader;
}  // namespace caffe2::serialize

namespace smp::exported {

/// A tensor of an archive.
struct StoredTensor {
  at::Tensor tensor;
  std::string record;          ///< holds its storage
  bool requires_grad = false;  ///< in Python
};

/// The archive that torch.export.save writes (torch 2.9 and later): a zip file with a graph in JSON
/// and tensors as raw bytes. Nothing that is pickled in it is read. A record that is damaged, or
/// stored in another way, is a `CheckpointError`.
class Archive {
 public:
  /// Opens the file.
  explicit Archive(const std::string& path);
  ~Archive();
  Archive(const Archive&) = delete;
  Archive& operator=(const Archive&) = delete;

  /// The record models/model.json.
  std::string program();
  /// Parameters and buffers, then constants, by name. Those that share a storage in Python share it
  /// here, and the same view of it is the same tensor.
  std::map<std::string, StoredTensor> tensors();

 private:
  std::string text(const std::string& record);
  c10::Storage storage(const std::string& record);
  void add_tensors(const std::string& folder, const std::string& kind,
                   std::map<std::string, StoredTensor>& tensors);

  const std::string path_;
  std::unique_ptr<caffe2::serialize::PyTorchStreamReader> reader_;
};

}  // namespace smp::exported
