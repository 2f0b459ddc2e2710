// SPDX-License-Identifier: Apache-2.0
#include "smp/detail/archive.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include "core/check.h"

namespace smp::detail {

const char* Reader::take(size_t bytes) {
  SMP_CHECK_WITH(CommError, bytes <= left_, "an object that was received ends early: expected ",
                 bytes, " more bytes, got ", left_,
                 ". Its serialize function must name the same fields on all ranks.");
  left_ -= bytes;
  return std::exchange(next_, next_ + bytes);
}

size_t Reader::count(size_t bytes_each) {
  uint64_t number = 0;
  raw(&number, sizeof number);
  SMP_CHECK_WITH(CommError, number <= left_ / bytes_each, "an object that was received announces ",
                 number,
                 " elements, more than its bytes hold. Its serialize function must name the same "
                 "fields on all ranks.");
  return number;
}

void Codec<at::Tensor>::write(Writer& writer, const at::Tensor& value) {
  writer(value.defined());
  if (!value.defined()) return;
  SMP_CHECK_WITH(UsageError, value.layout() == c10::kStrided && !value.is_quantized(),
                 "expected a dense tensor to send as an object, got one of layout ", value.layout(),
                 ". Send its parts, or to_dense() of it.");
  const at::NoGradGuard no_grad;
  const at::Tensor plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous();
  writer(plain.scalar_type(), plain.sizes().vec(), value.requires_grad());
  writer.raw(plain.const_data_ptr(), plain.nbytes());
}

void Codec<at::Tensor>::read(Reader& reader, at::Tensor& value) {
  bool defined = false;
  reader(defined);
  value = at::Tensor();
  if (!defined) return;
  at::ScalarType dtype;
  std::vector<int64_t> sizes;
  bool requires_grad = false;
  reader(dtype, sizes, requires_grad);
  value = at::empty(sizes, at::TensorOptions(dtype));
  reader.raw(value.mutable_data_ptr(), value.nbytes());
  value.set_requires_grad(requires_grad);
}

void Codec<c10::IValue>::write(Writer& writer, const c10::IValue& value) {
  writer(torch::jit::pickle_save(value));
}

void Codec<c10::IValue>::read(Reader& reader, c10::IValue& value) {
  std::vector<char> bytes;
  reader(bytes);
  value = torch::jit::pickle_load(bytes);
}

void check_type(Reader& reader, const std::string& expected, const std::string& source) {
  std::string type;
  reader(type);
  SMP_CHECK_WITH(CommError, type == expected, "expected an object of type ", expected, " from ",
                 source, ", got one of type ", type,
                 ". Receive the type that is sent; ranks must run the same program.");
}

void check_end(const Reader& reader, const std::string& type, const std::string& source) {
  SMP_CHECK_WITH(CommError, reader.left() == 0, "an object of type ", type, " from ", source,
                 " has ", reader.left(),
                 " bytes too many. Its serialize function must name the same fields on all ranks.");
}

}  // namespace smp::detail
