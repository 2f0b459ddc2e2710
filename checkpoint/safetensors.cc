// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/safetensors.h"

#include <ATen/ops/empty.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <tuple>

#include "core/check.h"
#include "core/json.h"
#include "core/text.h"

namespace smp::checkpoint {
namespace {

using NamedDtype = std::pair<const char*, at::ScalarType>;

constexpr std::array<NamedDtype, 16> kDtypes = {{{"F32", at::kFloat},
                                                 {"F64", at::kDouble},
                                                 {"F16", at::kHalf},
                                                 {"BF16", at::kBFloat16},
                                                 {"F8_E4M3", at::kFloat8_e4m3fn},
                                                 {"F8_E5M2", at::kFloat8_e5m2},
                                                 {"C64", at::kComplexFloat},
                                                 {"I64", at::kLong},
                                                 {"I32", at::kInt},
                                                 {"I16", at::kShort},
                                                 {"I8", at::kChar},
                                                 {"U64", at::kUInt64},
                                                 {"U32", at::kUInt32},
                                                 {"U16", at::kUInt16},
                                                 {"U8", at::kByte},
                                                 {"BOOL", at::kBool}}};

std::string dtype_list() {
  std::string list;
  for (const auto& [name, dtype] : kDtypes) list += (list.empty() ? "" : " ") + std::string(name);
  return list;
}

[[noreturn]] void refuse_dtype(const std::string& where, at::ScalarType dtype) {
  core::fail<CheckpointError>(where, "checkpoints cannot hold dtype ", at::toString(dtype),
                              "; expected one of ", dtype_list(),
                              ". Convert the tensor with to(dtype), or view it as another dtype.");
}

/// Null for one that the format has not.
const char* find_name(at::ScalarType dtype) {
  for (const auto& [name, known] : kDtypes) {
    if (known == dtype) return name;
  }
  return nullptr;
}

constexpr uint64_t kLengthBytes = 8;
constexpr size_t kPieceBytes = size_t{256} << 10;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the reference implementation's limit
constexpr size_t kMostDimensions = 64;             // operators of libtorch take no more
constexpr const char* kMetadataKey = "__metadata__";

void check_tensors(const std::string& path, const std::vector<NamedSpec>& tensors) {
  std::set<std::string> names;
  for (const auto& [name, spec] : tensors) {
    SMP_CHECK_WITH(CheckpointError, name != kMetadataKey && names.insert(name).second,
                   "cannot write \"", core::printable(path), "\": tensor name \"",
                   core::printable(name),
                   "\" is used twice or reserved. Give every tensor its own name.");
    SMP_CHECK_WITH(CheckpointError, name.size() <= kLongestName, "cannot write \"",
                   core::printable(path), "\": expected tensor names of at most ", kLongestName,
                   " bytes, got \"", core::printable(name), "\". Rename the tensor.");
    if (find_name(spec.dtype) != nullptr) continue;
    refuse_dtype(c10::str("cannot write \"", core::printable(path), "\": tensor \"",
                          core::printable(name), "\": "),
                 spec.dtype);
  }
}

void check_dense(const std::string& path,
                 const std::vector<std::pair<std::string, at::Tensor>>& tensors) {
  for (const auto& [name, tensor] : tensors) {
    SMP_CHECK_WITH(CheckpointError, tensor.defined() && tensor.layout() == at::kStrided,
                   "cannot write \"", core::printable(path), "\": tensor \"", core::printable(name),
                   "\" is undefined or not dense. Convert it with to_dense().");
  }
}

std::string make_header(const std::string& path, const std::vector<NamedSpec>& tensors,
                        const std::vector<size_t>& order) {
  nlohmann::ordered_json header;
  header[kMetadataKey] = {{"format", "pt"}};  // other readers ask for it
  uint64_t offset = 0;
  for (const size_t i : order) {
    const auto& [name, spec] = tensors[i];
    const uint64_t end = offset + byte_size(spec);
    header[name] = {
        {"dtype", dtype_name(spec.dtype)}, {"shape", spec.shape}, {"data_offsets", {offset, end}}};
    offset = end;
  }
  try {
    std::string text = header.dump();
    text.resize((text.size() + 7) / 8 * 8, ' ');  // the tensor bytes start 8-byte aligned
    SMP_CHECK_WITH(CheckpointError, text.size() <= kMaxHeaderBytes, "cannot write \"",
                   core::printable(path), "\": names and shapes of ", tensors.size(),
                   " tensors take ", text.size(), " bytes, and a safetensors header at most ",
                   kMaxHeaderBytes, ". Use shorter names, or write fewer tensors to a file.");
    return text;
  } catch (const nlohmann::json::exception& error) {
    core::fail<CheckpointError>("cannot write \"", core::printable(path),
                                "\": a tensor name is not UTF-8 (", error.what(),
                                "). Rename the tensor.");
  }
}

/// One tensor of a header. Throws nlohmann's exceptions on values of another type.
SafetensorsReader::Entry parse_entry(const nlohmann::json& value) {
  SafetensorsReader::Entry entry;
  entry.spec.dtype = dtype_from_name(value.at("dtype").get<std::string>());
  const nlohmann::json& shape = value.at("shape");
  const bool has_sizes =
      shape.is_array() && std::all_of(shape.begin(), shape.end(),
                                      [](const auto& size) { return size.is_number_unsigned(); });
  SMP_CHECK_WITH(CheckpointError, has_sizes, "shape ", core::printable(shape.dump(), 100),
                 " has an element that is not a non-negative integer.");
  for (const auto& size : shape) entry.spec.shape.push_back(size.get<int64_t>());
  const nlohmann::json& offsets = value.at("data_offsets");
  SMP_CHECK_WITH(CheckpointError,
                 offsets.is_array() && offsets.size() == 2 && offsets[0].is_number_unsigned() &&
                     offsets[1].is_number_unsigned(),
                 "data_offsets: expected [begin, end], got ", core::printable(offsets.dump(), 100),
                 ".");
  const uint64_t begin = offsets[0].get<uint64_t>();
  const uint64_t end = offsets[1].get<uint64_t>();
  const uint64_t expected = byte_size(entry.spec);
  SMP_CHECK_WITH(CheckpointError, begin <= end && end - begin == expected,
                 "data_offsets: expected ", expected, " bytes for ", to_string(entry.spec),
                 ", got ", core::printable(offsets.dump(), 100), ".");
  entry.offset = begin;
  entry.bytes = expected;
  return entry;
}

}  // namespace

TensorSpec spec_of(const at::Tensor& tensor) {
  return {tensor.scalar_type(), tensor.sizes().vec()};
}

std::string to_string(const TensorSpec& spec) {
  const char* const dtype = find_name(spec.dtype);
  return c10::str(dtype == nullptr ? at::toString(spec.dtype) : dtype, " ",
                  core::printable(c10::str(at::IntArrayRef(spec.shape)), 100));
}

std::string dtype_name(at::ScalarType dtype) {
  const char* const name = find_name(dtype);
  if (name == nullptr) refuse_dtype("", dtype);
  return name;
}

at::ScalarType dtype_from_name(const std::string& name) {
  for (const auto& [known, dtype] : kDtypes) {
    if (name == known) {
      return dtype;
    }
  }
  core::fail<CheckpointError>("unknown dtype \"", core::printable(name), "\"; expected one of ",
                              dtype_list(), ".");
}

uint64_t byte_size(const TensorSpec& spec) {
  // Bounded by int64, as sizes of at::Tensor are.
  constexpr uint64_t kMax = std::numeric_limits<int64_t>::max();
  SMP_CHECK_WITH(CheckpointError, spec.shape.size() <= kMostDimensions,
                 "expected a shape of at most ", kMostDimensions, " dimensions, got ",
                 spec.shape.size(), ".");
  bool empty = false;
  uint64_t bytes = c10::elementSize(spec.dtype);
  for (const int64_t size : spec.shape) {
    const uint64_t factor = size == 0 ? 1 : static_cast<uint64_t>(size);
    SMP_CHECK_WITH(CheckpointError, size >= 0 && bytes <= kMax / factor, "shape ",
                   at::IntArrayRef(spec.shape), " is not that of a tensor.");
    empty = empty || size == 0;
    bytes *= factor;
  }
  return empty ? 0 : bytes;
}

int64_t share_of(uint64_t begin, uint64_t total, int64_t parts) {
  const double place = total == 0 ? 0 : static_cast<double>(begin) / static_cast<double>(total);
  return std::min(static_cast<int64_t>(place * static_cast<double>(parts)), parts - 1);
}

uint64_t hash_of(const at::Tensor& tensor) {
  SMP_INTERNAL_ASSERT(tensor.is_cpu() && tensor.is_contiguous(), "hash of a strided tensor");
  return XXH64(tensor.const_data_ptr(), tensor.nbytes(), /*seed=*/0);
}

std::vector<size_t> SafetensorsWriter::order_of(const std::vector<NamedSpec>& tensors) {
  std::vector<size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return c10::elementSize(tensors[a].second.dtype) > c10::elementSize(tensors[b].second.dtype);
  });
  return order;
}

