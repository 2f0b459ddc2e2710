// SPDX-License-Identifier: Apache-2.0
// Rules of operators that keep elements and give them other places.

#include <algorithm>

#include "nn/rewrite/builtin_rules.h"
#include "nn/rewrite/emitter.h"

namespace smp::nn::rewrite {
namespace {

using Result = std::optional<Treatment>;

c10::IValue local_list(c10::IntArrayRef sizes, const Layout& layout, int ranks) {
  const Sizes local = local_sizes(sizes, layout, ranks);
  return std::vector<int64_t>(local.begin(), local.end());
}

/// Replaces the constant that holds the result's sizes, where there is one.
void localize(const Call& call, const char* name, Treatment& treatment) {
  const int index = call.argument(name);
  if (index < 0) return;
  treatment.constants.emplace_back(
      index, local_list(call.result_meta().sizes, treatment.results[0], call.ranks()));
}

/// That of `unflatten` has those of one dimension of its argument.
void localize_unflattened(const Call& call, Treatment& treatment) {
  const auto named = call.integers("sizes");
  if (!named) return;
  const Sizes local = local_sizes(call.result_meta().sizes, treatment.results[0], call.ranks());
  const auto first = local.begin() + *call.dimension("dim");
  treatment.constants.emplace_back(
      call.argument("sizes"),
      std::vector<int64_t>(first, first + static_cast<int64_t>(named->size())));
}

Result reshapes(const Call& call) {
  if (!call.divided(0)) return follow(call);
  const auto& from = call.meta(0).sizes;
  const auto& to = call.result_meta().sizes;
  const auto layout = through_view(from, call.layout(0), to, call.ranks());
  Treatment treatment = call.all_whole();
  if (!layout) {
    treatment.obstacle_parts = parts_in_view(from, call.layout(0), to, call.ranks());
    return treatment;
  }
  treatment.arguments[0] = call.layout(0);
  treatment.results[0] = *layout;
  localize(call, "size", treatment);
  localize(call, "shape", treatment);
  localize_unflattened(call, treatment);
  return treatment;
}

/// `view_as` and `reshape_as`: of the other tensor only the sizes matter, those of the whole.
std::vector<graph::ValueId> emit_reshape(Emitter& emitter, const Call& call,
                                         const Treatment& treatment) {
  const char* name = call.base_name() == "aten::view_as" ? "aten::view" : "aten::reshape";
  return {emitter.call(name, "", {emitter.argument(0)},
                       {local_list(call.result_meta().sizes, treatment.results[0], call.ranks())})};
}

Result reshapes_as(const Call& call) {
  if (!call.divided(0)) return std::nullopt;
  Result treatment = reshapes(call);
  treatment->arguments[1] = call.layout(1);
  treatment->emit = emit_reshape;
  return treatment;
}

Result expands(const Call& call) {
  if (!call.divided(0)) return std::nullopt;
  Result treatment = follow(call);
  if (treatment) localize(call, "size", *treatment);
  return treatment;
}

Result repeats(const Call& call) {
  if (!call.divided(0) || !call.integers("repeats")) return std::nullopt;
  return follow(call);
}

/// `slice` and `narrow`, from `start` on.
Result slices(const Call& call) {
  Result treatment = follow(call);
  const int dim = *call.dimension("dim");
  if (!treatment || !call.divided_along(0, dim)) return treatment;
  const int64_t size = call.meta(0).sizes[dim], length = call.result_meta().sizes[dim];
  const auto named = call.integers("start");
  int64_t start = named ? (*named)[0] : 0;
  if (start < 0) start += size;
  start = std::min(std::max<int64_t>(start, 0), size);
  const int64_t ranks = call.ranks();
  treatment->constants.emplace_back(call.argument("start"), start / ranks);
  if (call.argument("end") >= 0) {
    treatment->constants.emplace_back(call.argument("end"), (start + length) / ranks);
  } else {
    treatment->constants.emplace_back(call.argument("length"), length / ranks);
  }
  return treatment;
}

/// `chunk`, `split` and `unbind`. Pieces of one size must all be of it.
Result splits(const Call& call) {
  Result treatment = follow(call);
  const int dim = *call.dimension("dim");
  if (!treatment || !call.divided_along(0, dim) || call.argument("chunks") >= 0) return treatment;
  std::vector<int64_t> lengths;
  for (size_t i = 0; i < call.results().size(); ++i) {
    lengths.push_back(call.result_meta(static_cast<int>(i)).sizes[dim] / call.ranks());
  }
  const char* name = call.argument("split_size") >= 0 ? "split_size" : "split_sizes";
  const bool list = call.constant(name).isIntList();
  if (!list && lengths.front() != lengths.back()) return std::nullopt;
  treatment->constants.emplace_back(call.argument(name),
                                    list ? c10::IValue(lengths) : c10::IValue(lengths[0]));
  return treatment;
}

/// Joins and stacks parts, and along the divided dimension blocks of one size. In a stream only,
/// whatever is whole is cut for that.
Result joins(const Call& call) {
  const int first = leading(call);
  const Result treatment = first < 0 ? std::nullopt : follow_from(call, first);
  if (!treatment) return std::nullopt;
  const auto& asked = treatment->arguments;
  const bool all = std::all_of(asked.begin(), asked.end(),
                               [](const Layout& layout) { return layout.is_divided(); });
  const bool costs = !treatment->wishes.empty() && !call.in_stream(first);
  return all && !costs ? treatment : refused(call, *treatment);
}

}  // namespace

RuleTable shape_rules() {
  RuleTable rules;
  // "view." is the overload without a name: not view.dtype. The start of "narrow." is a number.
  add_rules(rules, {"_unsafe_view", "flatten.using_ints", "reshape", "unflatten.int", "view."},
            reshapes);
  add_rules(rules, {"view_as", "reshape_as"}, reshapes_as);
  add_rules(rules,
            {"permute", "transpose.int", "t", "numpy_T", "mT", "movedim.int", "swapaxes",
             "swapdims", "squeeze", "squeeze.dim", "squeeze.dims", "unsqueeze", "select.int"},
            follow);
  add_rules(rules,
            {"chunk", "split.Tensor", "split.sizes", "split_with_sizes", "unbind.int",
             "unsafe_chunk", "unsafe_split.Tensor"},
            splits);
  add_rules(rules, {"expand"}, expands);
  add_rules(rules, {"repeat"}, repeats);
  add_rules(rules, {"slice.Tensor", "narrow."}, slices);
  add_rules(rules, {"cat", "concat", "stack"}, joins);
  return rules;
}

}  // namespace smp::nn::rewrite
