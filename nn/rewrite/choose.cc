// SPDX-License-Identifier: Apache-2.0
#include "nn/rewrite/choose.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <limits>
#include <set>
#include <tuple>
#include <utility>

namespace smp::nn::rewrite {
namespace {

using graph::Graph;
using graph::ValueId;
using graph::ValueKind;

/// No projection has more blocks than this.
constexpr int64_t kMostBlocks = 8;

bool is_one_of(const std::string& name, std::initializer_list<const char*> names) {
  return std::any_of(names.begin(), names.end(), [&](const char* own) { return name == own; });
}

class Chooser {
 public:
  Chooser(Propagation& propagation, const Constraints& fixed, bool insist)
      : propagation_(propagation), graph_(propagation.graph()), fixed_(fixed), insist_(insist) {
    choice_.constraints = fixed;
  }

  Choice run() {
    choice_.whole_us = propagation_.run(choice_.constraints).us;
    propagation_.expect_residual_streams(true);
    best_ = propagation_.run(choice_.constraints);
    const std::vector<ValueId> weights = weights_in_order();
    for (ValueId seed : weights) {
      if (propagation_.is_allowed(seed) && is_open(seed, choice_.constraints, best_))
        consider(seed);
    }
    for (ValueId weight : weights) {
      if (choice_.constraints.count(weight) > 0 && fixed_.count(weight) == 0) reconsider(weight);
    }
    propagation_.expect_residual_streams(false);
    // A weight that a later choice divided was not refused after all.
    for (auto it = choice_.refusals.begin(); it != choice_.refusals.end();) {
      it = best_.layouts[it->first].is_divided() ? choice_.refusals.erase(it) : std::next(it);
    }
    return std::move(choice_);
  }

 private:
  const Call& call(int index) const { return propagation_.calls()[index]; }
  const std::vector<int>& users(ValueId value) const { return propagation_.users()[value]; }

  static bool is_open(ValueId value, const Constraints& constraints, const Outcome& outcome) {
    return constraints.count(value) == 0 && !outcome.layouts[value].is_divided();
  }

  /// Weights by first use; tables of embeddings at the end, since how they are divided depends on
  /// the readers of their rows.
  std::vector<ValueId> weights_in_order() const {
    std::vector<std::tuple<bool, int, ValueId>> found;
    for (size_t v = 0; v < graph_.values.size(); ++v) {
      const auto id = static_cast<ValueId>(v);
      if (!is_weight(propagation_, id)) continue;
      const bool table = std::any_of(users(id).begin(), users(id).end(), [&](int user) {
        return user != Layouts::kAtEnd && call(user).base_name() == "aten::embedding";
      });
      found.emplace_back(table, users(id)[0], id);
    }
    std::sort(found.begin(), found.end());
    std::vector<ValueId> weights;
    for (const auto& [table, user, id] : found) weights.push_back(id);
    return weights;
  }

  /// Whether, with all that was chosen later, a weight is better whole or divided in another way.
  void reconsider(ValueId weight) {
    std::optional<Try> shortest;
    const auto keep = [&](Try made) {
      if (insist_ && !made.outcome.layouts[weight].is_divided()) return;
      const double bound = shortest ? shortest->outcome.us : best_.us;
      if (made.outcome.us < bound * (1 - kTie) && !is_refused(made.outcome)) {
        shortest = std::move(made);
      }
    };
    Constraints without = choice_.constraints;
    without.erase(weight);
    keep({without, propagation_.run(without)});
    for (const Layout& option : options_of(weight, false)) keep(attempt(without, weight, option));
    if (!shortest) return;
    choice_.constraints = std::move(shortest->constraints);
    best_ = std::move(shortest->outcome);
    if (!best_.layouts[weight].is_divided()) {
      choice_.refusals[weight] = "with what else is divided, it is predicted to be faster whole";
    }
  }