SafetensorsWriter::SafetensorsWriter(const std::string& path, const std::vector<NamedSpec>& tensors,
                                     Medium medium)
    : order_(order_of(tensors)), file_(path, medium) {
  check_tensors(path, tensors);
  for (const size_t i : order_) specs_.push_back(tensors[i].second);
  const std::string header = make_header(path, tensors, order_);
  const uint64_t header_size = header.size();  // the format and this code are little-endian
  file_.append(&header_size, kLengthBytes);
  file_.append(header.data(), header.size());
}

uint64_t SafetensorsWriter::append(const at::Tensor& tensor) {
  SMP_INTERNAL_ASSERT(next_ < specs_.size() && spec_of(tensor) == specs_[next_],
                      "a tensor out of order");
  ++next_;
  const at::Tensor host = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous();
  const char* bytes = static_cast<const char*>(host.const_data_ptr());
  Hasher hasher;
  for (size_t done = 0; done < host.nbytes();) {  // while a piece is in the caches
    const size_t piece = std::min(kPieceBytes, host.nbytes() - done);
    hasher.update(bytes + done, piece);
    file_.append(bytes + done, piece);
    done += piece;
  }
  return hasher.digest();
}

uint64_t SafetensorsWriter::commit() {
  SMP_INTERNAL_ASSERT(next_ == specs_.size(), "a safetensors file lacks tensors");
  file_.commit();
  return file_.size();
}

