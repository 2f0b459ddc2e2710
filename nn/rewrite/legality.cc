// SPDX-License-Identifier: Apache-2.0
#include "nn/rewrite/legality.h"

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "graph/requires_grad.h"
#include "graph/visit.h"
#include "nn/rewrite/factors.h"

namespace smp::nn::rewrite {
namespace {

class Judge {
 public:
  Judge(const Call& call, const std::vector<Layout>& results) : call_(call), results_(results) {}

  bool run() const {
    if (!is_consistent()) return false;
    if (const auto own = judge_collective()) return *own;
    const std::optional<Factors> factors = factors_of(call_);
    if (!factors) return all_replicated();
    if (factors->is_view && !has_sizes_of_others(*factors)) return false;
    if (any_argument(*factors, &Layout::is_divided) || any_result(&Layout::is_divided)) {
      return factors->is_view ? keeps_cut(*factors) : follows_factor(*factors);
    }
    if (any_argument(*factors, &Layout::is_partial)) return stays_partial(*factors);
    return replicated(*factors);
  }

 private:
  using Is = bool (Layout::*)() const;

  int arguments() const { return static_cast<int>(call_.tensors().size()); }
  c10::IntArrayRef sizes(int position) const { return call_.meta(position).sizes; }
  c10::IntArrayRef result_sizes(size_t r) const {
    return call_.result_meta(static_cast<int>(r)).sizes;
  }

  static bool is_replicated(const Layout& layout) {
    return layout.is_whole() || layout == Layout::shared();
  }

  bool any_argument(const Factors& factors, Is is) const {
    for (int i = 0; i < arguments(); ++i) {
      if (factors.ignored.count(i) == 0 && (call_.layout(i).*is)()) return true;
    }
    return false;
  }
  bool any_result(Is is) const {
    return std::any_of(results_.begin(), results_.end(), std::mem_fn(is));
  }

  /// Parts are parts of these tensors, and a result that is an argument lies as that does.
  bool is_consistent() const {
    for (int i = 0; i < arguments(); ++i) {
      if (call_.divided(i) && block_of(sizes(i), call_.layout(i)) == 0) return false;
    }
    for (size_t r = 0; r < results_.size(); ++r) {
      if (results_[r].is_divided() && block_of(result_sizes(r), results_[r]) == 0) return false;
    }
    if (call_.of_microbatches()) return true;  // it may have been transposed in place
    bool same = true;
    graph::for_each_same_tensor(call_.op(), [&](graph::ValueId result, graph::ValueId argument) {
      const auto& values = call_.results();
      const auto at = std::find(values.begin(), values.end(), result) - values.begin();
      same &= results_[at] == call_.layout_of(argument);
    });
    return same;
  }

  bool any_result_has_gradient() const {
    for (size_t r = 0; r < results_.size(); ++r) {
      if (call_.result_has_gradient(static_cast<int>(r))) return true;
    }
    return false;
  }

  /// Whether ranks make terms of an argument's gradient where the layout promises all of it.
  bool lacks_sum(int position) const {
    return call_.layout(position).is_whole() && call_.has_gradient(position) &&
           any_result_has_gradient();
  }

  /// Every rank computes the same. Gradients that come as terms go on as terms.
  bool replicated(const Factors& factors) const {
    for (size_t r = 0; r < results_.size(); ++r) {
      if (!is_replicated(results_[r])) return false;
      if (!call_.result_has_gradient(static_cast<int>(r))) continue;
      for (int i = 0; i < arguments(); ++i) {
        const bool counts = factors.ignored.count(i) == 0 && call_.has_gradient(i);
        if (counts && call_.layout(i) != results_[r]) return false;
      }
    }
    return true;
  }

  bool all_replicated() const {
    for (int i = 0; i < arguments(); ++i) {
      if (!is_replicated(call_.layout(i))) return false;
    }
    return replicated(Factors());
  }

