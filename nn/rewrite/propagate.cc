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
      events_(graph.values.size()),
      steps_(graph.operators.size()),
      costs_(graph.values.size()),
      is_noted_(graph.operators.size()),
      is_stale_(graph.values.size()) {
  layouts_.users.resize(graph.values.size());
  layouts_.in_stream.resize(graph.values.size());
  layouts_.of.resize(graph.values.size());
  layouts_.free.resize(graph.values.size());
  note_operators();
  note_values();
  note_events();
}

/// Notes how operators are computed, what they take and who reads each value.
void Propagation::note_operators() {
  const std::vector<AttentionForm> forms = attention_forms(graph_, options_.options_of);
  const std::vector<bool> residuals = residual_sums(graph_, options_.options_of);
  for (size_t i = 0; i < graph_.operators.size(); ++i) {
    calls_.emplace_back(graph_, i, options_.ranks, layouts_, forms[i], residuals[i]);
    const Operator& op = graph_.operators[i];
    rules_.push_back(rule_of(op));
    times_.push_back(options_.estimate
                         ? estimated_time(calls_.back())
                         : op.cost.forward_us + (graph_.trains() ? op.cost.backward_us : 0));
    for (int set : op.writes) last_writes_[set] = static_cast<int>(i);
    graph::for_each_argument(op, [&](ValueId value) {
      auto& users = layouts_.users[value];
      if (users.empty() || users.back() != static_cast<int>(i))
        users.push_back(static_cast<int>(i));
    });
  }
  // Ranges that the step function differentiates are computed whole by every rank: gradients of
  // parts are sums over the ranks only when the backward pass of the step is over.
  for (const graph::DifferentiatedRange& range : graph::differentiated_ranges(graph_)) {
    for (int i = range.first; i <= range.last; ++i) rules_[i] = nullptr;
  }
  const auto at_end = [&](ValueId value) {
    if (value != graph::kUndefined) layouts_.users[value].push_back(Layouts::kAtEnd);
  };
  for (ValueId output : graph_.outputs) at_end(output);
  for (const graph::BackwardRoot& root : graph_.roots) {
    at_end(root.value);
    at_end(root.gradient);
  }
}

/// Notes what kind of value each is.
void Propagation::note_values() {
  const graph::RequiresGrad requires_grad(graph_);
  for (size_t v = 0; v < graph_.values.size(); ++v) {
    const Value& value = graph_.values[v];
    layouts_.requires_grad_since.push_back(requires_grad.since(static_cast<ValueId>(v)));
    const bool is_number = c10::isFloatingType(value.meta.dtype);
    comes_from_parameter_.push_back(comes_from_parameter(graph_, static_cast<ValueId>(v)) ? 1 : 0);
    is_activation_.push_back(value.kind == ValueKind::kResult && is_number &&
                             comes_from_parameter_.back() == 0);
    if (value.alias_set < 0) continue;
    alias_sets_[value.alias_set].push_back(static_cast<ValueId>(v));
    if (value.kind != ValueKind::kResult) lasting_[value.alias_set] = true;
  }
}

/// Notes what operators keep, and which of them read a value or write its storage.
void Propagation::note_events() {
  for (const Call& call : calls_) {
    kept_.push_back(saved_by(call));
    may_be_in_stream_.push_back(may_be_in_stream(call) ? 1 : 0);
    const auto index = static_cast<int>(call.index());
    const auto note = [&](ValueId value) {
      auto& events = events_[value];
      if (events.empty() || events.back() != index) events.push_back(index);
    };
    std::for_each(call.tensors().begin(), call.tensors().end(), note);
    for (int set : call.op().writes) {
      for (ValueId value : alias_sets_[set]) {
        if (graph_.values[value].producer <= index) note(value);
      }
    }
  }
}

bool Propagation::is_allowed(ValueId value) const {
  return graph_.values[value].kind == ValueKind::kParameter &&
         options_.allowed.count(graph_.values[value].name) > 0;
}

Outcome Propagation::run(const Constraints& constraints) {
  if (recalls_) {
    layouts_.of = std::move(of_);
    layouts_.in_stream = std::move(in_stream_);
    recalls_ = false;
  }
  // A storage that had to be whole need not be with other constraints.
  if (has_run_ && layouts_.whole_sets.empty()) {
    note_changes(constraints);
  } else {
    note_all();
  }
  layouts_.whole_sets.clear();
  constraints_ = constraints;
  layouts_.constraints = &constraints_;
  while (!treat_noted()) note_all();
  has_run_ = true;
  return outcome();
}

