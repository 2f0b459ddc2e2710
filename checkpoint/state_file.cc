// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/state_file.h"

#include <ATen/core/Dict.h>
#include <ATen/ops/empty.h>
#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/csrc/jit/serialization/import_read.h>
#include <torch/csrc/jit/serialization/pickler.h>
#include <torch/csrc/jit/serialization/storage_context.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <map>
#include <memory>

#include "checkpoint/file.h"
#include "core/check.h"
#include "core/text.h"

namespace smp::checkpoint {
namespace {

/// The pickled dictionary, which refers to the tensors' bytes by number: those of `tensors` in
/// their order. The memory of the pickled tensors is never touched, so they take none.
std::string pickle(const std::vector<NamedSpec>& tensors,
                   const std::map<std::string, std::string>& aliases) {
  c10::Dict<std::string, at::Tensor> dict;
  for (const auto& [name, spec] : tensors) dict.insert(name, at::empty(spec.shape, spec.dtype));
  for (const auto& [alias, name] : aliases) dict.insert(alias, dict.at(name));
  std::string bytes;
  // Without tags of TorchScript types, which torch.load would not take for weights only.
  torch::jit::Pickler pickler([&](const char* data, size_t size) { bytes.append(data, size); },
                              nullptr, nullptr, nullptr, nullptr, /*tag_aggregates=*/false);
  pickler.protocol();
  pickler.pushIValue(dict);
  pickler.stop();
  SMP_INTERNAL_ASSERT(pickler.tensorData().size() == tensors.size(), "a tensor without storage");
  for (size_t i = 0; i < tensors.size(); ++i) {
    SMP_INTERNAL_ASSERT(pickler.tensorData()[i].is_alias_of(dict.at(tensors[i].first)),
                        "tensors are pickled in another order");
  }
  return bytes;
}

/// The types that torch.load knows from the names of their storages.
bool is_pickled(at::ScalarType dtype) {
  constexpr std::array kWithout = {at::kUInt16, at::kUInt32, at::kUInt64, at::kFloat8_e4m3fn,
                                   at::kFloat8_e5m2};
  return std::find(kWithout.begin(), kWithout.end(), dtype) == kWithout.end();
}

void check_dtypes(const std::string& path, const std::vector<NamedSpec>& tensors) {
  for (const auto& [name, spec] : tensors) {
    SMP_CHECK_WITH(CheckpointError, is_pickled(spec.dtype), "cannot write \"",
                   core::printable(path), "\": tensor \"", core::printable(name), "\" is of dtype ",
                   dtype_name(spec.dtype),
                   ", which state dictionaries cannot hold. Write a .safetensors file.");
  }
}

/// Has libtorch read something of a file.
template <class Action>
auto with_libtorch(const std::string& path, const Action& action) {
  try {
    return action();
  } catch (const CheckpointError&) {
    throw;
  } catch (const c10::Error& error) {
    core::fail<CheckpointError>("cannot read the state dictionary \"", core::printable(path),
                                "\": ", core::printable(error.what_without_backtrace()),
                                ". It may be damaged, or an OrderedDict, which libtorch does not "
                                "read. Write it again with torch.save(dict(model.state_dict()), "
                                "path) in Python, or torch::save(module, path) in C++.");
  }
}

using Tensors = std::map<std::string, at::Tensor>;

/// Adds tensors of a pickled dictionary, under names that begin with `prefix`.
void add_tensors(const std::string& path, const std::string& prefix, const c10::IValue& value,
                 Tensors& tensors) {
  SMP_CHECK_WITH(CheckpointError, value.isTensor() || value.isGenericDict(), "\"",
                 core::printable(path), "\" is no state dictionary: expected tensors by name, got ",
                 value.tagKind(), prefix.empty() ? "" : " as \"" + core::printable(prefix) + "\"",
                 ". Save the state dictionary alone: torch.save(dict(model.state_dict()), path).");
  if (value.isTensor()) {
    tensors[prefix] = value.toTensor().detach();
    return;
  }
  for (const auto& item : value.toGenericDict()) {
    SMP_CHECK_WITH(
        CheckpointError, item.key().isString(), "\"", core::printable(path),
        "\" is no state dictionary: expected tensors by name, got a key that is a ",
        item.key().tagKind(),
        ". Save the state dictionary alone: torch.save(dict(model.state_dict()), path).");
    const std::string& name = item.key().toStringRef();
    add_tensors(path, prefix.empty() ? name : prefix + "." + name, item.value(), tensors);
  }
}

/// Parameters and buffers in the output of torch::save, a TorchScript module without code.
Tensors tensors_of_module(const torch::jit::Module& module) {
  Tensors tensors;
  for (const auto& item : module.named_parameters()) tensors[item.name] = item.value.detach();
  for (const auto& item : module.named_buffers()) tensors[item.name] = item.value;
  return tensors;
}

/// The identity that tied tensors share: memory and form.
std::string identity_of(const at::Tensor& tensor) {
  return c10::str(tensor.const_data_ptr(), " ", tensor.scalar_type(), " ", tensor.sizes(),
                  tensor.strides());
}

}  // namespace

bool is_state_file(const std::string& path) {
  constexpr char kZip[] = {'P', 'K', 3, 4};
  const FileReader file(path);
  char begin[sizeof(kZip)];
  if (file.size() < sizeof(begin)) return false;
  file.read(0, begin, sizeof(begin));
  return std::equal(std::begin(kZip), std::end(kZip), begin);
}

std::vector<NamedTensor> read_state_file(const std::string& path) {
  const Tensors tensors = with_libtorch(path, [&] {
    caffe2::serialize::PyTorchStreamReader archive(path);
    if (archive.hasRecord("constants.pkl")) return tensors_of_module(torch::jit::load(path));
    Tensors found;
    // A context makes tensors that share memory in the file share it here.
    const auto value = torch::jit::readArchiveAndTensors(
        "data", "", "", std::nullopt, std::nullopt, at::kCPU, archive,
        torch::jit::Unpickler::defaultTypeParser,
        std::make_shared<torch::jit::DeserializationStorageContext>());
    add_tensors(path, "", value, found);
    return found;
  });
  std::vector<NamedTensor> result;
  std::map<std::string, size_t> known;
  for (const auto& [name, tensor] : tensors) {
    SMP_CHECK_WITH(
        CheckpointError, tensor.layout() == at::kStrided && !tensor.is_quantized(), "\"",
        core::printable(path), "\": tensor \"", core::printable(name),
        "\" is undefined or not dense. Convert it with to_dense() or dequantize() before "
        "it is saved.");
    const auto [found, is_new] = known.emplace(identity_of(tensor), result.size());
    if (is_new || tensor.numel() == 0) {
      result.push_back({name, tensor, {}});
    } else {
      result[found->second].aliases.push_back(name);
    }
  }
  return result;
}

void write_state_file(const std::string& path, const std::vector<NamedSpec>& tensors,
                      const std::map<std::string, std::string>& aliases,
                      const std::function<at::Tensor(const std::string& name)>& read) {
  check_dtypes(path, tensors);
  FileWriter file(path);
  caffe2::serialize::PyTorchStreamWriter archive([&](const void* data, size_t size) {
    file.append(data, size);
    return size;
  });
  const std::string dict = pickle(tensors, aliases);
  archive.writeRecord("data.pkl", dict.data(), dict.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor tensor = read(tensors[i].first).cpu().contiguous();
    SMP_INTERNAL_ASSERT(spec_of(tensor) == tensors[i].second, "a tensor of another form");
    archive.writeRecord("data/" + std::to_string(i), tensor.const_data_ptr(), tensor.nbytes());
  }
  archive.writeEndOfFile();
  file.commit();
}

}  // namespace smp::checkpoint
