// SPDX-License-Identifier: Apache-2.0
// Exported programs. The first byte tells the kind of the rest: an archive, or the JSON of a
// program or of weights, which is put into an archive with a checksum that no input would guess.

#include <ATen/Parallel.h>
#include <caffe2/serialize/inline_container.h>

#include <string>

#include "core/check.h"
#include "exported/loaded_program.h"
#include "tests/fuzz/fuzz_target.h"

namespace {

const char* const kWeights = R"({"config": {"layer.weight": {"path_name": "weight_0",
  "is_param": true, "use_pickle": false, "tensor_meta": {"dtype": 7, "sizes": [{"as_int": 2},
  {"as_int": 3}], "requires_grad": true, "device": {"type": "cpu", "index": null},
  "strides": [{"as_int": 3}, {"as_int": 1}], "storage_offset": {"as_int": 0}, "layout": 7}},
  "layer.bias": {"path_name": "weight_1", "is_param": true, "use_pickle": false,
  "tensor_meta": {"dtype": 7, "sizes": [{"as_int": 2}], "requires_grad": true,
  "device": {"type": "cpu", "index": null}, "strides": [{"as_int": 1}],
  "storage_offset": {"as_int": 0}, "layout": 7}}}})";

const char* const kProgram = R"({"schema_version": {"major": 8, "minor": 17},
  "opset_version": {"aten": 10}, "range_constraints": {}, "graph_module": {
  "graph": {"inputs": [{"as_tensor": {"name": "w"}}], "outputs": [{"as_tensor": {"name": "r"}}],
  "nodes": [{"target": "torch.ops.aten.relu.default", "name": "r", "inputs": [{"name": "self",
  "arg": {"as_tensor": {"name": "w"}}}], "outputs": [{"as_tensor": {"name": "r"}}]}],
  "tensor_values": {"w": {"device": {"type": "cpu", "index": null}}}},
  "signature": {"input_specs": [{"parameter": {"arg": {"name": "w"},
  "parameter_name": "layer.weight"}}], "output_specs": [{"user_output": {}}]},
  "module_call_graph": [{"fqn": "", "signature": {
  "in_spec": "[1, {\"type\": \"builtins.tuple\", \"context\": null, \"children_spec\": [{\"type\": \"builtins.tuple\", \"context\": null, \"children_spec\": []}, {\"type\": \"builtins.dict\", \"context\": \"[]\", \"children_spec\": []}]}]",
  "out_spec": "[1, {\"type\": null, \"context\": null, \"children_spec\": []}]"}}]}})";

std::string archive_of(const std::string& program, const std::string& weights) {
  std::string bytes;
  caffe2::serialize::PyTorchStreamWriter writer([&](const void* data, size_t size) {
    bytes.append(static_cast<const char*>(data), size);
    return size;
  });
  const std::string numbers(24, '\0'), none = R"({"config": {}})";
  const auto write = [&](const char* name, const std::string& content) {
    writer.writeRecord(name, content.data(), content.size());
  };
  write("models/model.json", program);
  write("data/weights/model_weights_config.json", weights);
  write("data/weights/weight_0", numbers);
  write("data/weights/weight_1", numbers.substr(0, 8));
  write("data/constants/model_constants_config.json", none);
  writer.writeEndOfFile();
  return bytes;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  at::set_num_threads(1);
  if (size == 0) return 0;
  std::string bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  if (data[0] % 3 == 1) bytes = archive_of(bytes, kWeights);
  if (data[0] % 3 == 2) bytes = archive_of(kProgram, bytes);
  const smp::testing::MemoryFile file(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
  try {
    smp::exported::LoadedProgram program(file.path());
    for (const auto& tensor : program.tensors()) {
      smp::testing::require(tensor.tensor.nbytes() <= bytes.size(), "more bytes than the file has");
      tensor.tensor.sum();
    }
  } catch (const smp::Error&) {
  }
  return 0;
}
