// SPDX-License-Identifier: Apache-2.0
#include "exported/write_function.h"

#include <c10/core/DeviceType.h>

#include <map>
#include <utility>

#include "exported/structure.h"
#include "exported/write_nodes.h"
#include "exported/write_scope.h"
#include "graph/devices.h"
#include "graph/visit.h"

namespace smp::exported {
namespace {

using graph::ExecutionMode;
using graph::kUndefined;
using graph::Operator;
using graph::ValueId;
using Json = nlohmann::json;
using Kind = Input::Kind;

std::string target_of(const Operator& op) {
  const auto& name = op.handle.operator_name();
  return "torch.ops.aten." + short_name(op) + "." +
         (name.overload_name.empty() ? "default" : name.overload_name);
}

/// A mode of operators, which a wrapper gives to a function.
struct Layer {
  const char* wrapper;
  /// The argument of the wrapper; null for the mode that a program is in without one.
  Json (*setting)(const ExecutionMode& mode);
  /// Whether an operator does the same without it.
  bool (*is_idle)(const graph::Graph& graph, const Operator& op);
};

Json autocast(at::DeviceType device, at::ScalarType dtype, const ExecutionMode& mode) {
  constexpr bool kEnabled = true;
  return Json::array({tagged("as_string", c10::DeviceTypeName(device, /*lower_case=*/true)),
                      tagged("as_scalar_type", write_dtype(dtype)), tagged("as_bool", kEnabled),
                      tagged("as_bool", mode.autocast_cache)});
}

Json autocast_of_cpu(const ExecutionMode& mode) {
  return mode.autocast_cpu ? autocast(at::kCPU, mode.autocast_cpu_dtype, mode) : Json(nullptr);
}

Json autocast_of_accelerator(const ExecutionMode& mode) {
  return mode.autocast_accelerator
             ? autocast(graph::accelerator_type(), mode.autocast_accelerator_dtype, mode)
             : Json(nullptr);
}

Json no_grad(const ExecutionMode& mode) {
  return mode.records_history() ? Json(nullptr) : Json::array({tagged("as_bool", false)});
}

bool is_never_idle(const graph::Graph&, const Operator&) { return false; }

/// It has no history anyway, like the results of factories.
bool has_no_history(const graph::Graph& graph, const Operator& op) {
  bool has_none = true;
  graph::for_each_argument(op, [&](ValueId id) {
    const graph::Value& value = graph.values[id];
    has_none &= !value.meta.requires_grad && value.kind != graph::ValueKind::kParameter;
  });
  return has_none;
}

/// From the outermost in. Casts that autocast has cached live as long as its region, across regions
/// without gradients in it.
const std::vector<Layer>& layers() {
  static const std::vector<Layer> layers = {
      {"wrap_with_autocast", autocast_of_cpu, is_never_idle},
      {"wrap_with_autocast", autocast_of_accelerator, is_never_idle},
      {"wrap_with_set_grad_enabled", no_grad, has_no_history}};
  return layers;
}

class FunctionWriter {
 public:
  FunctionWriter(const ExportRequest& request, const ExportPlan& plan, Names& names)
      : request_(request), plan_(plan), nodes_(request), root_(request, plan, nodes_, names) {}

  WrittenFunction write(const std::vector<WrittenInput>& inputs) {
    for (const WrittenInput& input : inputs) add_input(input);
    write_operators(0, plan_.operators().size(), 0, root_);
    WrittenFunction function;
    function.outputs = outputs();
    function.graph = root_.finish(function.outputs);
    return function;
  }

  const std::vector<std::string>& numbers() const { return nodes_.numbers(); }
  size_t count() const { return count_; }

 private:
  void add_input(const WrittenInput& input) {
    const bool is_tensor = !input.meta.is_null();
    root_.add_input(is_tensor ? named_tensor(input.name) : write_constant(input.fixed));
    if (!is_tensor) return;
    if (input.value == kUndefined) {
      root_.define_unread(input.name, input.meta);
    } else if (input.kind == Kind::kConstant && plan_.is_written(input.value)) {
      root_.define_unread(input.name, input.meta);
      add_copy(input);
    } else {
      root_.define(input.value, input.name);
    }
  }

  /// A constant that operators write is a new tensor in each run.
  void add_copy(const WrittenInput& constant) {
    const std::string name = root_.names().add("clone");
    root_.define(constant.value, name);
    root_.add(make_node("torch.ops.aten.clone.default", name,
                        Json::array({positional("self", named_tensor(constant.name))}),
                        Json::array({named_tensor(name)}), nodes_.metadata("")));
  }

