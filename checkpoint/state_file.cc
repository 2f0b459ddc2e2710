#include "checkpoint/state_file.h"

#include <ATen/core/Dict.h>
#include <ATen/ops/empty.h>
#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/jit/serialization/pickler.h>

#include "checkpoint/file.h"
#include "smp/core/error.h"

namespace smp::checkpoint {
namespace {

/// The pickled dictionary, which refers to the tensors' bytes by number: those of `tensors` in
/// their order. What is pickled are tensors whose memory is never touched, so it takes none.
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

}  // namespace

void write_state_file(const std::string& path, const std::vector<NamedSpec>& tensors,
                      const std::map<std::string, std::string>& aliases,
                      const std::function<at::Tensor(const std::string& name)>& read) {
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
