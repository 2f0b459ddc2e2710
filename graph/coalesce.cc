// SPDX-License-Identifier: Apache-2.0
#include "graph/coalesce.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <utility>

#include "core/check.h"
#include "graph/alias_analysis.h"
#include "graph/visit.h"

namespace smp::graph {
namespace {

/// Whether tensors of the same sizes lie alike in their memory.
bool lie_alike(const TensorMeta& a, const TensorMeta& b) {
  for (size_t d = 0; d < a.sizes.size(); ++d) {
    if (a.sizes[d] > 1 && a.strides[d] != b.strides[d]) return false;
  }
  return true;
}

/// The layout of a copy: dense, with the same order of dimensions.
TensorMeta copied(TensorMeta meta) {
  const auto options = at::TensorOptions(meta.dtype).device(at::kMeta);
  const auto strides = at::empty_strided(meta.sizes, meta.strides, options).clone().strides();
  meta.strides.assign(strides.begin(), strides.end());
  return meta;
}

class Coalescer {
 public:
  Coalescer(const Graph& one, const Graph& many, const BatchAxes& axes, int factor)
      : one_(one), aliases_(one), many_(many), axes_(axes) {
    result_.map.factor = factor;
    result_.map.operators.resize(one.operators.size());
    values().resize(one.values.size());
  }

  Coalesced run() {
    add_givens();
    for (size_t i = 0; i < one_.operators.size(); ++i) {
      if (axes_.role[i] == BatchRole::kPart) {
        for (int part = 0; part < result_.map.factor; ++part) add_part(i, part);
      } else {
        add_whole(i);
      }
    }
    add_ends();
    return std::move(result_);
  }

 private:
  Graph& graph() { return result_.graph; }
  /// Parts of each value of `one`.
  std::vector<std::vector<ValueId>>& values() { return result_.map.values; }

  /// Inputs, parameters, buffers and constants.
  void add_givens() {
    std::map<int, int> set_of;
    for (size_t v = 0; v < one_.values.size(); ++v) {
      const Value& value = one_.values[v];
      if (value.producer >= 0) continue;
      const bool is_batched = axes_.axis[v] != kNoAxis;
      const auto [set, is_new] = set_of.try_emplace(value.alias_set, graph().alias_sets);
      if (is_new) ++graph().alias_sets;
      values()[v] = {
          add_value(value, is_batched ? many_.values[v].meta : value.meta, -1, set->second)};
    }
    for (ValueId input : one_.inputs) {
      graph().inputs.push_back(input == kUndefined ? kUndefined : values()[input][0]);
    }
  }

  ValueId add_value(Value value, const TensorMeta& meta, int producer, int alias_set) {
    value.meta = meta;
    value.producer = producer;
    value.alias_set = alias_set;
    graph().values.push_back(std::move(value));
    return static_cast<ValueId>(graph().values.size() - 1);
  }

  /// An operator that runs once, with the sizes of all samples and the numbers of one microbatch.
  void add_whole(size_t index) {
    const bool is_whole = axes_.role[index] == BatchRole::kWhole;
    Operator op = one_.operators[index];
    for (size_t a = 0; a < op.arguments.size(); ++a) {
      if (is_whole && !is_patchable(op.handle.schema(), a)) {
        op.arguments[a].constant = many_.operators[index].arguments[a].constant;
      }
      for (ValueId& value : op.arguments[a].values) {
        if (value != kUndefined) value = values()[value].at(0);
      }
    }
    if (is_whole) op.result_is_argument = many_.operators[index].result_is_argument;
    add(std::move(op), index, is_whole ? many_ : one_);
  }

  void add_part(size_t index, int part) {
    const Operator& original = one_.operators[index];
    Operator op = original;
    for (Argument& argument : op.arguments) {
      for (ValueId& value : argument.values) {
        if (value != kUndefined) value = part_of(value, part, &original);
      }
    }
    add(std::move(op), index, one_);
  }

  /// Adds an operator whose arguments are in the new graph, and results of `source`'s kind.
  void add(Operator op, size_t index, const Graph& source) {
    const Operator& original = source.operators[index];
    const auto position = static_cast<int>(graph().operators.size());
    const std::map<int, int> sets = argument_sets(op, original, source);
    const auto set_of = [&](int set) {
      const auto found = sets.find(set);
      return found == sets.end() ? graph().alias_sets++ : found->second;
    };
    op.first_result = static_cast<ValueId>(graph().values.size());
    std::map<int, int> new_sets;
    for (size_t r = 0; r < op.results.size(); ++r) {
      const ValueId result = original.results[r];
      if (result == kUndefined) continue;
      const Value& value = source.values[result];
      const auto set = new_sets.find(value.alias_set);
      const int alias_set = set == new_sets.end() ? set_of(value.alias_set) : set->second;
      new_sets[value.alias_set] = alias_set;
      op.results[r] = add_value(one_.values[result], value.meta, position, alias_set);
      values()[result].push_back(op.results[r]);
    }
    for (int& set : op.writes) set = sets.at(set);
    if (op.random_ordinal >= 0) op.random_ordinal = random_count_++;
    result_.map.operators[index].push_back(position);
    graph().operators.push_back(std::move(op));
  }

