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
  std::weak_ptr<const torch::nn::Module> module;
  std::string name;  ///< of its type, for errors
  int group;         ///< how many neighbours run again together; 0: all
};

/// Those of this thread: a rank that is a thread builds its own module.
std::vector<CheckpointingRequest>& checkpointing_requests();

/// Whether a module's children run one after the other: a `Sequential` or a `ModuleList`.
bool has_children_in_order(const torch::nn::Module& module);

/// What was asked for, by the modules' names in the models. Throws `UsageError` for a module that
/// is in none of them.
std::vector<partitioner::CheckpointedModules> checkpointed_modules(const Runtime& runtime);

}  // namespace smp::runtime
