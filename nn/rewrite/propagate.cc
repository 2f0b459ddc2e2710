// SPDX-License-Identifier: Apache-2.0
#include "nn/rewrite/propagate.h"

#include <algorithm>
#include <utility>

#include "graph/alias_analysis.h"
#include "graph/differentiate.h"
#include "graph/flops.h"
#include "graph/visit.h"
#include "nn/rewrite/residual_sums.h"

namespace smp::nn::rewrite {
namespace {

using graph::Graph;
using graph::Operator;
using graph::Value;
using graph::ValueId;
using graph::ValueKind;

/// The time that calling each operator takes, however little it has to do.
constexpr double kCallUs = 1.0;
// The cost of moving bytes and computing, as of one core (`DivideOptions::estimate`).
constexpr double kBytesPerUs = 5000.0;
constexpr double kFlopsPerUs = 40000.0;

/// True for an operator that is no product, and makes an activation of which ranks may have parts
/// along a dimension before the last.
bool may_be_in_stream(const Call& call) {
  if (call.results().empty() || is_product(call.base_name())) return false;
  const auto& sizes = call.result_meta().sizes;
  bool divisible = false;
  for (int dim = 0; dim + 1 < static_cast<int>(sizes.size()); ++dim) {
    divisible |= can_divide(sizes, dim, 1, call.ranks());
  }
  return divisible && !comes_from_parameter(call.graph(), call.results()[0]);
}

double estimated_time(const Call& call) {
  const bool is_view =
      call.op().writes.empty() && !call.results().empty() &&
      std::any_of(call.tensors().begin(), call.tensors().end(), [&](ValueId value) {
        return call.graph().values[value].alias_set ==
               call.graph().values[call.results()[0]].alias_set;
      });
  if (is_view) return kCallUs;
  int64_t bytes = 0;
  const auto add = [&](ValueId value) { bytes += call.graph().values[value].meta.nbytes(); };
  std::for_each(call.tensors().begin(), call.tensors().end(), add);
  std::for_each(call.results().begin(), call.results().end(), add);
  const double forward = kCallUs + static_cast<double>(bytes) / kBytesPerUs +
                         graph::operator_flops(call.graph(), call.op()) / kFlopsPerUs;
  return call.graph().trains() ? 3 * forward : forward;
}

}  // namespace

Propagation::Propagation(const Graph& graph, const DivideOptions& options)
    : graph_(graph),
      options_(options),
      alias_sets_(graph.alias_sets),
      lasting_(graph.alias_sets),
      last_writes_(graph.alias_sets, -1),
      conversions_(graph.values.size()) {
  layouts_.users.resize(graph.values.size());
  layouts_.in_stream.resize(graph.values.size());
  layouts_.of.resize(graph.values.size());
  layouts_.free.resize(graph.values.size());
  const graph::RequiresGrad requires_grad(graph);
  const std::vector<AttentionForm> forms = attention_forms(graph, options.options_of);
  const std::vector<bool> residuals = residual_sums(graph, options.options_of);
  for (size_t i = 0; i < graph.operators.size(); ++i) {
    calls_.emplace_back(graph, i, options.ranks, layouts_, forms[i], residuals[i]);
    const Operator& op = graph.operators[i];
    rules_.push_back(rule_of(op));
    times_.push_back(options.estimate
                         ? estimated_time(calls_.back())
                         : op.cost.forward_us + (graph.trains() ? op.cost.backward_us : 0));
    for (int set : op.writes) last_writes_[set] = static_cast<int>(i);
    graph::for_each_argument(op, [&](ValueId value) {
      auto& users = layouts_.users[value];
      if (users.empty() || users.back() != static_cast<int>(i))
        users.push_back(static_cast<int>(i));
    });
  }
  // Ranges that the step function differentiates are computed whole by every rank: gradients of
  // parts are sums over the ranks only when the backward pass of the step is over.
  for (const graph::DifferentiatedRange& range : graph::differentiated_ranges(graph)) {
    for (int i = range.first; i <= range.last; ++i) rules_[i] = nullptr;
  }
  const auto at_end = [&](ValueId value) {
    if (value != graph::kUndefined) layouts_.users[value].push_back(Layouts::kAtEnd);
  };
  for (ValueId output : graph.outputs) at_end(output);
  for (const graph::BackwardRoot& root : graph.roots) {
    at_end(root.value);
    at_end(root.gradient);
  }
  for (size_t v = 0; v < graph.values.size(); ++v) {
    const Value& value = graph.values[v];
    layouts_.requires_grad_since.push_back(requires_grad.since(static_cast<ValueId>(v)));
    const bool is_number = c10::isFloatingType(value.meta.dtype);
    comes_from_parameter_.push_back(comes_from_parameter(graph, static_cast<ValueId>(v)) ? 1 : 0);
    is_activation_.push_back(value.kind == ValueKind::kResult && is_number &&
                             comes_from_parameter_.back() == 0);
    if (value.alias_set < 0) continue;
    alias_sets_[value.alias_set].push_back(static_cast<ValueId>(v));
    if (value.kind != ValueKind::kResult) lasting_[value.alias_set] = true;
  }
  for (const Call& call : calls_) {
    kept_.push_back(saved_by(call));
    may_be_in_stream_.push_back(may_be_in_stream(call) ? 1 : 0);
  }
}

bool Propagation::is_allowed(ValueId value) const {
  return graph_.values[value].kind == ValueKind::kParameter &&
         options_.allowed.count(graph_.values[value].name) > 0;
}

Outcome Propagation::run(const Pins& pins) {
  layouts_.whole_sets.clear();
  while (true) {
    Outcome outcome;
    if (attempt(pins, outcome)) return outcome;
  }
}

/// False: a storage that is written turned out to need to be whole, which `Layouts::whole_sets`
/// notes.
bool Propagation::attempt(const Pins& pins, Outcome& outcome) {
  conversions_.clear();
  layouts_.pins = &pins;
  std::fill(layouts_.in_stream.begin(), layouts_.in_stream.end(), 0);
  kept_as_.resize(graph_.values.size());
  for (auto& forms : kept_as_) forms.clear();
  outcome.treatments.reserve(calls_.size());
  for (size_t v = 0; v < graph_.values.size(); ++v) {
    const auto id = static_cast<ValueId>(v);
    const auto pin = pins.find(id);
    const bool given = pin != pins.end() && graph_.values[v].producer < 0;
    layouts_.of[v] = given ? pin->second : Layout::whole();
    layouts_.free[v] = pin == pins.end() && is_allowed(id) ? 1 : 0;
    if (graph_.values[v].producer < 0) conversions_.add(id, layouts_.of[v], 0);
  }
  for (size_t i = 0; i < calls_.size(); ++i) {
    const size_t sets = layouts_.whole_sets.size();
    Treatment treatment = treat(i);
    if (layouts_.whole_sets.size() > sets) return false;
    settle(calls_[i], treatment, outcome);
    outcome.treatments.push_back(std::move(treatment));
  }
  finish(outcome);
  return true;
}

Treatment Propagation::treat(size_t index) {
  Treatment treatment = treat_as_captured(index);
  if (calls_[index].is_residual_sum()) treatment.emit = emit_residual_sum;
  return treatment;
}

/// The treatment that the operator's rule gives, if that respects writes; else all is whole.
Treatment Propagation::treat_as_captured(size_t index) {
  const Call& call = calls_[index];
  const auto is_whole = [&](ValueId value) { return layouts_.of[value].is_whole(); };
  if (std::all_of(call.tensors().begin(), call.tensors().end(), is_whole)) return call.all_whole();
  Treatment whole = call.all_whole();
  if (rules_[index]) {
    std::optional<Treatment> treatment = rules_[index](call);
    if (treatment && respects_writes(call, *treatment)) return *treatment;
    if (treatment) whole.wishes = treatment->wishes;
  }
  if (!respects_writes(call, whole)) {
    for (int set : call.op().writes) layouts_.whole_sets.insert(set);
    if (cuts_views(call, whole)) {
      for (ValueId value : call.tensors())
        layouts_.whole_sets.insert(graph_.values[value].alias_set);
    }
  }
  return whole;
}

/// A result would be a view of a joined copy, and not see later writes, or not be seen.
bool Propagation::cuts_views(const Call& call, const Treatment& treatment) const {
  for (size_t i = 0; i < call.tensors().size(); ++i) {
    const ValueId value = call.tensors()[i];
    const int set = graph_.values[value].alias_set;
    const auto& own = call.op().writes;
    if (treatment.arguments[i] == layouts_.of[value] || !is_written_after(set, call.index()) ||
        std::find(own.begin(), own.end(), set) != own.end()) {
      continue;
    }
    if (graph::has_result_on(graph_, call.op(), set)) return true;
  }
  return false;
}

/// An operator may write an argument in the layout that it asks for, or a joined copy that is all
/// that is seen from then on.
bool Propagation::respects_writes(const Call& call, const Treatment& treatment) {
  bool in_stream = false;
  for (size_t i = 0; i < call.tensors().size(); ++i) {
    in_stream |= call.divided(static_cast<int>(i)) && call.in_stream(static_cast<int>(i));
  }
  for (size_t r = 0; r < call.results().size(); ++r) {
    const int set = graph_.values[call.results()[r]].alias_set;
    const bool must_be_whole =
        layouts_.whole_sets.count(set) > 0 || (in_stream && needs_strides(set));
    if (must_be_whole && !treatment.results[r].is_whole()) return false;
  }
  if (cuts_views(call, treatment)) return false;
  const auto& writes = call.op().writes;
  if (writes.empty()) return true;
  if (treatment.emit != nullptr && !treatment.emit_writes) return false;
  for (size_t i = 0; i < call.tensors().size(); ++i) {
    const ValueId value = call.tensors()[i];
    const int set = graph_.values[value].alias_set;
    if (std::find(writes.begin(), writes.end(), set) == writes.end()) continue;
    const Layout& wanted = treatment.arguments[i];
    const bool kept = wanted == layouts_.of[value];
    if (!kept && (!wanted.is_whole() || is_read_after(call, value))) return false;
    for (size_t r = 0; r < call.results().size(); ++r) {
      const bool same = graph_.values[call.results()[r]].alias_set == set;
      if (same && treatment.results[r] != wanted) return false;
    }
  }
  return true;
}

/// Whether the written storage is seen otherwise than through the operator's results.
bool Propagation::is_read_after(const Call& call, ValueId written) const {
  const int set = graph_.values[written].alias_set;
  if (lasting_[set]) return true;
  const auto& values = alias_sets_[set];
  return std::any_of(values.begin(), values.end(), [&](ValueId value) {
    const auto& users = layouts_.users[value];
    return graph_.values[value].producer < static_cast<int>(call.index()) && !users.empty() &&
           users.back() > static_cast<int>(call.index());
  });
}

/// Counts the time of an operator and of the conversions it needs, and notes its results.
void Propagation::settle(const Call& call, const Treatment& treatment, Outcome& outcome) {
  const int index = static_cast<int>(call.index());
  bool joins = false;
  for (size_t i = 0; i < call.tensors().size(); ++i) {
    const ValueId value = call.tensors()[i];
    const Layout& wanted = treatment.arguments[i];
    if (layouts_.free[value] != 0) {
      layouts_.free[value] = 0;
      if (wanted.is_divided() && !treatment.cuts_parameters) {
        layouts_.of[value] = wanted;
        conversions_.add(value, wanted, 0);
        conversions_.forget(value, wanted);
      }
    }
    joins |= layouts_.of[value].is_divided() && !wanted.is_divided();
    need(value, wanted, call.has_gradient(static_cast<int>(i)), outcome);
  }
  if (joins) outcome.obstacles.push_back({index, treatment.obstacle_parts});
  bool meets_stream = false, in_stream = false;
  for (size_t i = 0; i < call.tensors().size(); ++i) {
    const Layout& home = layouts_.of[call.tensors()[i]];
    const bool own = home.is_divided() && call.in_stream(static_cast<int>(i));
    meets_stream |= own;
    in_stream |= own && treatment.arguments[i] == home && static_cast<int>(i) != treatment.gathered;
  }
  for (const Treatment::Wish& wish : treatment.wishes) {
    outcome.wishes.push_back({call.tensors()[wish.position], wish.layout, meets_stream});
  }
  for (size_t r = 0; r < call.results().size(); ++r) {
    settle_result(call, treatment, r, in_stream, outcome);
  }
  keep(call, treatment, outcome);
  for (int set : call.op().writes) {
    for (ValueId value : alias_sets_[set]) conversions_.forget(value, layouts_.of[value]);
  }
  const double time = times_[index];
  const double call_time = std::min(time, graph_.trains() ? 3 * kCallUs : kCallUs);
  const bool in_parts =
      works_on_parts(treatment) || (expects_streams_ && may_be_in_stream_[call.index()] != 0);
  outcome.us += in_parts ? call_time + (time - call_time) / options_.ranks : time;
  const auto [forward, backward] = times_of(traffic_inside(call, treatment), options_);
  outcome.us += forward + backward;
}

/// Notes in which layout a result is from here on: that of its pin, if it has one.
void Propagation::settle_result(const Call& call, const Treatment& treatment, size_t r,
                                bool in_stream, Outcome& outcome) {
  const ValueId value = call.results()[r];
  const Layout& made = treatment.results[r];
  layouts_.of[value] = made;
  layouts_.in_stream[value] = in_stream && made.is_divided() ? 1 : 0;
  conversions_.add(value, made, 0);
  const auto pin = call.pin(static_cast<int>(r));
  if (!pin) return;
  const Layout& home = *pin;
  layouts_.in_stream[value] = 1;
  if (home == made) return;
  need(value, home, call.result_has_gradient(static_cast<int>(r)), outcome);
  layouts_.of[value] = home;
  if (!made.is_whole()) conversions_.forget(value, home);
}

/// Counts the tensors that the operator's backward pass needs.
void Propagation::keep(const Call& call, const Treatment& treatment, Outcome& outcome) {
  const SavedForBackward& kept = kept_[call.index()];
  for (int position : kept.arguments) {
    keep(call.tensors()[position], treatment.arguments[position], outcome);
  }
  for (int r : kept.results) keep(call.results()[r], treatment.results[r], outcome);
  if (!kept.mask) return;
  const int64_t bytes = call.result_meta().nbytes();
  outcome.kept_bytes += treatment.results[0].is_divided() ? bytes / options_.ranks : bytes;
}

void Propagation::keep(ValueId value, const Layout& layout, Outcome& outcome) {
  // A copy for a divided region lies on the memory of the whole; joined, or in other parts, it is
  // another tensor.
  const Layout form = layout == Layout::shared() ? Layout::whole() : layout;
  const bool is_parameter = comes_from_parameter_[value] != 0;
  if (!is_parameter && is_activation_[value] == 0) return;
  if (is_parameter && form == layouts_.of[value]) return;  // that is held anyhow
  auto& forms = kept_as_[value];
  if (std::find(forms.begin(), forms.end(), form) != forms.end()) return;
  forms.push_back(form);
  const int64_t bytes = graph_.values[value].meta.nbytes();
  outcome.kept_bytes += layout.is_divided() ? bytes / options_.ranks : bytes;
}

void Propagation::recall(const Outcome& outcome) {
  layouts_.of = outcome.layouts;
  layouts_.in_stream = outcome.in_stream;
  layouts_.pins = &no_pins_;
}

std::optional<Layout> Propagation::carried(size_t operator_index, int position,
                                           const Layout& layout, ValueId result) {
  const Call& call = calls_[operator_index];
  if (!rules_[operator_index]) return std::nullopt;
  const ValueId value = call.tensors()[position];
  const Layout own = std::exchange(layouts_.of[value], layout);
  const char in_stream = std::exchange(layouts_.in_stream[value], 1);
  const auto treatment = rules_[operator_index](call);
  const bool follows =
      treatment && respects_writes(call, *treatment) && treatment->arguments[position] == layout;
  layouts_.of[value] = own;
  layouts_.in_stream[value] = in_stream;
  if (!follows) return std::nullopt;
  const auto at = std::find(call.results().begin(), call.results().end(), result);
  const Layout& made = treatment->results[at - call.results().begin()];
  return made.is_divided() ? std::optional(made) : std::nullopt;
}

void Propagation::need(ValueId value, const Layout& layout, bool has_gradient, Outcome& outcome) {
  const int64_t bytes = graph_.values[value].meta.nbytes();
  conversions_.get(value, layout, has_gradient, [&](const Conversion& conversion, char) {
    const Traffic moved = traffic_of(conversion.collective, bytes, has_gradient, options_.ranks);
    const auto [forward, backward] = times_of(moved, options_);
    outcome.us += forward + backward;
    const bool joins = conversion.from.is_divided() && comes_from_parameter(graph_, value);
    outcome.joined_parameters += joins ? 1 : 0;
    return char{0};
  });
}

void Propagation::finish(Outcome& outcome) {
  for (size_t v = 0; v < graph_.values.size(); ++v) {
    const Value& value = graph_.values[v];
    const auto& users = layouts_.users[v];
    if (!users.empty() && users.back() == Layouts::kAtEnd) {
      const auto id = static_cast<ValueId>(v);
      need(id, Layout::whole(), graph_.trains() && requires_grad_at_end(id), outcome);
    }
    if (value.kind != ValueKind::kParameter) continue;
    const double held = static_cast<double>(value.meta.nbytes()) * options_.parameter_us_per_byte;
    outcome.us += layouts_.of[v].is_divided() ? held / options_.ranks : held;
  }
  outcome.layouts = layouts_.of;
  outcome.in_stream = layouts_.in_stream;
}

}  // namespace smp::nn::rewrite
