// SPDX-License-Identifier: Apache-2.0
#include "smp/c/tensors.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/check.h"
#include "smp/c/callers_memory.h"
#include "smp/detail/structure.h"

namespace smp::c {
namespace {

/// More than any memory has, and so few that no sum or product of libtorch overflows.
constexpr int64_t kMostElements = int64_t{1} << 56;

at::ScalarType type_of(const smp_tensor& tensor, const std::string& what) {
  for (const NumberType& known : kNumberTypes) {
    if (known.dtype == tensor.dtype) return known.type;
  }
  core::fail<UsageError>(what, ": dtype ", tensor.dtype, " is none of smp_dtype. Set it, for ",
                         "example to SMP_FLOAT32");
}

void check_size(int64_t size, const std::string& what) {
  SMP_CHECK_WITH(UsageError, size <= kSize, what, ": struct_size is ", size, ", more than the ",
                 kSize,
                 " bytes that this library knows. The program was compiled with a newer smp/c.h: "
                 "link the library of that version");
  SMP_CHECK_WITH(UsageError, size == kSize || size == kSizeInVersion1, what, ": struct_size is ",
                 size, ", and a tensor takes ", kSize,
                 " bytes. Set it: tensor.struct_size = sizeof(smp_tensor)");
}

std::string text_of(const char* what, int64_t index) { return c10::str(what, " ", index); }

/// The index-th of an array, whose elements are of one size.
template <class T>
T& checked_element(T* tensors, int64_t index, const char* what) {
  check_size(tensors->struct_size, text_of(what, 0));
  T& tensor = *element(tensors, index);
  SMP_CHECK_WITH(UsageError, tensor.struct_size == tensors->struct_size, text_of(what, index),
                 ": struct_size is ", tensor.struct_size, ", and that of ", text_of(what, 0),
                 " is ", tensors->struct_size,
                 ". Set it in each of an array to sizeof(smp_tensor)");
  return tensor;
}

std::vector<int64_t> strides_of(const smp_tensor& tensor, const std::string& what) {
  const auto dims = static_cast<size_t>(tensor.dims);
  std::vector<int64_t> strides(tensor.strides, tensor.strides + dims);
  int64_t next = 1;
  switch (tensor.layout) {
    case SMP_ROW_MAJOR:
      for (size_t i = dims; i-- > 0; next *= tensor.sizes[i]) strides[i] = next;
      break;
    case SMP_COLUMN_MAJOR:
      for (size_t i = 0; i < dims; next *= tensor.sizes[i], ++i) strides[i] = next;
      break;
    case SMP_STRIDED:
      for (const int64_t stride : strides) {
        SMP_CHECK_WITH(UsageError, stride >= 0, what, ": the stride ", stride,
                       " is negative. Strides are 0 or more elements; reverse a dimension in the "
                       "caller's memory");
      }
      break;
    default:
      core::fail<UsageError>(what, ": layout ", tensor.layout, " is none of smp_layout. Set it, ",
                             "for example to SMP_COLUMN_MAJOR for a Fortran array");
  }
  return strides;
}

void check_shape(const smp_tensor& tensor, const std::string& what) {
  SMP_CHECK_WITH(UsageError, tensor.dims >= 0 && tensor.dims <= SMP_MAX_DIMS, what, ": it has ",
                 tensor.dims, " dimensions, and a tensor has 0 to ", SMP_MAX_DIMS,
                 " (SMP_MAX_DIMS)");
  int64_t elements = 1;
  for (int64_t i = 0; i < tensor.dims; ++i) {
    int64_t product = 0;
    const bool fits =
        tensor.sizes[i] >= 0 &&
        !__builtin_mul_overflow(elements, std::max<int64_t>(tensor.sizes[i], 1), &product) &&
        product <= kMostElements;
    SMP_CHECK_WITH(UsageError, fits, what, ": size ", i, " is ", tensor.sizes[i],
                   ", which no memory has. Sizes are numbers of elements, 0 or more");
    elements = product;
  }
}

/// Neither the elements' number nor the distance of the last from the first overflows in libtorch.
void check_extent(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                  const std::string& what) {
  int64_t last = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    int64_t distance = 0;
    const bool fits =
        sizes[i] < 2 || (!__builtin_mul_overflow(sizes[i] - 1, strides[i], &distance) &&
                         distance <= kMostElements - last);
    SMP_CHECK_WITH(UsageError, fits, what, ": the stride of dimension ", i, " is ", strides[i],
                   ", which no memory has. Strides are numbers of elements between neighbours");
    last += distance;
  }
}

/// For memory that is written to: each dimension, in the order of strides, has to step over those
/// before.
void check_apart(const at::Tensor& view, const std::string& what) {
  if (view.numel() == 0) return;
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride and size
  for (int64_t i = 0; i < view.dim(); ++i) {
    if (view.size(i) > 1) dims.emplace_back(view.stride(i), view.size(i));
  }
  std::sort(dims.begin(), dims.end());
  int64_t last = 0;
  for (const auto& [stride, size] : dims) {
    SMP_CHECK_WITH(UsageError, stride > last, what, ": with strides ", view.strides(),
                   " and sizes ", view.sizes(),
                   " elements lie on each other. Give each a place of its own");
    last += stride * (size - 1);
  }
}

/// A view of the caller's memory.
at::Tensor view_of(const smp_tensor& tensor, const std::string& what) {
  check_shape(tensor, what);
  const std::vector<int64_t> sizes(tensor.sizes, tensor.sizes + tensor.dims);
  const auto strides = strides_of(tensor, what);
  check_extent(sizes, strides, what);
  const bool is_empty = std::count(sizes.begin(), sizes.end(), 0) > 0;
  SMP_CHECK_WITH(UsageError, tensor.data != nullptr || is_empty, what,
                 ": data is NULL. Set it to the address of the first element");
  const at::Device device = device_of(tensor.device, tensor.device_index, what);
  const auto options = at::TensorOptions(type_of(tensor, what)).device(device);
  return at::for_blob(tensor.data, sizes)
      .strides(strides)
      .options(options)
      .target_device(device)
      .make_tensor();
}

void write_tensor(const at::Tensor& result, smp_tensor& place, const std::string& what) {
  const smp_tensor tensor = with_all_members(place, place.struct_size);
  SMP_CHECK_WITH(UsageError, tensor.dlpack == nullptr && tensor.dlpack_versioned == nullptr, what,
                 ": an output is given by DLPack, which inputs and targets may be. Set data to its "
                 "memory");
  if (tensor.data == nullptr) {
    const smp_tensor described = describe(result);
    place.dtype = described.dtype;
    place.dims = described.dims;
    std::copy_n(described.sizes, SMP_MAX_DIMS, place.sizes);
    return;
  }
  const at::Tensor view = view_of(tensor, what);
  SMP_CHECK_WITH(UsageError,
                 view.sizes() == result.sizes() && view.scalar_type() == result.scalar_type(), what,
                 ": the model returns ", result.scalar_type(), " of sizes ", result.sizes(),
                 ", and there is memory for ", view.scalar_type(), " of sizes ", view.sizes(),
                 ". With data = NULL the call fills in dtype and sizes");
  check_apart(view, what);
  view.copy_(result);
}

/// Those that a structure of `size` bytes has.
void write_members(smp_tensor described, void* place, int64_t size) {
  described.struct_size = size;
  std::memcpy(place, &described, static_cast<size_t>(size));
}

}  // namespace

