// SPDX-License-Identifier: Apache-2.0
#include "pipeline/stage_program.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "core/check.h"
#include "graph/leaf.h"
#include "graph/operator_traits.h"
#include "graph/replay.h"
#include "graph/requires_grad.h"
#include "graph/visit.h"

namespace smp::pipeline {

using graph::kUndefined;
using graph::ValueId;
using graph::ValueKind;

namespace {

/// Whether the host may do more for an operator than give the device work.
bool is_foreign(const graph::Operator& op) { return op.name().rfind("aten::", 0) != 0; }

/// Whether an operator reads values `of_interest` where its backward may need them. One that
/// updates running statistics needs those of the batch instead.
template <class Predicate>
bool reads_for_backward(const graph::Operator& op, const Predicate& of_interest) {
  for (size_t i = 0; i < op.arguments.size(); ++i) {
    if (!op.writes.empty() && graph::is_running_statistic(op.handle.schema(), i)) continue;
    const auto& values = op.arguments[i].values;
    if (std::any_of(values.begin(), values.end(), of_interest)) return true;
  }
  return false;
}

/// Whether the backward of an operator does not read an argument's memory: of a view; of an
/// embedding, which keeps the indices; of a product under autocast, which keeps its casts of
/// float32.
bool keeps_no_weight(const graph::Graph& graph, const graph::Operator& op, ValueId argument) {
  static const std::set<std::string> products = {
      "aten::_convolution", "aten::addmm",  "aten::baddbmm", "aten::bmm",    "aten::conv1d",
      "aten::conv2d",       "aten::conv3d", "aten::linear",  "aten::matmul", "aten::mm"};
  const std::string& name = op.handle.schema().name();
  const bool is_view = op.writes.empty() && op.results.size() == 1 && op.results[0] != kUndefined &&
                       graph.values[op.results[0]].alias_set == graph.values[argument].alias_set;
  if (is_view) return true;
  if (name == "aten::embedding") return op.arguments[0].values[0] == argument;
  const graph::TensorMeta& meta = graph.values[argument].meta;
  const bool is_on = meta.device.is_cpu() ? op.mode.autocast_cpu : op.mode.autocast_accelerator;
  const at::ScalarType to =
      meta.device.is_cpu() ? op.mode.autocast_cpu_dtype : op.mode.autocast_accelerator_dtype;
  // It knows overloads: on the CPU one of `_convolution`.
  const bool casts = is_on && graph::concerns_autocast(op.handle, meta.device.type());
  return casts && meta.dtype == at::kFloat && to != at::kFloat && products.count(name) > 0;
}

}  // namespace

StageProgram::StageProgram(const PartitionedGraph& partitioned, int index)
    : facts(partitioned.facts),
      graph(facts.graph),
      edges(partitioned.edges),
      index(index),
      has_backward(partitioned.has_backward[index]) {
  find_operators(partitioned.plan);
  find_kept();
  find_reads(partitioned.plan);
  find_edges();
  find_consumed();
}

void StageProgram::find_operators(const partitioner::Plan& plan) {
  for (size_t i = 0; i < plan.stage_of_operator.size(); ++i) {
    if (plan.stage_of_operator[i] == index) operators.push_back(static_cast<int>(i));
  }
  for (const auto& again : plan.recomputed) {
    if (again.stage == index) operators.push_back(again.operator_index);
  }
  std::sort(operators.begin(), operators.end());
  for (int operator_index : operators) calls_foreign |= is_foreign(graph.operators[operator_index]);
  for (size_t i = 0; i < graph.roots.size(); ++i) {
    if (plan.stage_of_root[i] == index) roots.push_back(graph.roots[i]);
  }
  for (size_t i = 0; i < graph.outputs.size(); ++i) {
    if (plan.stage_of_output[i] != index) continue;
    const auto position = static_cast<int>(i);
    returned.push_back(position);
    const ValueId output = graph.outputs[i];
    if (output != kUndefined && facts.aliases.of(output).outlives_run()) copied.insert(position);
  }
}

void StageProgram::find_kept() {
  std::set<ValueId> all;
  for (const Edge& edge : edges) {
    if (edge.from == index) all.insert(edge.values.begin(), edge.values.end());
  }
  for (int position : returned) all.insert(graph.outputs[position]);
  for (const auto& root : roots) {
    all.insert(root.value);
    all.insert(root.gradient);
  }
  std::set<ValueId> buffers;
  for (int index : operators) {
    graph::for_each_argument(graph.operators[index], [&](ValueId id) {
      if (graph.values[id].kind == ValueKind::kBuffer) buffers.insert(id);
    });
  }
  for (ValueId id : buffers) {
    if (is_copied(id)) all.insert(id);
  }
  all.erase(kUndefined);
  kept.assign(all.begin(), all.end());
}

bool StageProgram::writes(ValueId value) const {
  const auto& writers = facts.aliases.of(value).writers;
  return std::any_of(writers.begin(), writers.end(), [this](int index) {
    return std::binary_search(operators.begin(), operators.end(), index);
  });
}

/// Whether an operator with a backward reads a value's storage, or a backward starts with it as the
/// gradient. A leaf works on the module's own buffers.
bool StageProgram::backward_may_need(ValueId value) const {
  const int alias_set = graph.values[value].alias_set;
  const auto on_it = [&](ValueId id) {
    return id != kUndefined && graph.values[id].alias_set == alias_set;
  };
  bool needed = std::any_of(roots.begin(), roots.end(),
                            [&](const auto& root) { return on_it(root.gradient); });
  for (int index : operators) {
    const graph::Operator& op = graph.operators[index];
    if (!reads_for_backward(op, on_it)) continue;
    if (graph::is_leaf(op.handle)) return false;
    needed |= graph::records_history(graph, op);
  }
  return needed;
}

/// See `Parameter::copied`.
bool StageProgram::is_copied(ValueId value) const {
  if (!graph.trains() || !writes(value)) return false;
  const int separated = facts.separated[graph.values[value].alias_set];
  return separated != graph::kNeverSeparated || backward_may_need(value);
}

void StageProgram::find_reads(const partitioner::Plan& plan) {
  std::set<ValueId> read(kept.begin(), kept.end());
  for (int operator_index : operators) {
    const graph::Operator& op = graph.operators[operator_index];
    graph::for_each_argument(op, [&](ValueId id) { read.insert(id); });
    if (graph.makes_literal(op)) read.insert(op.results[0]);
  }
  for (ValueId id : read) {
    const graph::Value& value = graph.values[id];
    switch (value.kind) {
      case ValueKind::kInput:
        inputs.push_back({id, std::stoul(value.name), writes(id)});
        break;
      case ValueKind::kParameter:
      case ValueKind::kBuffer:
        parameters.push_back({id, plan.owner.at(value.name) == index,
                              graph.trains() && value.meta.requires_grad ? sinks++ : kNoSink,
                              is_copied(id)});
        break;
      case ValueKind::kConstant:
      case ValueKind::kLiteral:
        contents.push_back({id, writes(id)});
        break;
      case ValueKind::kResult:
        break;  // made here or received
    }
  }
}

bool StageProgram::reads_input(size_t position) const {
  return std::any_of(inputs.begin(), inputs.end(),
                     [&](const Input& input) { return input.position == position; });
}

/// The sink of a parameter, if it has one here.
int StageProgram::sink_of(ValueId value) const {
  for (const Parameter& parameter : parameters) {
    if (parameter.value == value) return parameter.sink;
  }
  return kNoSink;
}

void StageProgram::find_edges() {
  for (const Parameter& parameter : parameters) entered.push_back(parameter.value);
  for (const Input& input : inputs) entered.push_back(input.value);
  for (const Content& content : contents) entered.push_back(content.value);
  for (size_t i = 0; i < edges.size(); ++i) {
    const Edge& edge = edges[i];
    if (edge.from != index && edge.to != index) continue;
    const size_t place = own_edges.size();
    own_edges.push_back(static_cast<int>(i));
    edge.to == index ? find_incoming(edge, place) : find_outgoing(edge, place);
  }
}

void StageProgram::find_incoming(const Edge& edge, size_t place) {
  Incoming in;
  in.place = place;
  for (ValueId id : edge.values) {
    const auto is_in = [id](const std::vector<ValueId>& some) {
      return std::find(some.begin(), some.end(), id) != some.end();
    };
    in.values.push_back({id, is_in(edge.gradients) ? sinks++ : kNoSink, is_in(edge.requiring),
                         !is_in(edge.unlinked), writes(id) && graph::is_view(graph, id)});
    entered.push_back(id);
  }
  const auto sink_of_value = [&](ValueId id) {
    return std::find_if(in.values.begin(), in.values.end(),
                        [&](const Entry& entry) { return entry.value == id; })
        ->sink;
  };
  for (ValueId id : edge.gradients) in.returning.push_back(sink_of_value(id));
  for (ValueId id : edge.replicas) in.returning.push_back(sink_of(id));
  for (int sink : in.returning) {
    if (sink != kNoSink) input_sinks.push_back(sink);
  }
  incoming.push_back(std::move(in));
}

void StageProgram::find_outgoing(const Edge& edge, size_t place) {
  Outgoing out{place, edge.values, edge.gradients, {}};
  for (ValueId id : edge.replicas) out.replicas.push_back({id, sink_of(id)});
  outgoing.push_back(std::move(out));
}

size_t StageProgram::place_of(int edge) const {
  const auto found = std::lower_bound(own_edges.begin(), own_edges.end(), edge);
  SMP_INTERNAL_ASSERT(found != own_edges.end() && *found == edge, "stage ", index,
                      " is at no end of edge ", edge);
  return static_cast<size_t>(found - own_edges.begin());
}

void StageProgram::find_consumed() {
  for (const Parameter& parameter : parameters) {
    if (parameter.gives_gradient()) consumed.push_back(parameter.value);
  }
  for (const Outgoing& out : outgoing) {
    for (const Entry& replica : out.replicas) {
      if (replica.sink == kNoSink) consumed.push_back(replica.value);
    }
  }
  std::sort(consumed.begin(), consumed.end());
  consumed.erase(std::unique(consumed.begin(), consumed.end()), consumed.end());
}

std::vector<int> StageProgram::random_ordinals() const {
  std::vector<int> ordinals;
  for (int index : operators) {
    const int ordinal = graph.operators[index].random_ordinal;
    if (ordinal >= 0) ordinals.push_back(ordinal);
  }
  return ordinals;
}

std::vector<ValueId> StageProgram::given() const {
  std::vector<ValueId> values = entered;
  if (!has_backward) return values;
  for (const Outgoing& out : outgoing) {
    values.insert(values.end(), out.gradients.begin(), out.gradients.end());
    for (const Entry& replica : out.replicas) values.push_back(replica.value);
  }
  return values;
}

core::Refusal StageProgram::why_not_again() const {
  std::set<int> written;  // alias sets
  for (int index : operators) {
    const graph::Operator& op = graph.operators[index];
    if (graph::is_leaf(op.handle)) {
      return c10::str("operator ", index,
                      " is a leaf module, which computes with the parameters "
                      "of its rank");
    }
    written.insert(op.writes.begin(), op.writes.end());
  }
  const std::vector<ValueId> given = this->given();
  std::set<int> entered;  // those of them on which something lies that comes from outside
  for (ValueId id : std::set<ValueId>(given.begin(), given.end())) {
    const int alias_set = graph.values[id].alias_set;
    const bool here =
        std::binary_search(operators.begin(), operators.end(), graph.values[id].producer);
    if (here || written.count(alias_set) == 0 || entered.insert(alias_set).second) continue;
    return "it writes memory on which two tensors lie that come from outside";
  }
  return std::nullopt;
}

/// The parameters on whose memory the values lie, in ascending order.
std::vector<ValueId> StageProgram::parameters_under(const std::set<ValueId>& values) const {
  std::set<ValueId> result;
  for (ValueId id : values) {
    const ValueId base = id == kUndefined ? kUndefined : facts.aliases.of(id).base;
    if (base != kUndefined && graph.values[base].kind == ValueKind::kParameter) result.insert(base);
  }
  return {result.begin(), result.end()};
}

std::vector<ValueId> StageProgram::read_in_forward() const {
  std::set<ValueId> values(kept.begin(), kept.end());
  for (const Parameter& parameter : parameters) values.insert(parameter.value);
  for (int index : operators) {
    graph::for_each_argument(graph.operators[index], [&](ValueId id) { values.insert(id); });
  }
  return parameters_under(values);
}

std::vector<ValueId> StageProgram::read_in_backward(const std::vector<int>& regions) const {
  std::set<ValueId> values;
  for (const auto& root : roots) values.insert(root.gradient);
  for (int index : operators) {
    const graph::Operator& op = graph.operators[index];
    const bool runs_again = !regions.empty() && regions[index] >= 0;
    if (!runs_again && !graph::records_history(graph, op)) continue;
    graph::for_each_argument(op, [&](ValueId id) {
      if (runs_again || !keeps_no_weight(graph, op, id)) values.insert(id);
    });
  }
  return parameters_under(values);
}

core::Refusal StageProgram::why_no_device_graphs() const {
  const auto is_of_host = [this](ValueId id) {
    const graph::Value& value = graph.values[id];
    const bool is_constant =
        value.kind == ValueKind::kConstant || value.kind == ValueKind::kLiteral;
    return value.meta.device.is_cpu() && !is_constant;
  };
  for (int index : operators) {
    const graph::Operator& op = graph.operators[index];
    const auto text = [&] {
      return c10::str("operator ", index, " (", op.name(), ")",
                      op.scope.empty() ? "" : ", in module \"" + op.scope + "\"");
    };
    if (is_foreign(op)) {
      return text() + " may have the host do more than give the device work";
    }
    bool on_host = false;
    graph::for_each_argument(op, [&](ValueId id) { on_host |= is_of_host(id); });
    if (!graph.makes_literal(op)) {
      graph::for_each_result(op, [&](ValueId id) { on_host |= is_of_host(id); });
    }
    if (on_host) return text() + " computes on the CPU";
  }
  return std::nullopt;
}

}  // namespace smp::pipeline