SafetensorsSummary write_safetensors(const std::string& path,
                                     const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                                     Medium medium) {
  check_dense(path, tensors);
  std::vector<NamedSpec> specs;
  for (const auto& [name, tensor] : tensors) specs.emplace_back(name, spec_of(tensor));
  SafetensorsWriter writer(path, specs, medium);
  SafetensorsSummary summary;
  summary.hashes.resize(tensors.size());
  for (const size_t i : writer.order()) summary.hashes[i] = writer.append(tensors[i].second);
  summary.file_size = writer.commit();
  return summary;
}

SafetensorsReader::SafetensorsReader(std::shared_ptr<const FileReader> file)
    : file_(std::move(file)) {
  const uint64_t header_size = read_header_size();
  data_begin_ = kLengthBytes + header_size;
  std::string header(header_size, '\0');
  file_->read(kLengthBytes, header.data(), header.size());
  parse_header(header);
  check_layout();
}

uint64_t SafetensorsReader::read_header_size() const {
  SMP_CHECK_WITH(CheckpointError, file_->size() >= kLengthBytes, "\"",
                 core::printable(file_->path()), "\" is not a safetensors file: expected at least ",
                 kLengthBytes, " bytes, got ", file_->size(), ". Use another checkpoint.");
  uint64_t header_size = 0;
  file_->read(0, &header_size, kLengthBytes);
  const uint64_t limit = std::min(file_->size() - kLengthBytes, kMaxHeaderBytes);
  SMP_CHECK_WITH(CheckpointError, header_size <= limit, "\"", core::printable(file_->path()),
                 "\" is truncated or not a safetensors file: expected a header of at most ", limit,
                 " bytes, got a length of ", header_size, ". Use another checkpoint.");
  return header_size;
}