NamedTensors read_tensors(const smp_tensor* tensors, int64_t count, const char* what,
                          at::Device device) {
  SMP_CHECK_WITH(UsageError, count >= 0 && (count == 0 || tensors != nullptr), what, "s: ", count,
                 " tensors at ", static_cast<const void*>(tensors),
                 " are no array. Pass the address of the first and their number");
  NamedTensors result;
  for (int64_t i = 0; i < count; ++i) {
    const smp_tensor& tensor = checked_element(tensors, i, what);
    result.tensors.push_back(read_tensor(tensor, text_of(what, i), device));
    result.names.emplace_back(tensor.name == nullptr ? "" : tensor.name);
  }
  return result;
}

at::Tensor read_tensor(const smp_tensor& tensor, const std::string& what, at::Device device) {
  check_size(tensor.struct_size, what);
  const smp_tensor all = with_all_members(tensor, tensor.struct_size);
  at::Tensor view = view_of(without_dlpack(all, what), what);
  if (!view.is_cpu() && view.device() != device) view = view.to(device);
  return is_read_only(all) ? view.clone(at::MemoryFormat::Contiguous) : view.contiguous();
}

void write_tensors(const std::vector<at::Tensor>& results, smp_tensor* tensors, int64_t count) {
  const at::NoGradGuard no_grad;
  SMP_CHECK_WITH(UsageError, count >= 0 && count <= static_cast<int64_t>(results.size()), count,
                 " outputs were asked for, and the model returns ", results.size(),
                 " tensors. Ask for so many, or for fewer");
  SMP_CHECK_WITH(UsageError, count == 0 || tensors != nullptr,
                 "the array of outputs is NULL. Pass the address of the first");
  for (int64_t i = 0; i < count; ++i) {
    write_tensor(results[i], checked_element(tensors, i, "output"), text_of("output", i));
  }
}

smp_tensor describe(const at::Tensor& tensor) {
  smp_tensor result{};
  result.struct_size = sizeof(smp_tensor);
  for (const NumberType& known : kNumberTypes) {
    if (known.type == tensor.scalar_type()) result.dtype = known.dtype;
  }
  SMP_CHECK_WITH(UsageError, result.dtype != 0 && tensor.dim() <= SMP_MAX_DIMS, "a tensor of ",
                 tensor.scalar_type(), " of sizes ", tensor.sizes(),
                 " has no description in C: smp_dtype lacks its type, or it has more than ",
                 SMP_MAX_DIMS, " dimensions (SMP_MAX_DIMS). Export a program that converts it");
  result.layout = SMP_ROW_MAJOR;
  result.dims = tensor.dim();
  std::copy(tensor.sizes().begin(), tensor.sizes().end(), result.sizes);
  std::copy(tensor.strides().begin(), tensor.strides().end(), result.strides);
  result.data = tensor.numel() == 0 ? nullptr : tensor.mutable_data_ptr();
  return result;
}

DescribedArray::DescribedArray(const std::vector<at::Tensor>& tensors, int64_t size)
    : bytes_(tensors.size() * static_cast<size_t>(size) / sizeof(std::max_align_t) + 1) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    auto* const place = reinterpret_cast<char*>(bytes_.data()) + i * static_cast<size_t>(size);
    write_members(describe(tensors[i]), place, size);
  }
}

void store(const smp_tensor& described, smp_tensor* tensor) {
  SMP_CHECK_WITH(UsageError, tensor != nullptr,
                 "the place for a tensor is NULL. Pass the address "
                 "of an smp_tensor");
  check_size(tensor->struct_size, "the place for a tensor");
  write_members(described, tensor, tensor->struct_size);
}

std::vector<at::Tensor> tensors_of(const c10::IValue& value) {
  std::vector<at::Tensor> found = detail::tensors_in(value);
  found.erase(std::remove_if(found.begin(), found.end(),
                             [](const auto& tensor) { return !tensor.defined(); }),
              found.end());
  return found;
}

}  // namespace smp::c
