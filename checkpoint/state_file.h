#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/safetensors.h"

namespace smp::checkpoint {

/// Writes a state dictionary as Python's `torch.save` does, for `torch.load` (with `weights_only`,
/// its default) and `torch::pickle_load`: a dict of tensors by name. `tensors` are asked from
/// `read` one at a time; `aliases` gives other names of tied ones, which share their memory there,
/// too. The file appears under `path` only when it is complete and synced. Throws CheckpointError.
void write_state_file(const std::string& path, const std::vector<NamedSpec>& tensors,
                      const std::map<std::string, std::string>& aliases,
                      const std::function<at::Tensor(const std::string& name)>& read);

}  // namespace smp::checkpoint
