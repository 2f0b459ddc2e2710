// SPDX-License-Identifier: Apache-2.0
// The text form of a stage.

#include <sstream>

#include "pipeline/stage_program.h"

namespace smp::pipeline {
namespace {

using graph::kUndefined;
using graph::ValueId;
using graph::ValueKind;

class StageText {
 public:
  explicit StageText(const graph::Graph& graph) : graph_(graph) {}

  void line(const std::string& what, const std::string& text) {
    constexpr size_t kColumn = 12;
    out_ << "  " << what << std::string(what.size() < kColumn ? kColumn - what.size() : 1, ' ')
         << text << "\n";
  }
  /// "%12 Float [2, 8]", "weight Float [8, 8]".
  std::string value(ValueId id) const {
    const graph::Value& value = graph_.values[id];
    const bool is_named = value.kind == ValueKind::kParameter || value.kind == ValueKind::kBuffer;
    return (is_named ? value.name : "%" + std::to_string(id)) + " " + value.meta.to_string();
  }
  std::string str() const { return out_.str(); }
  std::ostringstream& out() { return out_; }

 private:
  const graph::Graph& graph_;
  std::ostringstream out_;
};

}  // namespace

std::string StageProgram::describe() const {
  StageText text(graph);
  text.out() << "stage " << index << ": " << operators.size() << " operators, "
             << (has_backward ? "forward and backward" : "forward only") << "\n";
  for (const Input& input : inputs) {
    text.line("input " + std::to_string(input.position),
              text.value(input.value) + (input.written ? ", a copy, which is written" : ""));
  }
  for (const Content& content : contents) text.line("constant", text.value(content.value));
  for (const Parameter& parameter : parameters) {
    std::string about = parameter.owned ? "" : ", of another stage";
    if (parameter.sink != kNoSink) {
      about += parameter.owned ? ", gradient to its sum" : ", gradient to its owner";
    }
    if (parameter.copied) about += ", a copy in each microbatch";
    const bool is_buffer = graph.values[parameter.value].kind == ValueKind::kBuffer;
    text.line(is_buffer ? "buffer" : "parameter", text.value(parameter.value) + about);
  }
  for (const Incoming& in : incoming) {
    const Edge& edge = edges[own_edges[in.place]];
    for (const Entry& entry : in.values) {
      text.line("from " + std::to_string(edge.from),
                text.value(entry.value) + (entry.sink != kNoSink ? ", gradient back" : ""));
    }
  }
  for (const Outgoing& out : outgoing) {
    const Edge& edge = edges[own_edges[out.place]];
    const auto to = "to " + std::to_string(edge.to);
    const std::set<ValueId> returning(out.gradients.begin(), out.gradients.end());
    for (ValueId id : out.values) {
      text.line(to, text.value(id) + (returning.count(id) > 0 ? ", gradient comes back" : ""));
    }
    for (const Entry& replica : out.replicas) {
      text.line(to, text.value(replica.value) + ", the gradient of its use there comes back");
    }
  }
  for (const auto& root : roots) text.line("backward of", text.value(root.value));
  for (int position : returned) {
    const ValueId id = graph.outputs[position];
    text.line("output " + std::to_string(position),
              id == kUndefined ? "undefined" : text.value(id));
  }
  return text.str();
}

}  // namespace smp::pipeline
