// SPDX-License-Identifier: Apache-2.0
#include "nn/rewrite/divide.h"

#include <c10/util/StringUtil.h>

#include <utility>

#include "core/check.h"
#include "nn/rewrite/build.h"
#include "nn/rewrite/choose.h"
#include "nn/rewrite/propagate.h"
#include "nn/rewrite/residual_streams.h"

namespace smp::nn::rewrite {
namespace {

using graph::Graph;
using graph::Value;
using graph::ValueId;
using graph::ValueKind;

ParameterSplit split_of(const Value& value, const Layout& layout, int ranks) {
  return {{value.meta.sizes.begin(), value.meta.sizes.end()}, layout.dim, layout.blocks, ranks};
}

/// The parameters that are divided already.
Constraints fixed_constraints(const Graph& whole, const DivideOptions& options) {
  Constraints constraints;
  for (size_t v = 0; v < whole.values.size(); ++v) {
    const Value& value = whole.values[v];
    const auto found = options.fixed.find(value.name);
    if (value.kind != ValueKind::kParameter || found == options.fixed.end()) continue;
    const ParameterSplit& split = found->second;
    const c10::IntArrayRef sizes(value.meta.sizes);
    const bool same = sizes == c10::IntArrayRef(split.sizes) && split.ranks == options.ranks;
    SMP_CHECK_WITH(UsageError, same, "parameter \"", value.name, "\" is divided as ",
                   split.to_string(), ", but this step function reads it with sizes ", sizes,
                   " on ", options.ranks,
                   " ranks. Parameters keep their sizes, and the way they are divided, once a step "
                   "has run");
    split.check();
    constraints[static_cast<ValueId>(v)] =
        Layout::divided(static_cast<int>(split.dim), split.blocks);
  }
  return constraints;
}

/// True for a bias that is added after the sum over the ranks.
bool is_added_to_sum(const Call& reader, const Outcome& outcome, ValueId bias) {
  const Treatment& treatment = *outcome.treatments[reader.index()];
  for (size_t i = 0; i < reader.tensors().size(); ++i) {
    const ValueId value = reader.tensors()[i];
    if (value != bias && outcome.layouts[value].is_partial()) return true;
    if (value == bias && treatment.reduced_bytes > 0) return true;
  }
  return false;
}

/// Why a parameter that the pass did not choose to divide is whole.
std::string reason_of(const Propagation& propagation, const Choice& choice, const Outcome& outcome,
                      ValueId id) {
  if (!propagation.is_allowed(id)) return "its module is not marked for tensor parallelism";
  const auto refusal = choice.refusals.find(id);
  if (refusal != choice.refusals.end()) return refusal->second;
  const auto& users = propagation.users()[id];
  if (users.empty()) return "no operator reads it";
  if (users[0] == Layouts::kAtEnd) return "the step function returns it";
  const Call& reader = propagation.calls()[users[0]];
  if (is_added_to_sum(reader, outcome, id)) return "it is added once, to the sum over the ranks";
  const bool of_parts = works_on_parts(*outcome.treatments[users[0]]);
  return c10::str(
      "operator ", reader.op().name(),
      of_parts ? " needs all of it for each part of what it works on" : " uses it on whole values");
}

void decide(const Propagation& propagation, const Choice& choice, const Outcome& outcome,
            const DivideOptions& options, DividedGraph& divided) {
  const Graph& whole = propagation.graph();
  for (size_t v = 0; v < whole.values.size(); ++v) {
    const Value& value = whole.values[v];
    if (value.kind != ValueKind::kParameter) continue;
    const auto id = static_cast<ValueId>(v);
    ParameterDecision decision;
    decision.name = value.name;
    decision.sizes.assign(value.meta.sizes.begin(), value.meta.sizes.end());
    decision.bytes = value.meta.nbytes();
    if (outcome.layouts[v].is_divided()) {
      decision.split = split_of(value, outcome.layouts[v], options.ranks);
      divided.parameters[value.name] = *decision.split;
    } else {
      decision.why_whole = reason_of(propagation, choice, outcome, id);
      decision.skipped = propagation.is_allowed(id) && is_weight(propagation, id);
    }
    divided.decisions.push_back(std::move(decision));
  }
}

}  // namespace

core::Refusal why_none_divided(const Graph& whole, const DivideOptions& options) {
  if (options.ranks <= 1) return "the tensor-parallel group has one rank";
  const Propagation propagation(whole, options);
  bool any_weight = false;
  for (size_t v = 0; v < whole.values.size(); ++v) {
    const auto id = static_cast<ValueId>(v);
    if (options.fixed.count(whole.values[v].name) > 0) return std::nullopt;
    if (!is_weight(propagation, id)) continue;
    if (propagation.is_allowed(id)) return std::nullopt;
    any_weight = true;
  }
  return any_weight ? "no module with a weight of products or embeddings is marked for tensor "
                      "parallelism"
                    : "no operator multiplies by a parameter or looks one up";
}

DividedGraph divide(const Graph& whole, const DivideOptions& options) {
  SMP_INTERNAL_ASSERT(options.ranks > 1, "a graph divided among ", options.ranks, " ranks");
  Propagation propagation(whole, options);
  const Choice choice = choose(propagation, fixed_constraints(whole, options), options.insist);
  ResidualStreams streams;
  streams.outcome = propagation.run(choice.constraints);
  const int64_t kept_bytes = streams.outcome.kept_bytes;
  if (options.residual_streams)
    streams = choose_residual_streams(propagation, choice.constraints, options);
  const Outcome& outcome = streams.outcome;
  DividedGraph divided = build(propagation, outcome, options);
  divided.ranks = options.ranks;
  divided.residual_streams = std::move(streams.decisions);
  divided.kept_bytes = outcome.kept_bytes;
  divided.kept_bytes_with_whole_streams = kept_bytes;
  divided.whole_us = choice.whole_us;
  divided.divided_us = outcome.us;
  decide(propagation, choice, outcome, options, divided);
  check_layouts(divided, divided.graph);
  for (const Call& call : propagation.calls()) {
    const bool wanted = !call.attention_form().is_as_captured() || call.is_residual_sum();
    if (wanted && outcome.treatments[call.index()]->emit != nullptr) {
      divided.computed_otherwise.insert(call.index());
    }
  }
  return divided;
}

}  // namespace smp::nn::rewrite
