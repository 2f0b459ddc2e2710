// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/safetensors.h"
#include "checkpoint/writer.h"

namespace smp::checkpoint {

/// Writes a state dictionary as Python's `torch.save` does, for `torch.load` (with `weights_only`,
/// its default) and `torch::pickle_load`: a dict of tensors by name. `tensors` are asked from
/// `read` one at a time; `aliases` gives other names of tied ones, which share their memory there,
/// too. The file appears under `path` only when it is complete and synced. Throws CheckpointError.
void write_state_file(const std::string& path, const std::vector<NamedSpec>& tensors,
                      const std::map<std::string, std::string>& aliases,
                      const std::function<at::Tensor(const std::string& name)>& read);

/// Whether a file is one that `read_state_file` is for: a zip archive.
bool is_state_file(const std::string& path);

/// The tensors of a state dictionary, sorted by name, each once, with tied ones as aliases. `path`
/// is a file of Python's `torch.save(dict(model.state_dict()), path)` (dictionaries inside it are
/// joined by dots), of `write_state_file`, or of `torch::save(module, path)` in C++. The whole file
/// is in memory. libtorch reads it; no code of the file is run. Throws CheckpointError for other
/// contents, also for the OrderedDict that Python's `state_dict()` gives, which libtorch does not
/// read.
std::vector<NamedTensor> read_state_file(const std::string& path);

}  // namespace smp::checkpoint
