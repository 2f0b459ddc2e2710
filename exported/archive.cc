// SPDX-License-Identifier: Apache-2.0
#include "exported/archive.h"

#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <caffe2/serialize/inline_container.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/json.h"
#include "core/text.h"
#include "exported/enumerations.h"
#include "exported/program_json.h"
#include "exported/zip_directory.h"

namespace smp::exported {
namespace {

using Sizes = std::vector<int64_t>;

constexpr size_t kMaxDimensions = 64;  // that libtorch's kernels take

/// The text of libtorch's error, without its list of C++ calls.
std::string first_line(const c10::Error& error) {
  const std::string text = error.what_without_backtrace();
  return core::printable(text.substr(0, text.find('\n')), 200);
}

/// Runs a read of the archive by libtorch, whose errors do not name the file.
template <class F>
auto reading(const std::string& path, const F& read) {
  try {
    return read();
  } catch (const Error&) {
    throw;
  } catch (const c10::Error& error) {
    core::fail<CheckpointError>("cannot read exported program \"", core::printable(path),
                                "\": ", first_line(error),
                                ". Expected an archive that torch.export.save of torch 2.9 or "
                                "later has written: write it again, or copy it again");
  }
}

Sizes read_numbers(const core::JsonReader& places) {
  Sizes numbers;
  for (const core::JsonReader& place : places.elements()) {
    const int64_t number = place.at("as_int").integer();
    if (number < 0) place.fail_expected("a number that is not negative");
    numbers.push_back(number);
  }
  return numbers;
}

/// How many elements from the start of the storage on a tensor spans; nothing if that is no
/// int64_t.
std::optional<int64_t> span_of(const Sizes& sizes, const Sizes& strides, int64_t offset) {
  int64_t span = offset;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return 0;
    int64_t distance = 0;
    if (__builtin_mul_overflow(sizes[i] - 1, strides[i], &distance) ||
        __builtin_add_overflow(span, distance, &span)) {
      return std::nullopt;
    }
  }
  if (__builtin_add_overflow(span, int64_t{1}, &span)) return std::nullopt;
  return span;
}

std::optional<int64_t> product_of(const Sizes& sizes) {
  int64_t product = 1;
  for (int64_t size : sizes) {
    if (size == 0) return 0;
  }
  for (int64_t size : sizes) {
    if (__builtin_mul_overflow(product, size, &product)) return std::nullopt;
  }
  return product;
}

/// A tensor's place in a storage.
struct Layout {
  at::ScalarType dtype;
  Sizes sizes, strides;
  int64_t offset;

  bool operator<(const Layout& other) const {
    return std::tie(dtype, sizes, strides, offset) <
           std::tie(other.dtype, other.sizes, other.strides, other.offset);
  }
};

Layout read_tensor_layout(const core::JsonReader& meta) {
  Layout layout{read_dtype(meta.at("dtype")), read_numbers(meta.at("sizes")),
                read_numbers(meta.at("strides")), meta.at("storage_offset").at("as_int").integer()};
  read_layout(meta.at("layout"));
  if (layout.strides.size() != layout.sizes.size()) {
    meta.at("strides").fail_expected("one for each size");
  }
  if (layout.sizes.size() > kMaxDimensions) meta.at("sizes").fail_expected("at most 64 sizes");
  if (layout.offset < 0) meta.at("storage_offset").fail_expected("a number that is not negative");
  return layout;
}

/// Throws where elements lie outside of the storage, or in each other's place so that a small file
/// would make a large tensor.
void check_fits(const Layout& layout, size_t bytes, const core::JsonReader& meta) {
  const auto room = static_cast<int64_t>(bytes / c10::elementSize(layout.dtype));
  const auto span = span_of(layout.sizes, layout.strides, layout.offset);
  const auto count = product_of(layout.sizes);
  if (!span || !count || *span > room || *count > room) {
    meta.fail_expected("a tensor within its record, which has " + std::to_string(bytes) + " bytes");
  }
}

}  // namespace

Archive::Archive(const std::string& path) : path_(path) {
  std::error_code error;
  const bool is_file = std::filesystem::is_regular_file(path, error);
  SMP_CHECK_WITH(CheckpointError, is_file, "cannot read exported program \"", core::printable(path),
                 "\": there is no such file. Give the path of what torch.export.save has written");
  check_zip_directory(path);
  reader_ =
      reading(path, [&] { return std::make_unique<caffe2::serialize::PyTorchStreamReader>(path); });
}

Archive::~Archive() = default;

std::string Archive::program() { return text("models/model.json"); }

std::string Archive::text(const std::string& record) {
  return reading(path_, [&] {
    const auto [data, size] = reader_->getRecord(record);
    return std::string(static_cast<const char*>(data.get()), size);
  });
}

c10::Storage Archive::storage(const std::string& record) {
  return reading(path_, [&] {
    auto [data, size] = reader_->getRecord(record);
    return c10::Storage(c10::Storage::use_byte_size_t(), size, std::move(data),
                        c10::GetCPUAllocator(), /*resizable=*/false);
  });
}

std::map<std::string, StoredTensor> Archive::tensors() {
  if (reading(path_, [&] { return reader_->hasRecord("byteorder"); })) {
    SMP_CHECK_WITH(CheckpointError, text("byteorder") == "little", "exported program \"",
                   core::printable(path_),
                   "\" has the byte order of another machine. Write it on a little-endian one");
  }
  std::map<std::string, StoredTensor> tensors;
  add_tensors("data/weights/", "weights", tensors);
  add_tensors("data/constants/", "constants", tensors);
  return tensors;
}

void Archive::add_tensors(const std::string& folder, const std::string& kind,
                          std::map<std::string, StoredTensor>& tensors) {
  const std::string record = folder + "model_" + kind + "_config.json";
  const nlohmann::json json = core::parse_untrusted(text(record));
  const std::string file = path_ + ", " + record;
  std::map<std::string, c10::Storage> storages;
  std::map<std::pair<std::string, Layout>, at::Tensor> known;
  for (const auto& [name, entry] : program_json(json, file).at("config").members()) {
    const std::string data = folder + entry.at("path_name").text();
    const bool is_raw = entry.has("use_pickle") && !entry.at("use_pickle").boolean();
    SMP_CHECK_WITH(CheckpointError, is_raw && entry.has("tensor_meta"), "exported program \"",
                   core::printable(path_), "\": \"", core::printable(name, 100),
                   "\" is stored as a pickle, or is no tensor, and pickles are never read. Make it "
                   "an ordinary dense tensor before the export");
    const core::JsonReader meta = entry.at("tensor_meta");
    const Layout layout = read_tensor_layout(meta);
    auto stored = storages.find(data);
    if (stored == storages.end()) stored = storages.emplace(data, storage(data)).first;
    check_fits(layout, stored->second.nbytes(), meta);
    at::Tensor& tensor = known[{data, layout}];
    if (!tensor.defined()) {
      tensor = at::empty({0}, layout.dtype)
                   .set_(stored->second, layout.offset, layout.sizes, layout.strides);
    }
    const bool requires_grad = meta.at("requires_grad").boolean();
    const bool is_new = tensors.emplace(name, StoredTensor{tensor, data, requires_grad}).second;
    if (!is_new) entry.fail_expected("a name that no weight has");
  }
}

}  // namespace smp::exported
