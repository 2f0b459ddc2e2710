// SPDX-License-Identifier: Apache-2.0
#include "exported/write_weights.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/Storage.h>
#include <caffe2/serialize/inline_container.h>

#include "core/check.h"
#include "core/text.h"
#include "exported/archive_writer.h"
#include "exported/loaded_program.h"

namespace smp::exported {
namespace {

using caffe2::serialize::PyTorchStreamReader;

/// Copies values into the tensors of a program, which share memory as those of the archive do.
void assign(const LoadedProgram& program, const std::map<std::string, at::Tensor>& state) {
  const at::NoGradGuard no_grad;
  for (const ModelTensor& own : program.tensors()) {
    const auto found = state.find(own.name);
    SMP_CHECK_WITH(CheckpointError, found != state.end() && found->second.defined(),
                   "cannot save exported program \"", core::printable(program.program().file),
                   "\" with other weights: the state has no \"", core::printable(own.name, 100),
                   "\". Give the parameters and buffers of the module that was loaded from it");
    SMP_CHECK_WITH(CheckpointError, found->second.sizes() == own.tensor.sizes(),
                   "cannot save exported program \"", core::printable(program.program().file),
                   "\" with other weights: the state has \"", core::printable(own.name, 100),
                   "\" with shape ", found->second.sizes(), ", and the program with ",
                   own.tensor.sizes(),
                   ". Give whole tensors, as model->state_dict() of all ranks has them");
    own.tensor.copy_(found->second);
  }
}

/// The writer makes these itself.
bool is_of_writer(const std::string& record) {
  return record.rfind(".data/", 0) == 0 || record == "byteorder" || record == "version";
}

}  // namespace

void write_weights(const std::string& from, const std::map<std::string, at::Tensor>& state,
                   const std::string& to) {
  const LoadedProgram program(from);
  assign(program, state);
  PyTorchStreamReader reader(from);
  std::map<std::string, c10::Storage> storages;
  for (const ModelTensor& own : program.tensors()) storages[own.record] = own.tensor.storage();
  ArchiveWriter writer(to, reader.version());
  for (const std::string& record : reader.getAllRecords()) {
    if (is_of_writer(record)) continue;
    const auto changed = storages.find(record);
    if (changed != storages.end()) {
      writer.add(record, changed->second.data(), changed->second.nbytes());
      continue;
    }
    const auto [data, size] = reader.getRecord(record);
    writer.add(record, data.get(), size);
  }
  writer.commit();
}

}  // namespace smp::exported
