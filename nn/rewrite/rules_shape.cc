// SPDX-License-Identifier: Apache-2.0
// Rules of operators that keep elements and give them other places.

#include <algorithm>
#include <numeric>
#include <set>

#include "nn/rewrite/builtin_rules.h"
#include "nn/rewrite/emitter.h"

namespace smp::nn::rewrite {
namespace {

using Result = std::optional<Treatment>;

/// The one tensor stays divided, and the results are divided so.
Treatment divided_like(const Call& call, const Layout& result) {
  Treatment treatment = call.all_shared();
  treatment.arguments[0] = call.layout(0);
  for (Layout& layout : treatment.results) layout = result;
  return treatment;
}

/// A sum of parts stays one if no other operator needs the sum.
Result stays_partial(const Call& call) {
  if (!call.layout(0).is_partial() || call.users(0).size() != 1 || call.in_place()) {
    return std::nullopt;
  }
  return divided_like(call, Layout::partial());
}

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
  if (!call.divided(0)) return stays_partial(call);
  const auto& from = call.meta(0).sizes;
  const auto& to = call.result_meta().sizes;
  const auto layout = through_view(from, call.layout(0), to, call.ranks());
  if (!layout) {
    Treatment treatment = call.all_whole();
    treatment.obstacle_parts = parts_in_view(from, call.layout(0), to, call.ranks());
    return treatment;
  }
  Treatment treatment = divided_like(call, *layout);
  localize(call, "size", treatment);
  localize(call, "shape", treatment);
  localize_unflattened(call, treatment);
  return treatment;
}

/// `view_as` and `reshape_as`: of the other tensor only the sizes matter.
std::vector<graph::ValueId> emit_reshape(Emitter& emitter, const Call& call,
                                         const Treatment& treatment) {
  const char* name = call.base_name() == "aten::view_as" ? "aten::view" : "aten::reshape";
  return {emitter.call(name, "",
                       {Emitter::tensor(emitter.argument(0)),
                        Emitter::constant(local_list(call.result_meta().sizes, treatment.results[0],
                                                     call.ranks()))})};
}

Result reshapes_as(const Call& call) {
  if (!call.divided(0)) return std::nullopt;
  Result treatment = reshapes(call);
  treatment->arguments[1] = call.layout(1);
  if (treatment->results[0].is_divided()) treatment->emit = emit_reshape;
  return treatment;
}

Result expands(const Call& call) {
  if (!call.divided(0)) return std::nullopt;
  Layout layout = call.layout(0);
  layout.dim += static_cast<int>(call.result_meta().sizes.size()) - call.dim(0);
  Treatment treatment = divided_like(call, layout);
  localize(call, "size", treatment);
  return treatment;
}

Result repeats(const Call& call) {
  const auto repeats = call.integers("repeats");
  if (!call.divided(0) || !repeats) return std::nullopt;
  Layout layout = call.layout(0);
  layout.dim += static_cast<int>(repeats->size()) - call.dim(0);
  if ((*repeats)[layout.dim] != 1) return std::nullopt;
  return divided_like(call, layout);
}

/// The dimensions of the first tensor in the order in which the result has them; none if the
/// operator is not understood.
std::vector<int> order_of(const Call& call) {
  const int count = call.dim(0);
  std::vector<int> order(count);
  std::iota(order.begin(), order.end(), 0);
  const auto wrap = [&](int64_t dim) { return static_cast<int>(dim < 0 ? dim + count : dim); };
  const std::string& name = call.base_name();
  if (name == "aten::permute") {
    const auto dims = call.integers("dims");
    for (int d = 0; d < count; ++d) order[d] = wrap((*dims)[d]);
  } else if (name == "aten::movedim") {
    const auto source = call.integers("source"), destination = call.integers("destination");
    if (source->size() != 1) return {};
    order.erase(order.begin() + wrap((*source)[0]));
    order.insert(order.begin() + wrap((*destination)[0]), wrap((*source)[0]));
  } else if (name == "aten::t" || name == "aten::numpy_T" || name == "aten::mT") {
    if (count < 2) return order;
    if (name == "aten::numpy_T") {
      std::reverse(order.begin(), order.end());
    } else {
      std::swap(order[count - 2], order[count - 1]);
    }
  } else {
    const bool axes = call.argument("axis0") >= 0;
    const auto first = call.integers(axes ? "axis0" : "dim0");
    const auto second = call.integers(axes ? "axis1" : "dim1");
    if (!first || !second) return {};
    if (count > 0) std::swap(order[wrap((*first)[0])], order[wrap((*second)[0])]);
  }
  return order;
}

Result permutes(const Call& call) {
  if (!call.divided(0)) return stays_partial(call);
  const std::vector<int> order = order_of(call);
  const auto found = std::find(order.begin(), order.end(), call.layout(0).dim);
  if (found == order.end()) return std::nullopt;
  return divided_like(
      call, Layout::divided(static_cast<int>(found - order.begin()), call.layout(0).blocks));
}

Result unsqueezes(const Call& call) {
  if (!call.divided(0)) return stays_partial(call);
  int64_t dim = (*call.integers("dim"))[0];
  if (dim < 0) dim += call.dim(0) + 1;
  Layout layout = call.layout(0);
  layout.dim += dim <= layout.dim ? 1 : 0;
  return divided_like(call, layout);
}

/// A dimension of which a rank has a single element must not go.
Result squeezes(const Call& call) {
  if (!call.divided(0)) return stays_partial(call);
  const auto& sizes = call.meta(0).sizes;
  Layout layout = call.layout(0);
  std::set<int64_t> dims;
  if (const auto named = call.integers("dim")) {
    for (int64_t dim : *named) dims.insert(dim < 0 ? dim + call.dim(0) : dim);
  } else {
    for (int64_t d = 0; d < call.dim(0); ++d) dims.insert(d);
  }
  const bool goes = dims.count(layout.dim) > 0 && sizes[layout.dim] == call.ranks();
  if (goes) return std::nullopt;
  const auto removed = std::count_if(
      dims.begin(), dims.end(), [&](int64_t dim) { return dim < layout.dim && sizes[dim] == 1; });
  layout.dim -= static_cast<int>(removed);
  return divided_like(call, layout);
}

Result selects(const Call& call) {
  if (!call.divided(0)) return stays_partial(call);
  const int dim = *call.dimension("dim");
  Layout layout = call.layout(0);
  if (dim == layout.dim) return std::nullopt;
  layout.dim -= dim < layout.dim ? 1 : 0;
  return divided_like(call, layout);
}

/// Whether a cut of `length` elements from `start` along the divided dimension is made of whole
/// blocks, and its layout then.
std::optional<Layout> cut(const Call& call, int64_t start, int64_t length) {
  Layout layout = call.layout(0);
  const int64_t block = call.meta(0).sizes[layout.dim] / layout.blocks;
  if (start % block != 0 || length % block != 0 || length == 0) return std::nullopt;
  layout.blocks = length / block;
  return layout;
}

/// `slice` and `narrow`, from `start` on.
Result slices(const Call& call) {
  if (!call.divided(0)) return stays_partial(call);
  const int dim = *call.dimension("dim");
  if (dim != call.layout(0).dim) return divided_like(call, call.layout(0));
  const auto step = call.integers("step");
  if (step && (*step)[0] != 1) return std::nullopt;
  const int64_t size = call.meta(0).sizes[dim], length = call.result_meta().sizes[dim];
  const auto named = call.integers("start");
  int64_t start = named ? (*named)[0] : 0;
  if (start < 0) start += size;
  start = std::min(std::max<int64_t>(start, 0), size);
  const auto layout = cut(call, start, length);
  if (!layout) return std::nullopt;
  Treatment treatment = divided_like(call, *layout);
  const int64_t ranks = call.ranks();
  treatment.constants.emplace_back(call.argument("start"), start / ranks);
  if (call.argument("end") >= 0) {
    treatment.constants.emplace_back(call.argument("end"), (start + length) / ranks);
  } else {
    treatment.constants.emplace_back(call.argument("length"), length / ranks);
  }
  return treatment;
}

/// `chunk`, `split` and `unbind`: each piece of the divided dimension must be of whole blocks, and
/// of as many as the others.
Result splits(const Call& call) {
  if (!call.divided(0)) return stays_partial(call);
  const int dim = *call.dimension("dim");
  Layout layout = call.layout(0);
  const bool removes = call.base_name() == "aten::unbind";
  if (dim != layout.dim) {
    layout.dim -= removes && dim < layout.dim ? 1 : 0;
    return divided_like(call, layout);
  }
  if (removes) return std::nullopt;
  Treatment treatment = divided_like(call, layout);
  std::vector<int64_t> lengths;
  int64_t start = 0;
  for (size_t i = 0; i < call.results().size(); ++i) {
    const int64_t length = call.result_meta(static_cast<int>(i)).sizes[dim];
    const auto piece = cut(call, start, length);
    if (!piece) return std::nullopt;
    treatment.results[i] = *piece;
    lengths.push_back(length / call.ranks());
    start += length;
  }
  const bool equal =
      std::adjacent_find(lengths.begin(), lengths.end(), std::not_equal_to<>()) == lengths.end();
  if (call.argument("chunks") >= 0) return equal ? Result(treatment) : std::nullopt;
  const char* name = call.argument("split_size") >= 0 ? "split_size" : "split_sizes";
  const bool list = call.constant(name).isIntList();
  if (!list && !equal) return std::nullopt;
  treatment.constants.emplace_back(call.argument(name),
                                   list ? c10::IValue(lengths) : c10::IValue(lengths[0]));
  return treatment;
}

/// Joins along a dimension that is not divided, or blocks of one size along the divided one.
Result joins(const Call& call) {
  const int first = call.first_divided();
  if (first < 0) return std::nullopt;
  const Layout& layout = call.layout(first);
  const int dim = *call.dimension("dim");
  Treatment treatment = call.all_shared();
  int64_t blocks = 0;
  const int64_t block = call.meta(first).sizes[layout.dim] / layout.blocks;
  Treatment refused = call.all_whole();
  for (int i = 0; i < static_cast<int>(call.tensors().size()); ++i) {
    if (!call.divided(i) && !call.is_free_of_gradient(i)) refused.wishes.push_back({i, layout});
    if (call.dim(i) != call.dim(first)) return std::nullopt;
    Layout own = call.divided(i) ? call.layout(i) : layout;
    const int64_t size = call.meta(i).sizes[layout.dim];
    if (dim == layout.dim && !call.divided(i)) own.blocks = size / block;
    if (own.dim != layout.dim || size % block != 0 || own.blocks != size / block ||
        !can_divide(call.meta(i).sizes, own.dim, own.blocks, call.ranks())) {
      return refused;
    }
    treatment.arguments[i] = own;
    blocks += own.blocks;
  }
  if (!refused.wishes.empty() && !call.in_stream(first)) return refused;
  treatment.wishes = refused.wishes;
  treatment.results[0] = dim == layout.dim ? Layout::divided(dim, blocks) : layout;
  return treatment;
}

Result stacks(const Call& call) {
  const int first = call.first_divided();
  if (first < 0) return std::nullopt;
  const Layout& layout = call.layout(first);
  int64_t dim = (*call.integers("dim"))[0];
  if (dim < 0) dim += call.dim(first) + 1;
  Treatment treatment = call.all_whole();
  for (int i = 0; i < static_cast<int>(call.tensors().size()); ++i) {
    if (call.layout(i) == layout || call.is_free_of_gradient(i)) continue;
    treatment.wishes.push_back({i, layout});
  }
  if (!treatment.wishes.empty() && !call.in_stream(first)) return treatment;
  std::fill(treatment.arguments.begin(), treatment.arguments.end(), layout);
  treatment.results[0] = Layout::divided(layout.dim + (dim <= layout.dim ? 1 : 0), layout.blocks);
  return treatment;
}

}  // namespace

