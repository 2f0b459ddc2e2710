// SPDX-License-Identifier: Apache-2.0
// Higher-order nodes: those that run a function of the program, in another mode.
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "exported/action.h"

namespace smp::exported {
namespace {

const std::string kHigherOrder = "torch.ops.higher_order.";

/// While it lives, autocast keeps its casts, or not, as Python's torch.autocast was told.
class AutocastCacheScope {
 public:
  explicit AutocastCacheScope(bool enabled)
      : was_enabled_(at::autocast::is_autocast_cache_enabled()) {
    at::autocast::set_autocast_cache_enabled(enabled);
  }
  ~AutocastCacheScope() { at::autocast::set_autocast_cache_enabled(was_enabled_); }
  AutocastCacheScope(const AutocastCacheScope&) = delete;
  AutocastCacheScope& operator=(const AutocastCacheScope&) = delete;

 private:
  const bool was_enabled_;
};

/// The modes that a region sets while its function runs.
struct Modes {
  std::optional<bool> grad;
  struct Autocast {
    at::DeviceType device;
    std::optional<at::ScalarType> dtype;
    bool enabled;
    bool cache;
  };
  std::optional<Autocast> autocast;
};

/// Runs a function in modes of its own.
struct Region {
  Modes modes;
  std::shared_ptr<const Function> function;
  std::vector<Argument> operands;
  std::vector<Result> results;  ///< those of the node

  std::vector<c10::IValue> operator()(const Frame& frame) const {
    std::vector<c10::IValue> inputs;
    for (const Argument& operand : operands) inputs.push_back(value_of(operand, frame));
    std::optional<at::AutoGradMode> grad;
    if (modes.grad) grad.emplace(*modes.grad);
    if (modes.autocast) return run_in(*modes.autocast, frame.environment, std::move(inputs));
    return grouped(run_function(*function, std::move(inputs), frame.environment));
  }

  std::vector<c10::IValue> run_in(const Modes::Autocast& autocast, const Environment& environment,
                                  std::vector<c10::IValue> inputs) const {
    const AutocastCacheScope cache(autocast.cache);
    const bool moves = autocast.device == environment.exported_on;
    const at::DeviceType device = moves ? environment.device.type() : autocast.device;
    const at::ScalarType dtype = autocast.dtype.value_or(at::autocast::get_autocast_dtype(device));
    const auto scope = environment.autocast(dtype, device, autocast.enabled);
    return grouped(run_function(*function, std::move(inputs), environment));
  }

  /// The function's results, with those that the node has as a list in one.
  std::vector<c10::IValue> grouped(std::vector<c10::IValue> made) const {
    std::vector<c10::IValue> values;
    size_t next = 0;
    for (const Result& result : results) {
      if (!result.is_list) {
        if (next == made.size()) return made;  // too few, as the caller finds
        values.push_back(std::move(made[next++]));
        continue;
      }
      c10::impl::GenericList list(c10::AnyType::get());
      for (size_t i = 0; i < result.slots.size() && next < made.size(); ++i) {
        list.push_back(made[next++]);
      }
      values.emplace_back(std::move(list));
    }
    return values;
  }
};

/// Reads the arguments of a higher-order node.
class Arguments {
 public:
  Arguments(const std::string& file, const Node& node) : file_(file), node_(node) {}

  const c10::IValue& constant(size_t i) const {
    const bool is_there =
        i < node_.arguments.size() && node_.arguments[i].value.kind == Argument::Kind::kConstant;
    if (!is_there) refuse();
    return node_.arguments[i].value.constant;
  }
  bool boolean(size_t i) const {
    if (!constant(i).isBool()) refuse();
    return constant(i).toBool();
  }
  /// Where the function is among them.
  size_t function() const {
    for (size_t i = 0; i < node_.arguments.size(); ++i) {
      if (node_.arguments[i].value.kind == Argument::Kind::kFunction) return i;
    }
    refuse();
  }
  [[noreturn]] void refuse() const {
    exported::refuse(file_, node_, "has arguments that it does not take",
                     "The file is damaged: write it again by torch.export.save");
  }

 private:
  const std::string& file_;
  const Node& node_;
};

Modes::Autocast read_autocast(const Arguments& arguments) {
  if (!arguments.constant(0).isString()) arguments.refuse();
  Modes::Autocast autocast{at::kCPU, std::nullopt, arguments.boolean(2), true};
  const std::string device = arguments.constant(0).toStringRef();
  if (device != "cpu" && device != "cuda") arguments.refuse();
  autocast.device = device == "cpu" ? at::kCPU : at::kCUDA;
  if (arguments.constant(1).isInt()) {
    const int64_t dtype = arguments.constant(1).toInt();
    if (dtype < 0 || dtype >= static_cast<int64_t>(at::ScalarType::NumOptions)) arguments.refuse();
    autocast.dtype = static_cast<at::ScalarType>(dtype);
  }
  if (arguments.constant(3).isBool()) autocast.cache = arguments.boolean(3);
  return autocast;
}

/// Values that the function takes must be of the types that it declares.
void check_operands(const std::vector<Argument>& operands, const Function& body,
                    const Function& outer, const Arguments& arguments) {
  if (operands.size() != body.inputs.size()) arguments.refuse();
  for (size_t i = 0; i < operands.size(); ++i) {
    if (body.inputs[i] == kNoSlot) continue;
    const ValueType type = body.values[body.inputs[i]].type;
    const Argument& operand = operands[i];
    const bool is_slot = operand.kind == Argument::Kind::kSlot;
    const bool fits =
        is_slot ? outer.values[operand.slot].type == type
                : operand.kind == Argument::Kind::kConstant && is_of(operand.constant, type);
    if (!fits) arguments.refuse();
  }
}

}  // namespace

Action region_action(const std::string& file, const Node& node, const Function& function) {
  if (node.target.compare(0, kHigherOrder.size(), kHigherOrder) != 0) return nullptr;
  const std::string name = node.target.substr(kHigherOrder.size());
  const Arguments arguments(file, node);
  Modes modes;
  if (name == "wrap_with_set_grad_enabled") {
    modes.grad = arguments.boolean(0);
  } else if (name == "wrap_with_autocast") {
    modes.autocast = read_autocast(arguments);
  } else if (name != "tag_activation_checkpoint" && name != "wrap_activation_checkpoint") {
    refuse(file, node, "is a higher-order operator that cannot be loaded",
           "Loaded are torch.no_grad, torch.autocast and activation checkpointing; write cond, "
           "scan, map, while_loop, flex_attention and the like as ordinary operators");
  }
  const size_t place = arguments.function();
  const auto& body = node.arguments[place].value.function;
  std::vector<Argument> operands;
  for (size_t i = place + 1; i < node.arguments.size(); ++i) {
    // Those by name are options of the region, such as use_reentrant.
    const bool is_option =
        !node.arguments[i].name.empty() && operands.size() == body->inputs.size();
    if (!is_option) operands.push_back(node.arguments[i].value);
  }
  check_operands(operands, *body, function, arguments);
  return Region{modes, body, std::move(operands), node.results};
}

}  // namespace smp::exported
