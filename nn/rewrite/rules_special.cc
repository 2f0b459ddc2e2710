// SPDX-License-Identifier: Apache-2.0
// Rules of operators for which others stand when they are divided: dropout and losses.

#include <algorithm>

#include "nn/rewrite/builtin_rules.h"
#include "nn/rewrite/emitter.h"

namespace smp::nn::rewrite {
namespace {

using graph::ValueId;
using Result = std::optional<Treatment>;

/// The mask of the whole is drawn, and each rank keeps its part.
std::vector<ValueId> emit_dropout(Emitter& emitter, const Call& call, const Treatment& treatment) {
  const ValueId input = emitter.argument(0);
  const graph::TensorMeta meta = emitter.meta(input);
  const Layout& layout = treatment.arguments[0];
  const ValueId kept = emitter.call_own(
      "smp::tp_dropout", {input},
      {call.constant("p"), call.constant("train"), int64_t{layout.dim}, layout.blocks}, meta.sizes,
      meta.dtype);
  emitter.follow("p", 1);
  if (!call.in_place()) return {kept};
  return {emitter.call("aten::copy_", "", {input, kept}, {false})};
}

/// One that drops nothing hands on its argument, as it was recorded.
std::vector<ValueId> emit_no_dropout(Emitter& emitter, const Call& call, const Treatment&) {
  const ValueId same = emitter.call("aten::dropout", "", {emitter.argument(0)},
                                    {call.constant("p"), call.constant("train")});
  emitter.require("p");
  return {same};
}

bool is_written_later(const Call& call, int alias_set) {
  const auto& operators = call.graph().operators;
  return std::any_of(operators.begin() + static_cast<int64_t>(call.index()) + 1, operators.end(),
                     [&](const graph::Operator& op) {
                       return std::find(op.writes.begin(), op.writes.end(), alias_set) !=
                              op.writes.end();
                     });
}

/// The mask of a whole tensor is drawn in the order of its memory, which must be that of its
/// elements.
Result dropout(const Call& call) {
  if (!call.divided(0) || !is_contiguous(call.meta(0))) return std::nullopt;
  Treatment treatment = call.all_whole();
  treatment.arguments[0] = treatment.results[0] = call.layout(0);
  const int set = call.graph().values[call.results()[0]].alias_set;
  const bool same = !call.in_place() && set == call.graph().values[call.tensors()[0]].alias_set;
  treatment.emit = same && is_written_later(call, set) ? emit_no_dropout : emit_dropout;
  treatment.emit_writes = call.in_place();
  return treatment;
}

/// Logits whose classes, dimension 1, are divided in one block.
bool has_divided_classes(const Call& call) {
  return call.divided(0) && call.dim(0) >= 2 && call.layout(0).dim == 1 &&
         call.layout(0).blocks == 1;
}

/// Maxima, sums and the logits of the targets are summed over the ranks, never the logits.
int64_t bytes_of_loss(const Call& call) {
  const auto& meta = call.meta(0);
  return 3 * meta.nbytes() / meta.sizes[1];
}

std::vector<ValueId> emit_cross_entropy(Emitter& emitter, const Call& call, const Treatment&) {
  const auto logits = emitter.argument(0), target = emitter.argument(1);
  const auto weight = emitter.argument_or_none(call.position("weight"));
  const bool smooths = call.argument("label_smoothing") >= 0;
  const auto result =
      emitter.call_own("smp::tp_cross_entropy", {logits, target, weight},
                       {call.constant("reduction"), call.constant("ignore_index"),
                        smooths ? call.constant("label_smoothing") : c10::IValue(0.0)},
                       call.result_meta().sizes, call.result_meta().dtype);
  if (smooths) emitter.follow("label_smoothing", 5);
  return {result};
}

Result loss_of_parts(const Call& call) {
  if (call.meta(1).dtype != at::kLong) return std::nullopt;  // libtorch checks and refuses others
  Treatment treatment = call.all_whole();
  treatment.arguments[0] = call.layout(0);
  treatment.emit = emit_cross_entropy;
  treatment.reduced_bytes = bytes_of_loss(call);
  return treatment;
}

Result cross_entropy(const Call& call) {
  if (!has_divided_classes(call)) return std::nullopt;
  return loss_of_parts(call);
}

/// A log-softmax of classes, dimension 1, in the type of the logits: autocast may run it in
/// another.
bool is_log_softmax(const graph::Graph& graph, const graph::Operator& op) {
  if (op.name() != "aten::log_softmax.int" || !op.arguments[2].constant.isNone()) return false;
  const graph::TensorMeta& logits = graph.values[op.arguments[0].values[0]].meta;
  const int64_t dim = op.arguments[1].constant.toInt();
  const auto dims = static_cast<int64_t>(logits.sizes.size());
  return (dim < 0 ? dim + dims : dim) == 1 &&
         graph.values[op.results[0]].meta.dtype == logits.dtype;
}

/// A loss of these likelihoods for which one of their logits can stand.
bool is_loss_of(const graph::Graph& graph, const graph::Operator& op, ValueId likelihoods) {
  const std::string name = op.name();
  const bool is_loss =
      name == "aten::nll_loss_nd" || name == "aten::nll_loss" || name == "aten::nll_loss2d";
  return is_loss && op.arguments[0].values[0] == likelihoods &&
         graph.values[op.arguments[1].values[0]].meta.dtype == at::kLong;
}

/// Only likelihoods of targets are asked of it: the loss normalises the logits itself.
std::vector<ValueId> emit_nothing(Emitter& emitter, const Call&, const Treatment&) {
  return {emitter.argument(0)};
}

Result log_softmax(const Call& call) {
  if (!has_divided_classes(call) || !is_log_softmax(call.graph(), call.op())) {
    return along_dims(call, "dim");
  }
  for (int user : call.result_users()) {
    if (user == Layouts::kAtEnd) return std::nullopt;
    const graph::Operator& op = call.graph().operators[user];
    if (!is_loss_of(call.graph(), op, call.results()[0])) return std::nullopt;
  }
  Treatment treatment = call.all_whole();
  treatment.arguments[0] = treatment.results[0] = call.layout(0);
  treatment.emit = emit_nothing;
  return treatment;
}

Result nll_loss(const Call& call) {
  const int producer = call.graph().values[call.tensors()[0]].producer;
  const bool follows =
      producer >= 0 && is_log_softmax(call.graph(), call.graph().operators[producer]);
  if (!has_divided_classes(call) || !follows) return std::nullopt;
  return loss_of_parts(call);
}

}  // namespace

RuleTable special_rules() {
  return {{"aten::dropout", dropout},
          {"aten::cross_entropy_loss", cross_entropy},
          {"aten::log_softmax.int", log_softmax},
          {"aten::nll_loss_nd", nll_loss},
          {"aten::nll_loss", nll_loss},
          {"aten::nll_loss2d", nll_loss}};
}

}  // namespace smp::nn::rewrite