RuleTable shape_rules() {
  RuleTable rules;
  for (const char* name :
       {"_unsafe_view", "flatten.using_ints", "reshape", "unflatten.int", "view"}) {
    rules[std::string("aten::") + name] = reshapes;
  }
  rules.erase("aten::view");
  rules["aten::view."] = reshapes;  // not view.dtype
  for (const char* name :
       {"permute", "transpose.int", "t", "numpy_T", "mT", "movedim.int", "swapaxes", "swapdims"}) {
    rules[std::string("aten::") + name] = permutes;
  }
  for (const char* name : {"squeeze", "squeeze.dim", "squeeze.dims"}) {
    rules[std::string("aten::") + name] = squeezes;
  }
  for (const char* name : {"chunk", "split.Tensor", "split.sizes", "split_with_sizes", "unbind.int",
                           "unsafe_chunk", "unsafe_split.Tensor"}) {
    rules[std::string("aten::") + name] = splits;
  }
  rules["aten::view_as"] = reshapes_as;
  rules["aten::reshape_as"] = reshapes_as;
  rules["aten::unsqueeze"] = unsqueezes;
  rules["aten::expand"] = expands;
  rules["aten::repeat"] = repeats;
  rules["aten::select.int"] = selects;
  rules["aten::slice.Tensor"] = slices;
  rules["aten::narrow"] = slices;
  rules["aten::cat"] = joins;
  rules["aten::concat"] = joins;
  rules["aten::stack"] = stacks;
  return rules;
}

}  // namespace smp::nn::rewrite
