// SPDX-License-Identifier: Apache-2.0
#include "nn/rewrite/graph_writer.h"

#include <c10/util/strides.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "graph/random.h"
#include "graph/visit.h"
#include "nn/rewrite/legality.h"

namespace smp::nn::rewrite {

using graph::Argument;
using graph::kUndefined;
using graph::Operator;
using graph::TensorMeta;
using graph::Value;
using graph::ValueId;

namespace {

c10::OperatorHandle find_operator(const char* name, const char* overload) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
}

Operator operator_of(const Conversion& step, ValueId argument) {
  const auto& [collective, from, to] = step;
  const CollectiveForm& form = form_of(collective);
  Emitter::Constants numbers;
  if (to.is_divided()) numbers.emplace_back(to.dim);
  if (from.is_divided()) numbers.emplace_back(from.dim);
  if (form.takes_blocks) numbers.emplace_back(to.is_divided() ? to.blocks : from.blocks);
  Operator op(find_operator(form.name, ""));
  op.arguments = Emitter::arguments_of({argument}, numbers);
  return op;
}

}  // namespace

TensorMeta contiguous(TensorMeta meta, c10::IntArrayRef sizes) {
  meta.sizes.assign(sizes.begin(), sizes.end());
  const auto strides = c10::contiguous_strides(sizes);
  meta.strides.assign(strides.begin(), strides.end());
  return meta;
}

ValueId GraphWriter::call_with(const char* name, const char* overload,
                               std::vector<Argument> arguments) {
  Operator op = like_call(find_operator(name, overload));
  op.arguments = std::move(arguments);
  note_writes(op);
  return add_on_shapes(std::move(op)).at(0);
}

ValueId GraphWriter::call_own(const char* name, const Tensors& tensors, const Constants& constants,
                              c10::IntArrayRef sizes, at::ScalarType dtype) {
  Operator op = like_call(find_operator(name, ""));
  op.arguments = arguments_of(tensors, constants);
  TensorMeta meta = contiguous(this->meta(tensors[0]), sizes);
  meta.dtype = dtype;
  meta.requires_grad = op.mode.grad && any_requires_grad(op);
  return add_own(std::move(op), meta, Traffic());
}

ValueId GraphWriter::reduce(ValueId value) {
  return add_sum(value, Layout::whole(), Collective::kReduce);
}

ValueId GraphWriter::reduce_scatter(ValueId value, int dim) {
  return add_sum(value, Layout::divided(dim), Collective::kReduceScatter);
}

void GraphWriter::follow(const char* from, int to,
                         std::function<c10::IValue(const c10::IValue&)> change) {
  places_of(from).push_back(
      {static_cast<int>(graph().operators.size()) - 1, to, std::move(change), ""});
}

void GraphWriter::require(const char* from) {
  places_of(from).push_back({-1, 0, nullptr, call_->op().name()});
}

std::vector<graph::GraphMap::Number>& GraphWriter::places_of(const char* number) {
  return result_.map.numbers[{static_cast<int>(call_->index()), call_->argument(number)}];
}

ValueId GraphWriter::add_value(Value value, const TensorMeta& meta, int producer, int alias_set) {
  value.meta = meta;
  value.producer = producer;
  value.alias_set = alias_set;
  graph().values.push_back(std::move(value));
  result_.layouts.emplace_back();
  placed_.push_back(0);
  return static_cast<ValueId>(graph().values.size() - 1);
}

void GraphWriter::place(ValueId value, const Layout& layout) {
  result_.layouts[value] = layout;
  placed_[value] = 1;
}

