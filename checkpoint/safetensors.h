// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/file.h"

namespace smp::checkpoint {

/// The length of the longest name of a tensor, in bytes: longer ones, which no module gives, are
/// neither written nor read.
constexpr size_t kLongestName = size_t{64} << 10;

/// The dtype and shape of a stored tensor.
struct TensorSpec {
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> shape;

  bool operator==(const TensorSpec& other) const {
    return dtype == other.dtype && shape == other.shape;
  }
  bool operator!=(const TensorSpec& other) const { return !(*this == other); }
};

/// The spec of a tensor in memory.
TensorSpec spec_of(const at::Tensor& tensor);

/// For messages: "F32 [2, 3]".
std::string to_string(const TensorSpec& spec);

/// The name of a dtype in safetensors files: F32 F64 F16 BF16 F8_E4M3 F8_E5M2 C64 I64 I32 I16 I8
/// U64 U32 U16 U8 BOOL. Throws CheckpointError for any other.
std::string dtype_name(at::ScalarType dtype);

/// The inverse of `dtype_name`. Throws CheckpointError for an unknown name.
at::ScalarType dtype_from_name(const std::string& name);

/// Bytes of a tensor with this spec. Throws CheckpointError for negative or overflowing shapes.
uint64_t byte_size(const TensorSpec& spec);

/// The share of a tensor that `begin` bytes come before, when `total` bytes are divided into
/// `parts` shares of about equal size.
int64_t share_of(uint64_t begin, uint64_t total, int64_t parts);

/// 64-bit xxHash (XXH64, seed 0) of a contiguous CPU tensor's bytes.
uint64_t hash_of(const at::Tensor& tensor);

/// A name and the form of the tensor stored under it.
using NamedSpec = std::pair<std::string, TensorSpec>;

/// Writes a safetensors file tensor by tensor, with a `FileWriter`. Format:
/// https://github.com/huggingface/safetensors, "Format".
class SafetensorsWriter {
 public:
  /// Begins the file with the names and specs of all tensors. Throws CheckpointError, also for a
  /// name that is used twice.
  SafetensorsWriter(const std::string& path, const std::vector<NamedSpec>& tensors,
                    Medium medium = Medium::kDisk);

  /// The indices of the tensors in the order in which `append` takes them: larger elements first,
  /// so that each tensor starts at a multiple of its element size.
  static std::vector<size_t> order_of(const std::vector<NamedSpec>& tensors);
  const std::vector<size_t>& order() const { return order_; }

  /// Writes the next tensor, dense, of any device and strides. Returns the XXH64 of its bytes.
  uint64_t append(const at::Tensor& tensor);

  /// Call once, when all tensors were appended. Returns the file's size in bytes.
  uint64_t commit();

 private:
  std::vector<TensorSpec> specs_;
  std::vector<size_t> order_;
  size_t next_ = 0;
  FileWriter file_;
};

/// The result of `write_safetensors`.
struct SafetensorsSummary {
  uint64_t file_size = 0;
  std::vector<uint64_t> hashes;  ///< XXH64 of each tensor's bytes, in the order of the argument.
};

/// Writes `tensors` (dense, any device, any strides) with a `SafetensorsWriter`: they go through
/// host memory one at a time. Throws CheckpointError.
SafetensorsSummary write_safetensors(const std::string& path,
                                     const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                                     Medium medium = Medium::kDisk);

/// An open safetensors file. The constructor checks the whole header, so that nothing a damaged
/// or hostile file says leads to a read outside it or to a larger allocation than the file itself.
class SafetensorsReader {
 public:
  /// A tensor and where its bytes lie in the file.
  struct Entry {
    TensorSpec spec;
    uint64_t offset = 0;  ///< From the start of the file.
    uint64_t bytes = 0;
  };

  /// Throws CheckpointError that names the file, the error, and the expected and actual values.
  explicit SafetensorsReader(const std::string& path)
      : SafetensorsReader(std::make_shared<FileReader>(path)) {}
  explicit SafetensorsReader(std::shared_ptr<const FileReader> file);

  /// All tensors by name.
  const std::map<std::string, Entry>& entries() const { return entries_; }

  /// Reads one tensor to the CPU. Throws CheckpointError if there is none of this name.
  at::Tensor read(const std::string& name) const;

  /// The XXH64 of one tensor's bytes, read through a small buffer. Throws like `read`.
  uint64_t hash(const std::string& name) const;

 private:
  uint64_t read_header_size() const;
  void parse_header(const std::string& header);
  void check_layout() const;
  const Entry& at(const std::string& name) const;

  std::shared_ptr<const FileReader> file_;
  uint64_t data_begin_ = 0;
  std::map<std::string, Entry> entries_;
};

}  // namespace smp::checkpoint