  /// A function that is linear in all terms together gives terms.
  bool stays_partial(const Factors& factors) const {
    std::set<int> terms;
    for (int i = 0; i < arguments(); ++i) {
      if (factors.ignored.count(i) > 0) continue;
      if (call_.layout(i).is_partial()) {
        terms.insert(i);
      } else if (lacks_sum(i)) {
        return false;
      }
    }
    return factors.linear.count(terms) > 0 &&
           std::all_of(results_.begin(), results_.end(), std::mem_fn(&Layout::is_partial));
  }

  /// A view keeps the order of elements, and so the digit of the divided tensor.
  bool keeps_cut(const Factors& factors) const {
    const Layout& layout = call_.layout(0);
    return layout.is_divided() && results_[0].is_divided() &&
           factors.arguments[0][layout.dim] == factors.results[0][results_[0].dim] &&
           stride_of(sizes(0), layout, 1) == stride_of(result_sizes(0), results_[0], 1);
  }

  /// A tensor that lends a view its sizes is cut as the view is.
  bool has_sizes_of_others(const Factors& factors) const {
    return std::all_of(factors.ignored.begin(), factors.ignored.end(), [&](int other) {
      const Layout& layout = call_.layout(other);
      return layout == results_[0] || (!layout.is_divided() && !results_[0].is_divided());
    });
  }

  struct Cut {
    int factor;
    int64_t blocks;
    int64_t block;  ///< elements of a rank in each
  };

  static Cut cut_of(c10::IntArrayRef sizes, const Layout& layout, const Factors::Dims& dims) {
    return {dims[layout.dim], layout.blocks, block_of(sizes, layout)};
  }

  /// The cut that arguments, or results made of nothing that is divided, have.
  Cut cut_of_call(const Factors& factors) const {
    for (int i = 0; i < arguments(); ++i) {
      if (factors.ignored.count(i) > 0 || !call_.divided(i)) continue;
      return cut_of(sizes(i), call_.layout(i), factors.arguments[i]);
    }
    size_t r = 0;
    while (!results_[r].is_divided()) ++r;
    return cut_of(result_sizes(r), results_[r], factors.results[r]);
  }

  static bool has(const Factors::Dims& dims, int factor) {
    return std::find(dims.begin(), dims.end(), factor) != dims.end();
  }

  static bool is_cut_so(c10::IntArrayRef sizes, const Layout& layout, const Factors::Dims& dims,
                        const Cut& cut, bool grouped) {
    if (!layout.is_divided()) return false;
    const Cut own = cut_of(sizes, layout, dims);
    return own.factor == cut.factor &&
           (grouped ? own.blocks == cut.blocks : own.block == cut.block);
  }

  /// All that has the factor is cut along it, in the same way; the rest is whole. Where the
  /// operator sums over it, ranks have terms.
  bool follows_factor(const Factors& factors) const {
    const Cut cut = cut_of_call(factors);
    if (cut.factor == kAlong) return false;
    const bool summed = factors.summed.count(cut.factor) > 0;
    const bool grouped = factors.grouped.count(cut.factor) > 0;
    for (int i = 0; i < arguments(); ++i) {
      if (factors.ignored.count(i) > 0) continue;
      const Layout& layout = call_.layout(i);
      if (has(factors.arguments[i], cut.factor)) {
        if (!is_cut_so(sizes(i), layout, factors.arguments[i], cut, grouped)) return false;
      } else if (summed && factors.added.count(i) > 0) {
        if (!layout.is_partial()) return false;
      } else if (!is_replicated(layout) || lacks_sum(i)) {
        return false;
      }
    }
    for (size_t r = 0; r < results_.size(); ++r) {
      const bool fits =
          has(factors.results[r], cut.factor)
              ? is_cut_so(result_sizes(r), results_[r], factors.results[r], cut, grouped)
              : summed && results_[r].is_partial();
      if (!fits) return false;
    }
    return true;
  }

  // ---------------------------------------------------------------------------------------------
  // The operators that communicate

  Layout named(const char* dim, const char* blocks = nullptr) const {
    return Layout::divided(static_cast<int>(call_.constant(dim).toInt()),
                           blocks == nullptr ? 1 : call_.constant(blocks).toInt());
  }