  void consider(ValueId seed) {
    const std::vector<Layout> options = options_of(seed, true);
    std::optional<int64_t> heads;
    std::optional<Try> shortest;
    std::optional<double> slower;
    for (const Layout& option : options) {
      Try grown = grow(seed, option);
      if (const Obstacle* cut = cut_heads(grown.outcome)) {
        heads = std::max(heads.value_or(0), cut->parts);
        continue;
      }
      if (is_refused(grown.outcome)) continue;
      slower = std::min(slower.value_or(grown.outcome.us), grown.outcome.us);
      const double longest =
          insist_ ? std::numeric_limits<double>::infinity() : best_.us * (1 - kTie);
      const double bound = shortest ? shortest->outcome.us * (1 - kTie) : longest;
      if (grown.outcome.us < bound) shortest = std::move(grown);
    }
    if (shortest) {
      choice_.constraints = std::move(shortest->constraints);
      best_ = std::move(shortest->outcome);
    } else if (options.empty()) {
      choice_.refusals[seed] =
          c10::str("no dimension of ", c10::IntArrayRef(graph_.values[seed].meta.sizes),
                   " can be divided among ", ranks(), " ranks");
    } else {
      choice_.refusals[seed] = refusal(seed, slower, heads);
    }
  }

  /// Why none of a weight's options was taken: `slower` is the predicted time with the best that is
  /// possible, if one is, and `heads` the heads that others would cut, if they do; 0 if their
  /// number is not known.
  std::string refusal(ValueId weight, std::optional<double> slower,
                      std::optional<int64_t> heads) const {
    if (slower) {
      return c10::str("dividing it is predicted to take ", static_cast<int64_t>(*slower),
                      " us a microbatch instead of ", static_cast<int64_t>(best_.us));
    }
    if (!heads) return "no operator that uses it can work on a part of it";
    if (*heads > 0) {
      return c10::str(*heads, " heads cannot be divided among ", ranks(), " ranks");
    }
    return indivisible_blocks(weight).value_or("its heads cannot be told apart");
  }

  /// The blocks, such as those of queries, keys and values, of which ranks cannot get a part each.
  std::optional<std::string> indivisible_blocks(ValueId weight) const {
    const auto& sizes = graph_.values[weight].meta.sizes;
    std::set<int64_t> blocks;
    add_hints(weight, blocks);
    std::set<int> dims;
    add_columns(weight, false, 0, dims);
    for (int64_t count : blocks) {
      for (int dim : dims) {
        if (sizes[dim] % count != 0 || can_divide(sizes, dim, count, ranks())) continue;
        return c10::str("its ", count, " blocks of ", sizes[dim] / count, " along dimension ", dim,
                        " cannot be divided among ", ranks(), " ranks");
      }
    }
    return std::nullopt;
  }

  int ranks() const { return call(0).ranks(); }

  /// Divides a weight and, as long as that helps, those whose results meet it undivided.
  Try grow(ValueId seed, const Layout& option) {
    Try current = attempt(choice_.constraints, seed, option);
    std::set<ValueId> considered = {seed};
    while (true) {
      std::optional<ValueId> next;
      for (const Wish& wish : current.outcome.wishes) {
        for (ValueId weight : origins(wish.value)) {
          const bool open = is_open(weight, current.constraints, current.outcome);
          if (!next && open && considered.insert(weight).second) next = weight;
        }
      }
      if (!next) return current;
      const Try before = current;
      for (const Layout& other : options_of(*next, false)) {
        Try grown = attempt(before.constraints, *next, other);
        const bool cuts = is_refused(grown.outcome);
        if (!cuts && grown.outcome.us < current.outcome.us * (1 - kTie)) current = std::move(grown);
      }
    }
  }

  Try attempt(const Constraints& constraints, ValueId seed, const Layout& option) {
    Try made{constraints, {}};
    made.constraints[seed] = option;
    made.outcome = propagation_.run(made.constraints);
    return made;
  }

