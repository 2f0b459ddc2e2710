#include "smp/activation_checkpointing.h"

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <algorithm>
#include <cctype>
#include <memory>
#include <optional>

#include "core/check.h"
#include "partitioner/checkpointing.h"
#include "runtime/runtime.h"
#include "smp/model_core.h"

namespace smp {
namespace {

/// A call of `set_activation_checkpointing`.
struct Request {
  std::weak_ptr<const torch::nn::Module> module;
  std::string name;  // of its type, for errors
  int group;
};

/// Of this thread: a rank that is a thread builds its own module.
std::vector<Request>& requests() {
  static thread_local std::vector<Request> of_thread;
  return of_thread;
}

bool has_children_in_order(const torch::nn::Module& module) {
  return dynamic_cast<const torch::nn::SequentialImpl*>(&module) != nullptr ||
         dynamic_cast<const torch::nn::ModuleListImpl*>(&module) != nullptr;
}

/// How many neighbours run again together; 0: all; nothing for an unknown strategy.
std::optional<int> group_of(const std::string& strategy) {
  const std::string prefix = "group_";
  if (strategy == "each") return 1;
  if (strategy == "contiguous") return 0;
  if (strategy.compare(0, prefix.size(), prefix) != 0) return std::nullopt;
  const std::string number = strategy.substr(prefix.size());
  const bool digits = !number.empty() && number.size() < 7 &&
                      std::all_of(number.begin(), number.end(),
                                  [](unsigned char c) { return std::isdigit(c) != 0; });
  if (!digits || std::stoi(number) == 0) return std::nullopt;
  return std::stoi(number);
}

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

}  // namespace

void detail::checkpoint_module(const torch::nn::Module& module, const CheckpointOptions& options) {
  SMP_CHECK_WITH(UsageError, !Runtime::exists() || !Runtime::get().partitioned,
                 "smp::set_activation_checkpointing was called after the first step, which planned "
                 "what runs again; call it before");
  const auto group = group_of(options.strategy());
  SMP_CHECK_WITH(UsageError, group.has_value(),
                 "smp::set_activation_checkpointing: unknown strategy \"", options.strategy(),
                 "\". Use \"each\", \"contiguous\" or \"group_N\" with a number N from 1 on");
  const bool whole = !has_children_in_order(module);
  SMP_CHECK_WITH(UsageError, !whole || options.strategy() == "each",
                 "smp::set_activation_checkpointing: the strategy \"", options.strategy(),
                 "\" is for a Sequential or a ModuleList, and ", module.name(),
                 " is neither. Leave the strategy out");
  requests().push_back({module.weak_from_this(), module.name(), *group});
}

std::vector<partitioner::CheckpointedModules> checkpointed_modules(const Runtime& runtime) {
  std::vector<partitioner::CheckpointedModules> result;
  for (const Request& request : requests()) {
    const auto module = request.module.lock();
    if (module == nullptr) continue;
    const auto path = path_of(runtime, *module);
    SMP_CHECK_WITH(UsageError, path.has_value(), "smp::set_activation_checkpointing: module ",
                   request.name, " is not inside a module that a DistributedModel wraps. Register "
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

}  // namespace smp
