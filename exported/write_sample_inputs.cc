// SPDX-License-Identifier: Apache-2.0
#include "exported/write_sample_inputs.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/jit_type.h>
#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/jit/serialization/pickler.h>

#include <string>
#include <utility>

#include "exported/structure.h"
#include "exported/write_tensors.h"

namespace smp::exported {
namespace {

/// A copy with tensors of their own memory, and lists and dictionaries of no type, which Python
/// reads as its own.
c10::IValue plain_copy(const c10::IValue& value) {
  std::vector<c10::IValue> leaves;
  const Structure structure = structure_of(value, leaves);
  for (c10::IValue& leaf : leaves) {
    if (leaf.isTensor()) leaf = leaf.toTensor().detach().clone();
  }
  return unflatten(structure, leaves, /*typed=*/false);
}

/// The value in the form of torch.save. `torch::pickle_save` names the types of lists and
/// dictionaries by a function that `weights_only=True` refuses.
std::string pickled(const c10::IValue& value) {
  std::string bytes, archive;
  torch::jit::Pickler pickler([&](const char* data, size_t size) { bytes.append(data, size); },
                              nullptr, nullptr, nullptr, nullptr, /*tag_aggregates=*/false);
  pickler.protocol();
  pickler.pushIValue(value);
  pickler.stop();
  caffe2::serialize::PyTorchStreamWriter writer([&](const void* data, size_t size) {
    archive.append(static_cast<const char*>(data), size);
    return size;
  });
  writer.writeRecord("data.pkl", bytes.data(), bytes.size());
  size_t number = 0;
  for (const at::Tensor& tensor : pickler.tensorData()) {
    const at::Tensor content = storage_bytes(tensor);
    writer.writeRecord("data/" + std::to_string(number++), content.const_data_ptr(),
                       content.nbytes());
  }
  writer.writeEndOfFile();
  return archive;
}

}  // namespace

void write_sample_inputs(ArchiveWriter& archive, const std::vector<c10::IValue>& arguments) {
  std::vector<c10::IValue> positions;
  for (const c10::IValue& argument : arguments) positions.push_back(plain_copy(argument));
  const c10::impl::GenericDict by_name(c10::StringType::get(), c10::AnyType::get());
  archive.add("data/sample_inputs/model.pt",
              pickled(c10::ivalue::Tuple::create(
                  {c10::ivalue::Tuple::create(std::move(positions)), by_name})));
}

}  // namespace smp::exported
