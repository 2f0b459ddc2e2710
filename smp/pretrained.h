#pragma once

#include <string>
#include <vector>

#include "checkpoint/pretrained.h"
#include "smp/distributed_model.h"

namespace smp {

using checkpoint::NameMap;
using checkpoint::PretrainedOptions;
using checkpoint::PretrainedReport;
using checkpoint::Transform;

/// With types erased. Internal.
PretrainedReport load_pretrained(ModelCore& model, const std::string& path,
                                 const PretrainedOptions& options);

/// Loads safetensors files that another program wrote into a model, for fine-tuning: one file, or a
/// folder as Hugging Face's libraries write it (`checkpoint::PretrainedFiles`). `names` says what
/// stored tensors are called in the model. Before or after the first step; collective over the
/// world, each rank reads what it holds. Shapes, types and names are checked first: what does not
/// fit is one `CheckpointError` on all ranks, and then nothing has changed. Returns what was used
/// and what not, the same on all ranks.
template <class M>
PretrainedReport load_pretrained(const std::string& path, DistributedModel<M>& model,
                                 const PretrainedOptions& options = {}) {
  return load_pretrained(model.core(), path, options);
}

/// The same into a plain module of this process; needs no `init`.
inline PretrainedReport load_pretrained(const std::string& path, torch::nn::Module& module,
                                        const PretrainedOptions& options = {}) {
  return checkpoint::load_pretrained(module, path, options);
}

}  // namespace smp