  /// The parameters that may be divided for a value to be divided: itself, its base, or the weights
  /// and biases of the first products before it.
  std::vector<ValueId> origins(ValueId value) const {
    std::vector<ValueId> found;
    std::set<ValueId> seen;
    std::vector<std::pair<ValueId, int>> open = {{value, 0}};
    while (!open.empty()) {
      const auto [id, depth] = open.back();
      open.pop_back();
      if (depth > kReach || !seen.insert(id).second) continue;
      if (propagation_.is_allowed(id)) found.push_back(id);
      const int producer = graph_.values[id].producer;
      if (producer < 0) continue;
      const Call& made_by = call(producer);
      const bool ends = is_product(made_by.base_name()) || made_by.base_name() == "aten::embedding";
      for (size_t i = made_by.tensors().size(); i-- > 0;) {
        const ValueId argument = made_by.tensors()[i];
        if (ends && !comes_from_parameter(graph_, argument)) continue;
        if (made_by.requires_grad(static_cast<int>(i))) open.emplace_back(argument, depth + 1);
      }
    }
    return found;
  }

  /// How a weight may be divided: fewer blocks first. For its own sake, only along dimensions that
  /// divide the result of its products; the summed dimension is divided where another operand's is.
  std::vector<Layout> options_of(ValueId weight, bool for_own_sake) const {
    const auto& sizes = graph_.values[weight].meta.sizes;
    std::set<int64_t> blocks = {1};
    add_hints(weight, blocks);
    std::set<int> dims;
    if (for_own_sake) {
      add_columns(weight, false, 0, dims);
    } else {
      for (int dim = 0; dim < std::min<int>(static_cast<int>(sizes.size()), 2); ++dim) {
        dims.insert(dim);
      }
    }
    std::vector<Layout> options;
    for (int64_t count : blocks) {
      for (int dim : dims) {
        if (can_divide(sizes, dim, count, ranks())) options.push_back(Layout::divided(dim, count));
      }
    }
    return options;
  }

  /// The dimensions of a weight (`value` is it or rearranges it; `turned`: transposed) that
  /// products and embeddings do not sum over.
  void add_columns(ValueId value, bool turned, int depth, std::set<int>& dims) const {
    if (depth > kReach) return;
    const auto last = static_cast<int>(graph_.values[value].meta.sizes.size()) - 1;
    for (int user : users(value)) {
      if (user == Layouts::kAtEnd) continue;
      const Call& reader = call(user);
      const std::string& base = reader.base_name();
      const auto& tensors = reader.tensors();
      if (base == "aten::embedding") {
        dims.insert({0, 1});
      } else if (is_product(base)) {
        const bool has_rows = base == "aten::linear" || base.rfind("aten::conv", 0) == 0;
        const bool on_the_left = tensors[0] == value && base != "aten::addmm";
        const int column = has_rows || on_the_left ? 0 : last;
        dims.insert(turned ? last - column : column);
      } else if (is_rearrangement(base)) {
        const bool turns = is_one_of(
            base, {"aten::t", "aten::transpose", "aten::permute", "aten::mT", "aten::numpy_T"});
        for (ValueId result : reader.results())
          add_columns(result, turned != turns, depth + 1, dims);
      }
    }
  }

  /// Into how many pieces operators take apart the weight, or the results of products with it.
  void add_hints(ValueId weight, std::set<int64_t>& blocks) const {
    std::vector<std::pair<ValueId, int>> open = {{weight, 0}};
    std::set<ValueId> seen;
    while (!open.empty()) {
      const auto [value, depth] = open.back();
      open.pop_back();
      if (depth > kReach || !seen.insert(value).second) continue;
      for (int user : users(value)) {
        if (user == Layouts::kAtEnd) continue;
        const Call& reader = call(user);
        const bool product = is_product(reader.base_name());
        if (product && !comes_from_parameter(graph_, value)) continue;
        add_hint(reader, blocks);
        if (reader.base_name() == "aten::layer_norm") continue;
        for (ValueId result : reader.results()) open.emplace_back(result, depth + 1);
      }
    }
  }

