// SPDX-License-Identifier: Apache-2.0
#include "smp/activation_checkpointing.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <cctype>
#include <optional>

#include "core/check.h"
#include "runtime/runtime.h"
#include "runtime/step/checkpointed_modules.h"

namespace smp {
namespace {

using runtime::Runtime;

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

}  // namespace

CheckpointOptions& CheckpointOptions::strategy(CheckpointStrategy strategy) {
  return this->strategy(strategy == CheckpointStrategy::kEach ? "each" : "contiguous");
}

CheckpointOptions& CheckpointOptions::group(int64_t neighbours) {
  return strategy("group_" + std::to_string(neighbours));
}

void detail::checkpoint_module(const torch::nn::Module& module, const CheckpointOptions& options) {
  SMP_CHECK_WITH(UsageError, !Runtime::exists() || !Runtime::get().partitioned(),
                 "smp::set_activation_checkpointing was called after the first step, which planned "
                 "what runs again; call it before");
  const auto group = group_of(options.strategy());
  SMP_CHECK_WITH(UsageError, group.has_value(),
                 "smp::set_activation_checkpointing: unknown strategy \"", options.strategy(),
                 "\". Use \"each\", \"contiguous\" or \"group_N\" with a number N from 1 on");
  const bool whole = !runtime::has_children_in_order(module);
  SMP_CHECK_WITH(UsageError, !whole || options.strategy() == "each",
                 "smp::set_activation_checkpointing: the strategy \"", options.strategy(),
                 "\" is for a Sequential or a ModuleList, and ", module.name(),
                 " is neither. Leave the strategy out");
  runtime::request_checkpointing({Runtime::exists() ? Runtime::get_shared() : nullptr,
                                  module.weak_from_this(), module.name(), *group});
}

}  // namespace smp
