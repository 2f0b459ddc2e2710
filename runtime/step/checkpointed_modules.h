// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "partitioner/checkpointing.h"
#include "runtime/runtime.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace smp::runtime {

/// A call of `smp::set_activation_checkpointing`.
struct CheckpointingRequest {
  std::weak_ptr<Runtime> runtime;  ///< runtime of the rank that called; null: it was before `init`
  std::weak_ptr<const torch::nn::Module> module;
  std::string name;  ///< name of its type, for errors
  int group;         ///< how many neighbours run again together; 0: all
};

/// Notes a request, of any thread: a model may be made on another one than that of its first step.
void request_checkpointing(CheckpointingRequest request);

/// Whether a module's children run one after the other: a `Sequential` or a `ModuleList`.
bool has_children_in_order(const torch::nn::Module& module);

/// The requested modules, by their names in the models. Throws `UsageError` for a module that this
/// rank named and that is in none of them.
std::vector<partitioner::CheckpointedModules> checkpointed_modules(const Runtime& runtime);

}  // namespace smp::runtime