void Propagation::note_all() {
  std::fill(is_noted_.begin(), is_noted_.end(), 1);
  std::fill(is_stale_.begin(), is_stale_.end(), 1);
}

/// Notes the operators that make values with other constraints or, of those that are given, use
/// them first.
void Propagation::note_changes(const Constraints& constraints) {
  const auto note = [&](ValueId value) {
    is_stale_[value] = 1;
    const int producer = graph_.values[value].producer;
    const auto& users = layouts_.users[value];
    if (producer >= 0) is_noted_[producer] = 1;
    if (producer < 0 && !users.empty() && users[0] != Layouts::kAtEnd) is_noted_[users[0]] = 1;
  };
  const auto compare = [&](const Constraints& some, const Constraints& others) {
    for (const auto& [value, layout] : some) {
      const auto other = others.find(value);
      if (other == others.end() || other->second != layout) note(value);
    }
  };
  compare(constraints, constraints_);
  compare(constraints_, constraints);
}

/// False: a storage that is written turned out to need to be whole, which `Layouts::whole_sets`
/// notes.
bool Propagation::treat_noted() {
  for (size_t v = 0; v < graph_.values.size(); ++v) {
    const auto id = static_cast<ValueId>(v);
    const bool is_used = !layouts_.users[v].empty() && layouts_.users[v][0] != Layouts::kAtEnd;
    if (is_stale_[v] != 0 && graph_.values[v].producer < 0 && !is_used) {
      layouts_.of[v] = layout_at_start(id);
    }
  }
  for (size_t i = 0; i < calls_.size(); ++i) {
    if (std::exchange(is_noted_[i], 0) != 0 && !renew(i)) return false;
  }
  for (size_t v = 0; v < graph_.values.size(); ++v) {
    if (std::exchange(is_stale_[v], 0) != 0) costs_[v] = cost_of(static_cast<ValueId>(v));
  }
  return true;
}

/// The layout of a value that no operator makes, before one uses it.
Layout Propagation::layout_at_start(ValueId value) const {
  const auto constraint = constraints_.find(value);
  return constraint == constraints_.end() ? Layout::whole() : constraint->second;
}

/// Whether how the operator needs a parameter decides how it is divided: it is the first to use it.
bool Propagation::decides(const Call& call, ValueId value) const {
  return graph_.values[value].producer < 0 &&
         layouts_.users[value][0] == static_cast<int>(call.index()) &&
         constraints_.count(value) == 0 && is_allowed(value);
}

/// Has the values that the operator is the first to use lie as at the start.
void Propagation::enter(const Call& call) {
  for (ValueId value : call.tensors()) {
    const bool is_first = graph_.values[value].producer < 0 &&
                          layouts_.users[value][0] == static_cast<int>(call.index());
    if (!is_first) continue;
    layouts_.of[value] = layout_at_start(value);
    layouts_.free[value] = decides(call, value) ? 1 : 0;
  }
}