  static void add_hint(const Call& reader, std::set<int64_t>& blocks) {
    const std::string& base = reader.base_name();
    int64_t count = 1;
    if (base == "aten::glu") {
      count = 2;
    } else if (is_one_of(base, {"aten::chunk", "aten::split", "aten::split_with_sizes"})) {
      count = static_cast<int64_t>(reader.results().size());
    } else if (is_one_of(base, {"aten::slice", "aten::narrow"})) {
      const auto dim = reader.dimension("dim");
      const int64_t length = reader.result_meta().sizes[*dim];
      if (length > 0) count = reader.meta(0).sizes[*dim] / length;
    } else if (is_one_of(base, {"aten::view", "aten::reshape", "aten::unflatten"})) {
      count = leading_factor(reader.meta(0).sizes, reader.result_meta().sizes);
    }
    if (count > 1 && count <= kMostBlocks) blocks.insert(count);
  }

  /// The first factor of a view that takes the last dimension apart.
  static int64_t leading_factor(c10::IntArrayRef from, c10::IntArrayRef to) {
    if (from.empty()) return 1;
    int64_t product = 1;
    for (size_t d = to.size(); d-- > 0;) {
      product *= to[d];
      if (product == from.back()) return d + 1 < to.size() ? to[d] : 1;
      if (product > from.back()) return 1;
    }
    return 1;
  }

  /// Heads would be cut, or a parameter joined where it is used: its parts are for those who can
  /// work on parts.
  bool is_refused(const Outcome& outcome) const {
    return outcome.joined_parameters > best_.joined_parameters || cut_heads(outcome) != nullptr;
  }

  /// An obstacle that lies before attention, among those that the fixed parameters do not make.
  const Obstacle* cut_heads(const Outcome& outcome) const {
    const Obstacle* found = nullptr;
    for (const Obstacle& obstacle : outcome.obstacles) {
      const bool known = std::any_of(
          best_.obstacles.begin(), best_.obstacles.end(),
          [&](const Obstacle& other) { return other.operator_index == obstacle.operator_index; });
      if (known || !leads_to_attention(obstacle.operator_index)) continue;
      if (found == nullptr || obstacle.parts > found->parts) found = &obstacle;
    }
    return found;
  }

  /// The operator's results meet another activation in a product, before they meet a weight.
  bool leads_to_attention(int index) const {
    std::vector<std::pair<int, int>> open = {{index, 0}};
    std::set<int> seen;
    while (!open.empty()) {
      const auto [at, depth] = open.back();
      open.pop_back();
      if (depth > kReach || !seen.insert(at).second) continue;
      const Call& reader = call(at);
      if (is_product(reader.base_name())) {
        const auto& tensors = reader.tensors();
        const bool by_weight = std::any_of(tensors.begin(), tensors.end(), [&](ValueId value) {
          return comes_from_parameter(graph_, value);
        });
        if (!by_weight) return true;
        continue;
      }
      for (ValueId result : reader.results()) {
        for (int user : users(result)) {
          if (user != Layouts::kAtEnd) open.emplace_back(user, depth + 1);
        }
      }
    }
    return false;
  }

  Propagation& propagation_;
  const Graph& graph_;
  const Constraints& fixed_;
  const bool insist_;
  Choice choice_;
  Outcome best_;
};

}  // namespace

bool is_weight(const Propagation& propagation, ValueId value) {
  const Graph& graph = propagation.graph();
  if (graph.values[value].kind != ValueKind::kParameter ||
      graph.values[value].meta.sizes.size() < 2) {
    return false;
  }
  std::vector<ValueId> open = {value};
  for (size_t next = 0; next < open.size(); ++next) {
    for (int user : propagation.users()[open[next]]) {
      if (user == Layouts::kAtEnd) continue;
      const Call& reader = propagation.calls()[user];
      if (is_product(reader.base_name()) || reader.base_name() == "aten::embedding") return true;
      if (!is_rearrangement(reader.base_name())) continue;
      open.insert(open.end(), reader.results().begin(), reader.results().end());
    }
  }
  return false;
}

Choice choose(Propagation& propagation, const Constraints& fixed, bool insist) {
  return Chooser(propagation, fixed, insist).run();
}

}  // namespace smp::nn::rewrite