void GraphWriter::place_the_rest() {
  Layouts layouts = layouts_in(graph(), std::move(result_.layouts));
  for (size_t i = 0; i < graph().operators.size(); ++i) {
    const Call own(graph(), i, options_.ranks, layouts);
    const auto is_placed = [&](ValueId value) { return placed_[value] != 0; };
    if (std::all_of(own.results().begin(), own.results().end(), is_placed)) continue;
    const std::vector<Layout> made = legal_results(own);
    for (size_t r = 0; r < made.size(); ++r) {
      if (!is_placed(own.results()[r])) layouts.of[own.results()[r]] = made[r];
    }
  }
  result_.layouts = std::move(layouts.of);
}

std::vector<ValueId> GraphWriter::add_on_shapes(Operator op) {
  const std::vector<ShapeResult> results = shapes_of(op);
  std::vector<ValueId> arguments;
  for (const Argument& argument : op.arguments) {
    arguments.insert(arguments.end(), argument.values.begin(), argument.values.end());
  }
  std::vector<int> sets;
  op.result_is_argument.clear();
  for (const ShapeResult& result : results) {
    op.result_is_argument.push_back(result.is_argument ? result.alias_of : -1);
    sets.push_back(result.alias_of < 0 ? graph().alias_sets++
                                       : graph().values[arguments[result.alias_of]].alias_set);
  }
  if (op.list_lengths.empty()) op.list_lengths.assign(results.size(), -1);
  return append(std::move(op), results, sets);
}

/// A view that the local strides do not allow is a reshape.
std::vector<ShapeResult> GraphWriter::shapes_of(Operator& op) const {
  const bool is_view = op.name() == "aten::view";
  try {
    return run_on_shapes(result_.graph, op, requires_grad_);
  } catch (const c10::Error&) {
    if (!is_view) throw;
  }
  op.handle = find_operator("aten::reshape", "");
  return run_on_shapes(result_.graph, op, requires_grad_);
}

void GraphWriter::note_writes(Operator& op) const {
  const auto& declared = op.handle.schema().arguments();
  for (size_t i = 0; i < op.arguments.size(); ++i) {
    const auto* alias = declared[i].alias_info();
    if (alias == nullptr || !alias->isWrite()) continue;
    for (ValueId value : op.arguments[i].values) {
      if (value != kUndefined) op.writes.push_back(result_.graph.values[value].alias_set);
    }
  }
}

std::vector<ValueId> GraphWriter::append(Operator op, const std::vector<ShapeResult>& results,
                                         const std::vector<int>& sets) {
  const auto position = static_cast<int>(graph().operators.size());
  op.first_result = static_cast<ValueId>(graph().values.size());
  op.results.clear();
  for (size_t r = 0; r < results.size(); ++r) {
    op.results.push_back(results[r].defined ? add_value(Value(), results[r].meta, position, sets[r])
                                            : kUndefined);
  }
  set_reads_parameter(op);
  std::vector<ValueId> ids(op.results.begin(), op.results.end());
  result_.map.operators[call_->index()].push_back(position);
  graph().operators.push_back(std::move(op));
  return ids;
}

void GraphWriter::set_reads_parameter(Operator& op) const {
  op.reads_parameter = false;
  graph::for_each_argument(op, [&](ValueId value) {
    op.reads_parameter |= result_.graph.values[value].kind == graph::ValueKind::kParameter;
  });
}

Operator GraphWriter::like_call(c10::OperatorHandle handle) const {
  Operator op(std::move(handle));
  op.mode = call_->op().mode;
  op.scope = call_->op().scope;
  if (graph::is_random(op.handle)) op.random_ordinal = call_->op().random_ordinal;
  return op;
}

bool GraphWriter::any_requires_grad(const Operator& op) const {
  bool found = false;
  graph::for_each_argument(op, [&](ValueId value) {
    found |= meta(value).requires_grad || requires_grad_.count(value) > 0;
  });
  return found;
}

/// Adds an operator of ours, with one new result.
ValueId GraphWriter::add_own(Operator op, const TensorMeta& meta, const Traffic& moved) {
  op.result_is_argument = {-1};
  op.list_lengths = {-1};
  const auto [forward, backward] = times_of(moved, options_);
  op.cost = {forward, backward, meta.nbytes(), 0};
  count(op.scope, moved);
  ShapeResult result;
  result.meta = meta;
  return append(std::move(op), {result}, {graph().alias_sets++})[0];
}