/// Treats an operator anew, and notes those that read values that lie otherwise since. False where
/// `treat_noted` is.
bool Propagation::renew(size_t index) {
  const Call& call = calls_[index];
  const auto state_of = [&](ValueId value) {
    return std::make_pair(layouts_.of[value], layouts_.in_stream[value]);
  };
  std::vector<ValueId> concerned = call.tensors();
  concerned.insert(concerned.end(), call.results().begin(), call.results().end());
  std::vector<std::pair<Layout, char>> before;
  for (ValueId value : concerned) before.push_back(state_of(value));
  enter(call);
  const size_t sets = layouts_.whole_sets.size();
  Treatment treatment = treat(index);
  if (layouts_.whole_sets.size() > sets) return false;
  steps_[index] = settle(call, std::move(treatment));
  for (size_t i = 0; i < concerned.size(); ++i) {
    is_stale_[concerned[i]] = 1;
    if (state_of(concerned[i]) == before[i]) continue;
    for (int user : layouts_.users[concerned[i]]) {
      if (user != Layouts::kAtEnd && user > static_cast<int>(index)) is_noted_[user] = 1;
    }
  }
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

/// Notes how the operator's results lie, and parameters that it decides on.
Propagation::Step Propagation::settle(const Call& call, Treatment treatment) {
  Step step;
  bool in_stream = false;
  for (size_t i = 0; i < call.tensors().size(); ++i) {
    const ValueId value = call.tensors()[i];
    const Layout& wanted = treatment.arguments[i];
    if (std::exchange(layouts_.free[value], 0) != 0 && wanted.is_divided() &&
        !treatment.cuts_parameters) {
      layouts_.of[value] = wanted;
    }
    step.joins |= layouts_.of[value].is_divided() && !wanted.is_divided();
  }
  for (size_t i = 0; i < call.tensors().size(); ++i) {
    const Layout& home = layouts_.of[call.tensors()[i]];
    const bool own = home.is_divided() && call.in_stream(static_cast<int>(i));
    step.meets_stream |= own;
    in_stream |= own && treatment.arguments[i] == home && static_cast<int>(i) != treatment.gathered;
  }
  for (size_t r = 0; r < call.results().size(); ++r) settle_result(call, treatment, r, in_stream);
  step.us = time_of(call, treatment);
  step.treatment = std::make_shared<const Treatment>(std::move(treatment));
  return step;
}

/// Notes in which layout a result is from here on: that of its constraint, if it has one.
void Propagation::settle_result(const Call& call, const Treatment& treatment, size_t r,
                                bool in_stream) {
  const ValueId value = call.results()[r];
  const Layout& made = treatment.results[r];
  const auto constraint = call.constraint(static_cast<int>(r));
  layouts_.of[value] = constraint.value_or(made);
  layouts_.in_stream[value] = constraint || (in_stream && made.is_divided()) ? 1 : 0;
}

/// The time of an operator, and of the messages that it sends itself.
double Propagation::time_of(const Call& call, const Treatment& treatment) const {
  const double time = times_[call.index()];
  const double call_time = std::min(time, graph_.trains() ? 3 * kCallUs : kCallUs);
  const bool in_parts = works_on_parts(treatment) ||
                        (expects_residual_streams_ && may_be_in_stream_[call.index()] != 0);
  const auto [forward, backward] = times_of(traffic_inside(call, treatment), options_);
  return (in_parts ? call_time + (time - call_time) / options_.ranks : time) + forward + backward;
}

int64_t Propagation::mask_bytes(const Call& call, const Treatment& treatment) const {
  if (!kept_[call.index()].mask) return 0;
  const int64_t bytes = call.result_meta().nbytes();
  return treatment.results[0].is_divided() ? bytes / options_.ranks : bytes;
}

/// The cost of one value, by the operators that make, read and write it, in program order.
class Propagation::ValueWalk {
 public:
  ValueWalk(const Propagation& all, ValueId value)
      : all_(all), id_(value), value_(all.graph_.values[value]) {}

  ValueCost run() {
    value_.producer < 0 ? begin(all_.layout_at_start(id_)) : make(all_.calls_[value_.producer]);
    for (int index : all_.events_[id_]) {
      if (index != value_.producer) pass(all_.calls_[index]);
    }
    end();
    return cost_;
  }

 private:
  const Treatment& treatment(const Call& call) const {
    return *all_.steps_[call.index()].treatment;
  }

  void begin(const Layout& layout) {
    home_ = layout;
    forms_.add(0, layout, 0);
  }

  void make(const Call& call) {
    const auto& results = call.results();
    const auto r =
        static_cast<int>(std::find(results.begin(), results.end(), id_) - results.begin());
    const Layout& made = treatment(call).results[r];
    begin(made);
    home_ = all_.layouts_.of[id_];
    if (home_ != made) {
      need(home_, call.result_has_gradient(r));
      if (!made.is_whole()) forms_.forget(0, home_);
    }
    for (int kept : all_.kept_[call.index()].results) {
      if (kept == r) keep(made);
    }
    forget_if_written(call);
  }

  void pass(const Call& call) {
    const auto& tensors = call.tensors();
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (tensors[i] != id_) continue;
      const Layout& wanted = treatment(call).arguments[i];
      if (all_.decides(call, id_) && !std::exchange(is_decided_, true) && wanted.is_divided() &&
          !treatment(call).cuts_parameters) {
        begin(wanted);
        forms_.forget(0, wanted);
      }
      need(wanted, call.has_gradient(static_cast<int>(i)));
    }
    for (int position : all_.kept_[call.index()].arguments) {
      if (tensors[position] == id_) keep(treatment(call).arguments[position]);
    }
    forget_if_written(call);
  }

  void end() {
    const auto& users = all_.layouts_.users[id_];
    if (!users.empty() && users.back() == Layouts::kAtEnd) {
      need(Layout::whole(), all_.graph_.trains() && all_.requires_grad_at_end(id_));
    }
    if (value_.kind != ValueKind::kParameter) return;
    const double held =
        static_cast<double>(value_.meta.nbytes()) * all_.options_.parameter_us_per_byte;
    cost_.us += home_.is_divided() ? held / all_.options_.ranks : held;
  }

  void need(const Layout& layout, bool has_gradient) {
    forms_.get(0, layout, has_gradient, [&](const Conversion& conversion, char) {
      const Traffic moved = traffic_of(conversion.collective, value_.meta.nbytes(), has_gradient,
                                       all_.options_.ranks);
      const auto [forward, backward] = times_of(moved, all_.options_);
      cost_.us += forward + backward;
      const bool joins = conversion.from.is_divided() && all_.comes_from_parameter_[id_] != 0;
      cost_.joined_parameters += joins ? 1 : 0;
      return char{0};
    });
  }

  /// Counts what a backward pass needs of it.
  void keep(const Layout& layout) {
    // A copy for a divided region lies on the memory of the whole; joined, or in other parts, it is
    // another tensor.
    const Layout form = layout == Layout::shared() ? Layout::whole() : layout;
    const bool is_parameter = all_.comes_from_parameter_[id_] != 0;
    if (!is_parameter && all_.is_activation_[id_] == 0) return;
    if (is_parameter && form == home_) return;  // that is held anyhow
    if (std::find(kept_as_.begin(), kept_as_.end(), form) != kept_as_.end()) return;
    kept_as_.push_back(form);
    const int64_t bytes = value_.meta.nbytes();
    cost_.kept_bytes += layout.is_divided() ? bytes / all_.options_.ranks : bytes;
  }

  /// A value that is written has to be converted anew.
  void forget_if_written(const Call& call) {
    const auto& writes = call.op().writes;
    if (std::find(writes.begin(), writes.end(), value_.alias_set) != writes.end()) {
      forms_.forget(0, home_);
    }
  }

  const Propagation& all_;
  const ValueId id_;
  const Value& value_;
  Conversions<char> forms_{1};
  std::vector<Layout> kept_as_;
  Layout home_;
  bool is_decided_ = false;
  ValueCost cost_;
};