void SafetensorsReader::parse_header(const std::string& header) {
  const nlohmann::json json = core::parse_untrusted(header);
  SMP_CHECK_WITH(CheckpointError, json.is_object(), "\"", core::printable(file_->path()),
                 "\" has a malformed header: expected a JSON object in bytes ", kLengthBytes,
                 " to ", data_begin_, ", got something else. Use another checkpoint.");
  for (const auto& [name, value] : json.items()) {
    if (name == kMetadataKey) {
      continue;
    }
    const auto fail = [&, &name = name](const std::string& what) {
      core::fail<CheckpointError>("\"", core::printable(file_->path()),
                                  "\" has a malformed header: tensor \"", core::printable(name),
                                  "\": ", what);
    };
    try {
      SMP_CHECK_WITH(CheckpointError, name.size() <= kLongestName, "expected a name of at most ",
                     kLongestName, " bytes.");
      Entry entry = parse_entry(value);
      entry.offset += data_begin_;
      entries_.emplace(name, std::move(entry));
    } catch (const nlohmann::json::exception& error) {
      fail(error.what());
    } catch (const CheckpointError& error) {
      fail(core::text_without_prefix(error));
    }
  }
}

void SafetensorsReader::check_layout() const {
  std::vector<std::tuple<uint64_t, uint64_t, std::string>> by_offset;
  for (const auto& [name, entry] : entries_) {
    by_offset.emplace_back(entry.offset, entry.bytes, name);
  }
  // Empty tensors share their offset with a neighbour: they come first.
  std::sort(by_offset.begin(), by_offset.end());
  uint64_t end = data_begin_;
  for (const auto& [offset, bytes, name] : by_offset) {
    SMP_CHECK_WITH(CheckpointError, offset == end, "\"", core::printable(file_->path()),
                   "\" has a malformed header: tensor \"", core::printable(name), "\" ",
                   offset < end ? "overlaps another" : "leaves a hole before it",
                   ": expected it to start at byte ", end, ", got ", offset,
                   ". Use another checkpoint.");
    SMP_CHECK_WITH(CheckpointError, bytes <= file_->size() - std::min(end, file_->size()), "\"",
                   core::printable(file_->path()), "\" is truncated: tensor \"",
                   core::printable(name), "\" ends at byte ", end + bytes, ", got a file of ",
                   file_->size(), " bytes. Use another checkpoint.");
    end += bytes;
  }
  SMP_CHECK_WITH(CheckpointError, end == file_->size(), "\"", core::printable(file_->path()),
                 "\" has bytes after its last tensor: expected a file of ", end, " bytes, got ",
                 file_->size(), ". Use another checkpoint.");
}

const SafetensorsReader::Entry& SafetensorsReader::at(const std::string& name) const {
  const auto found = entries_.find(name);
  SMP_CHECK_WITH(CheckpointError, found != entries_.end(), "\"", core::printable(file_->path()),
                 "\" holds no tensor \"", core::printable(name),
                 "\". Check the name against its header.");
  return found->second;
}

at::Tensor SafetensorsReader::read(const std::string& name) const {
  const Entry& entry = at(name);
  at::Tensor tensor = at::empty(entry.spec.shape, at::TensorOptions(entry.spec.dtype));
  file_->read(entry.offset, tensor.mutable_data_ptr(), entry.bytes);
  return tensor;
}

uint64_t SafetensorsReader::hash(const std::string& name) const {
  const Entry& entry = at(name);
  return file_->hash(entry.offset, entry.bytes);
}

}  // namespace smp::checkpoint