  /// The alias sets of an operator's arguments: as in `source` -> as in the new graph.
  std::map<int, int> argument_sets(const Operator& op, const Operator& original,
                                   const Graph& source) const {
    std::map<int, int> sets;
    for (size_t a = 0; a < op.arguments.size(); ++a) {
      for (size_t v = 0; v < op.arguments[a].values.size(); ++v) {
        const ValueId value = original.arguments[a].values[v];
        if (value == kUndefined) continue;
        // Copies of two values on one memory have one each: a view is one of the first argument.
        sets.try_emplace(source.values[value].alias_set,
                         result_.graph.values[op.arguments[a].values[v]].alias_set);
      }
    }
    return sets;
  }

  /// The value that stands for one of one microbatch; `reader` is the operator that needs it, null
  /// at the end of the graph.
  ValueId part_of(ValueId value, int part, const Operator* reader) {
    const auto& known = values()[value];
    if (axes_.axis[value] == kNoAxis) return known.size() == 1 ? known[0] : known.at(part);
    auto& parts = split_[value];
    // A written value is cut where it is read, so that autograd sees the last state.
    if (parts.empty() || (part == 0 && aliases_.of(value).is_written()))
      parts = split(value, reader);
    return parts[part];
  }

  /// Cuts a value into microbatches that lie as each does on its own, since operators may refuse
  /// the gaps that a cut leaves (`view`), and round differently with them. Where that takes copies
  /// they are as good as the parts: a tensor that is written is one for each microbatch, unless all
  /// of its operators run once, and then it is cut when they have.
  std::vector<ValueId> split(ValueId value, const Operator* reader) {
    const auto axis = static_cast<int64_t>(axes_.axis[value]);
    const TensorMeta& own = one_.values[value].meta;
    const ValueId whole = values()[value].at(0);
    TensorMeta meta = graph().values[whole].meta;
    meta.sizes[axis] = own.sizes[axis];
    Operator cut = operator_on(whole, "aten::split", "Tensor", {own.sizes[axis], axis});
    cut.list_lengths = {result_.map.factor};
    cut.mode = mode_before(one_, value, reader);
    if (reader != nullptr) cut.scope = reader->scope;
    Operator copy = operator_on(whole, "aten::clone", "", {c10::IValue()});
    copy.list_lengths = {-1};
    copy.mode = cut.mode;
    copy.scope = cut.scope;
    auto parts = add_results(std::move(cut), meta, graph().values[whole].alias_set);
    if (lie_alike(meta, own)) return parts;
    meta = copied(meta);
    for (ValueId& part : parts) {
      copy.arguments[0].values = {part};
      part = add_results(copy, meta, graph().alias_sets++).front();
    }
    return parts;
  }

  static Operator operator_on(ValueId value, const char* name, const char* overload,
                              const std::vector<c10::IValue>& constants) {
    Operator op(c10::Dispatcher::singleton().findSchemaOrThrow(name, overload));
    op.arguments.resize(1);
    op.arguments[0].kind = Argument::Kind::kTensor;
    op.arguments[0].values = {value};
    for (const c10::IValue& constant : constants) op.arguments.emplace_back().constant = constant;
    return op;
  }

  /// Adds an operator that stands for none of the original: one tensor, or a list of such.
  std::vector<ValueId> add_results(Operator op, const TensorMeta& meta, int alias_set) {
    const auto position = static_cast<int>(graph().operators.size());
    op.first_result = static_cast<ValueId>(graph().values.size());
    for (int result = 0; result < std::abs(op.list_lengths[0]); ++result) {
      op.results.push_back(add_value(Value(), meta, position, alias_set));
      op.result_is_argument.push_back(-1);
    }
    graph().operators.push_back(std::move(op));
    const auto& results = graph().operators.back().results;
    return {results.begin(), results.end()};
  }

  void add_ends() {
    for (ValueId output : one_.outputs) {
      for (int part = 0; part < result_.map.factor; ++part) {
        graph().outputs.push_back(output == kUndefined ? kUndefined
                                                       : part_of(output, part, nullptr));
      }
    }
    for (const BackwardRoot& root : one_.roots) {
      for (int part = 0; part < result_.map.factor; ++part) {
        BackwardRoot own = root;
        own.value = part_of(root.value, part, nullptr);
        if (root.gradient != kUndefined) own.gradient = part_of(root.gradient, part, nullptr);
        graph().roots.push_back(own);
      }
    }
  }

  const Graph& one_;
  const AliasAnalysis aliases_;
  const Graph& many_;
  const BatchAxes& axes_;
  Coalesced result_;
  std::map<ValueId, std::vector<ValueId>> split_;  // microbatches of values of `one`
  int random_count_ = 0;
};

}  // namespace

size_t Coalesced::run_once() const {
  return static_cast<size_t>(std::count_if(map.operators.begin(), map.operators.end(),
                                           [](const auto& own) { return own.size() == 1; }));
}

Coalesced coalesce(const Graph& one, const Graph& many, const BatchAxes& axes, int factor) {
  SMP_INTERNAL_ASSERT(!axes.refusal, "a graph that cannot be coalesced: ", *axes.refusal);
  return Coalescer(one, many, axes, factor).run();
}

}  // namespace smp::graph