  /// Nothing: another operator, or one whose ranks are others than those of these parts.
  std::optional<bool> judge_collective() const {
    const std::string& name = call_.base_name();
    if (!is_collective(call_.op()) || call_.of_microbatches()) return std::nullopt;
    const Layout& from = call_.layout(0);
    const Layout& to = results_[0];
    if (name == "smp::tp_copy") return from.is_whole() && to == Layout::shared();
    if (name == "smp::tp_reduce") return from.is_partial() && to.is_whole();
    if (name == "smp::tp_scatter") return from.is_whole() && to == named("dim", "blocks");
    if (name == "smp::tp_gather") return from == named("dim", "blocks") && to.is_whole();
    if (name == "smp::tp_all_gather") return from == named("dim") && to == Layout::shared();
    if (name == "smp::tp_reduce_scatter") return from.is_partial() && to == named("dim");
    if (name == "smp::tp_all_to_all") return from == named("join_dim") && to == named("split_dim");
    if (name == "smp::tp_dropout") return from == named("dim", "blocks") && to == from;
    // [N, heads, ...] becomes [1, heads, ...].
    if (name == "smp::tp_linear_biases") {
      const bool by_samples = !from.is_divided() || from.dim == 0;
      return by_samples ? to.is_whole() : from == Layout::divided(1) && to == from;
    }
    return judge_computation(name);
  }

  /// Operators of ours that also compute.
  bool judge_computation(const std::string& name) const {
    const auto rest_is_whole = [&] {
      for (int i = 1; i < arguments(); ++i) {
        if (!is_replicated(call_.layout(i)) || lacks_sum(i)) return false;
      }
      return true;
    };
    const Layout& first = call_.layout(0);
    if (name == "smp::tp_embedding") {
      return first == Layout::divided(0) && rest_is_whole() && results_[0].is_partial() &&
             call_.constant("num_embeddings").toInt() == sizes(0)[0] * call_.ranks();
    }
    if (name == "smp::tp_cross_entropy") {
      return first == Layout::divided(1) && rest_is_whole() && results_[0].is_whole();
    }
    if (name != "smp::tp_gathered_linear") return false;
    const Layout& weight = call_.layout(1);
    const int bias = call_.position("bias");
    const int last = static_cast<int>(result_sizes(0).size()) - 1;
    return first == named("dim") && first.dim < last && weight.is_divided() && weight.dim == 0 &&
           (bias < 0 || call_.layout(bias) == weight) &&
           results_[0] == Layout::divided(last, weight.blocks);
  }

  const Call& call_;
  const std::vector<Layout>& results_;
};

}  // namespace

bool is_legal(const Call& call, const std::vector<Layout>& results) {
  return Judge(call, results).run();
}

std::vector<Layout> legal_results(const Call& call) {
  std::set<int64_t> blocks{1};
  for (int i = 0; i < static_cast<int>(call.tensors().size()); ++i) {
    if (call.divided(i)) blocks.insert(call.layout(i).blocks);
  }
  std::vector<Layout> options = {Layout::whole(), Layout::shared(), Layout::partial()};
  const auto dims = call.results().empty() ? 0 : call.result_meta().sizes.size();
  for (size_t d = 0; d < dims; ++d) {
    for (int64_t count : blocks) options.push_back(Layout::divided(static_cast<int>(d), count));
  }
  for (const Layout& option : options) {
    std::vector<Layout> results(call.results().size(), option);
    if (is_legal(call, results)) return results;
  }
  return std::vector<Layout>(call.results().size());
}

Layouts layouts_in(const graph::Graph& divided, std::vector<Layout> of) {
  Layouts layouts;
  layouts.are_local = true;
  layouts.of = std::move(of);
  const graph::RequiresGrad requires_grad(divided);
  for (size_t v = 0; v < divided.values.size(); ++v) {
    layouts.requires_grad_since.push_back(requires_grad.since(static_cast<graph::ValueId>(v)));
  }
  return layouts;
}

bool is_collective(const graph::Operator& op) {
  return op.handle.operator_name().name.rfind("smp::tp_", 0) == 0;
}

}  // namespace smp::nn::rewrite