  const Operator& op(size_t position) const {
    return request_.graph().operators[plan_.operators()[position]];
  }

  /// The needed operators `begin` to `end` - 1, all in one mode as far as layers before `layer` go.
  void write_operators(size_t begin, size_t end, size_t layer, WriteScope& scope) {
    if (layer == layers().size()) {
      for (size_t i = begin; i < end; ++i) write_operator(i, scope);
      return;
    }
    for (size_t first = begin, last = begin; first < end; first = last) {
      const Json setting = setting_at(first, layer);
      while (last < end && setting_at(last, layer) == setting) ++last;
      size_t idle = first;
      while (!setting.is_null() && idle < last && is_idle(idle, layer)) ++idle;
      const size_t outside = setting.is_null() ? last : idle;
      write_operators(first, outside, layer + 1, scope);
      if (outside < last) write_region(outside, last, layer, setting, scope);
    }
  }

  Json setting_at(size_t position, size_t layer) const {
    return layers()[layer].setting(op(position).mode);
  }
  bool is_idle(size_t position, size_t layer) const {
    return layers()[layer].is_idle(request_.graph(), op(position));
  }

  void write_region(size_t begin, size_t end, size_t layer, const Json& setting,
                    WriteScope& scope) {
    WriteScope inner(scope);
    write_operators(begin, end, layer + 1, inner);
    if (inner.size() == 0) return;  // constants only
    const std::string wrapper = layers()[layer].wrapper;
    std::vector<Json> outputs;
    for (ValueId value : used_after(begin, end)) {
      const std::string name = inner.tensor(value);
      scope.define(value, name);
      outputs.push_back(named_tensor(name));
    }
    if (outputs.empty()) outputs.push_back(write_constant({}));  // it writes only
    auto inputs = Json::array();
    for (const Json& value : setting) inputs.push_back(positional("", value));
    const Json graph = {{"name", scope.names().add("submod")}, {"graph", inner.finish(outputs)}};
    inputs.push_back(positional("", tagged("as_graph", graph)));
    for (const Json& operand : inner.operands()) inputs.push_back(positional("", operand));
    Json node = make_node("torch.ops.higher_order." + wrapper, scope.names().add(wrapper),
                          std::move(inputs), std::move(outputs), nodes_.metadata(""));
    node["is_hop_single_tensor_return"] = false;
    scope.add(std::move(node));
  }

  /// Values that operators `begin` to `end` - 1 make, and others read.
  std::vector<ValueId> used_after(size_t begin, size_t end) const {
    const size_t next = plan_.operators()[end - 1] + 1;
    std::vector<ValueId> values;
    for (size_t i = begin; i < end; ++i) {
      if (request_.graph().makes_literal(op(i))) continue;
      for (ValueId result : op(i).results) {
        const bool is_new = result != kUndefined && plan_.first_of(result) == result;
        if (is_new && plan_.is_used_from(result, next)) values.push_back(result);
      }
    }
    return values;
  }

  void write_operator(size_t position, WriteScope& scope) {
    const Operator& op = this->op(position);
    if (request_.graph().makes_literal(op)) return;  // an input
    Json inputs = nodes_.arguments(plan_.operators()[position], scope);
    const std::string name = scope.names().add(short_name(op));
    scope.add(make_node(target_of(op), name, std::move(inputs), results(op, name, scope),
                        nodes_.metadata(op.scope)));
    ++count_;
  }

  /// Declares the results of an operator: tensors that it writes besides are known by other names.
  Json results(const Operator& op, const std::string& name, WriteScope& scope) {
    auto outputs = Json::array();
    size_t next = 0;
    const size_t count = op.handle.schema().returns().size();
    const bool is_single = count == 1 && op.list_lengths[0] < 0;
    for (size_t i = 0; i < count; ++i) {
      if (op.list_lengths[i] < 0) {
        outputs.push_back(result(op.results[next++], is_single ? name : "", scope));
        continue;
      }
      auto list = Json::array();
      for (int k = 0; k < op.list_lengths[i]; ++k) {
        list.push_back(result(op.results[next++], "", scope).at("as_tensor"));
      }
      outputs.push_back(tagged("as_tensors", std::move(list)));
    }
    return outputs;
  }