Propagation::ValueCost Propagation::cost_of(ValueId value) const {
  return ValueWalk(*this, value).run();
}

Outcome Propagation::outcome() const {
  Outcome outcome;
  outcome.treatments.reserve(steps_.size());
  for (size_t i = 0; i < steps_.size(); ++i) {
    const Step& step = steps_[i];
    const Treatment& treatment = *step.treatment;
    outcome.us += step.us;
    outcome.kept_bytes += mask_bytes(calls_[i], treatment);
    for (const Treatment::Wish& wish : treatment.wishes) {
      outcome.wishes.push_back(
          {calls_[i].tensors()[wish.position], wish.layout, step.meets_stream});
    }
    if (step.joins) outcome.obstacles.push_back({static_cast<int>(i), treatment.obstacle_parts});
    outcome.treatments.push_back(step.treatment);
  }
  for (const ValueCost& cost : costs_) {
    outcome.us += cost.us;
    outcome.kept_bytes += cost.kept_bytes;
    outcome.joined_parameters += cost.joined_parameters;
  }
  outcome.layouts = layouts_.of;
  outcome.in_stream = layouts_.in_stream;
  return outcome;
}

void Propagation::recall(const Outcome& outcome) {
  if (!std::exchange(recalls_, true)) {
    of_ = std::move(layouts_.of);
    in_stream_ = std::move(layouts_.in_stream);
  }
  layouts_.of = outcome.layouts;
  layouts_.in_stream = outcome.in_stream;
  layouts_.constraints = &no_constraints_;
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

}  // namespace smp::nn::rewrite
