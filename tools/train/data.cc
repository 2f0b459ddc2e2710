// SPDX-License-Identifier: Apache-2.0
#include "tools/train/data.h"

#include <ATen/Functions.h>
#include <ATen/TensorIndexing.h>
#include <ATen/TensorOperators.h>

#include <filesystem>

#include "checkpoint/safetensors.h"
#include "core/check.h"
#include "core/text.h"
#include "smp/error.h"

namespace smp::tools::train {
namespace {

/// The bytes of a file.
at::Tensor map_file(const std::string& path) {
  std::error_code error;
  const bool is_file = std::filesystem::is_regular_file(path, error);
  const auto size = is_file ? static_cast<int64_t>(std::filesystem::file_size(path, error)) : 0;
  SMP_CHECK_WITH(CheckpointError, size > 0, "cannot read the data \"", path,
                 "\": ", is_file ? "it is empty" : "there is no such file",
                 ". Give the path of a file of samples");
  return at::from_file(path, /*shared=*/false, size, at::kByte);
}

/// Bytes as numbers. They are copied where they do not begin at a multiple of the number's size.
at::Tensor numbers_of(const at::Tensor& bytes, at::ScalarType type) {
  const auto size = static_cast<int64_t>(c10::elementSize(type));
  const bool is_aligned = bytes.storage_offset() % size == 0;
  return (is_aligned ? bytes : bytes.clone()).view(type);
}

at::ScalarType type_of_tokens(const std::string& name) {
  if (name == "uint8") return at::kByte;
  if (name == "uint16") return at::kUInt16;
  return name == "int32" ? at::kInt : at::kLong;
}

/// Few operators take these.
bool is_unsigned(at::ScalarType type) { return type == at::kUInt16 || type == at::kUInt32; }

/// An idx file of unsigned bytes: https://yann.lecun.com/exdb/mnist
at::Tensor read_idx(const std::string& path) {
  const at::Tensor bytes = map_file(path);
  const auto* data = bytes.const_data_ptr<uint8_t>();
  const int64_t dimensions = bytes.numel() >= 4 ? data[3] : 0;
  const int64_t header = 4 + 4 * dimensions;
  const bool is_idx = dimensions >= 1 && dimensions <= 4 && bytes.numel() >= header &&
                      data[0] == 0 && data[1] == 0 && data[2] == 8;
  SMP_CHECK_WITH(CheckpointError, is_idx, "cannot read the data \"", path,
                 "\": it is no idx file of unsigned bytes. Unpack it first if it ends with .gz");
  std::vector<int64_t> sizes;
  double count = 1;  // sizes of 32 bits in four dimensions may not fit into 64 bits
  for (int64_t i = 4; i < header; i += 4) {
    sizes.push_back(int64_t{data[i]} << 24 | int64_t{data[i + 1]} << 16 |
                    int64_t{data[i + 2]} << 8 | int64_t{data[i + 3]});
    count *= static_cast<double>(sizes.back());
  }
  const int64_t held = bytes.numel() - header;
  const bool is_complete = held > 0 && count == static_cast<double>(held);
  SMP_CHECK_WITH(CheckpointError, is_complete, "cannot read the data \"", path,
                 "\": its header says ", at::IntArrayRef(sizes), ", and it holds ", held,
                 " bytes. Get the file again");
  return bytes.narrow(0, header, held).view(sizes);
}

}  // namespace

Samples::Samples(const DataOptions& options, const std::string& path, const std::string& labels,
                 const std::vector<std::string>& names)
    : options_(options), path_(path) {
  if (options.format == Format::kTokens) {
    add_tokens();
  } else if (options.format == Format::kIdx) {
    add_images(labels);
  } else {
    add_tensors(names);
  }
  for (const std::string& name : names) {
    SMP_CHECK_WITH(UsageError, tensors_.count(name) > 0, "the data \"", path, "\" has no \"",
                   core::printable(name, 100),
                   "\": with --format tokens and idx tensors are called input and target. Name "
                   "others by --inputs and --target");
  }
}

void Samples::add(const std::string& name, const at::Tensor& tensor) {
  const int64_t count = tensor.dim() > 0 ? tensor.size(0) : 0;
  if (tensors_.empty()) size_ = count;
  SMP_CHECK_WITH(UsageError, count > 0 && count == size_, "the data \"", path_, "\": \"",
                 core::printable(name, 100), "\" has ", count, " samples, and another tensor ",
                 size_, ". The first dimension of each tensor counts the samples, at least one");
  tensors_[name] = tensor;
}

void Samples::add_tensors(const std::vector<std::string>& names) {
  const checkpoint::SafetensorsReader reader(path_);
  const at::Tensor bytes = map_file(path_);
  for (const std::string& name : names) {
    const auto found = reader.entries().find(name);
    if (found == reader.entries().end()) {
      std::string known;
      for (const auto& entry : reader.entries()) {
        known += (known.empty() ? "" : ", ") + core::printable(entry.first, 60);
      }
      core::fail<UsageError>("the data \"", path_, "\" has no tensor \"",
                             core::printable(name, 100), "\", it has ", core::printable(known, 600),
                             ". Choose by --inputs and --target");
    }
    const auto& [spec, offset, size] = found->second;
    SMP_CHECK_WITH(UsageError, spec.dtype != at::kUInt64, "the data \"", path_, "\": \"",
                   core::printable(name, 100),
                   "\" has type U64, whose numbers int64 may not hold. Write it as int64");
    const auto own = bytes.narrow(0, static_cast<int64_t>(offset), static_cast<int64_t>(size));
    add(name, numbers_of(own, spec.dtype).view(spec.shape));
  }
}

void Samples::add_tokens() {
  const at::Tensor bytes = map_file(path_);
  const at::ScalarType type = type_of_tokens(options_.token_type);
  const auto token_size = static_cast<int64_t>(c10::elementSize(type));
  const int64_t tokens = bytes.numel() / token_size;
  const int64_t length = options_.sequence;
  const int64_t count = (tokens - (options_.shift ? 1 : 0)) / length;
  SMP_CHECK_WITH(UsageError, bytes.numel() % token_size == 0 && count > 0, "the data \"", path_,
                 "\" has ", bytes.numel(), " bytes, which are no tokens of type ",
                 options_.token_type, " for a sample of ", length,
                 ". Choose another --token-type or --sequence");
  const at::Tensor numbers = numbers_of(bytes, type);
  const int64_t first_target = options_.shift ? 1 : 0;
  add("input", numbers.narrow(0, 0, count * length).view({count, length}));
  add("target", numbers.narrow(0, first_target, count * length).view({count, length}));
}

void Samples::add_images(const std::string& labels) {
  const at::Tensor images = read_idx(path_);
  add("input", images.dim() == 3 ? images.unsqueeze(1) : images);
  add("target", read_idx(labels));
}

at::Tensor Samples::rows(const std::string& name, const at::Tensor& indices) const {
  const at::Tensor rows = tensors_.at(name).index({indices});
  if (options_.format == Format::kIdx && name == "input") return rows.to(at::kFloat) / 255;
  const bool stays = options_.format == Format::kSafetensors && !is_unsigned(rows.scalar_type());
  return stays ? rows : rows.to(at::kLong);
}

}  // namespace smp::tools::train
