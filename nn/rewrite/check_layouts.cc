// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>
#include <vector>

#include "core/check.h"
#include "graph/requires_grad.h"
#include "nn/rewrite/divide.h"
#include "nn/rewrite/legality.h"
#include "nn/rewrite/rule.h"

namespace smp::nn::rewrite {
namespace {

using graph::Graph;
using graph::Operator;
using graph::Value;
using graph::ValueId;

class LayoutCheck {
 public:
  LayoutCheck(const DividedGraph& divided, const Graph& graph)
      : divided_(divided), graph_(graph), layouts_(layouts_in(graph, divided.layouts)) {}

  void run() const {
    SMP_INTERNAL_ASSERT(divided_.layouts.size() == graph_.values.size(), divided_.layouts.size(),
                        " layouts of ", graph_.values.size(), " values");
    for (const Value& value : graph_.values) {
      if (value.producer < 0) check_given(value);
    }
    for (size_t i = 0; i < graph_.operators.size(); ++i) check_operator(i);
    for (ValueId output : graph_.outputs) check_end(output, "an output");
    for (const graph::BackwardRoot& root : graph_.roots) {
      check_end(root.value, "a root of backward");
      check_end(root.gradient, "the gradient of a root of backward");
    }
  }

 private:
  const Layout& layout_of(ValueId value) const { return layouts_.of[value]; }

  void check_given(const Value& value) const {
    const auto split = divided_.parameters.find(value.name);
    const bool is_divided =
        value.kind == graph::ValueKind::kParameter && split != divided_.parameters.end();
    const Layout expected =
        is_divided ? Layout::divided(static_cast<int>(split->second.dim), split->second.blocks)
                   : Layout::whole();
    const Layout& own = layout_of(static_cast<ValueId>(&value - graph_.values.data()));
    SMP_INTERNAL_ASSERT(own == expected, to_string(value.kind), " \"", value.name, "\" is ",
                        own.to_string(), " in the divided graph, and ranks hold it ",
                        expected.to_string());
  }

  /// A module's own communication is the module's affair, and a registered rule's promise the
  /// user's.
  bool is_others(const Operator& op) const {
    const auto by_module = [&](ValueId value) { return divided_.made_by_modules.count(value) > 0; };
    return is_promised(op) || std::any_of(op.results.begin(), op.results.end(), by_module);
  }

  void check_operator(size_t index) const {
    const Call call(graph_, index, divided_.ranks, layouts_);
    std::vector<Layout> results;
    for (ValueId value : call.results()) results.push_back(layout_of(value));
    if (is_others(call.op())) return;
    SMP_INTERNAL_ASSERT(is_legal(call, results) && is_mean(call), text_of(call),
                        " in the divided graph does not compute on parts what it computes on the "
                        "whole");
  }

  /// The mean of a rank's part is a term of the whole's once it is divided by the ranks.
  bool is_mean(const Call& call) const {
    const bool of_parts = call.base_name() == "aten::mean" && call.divided(0) &&
                          layout_of(call.results()[0]).is_partial();
    if (!of_parts) return true;
    int readers = 0;
    bool divides = true;
    for (size_t i = 0; i < graph_.operators.size(); ++i) {
      const Call reader(graph_, i, divided_.ranks, layouts_);
      const auto& read = reader.tensors();
      if (std::find(read.begin(), read.end(), call.results()[0]) == read.end()) continue;
      ++readers;
      const c10::IValue by = reader.constant("other");
      divides &= reader.base_name() == "aten::div" && by.isInt() && by.toInt() == divided_.ranks;
    }
    return readers == 1 && divides;
  }

  void check_end(ValueId value, const char* what) const {
    if (value == graph::kUndefined) return;
    const Layout& own = layout_of(value);
    const bool needs_sum =
        graph_.trains() && layouts_.requires_grad_since[value] != graph::RequiresGrad::kNever;
    SMP_INTERNAL_ASSERT(own.is_whole() || (own == Layout::shared() && !needs_sum), what,
                        " of the divided graph, %", value, ", is ", own.to_string(),
                        ", and has to be whole");
  }

  std::string text_of(const Call& call) const {
    const auto list = [&](const std::vector<ValueId>& values) {
      std::string text;
      for (ValueId value : values) {
        text += c10::str(text.empty() ? "" : ", ", "%", value, " ", layout_of(value).to_string());
      }
      return text;
    };
    const std::string& scope = call.op().scope;
    return c10::str("operator ", call.op().name(),
                    scope.empty() ? "" : " in or after module \"" + scope + "\"", ", which makes ",
                    list(call.results()), " of ", list(call.tensors()), ",");
  }

  const DividedGraph& divided_;
  const Graph& graph_;
  const Layouts layouts_;
};

}  // namespace

void check_layouts(const DividedGraph& divided, const Graph& graph) {
  LayoutCheck(divided, graph).run();
}

}  // namespace smp::nn::rewrite