  Json result(ValueId value, const std::string& name, WriteScope& scope) {
    if (value == kUndefined) return write_constant({});
    const std::string own = name.empty() ? scope.names().add("getitem") : name;
    if (plan_.first_of(value) == value) {
      scope.define(value, own);
    } else {
      scope.define_unread(own, nodes_.meta(value));
    }
    return named_tensor(own);
  }

  std::vector<Json> outputs() {
    std::vector<c10::IValue> leaves;
    structure_of(request_.result, leaves);
    std::vector<Json> outputs;
    size_t next = 0;
    for (const c10::IValue& leaf : leaves) {
      outputs.push_back(leaf.isTensor() ? output(request_.graph().outputs.at(next++))
                                        : write_constant(leaf));
    }
    return outputs;
  }

  Json output(ValueId value) {
    return value == kUndefined ? write_constant({}) : named_tensor(root_.tensor(value));
  }

  const ExportRequest& request_;
  const ExportPlan& plan_;
  NodeWriter nodes_;
  WriteScope root_;
  size_t count_ = 0;
};

/// A parameter or buffer's input is named for it, as in Python.
WrittenInput input_of(const ExportRequest::Tensor& tensor, Names& names) {
  WrittenInput input;
  input.kind = tensor.is_parameter ? Kind::kParameter : Kind::kBuffer;
  input.name = names.add((tensor.is_parameter ? "p_" : "b_") + tensor.name);
  input.target = python_path(tensor.name);
  input.meta = write_meta(tensor.tensor);
  return input;
}

/// The names of an argument's leaves: "mask", "state_0", "batch_ids".
void name_leaves(const Structure& structure, const std::string& name,
                 std::vector<std::string>& names) {
  if (structure.kind == Structure::Kind::kLeaf) names.push_back(name);
  for (size_t i = 0; i < structure.children.size(); ++i) {
    const bool has_key = structure.kind == Structure::Kind::kDictionary;
    const std::string key = has_key && structure.keys[i].isString()
                                ? structure.keys[i].toStringRef()
                                : std::to_string(i);
    name_leaves(structure.children[i], name + "_" + key, names);
  }
}

}  // namespace

std::vector<WrittenInput> inputs_of(const ExportRequest& request, const ExportPlan& plan,
                                    Names& names) {
  const NodeWriter nodes(request);
  const graph::Graph& graph = request.graph();
  std::vector<WrittenInput> inputs;
  std::map<std::string, ValueId> known;
  for (size_t id = 0; id < graph.values.size(); ++id) {
    const graph::ValueKind kind = graph.values[id].kind;
    const bool is_state = kind == graph::ValueKind::kParameter || kind == graph::ValueKind::kBuffer;
    if (is_state) known[graph.values[id].name] = static_cast<ValueId>(id);
  }
  for (const ExportRequest::Tensor& tensor : request.tensors) {
    inputs.push_back(input_of(tensor, names));
    const auto value = known.find(tensor.name);
    if (value != known.end()) inputs.back().value = value->second;
  }
  for (size_t i = 0; i < plan.constants().size(); ++i) {
    const ValueId value = plan.constants()[i];
    const std::string name = "lifted_tensor_" + std::to_string(i);
    inputs.push_back({Kind::kConstant, names.add("c_" + name), name, value, nodes.meta(value), {}});
  }
  size_t next = 0;
  for (size_t i = 0; i < request.arguments.size(); ++i) {
    std::vector<c10::IValue> leaves;
    std::vector<std::string> leaf_names;
    name_leaves(structure_of(request.arguments[i], leaves), request.argument_names[i], leaf_names);
    for (size_t k = 0; k < leaves.size(); ++k) {
      WrittenInput input{Kind::kUser, names.add(leaf_names[k]), "", kUndefined, nullptr, leaves[k]};
      if (leaves[k].isTensor()) {
        input.value = graph.inputs.at(next++);
        input.meta = nodes.meta(input.value);
      }
      inputs.push_back(std::move(input));
    }
  }
  return inputs;
}

WrittenFunction write_function(const ExportRequest& request, const ExportPlan& plan,
                               const std::vector<WrittenInput>& inputs, Names& names,
                               ExportReport& report) {
  FunctionWriter writer(request, plan, names);
  WrittenFunction function = writer.write(inputs);
  report.nodes = writer.count();
  report.numbers = writer.numbers();
  return function;
}

}  // namespace smp::exported
