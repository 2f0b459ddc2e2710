// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "smp/export.h"
#include "smp/pretrained_options.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace smp {

class ModelCore;

/// Loads safetensors files that another program wrote into a model, for fine-tuning: one file, or a
/// folder as Hugging Face's libraries write it (`checkpoint::PretrainedFiles`). `names` maps stored
/// names to the model's. Before or after the first step; collective over the world, each rank reads
/// the tensors that it holds. Shapes, types and names are checked first: misfits are one
/// `CheckpointError` on all ranks, and then nothing has changed. Returns the names that were used
/// and that were not, the same on all ranks.
SMP_API PretrainedReport load_pretrained(const std::string& path, const ModelCore& model,
                                         const PretrainedOptions& options = {});

/// The same into a plain module of this process; needs no `init`.
SMP_API PretrainedReport load_pretrained(const std::string& path, torch::nn::Module& module,
                                         const PretrainedOptions& options = {});

/// Writes a model as `folder`/model.safetensors, as Hugging Face's libraries read it (with the
/// config.json of the model beside it), by the names that `names` gives its tensors; a tied one is
/// stored once. World rank 0 writes; the others send it their tensors one at a time. Collective
/// over the world, between steps. A tensor or file that cannot be stored or written is one
/// `CheckpointError` on all ranks, and then an earlier file is as it was.
SMP_API void save_pretrained(const std::string& folder, const ModelCore& model,
                             const NameMap& names = {});

/// The same of a plain module of this process; needs no `init`.
SMP_API void save_pretrained(const std::string& folder, const torch::nn::Module& module,
                             const NameMap& names = {});

}  // namespace smp