/// Adds a sum over the ranks. Each gets its share by the layout.
ValueId GraphWriter::add_sum(ValueId terms, const Layout& to, Collective collective) {
  Operator op = operator_of({collective, Layout::partial(), to}, terms);
  op.mode = call_->op().mode;
  op.scope = call_->op().scope;
  const TensorMeta& whole = this->meta(terms);
  TensorMeta meta = contiguous(whole, local_sizes(whole.sizes, to, options_.ranks));
  meta.requires_grad = op.mode.grad && any_requires_grad(op);
  const bool has_gradient = whole_.trains() && meta.requires_grad;
  const Traffic moved =
      rewrite::traffic_of(collective, whole.nbytes(), has_gradient, options_.ranks);
  return add_own(std::move(op), meta, moved);
}

void GraphWriter::count(const std::string& scope, const Traffic& moved) {
  if (moved.forward_calls + moved.backward_calls == 0) return;
  result_.traffic += moved;
  result_.traffic_of[scope] += moved;
}

ValueId GraphWriter::convert(ValueId value, const Conversion& step, ValueId from,
                             Gradient gradient) {
  const bool shares = step.collective == Collective::kCopy;
  if (shares && is_written_later(value)) from = add_clone(value, from, gradient);
  Operator op = operator_of(step, from);
  op.mode = graph::mode_before(whole_, value, reader());
  const TensorMeta& whole = whole_.values[value].meta;
  TensorMeta meta = shares ? this->meta(from)
                           : contiguous(whole, local_sizes(whole.sizes, step.to, options_.ranks));
  meta.requires_grad = gradient.required && op.mode.grad;
  const Traffic moved =
      rewrite::traffic_of(step.collective, whole.nbytes(), gradient.sent, options_.ranks);
  const int set = shares ? graph().values[from].alias_set : graph().alias_sets++;
  const ValueId id = add_conversion(std::move(op), meta, set, shares ? 0 : meta.nbytes());
  place(id, step.to);
  Operator& added = graph().operators.back();
  std::tie(added.cost.forward_us, added.cost.backward_us) = times_of(moved, options_);
  count(added.scope, moved);
  return id;
}

/// Memory that `tp_copy` shares must not change while it is used.
bool GraphWriter::is_written_later(ValueId value) const {
  return call_ != nullptr &&
         propagation_.is_written_after(whole_.values[value].alias_set, call_->index());
}

ValueId GraphWriter::add_clone(ValueId value, ValueId from, Gradient gradient) {
  Operator op(find_operator("aten::clone", ""));
  op.arguments = arguments_of({from}, {at::MemoryFormat::Contiguous});
  op.mode = graph::mode_before(whole_, value, reader());
  TensorMeta meta = contiguous(this->meta(from), this->meta(from).sizes);
  meta.requires_grad = gradient.required && op.mode.grad;
  return add_conversion(std::move(op), meta, graph().alias_sets++, meta.nbytes());
}

/// Adds an operator that stands for none of the whole graph.
ValueId GraphWriter::add_conversion(Operator op, const TensorMeta& meta, int alias_set,
                                    int64_t output_bytes) {
  if (call_ != nullptr) op.scope = call_->op().scope;
  op.result_is_argument = {-1};
  op.list_lengths = {-1};
  op.cost = {0, 0, output_bytes, 0};
  op.first_result = static_cast<ValueId>(graph().values.size());
  const auto position = static_cast<int>(graph().operators.size());
  const ValueId id = add_value(Value(), meta, position, alias_set);
  op.results = {id};
  set_reads_parameter(op);
  graph().operators.push_back(std::move(op));
  return id;
}

}  // namespace smp::nn::rewrite
