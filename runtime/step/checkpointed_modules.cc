// SPDX-License-Identifier: Apache-2.0
#include "runtime/step/checkpointed_modules.h"

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <utility>

#include "core/check.h"
#include "runtime/model.h"

namespace smp::runtime {
namespace {

/// The module's dotted path in the models.
std::optional<std::string> path_of(const Runtime& runtime, const torch::nn::Module& module) {
  for (const auto& model : runtime.models()) {
    for (const auto& item : model->module_ptr()->named_modules()) {
      if (item.value().get() != &module) continue;
      return item.key().empty() ? model->options().name() : model->full_name(item.key());
    }
  }
  return std::nullopt;
}

std::string join(const std::string& path, const std::string& child) {
  return path.empty() ? child : path + "." + child;
}

/// The requests of all threads.
class Requests {
 public:
  static Requests& of_process() {
    static Requests requests;
    return requests;
  }

  void add(CheckpointingRequest request) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto gone = [](const CheckpointingRequest& old) { return old.module.expired(); };
    requests_.erase(std::remove_if(requests_.begin(), requests_.end(), gone), requests_.end());
    requests_.push_back(std::move(request));
  }

  std::vector<CheckpointingRequest> all() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return requests_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<CheckpointingRequest> requests_;
};

}  // namespace

void request_checkpointing(CheckpointingRequest request) {
  Requests::of_process().add(std::move(request));
}

bool has_children_in_order(const torch::nn::Module& module) {
  return dynamic_cast<const torch::nn::SequentialImpl*>(&module) != nullptr ||
         dynamic_cast<const torch::nn::ModuleListImpl*>(&module) != nullptr;
}

std::vector<partitioner::CheckpointedModules> checkpointed_modules(const Runtime& runtime) {
  std::vector<partitioner::CheckpointedModules> result;
  for (const CheckpointingRequest& request : Requests::of_process().all()) {
    const auto module = request.module.lock();
    if (module == nullptr) continue;
    const auto path = path_of(runtime, *module);
    // Ranks that are threads have models of their own, of which the others know nothing.
    if (!path && request.runtime.lock().get() != &runtime) continue;
    SMP_CHECK_WITH(UsageError, path.has_value(), "smp::set_activation_checkpointing: module ",
                   request.name,
                   " is not inside a module that a DistributedModel wraps. Register "
                   "it with register_module, and wrap the model before the first step");
    partitioner::CheckpointedModules modules;
    modules.group = request.group;
    if (has_children_in_order(*module)) {
      for (const auto& child : module->named_children()) {
        modules.modules.push_back(join(*path, child.key()));
      }
    } else {
      modules.modules.push_back(*path);
    }
    result.push_back(std::move(modules));
  }
  return result;
}

}  // namespace smp::runtime
