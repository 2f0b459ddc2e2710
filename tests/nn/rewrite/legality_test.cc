// SPDX-License-Identifier: Apache-2.0
// Legality by brute force: an operator runs on whole tensors and, for every way in which its
// tensors may lie, on what each rank has of them. That is legal if and only if what the ranks made
// is the result, and the gradients that they send back are the gradients. Numbers are small
// integers, so sums are exact where the operator's are.

#include "nn/rewrite/legality.h"

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "smp/nn/parameter_split.h"
#include "tests/nn/rewrite/harness.h"
#include "tests/nn/rewrite/legality_samples.h"

namespace smp::nn::rewrite::testing {
namespace {

using graph::Argument;
using graph::kUndefined;
using graph::Operator;
using graph::Value;
using graph::ValueId;
using torch::Tensor;

// ---------------------------------------------------------------------------------------------
// Tensors of a stack

std::vector<Tensor> tensors_of(const Stack& stack) {
  std::vector<Tensor> tensors;
  for (const c10::IValue& value : stack) {
    if (value.isTensor() && value.toTensor().defined()) tensors.push_back(value.toTensor());
    if (value.isTensorList()) {
      for (const Tensor& tensor : value.toTensorVector()) tensors.push_back(tensor);
    }
  }
  return tensors;
}

Stack with_tensors(const Stack& stack, const std::vector<Tensor>& tensors) {
  size_t next = 0;
  Stack result;
  for (const c10::IValue& value : stack) {
    if (value.isTensor() && value.toTensor().defined()) {
      result.emplace_back(tensors[next++]);
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (size_t i = 0; i < value.toTensorVector().size(); ++i) list.push_back(tensors[next++]);
      result.emplace_back(list);
    } else {
      result.push_back(value);
    }
  }
  return result;
}

c10::OperatorHandle handle_of(const Sample& sample) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(sample.name.c_str(),
                                                        sample.overload.c_str());
}

std::vector<Tensor> run(const Sample& sample, Stack stack) {
  handle_of(sample).callBoxed(stack);
  return tensors_of(stack);
}

// ---------------------------------------------------------------------------------------------
// Layouts

ParameterSplit split_of(const Tensor& whole, const Layout& layout, int ranks) {
  return {whole.sizes().vec(), layout.dim, layout.blocks, ranks};
}

/// All layouts of a tensor.
LayoutList layouts_for(const Tensor& whole, bool has_gradient, int ranks) {
  LayoutList found = {Layout::whole()};
  if (has_gradient) found.push_back(Layout::shared());
  if (whole.is_floating_point()) found.push_back(Layout::partial());
  for (int dim = 0; dim < whole.dim(); ++dim) {
    for (int64_t blocks = 1; blocks <= whole.size(dim) / ranks; ++blocks) {
      if (can_divide(whole.sizes(), dim, blocks, ranks)) {
        found.push_back(Layout::divided(dim, blocks));
      }
    }
  }
  return found;
}

/// The ranks' shares of a tensor, or of its gradient: `terms` says which layout has terms.
std::vector<Tensor> spread(const Tensor& whole, const Layout& layout, Layout::Kind terms,
                           int ranks) {
  std::vector<Tensor> parts;
  Tensor rest = whole;
  for (int r = 0; r < ranks; ++r) {
    if (layout.is_divided()) {
      parts.push_back(split_of(whole, layout, ranks).part(whole, r));
    } else if (layout.kind != terms) {
      parts.push_back(whole.clone());
    } else if (r + 1 < ranks) {
      parts.push_back(integers(whole.sizes().vec()));
      rest = rest - parts.back();
    } else {
      parts.push_back(rest.clone());
    }
  }
  return parts;
}

bool same(const Tensor& a, const Tensor& b) {
  return a.sizes() == b.sizes() &&
         (a.is_floating_point() ? torch::allclose(a, b, 1e-9, 1e-9) : torch::equal(a, b));
}

/// Whether the ranks' tensors are `whole` in that layout.
bool is_joined(const std::vector<Tensor>& parts, const Layout& layout, Layout::Kind terms,
               const Tensor& whole, int scale = 1) {
  const auto ranks = static_cast<int>(parts.size());
  if (layout.is_divided()) {
    const ParameterSplit split = split_of(whole, layout, ranks);
    for (const Tensor& part : parts) {
      if (part.sizes() != at::IntArrayRef(split.local_sizes())) return false;
    }
    return same(split.join(parts), whole);
  }
  if (layout.kind == terms) {
    Tensor sum = parts[0];
    for (int r = 1; r < ranks; ++r) {
      if (parts[r].sizes() != sum.sizes()) return false;
      sum = sum + parts[r];
    }
    return same(sum, whole * scale);
  }
  return std::all_of(parts.begin(), parts.end(), [&](const Tensor& p) { return same(p, whole); });
}

// ---------------------------------------------------------------------------------------------
// The same call as an operator of a graph

/// The call of a rank, and the verdict about it.
bool verdict(const Sample& sample, const Stack& local, const std::vector<Tensor>& results,
             LayoutList arguments, const LayoutList& of_results, int ranks) {
  Graph graph;
  Operator op(handle_of(sample));
  const auto add = [&](const Tensor& tensor, int producer) {
    Value value;
    value.kind = producer < 0 ? graph::ValueKind::kInput : graph::ValueKind::kResult;
    value.meta = graph::TensorMeta::of(tensor);
    value.producer = producer;
    value.alias_set = graph.alias_sets++;
    graph.values.push_back(value);
    return static_cast<ValueId>(graph.values.size() - 1);
  };
  for (const c10::IValue& value : local) {
    Argument argument;
    if (value.isTensor()) {
      argument.kind = Argument::Kind::kTensor;
      argument.values = {value.toTensor().defined() ? add(value.toTensor(), -1) : kUndefined};
    } else if (value.isTensorList()) {
      argument.kind = Argument::Kind::kTensorList;
      for (const Tensor& tensor : value.toTensorVector()) {
        argument.values.push_back(add(tensor, -1));
      }
    } else {
      argument.constant = value;
    }
    op.arguments.push_back(argument);
  }
  for (const Tensor& result : results) {
    op.results.push_back(add(result, 0));
    op.result_is_argument.push_back(-1);
  }
  graph.operators.push_back(op);
  graph.roots.emplace_back();  // it trains
  arguments.insert(arguments.end(), of_results.begin(), of_results.end());
  const Layouts layouts = layouts_in(graph, arguments);
  return is_legal(Call(graph, 0, ranks, layouts), of_results);
}

// ---------------------------------------------------------------------------------------------
// Brute force

struct Whole {
  std::vector<Tensor> arguments, results, cotangents, gradients;
};

std::vector<Tensor> gradients_of(const std::vector<Tensor>& results,
                                 const std::vector<Tensor>& cotangents,
                                 const std::vector<Tensor>& arguments) {
  std::vector<Tensor> roots, of_roots, leaves;
  for (size_t r = 0; r < results.size(); ++r) {
    if (!results[r].requires_grad()) continue;
    roots.push_back(results[r]);
    of_roots.push_back(cotangents[r]);
  }
  for (const Tensor& argument : arguments) {
    if (argument.requires_grad()) leaves.push_back(argument);
  }
  std::vector<Tensor> found(arguments.size());
  if (roots.empty() || leaves.empty()) return found;
  const auto made = torch::autograd::grad(roots, leaves, of_roots, std::nullopt, false, true);
  size_t next = 0;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!arguments[i].requires_grad()) continue;
    found[i] = made[next].defined() ? made[next] : torch::zeros_like(arguments[i]);
    ++next;
  }
  return found;
}

Whole run_whole(const Sample& sample) {
  Whole whole;
  whole.arguments = tensors_of(sample.whole);
  whole.results = sample.of_whole ? sample.of_whole(whole.arguments) : run(sample, sample.whole);
  for (const Tensor& result : whole.results)
    whole.cotangents.push_back(integers(result.sizes().vec()));
  whole.gradients = gradients_of(whole.results, whole.cotangents, whole.arguments);
  return whole;
}

class BruteForce {
 public:
  BruteForce(const Sample& sample, int ranks)
      : sample_(sample), ranks_(ranks), whole_(run_whole(sample)) {}

  void run() {
    std::vector<LayoutList> options;
    for (const Tensor& argument : whole_.arguments) {
      options.push_back(layouts_for(argument, argument.requires_grad(), ranks_));
    }
    std::vector<LayoutList> of_results;
    for (const Tensor& result : whole_.results) {
      of_results.push_back(layouts_for(result, result.requires_grad(), ranks_));
    }
    each(options, {}, [&](const LayoutList& arguments) {
      each(of_results, {}, [&](const LayoutList& results) { compare(arguments, results); });
    });
    EXPECT_GT(legal_, 0) << sample_.name;
    EXPECT_GT(illegal_, 0) << sample_.name;
  }

 private:
  using Visit = std::function<void(const LayoutList&)>;

  static void each(const std::vector<LayoutList>& options, LayoutList chosen, const Visit& visit) {
    if (chosen.size() == options.size()) return visit(chosen);
    chosen.emplace_back();
    for (const Layout& option : options[chosen.size() - 1]) {
      chosen.back() = option;
      each(options, chosen, visit);
    }
  }

  /// The call of a rank.
  Stack local_stack(const LayoutList& arguments, const LayoutList& results, int rank) const {
    std::vector<Tensor> own;
    for (size_t i = 0; i < arguments.size(); ++i) {
      const Tensor& whole = whole_.arguments[i];
      own.push_back(spread_[i][rank].detach().clone().requires_grad_(whole.requires_grad()));
    }
    Stack stack = with_tensors(sample_.whole, own);
    if (sample_.localize) sample_.localize(stack, arguments, results);
    return stack;
  }

  /// Calls `work(rank)` for every rank: at once, if they communicate.
  void on_every_rank(const std::function<void(int)>& work) const {
    if (sample_.name.rfind("smp::", 0) != 0) {
      for (int rank = 0; rank < ranks_; ++rank) work(rank);
      return;
    }
    comm::run_ranks(ranks_, [&](const comm::CommunicatorPtr& group) {
      at::set_num_threads(1);
      const TensorGroupScope scope(group);
      work(group->rank());
    });
  }

  /// Makes `made_`; false where the operator refuses its arguments.
  bool run_ranks(const LayoutList& arguments, const LayoutList& results) {
    locals_.assign(ranks_, {});
    made_.assign(ranks_, {});
    try {
      on_every_rank([&](int rank) {
        locals_[rank] = local_stack(arguments, results, rank);
        made_[rank] = testing::run(sample_, locals_[rank]);
      });
    } catch (const std::exception&) {
      return false;
    }
    return made_[0].size() == results.size();  // else it is another call: of fewer pieces
  }

  std::vector<Tensor> of_ranks(size_t result) const {
    std::vector<Tensor> tensors;
    for (const auto& made : made_) tensors.push_back(made[result]);
    return tensors;
  }

  bool is_right(const LayoutList& arguments, const LayoutList& results) const {
    const int scale = arguments[0].is_divided() ? sample_.scale : 1;
    std::vector<std::vector<Tensor>> cotangents(ranks_);
    for (size_t r = 0; r < results.size(); ++r) {
      const bool joined =
          is_joined(of_ranks(r), results[r], Layout::Kind::kPartial, whole_.results[r], scale);
      if (!joined) return false;
      const auto parts = spread(whole_.cotangents[r], results[r], Layout::Kind::kShared, ranks_);
      for (int rank = 0; rank < ranks_; ++rank) {
        cotangents[rank].push_back(results[r].is_partial() ? parts[rank] / scale : parts[rank]);
      }
    }
    std::vector<std::vector<Tensor>> gradients(ranks_);
    on_every_rank([&](int rank) {
      gradients[rank] = gradients_of(made_[rank], cotangents[rank], tensors_of(locals_[rank]));
    });
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (!whole_.gradients[i].defined()) continue;
      std::vector<Tensor> parts;
      for (const auto& own : gradients) parts.push_back(own[i]);
      if (!is_joined(parts, arguments[i], Layout::Kind::kShared, whole_.gradients[i])) return false;
    }
    return true;
  }

  void compare(const LayoutList& arguments, const LayoutList& results) {
    spread_.clear();
    for (size_t i = 0; i < arguments.size(); ++i) {
      spread_.push_back(
          spread(whole_.arguments[i].detach(), arguments[i], Layout::Kind::kPartial, ranks_));
    }
    if (!run_ranks(arguments, results)) return;
    const bool right = is_right(arguments, results);
    const bool legal = verdict(sample_, locals_[0], made_[0], arguments, results, ranks_);
    ++(legal ? legal_ : illegal_);
    if (legal == right || (right && !sample_.is_exact)) return;
    std::string text;
    for (const Layout& layout : arguments) text += layout.to_string() + " ";
    text += "->";
    for (const Layout& layout : results) text += " " + layout.to_string();
    ADD_FAILURE() << sample_.name << "." << sample_.overload << " on " << ranks_
                  << " ranks: " << text
                  << (legal ? " is said to be legal, and is wrong"
                            : " is said to be wrong, and is right");
  }

  const Sample& sample_;
  const int ranks_;
  const Whole whole_;
  std::vector<std::vector<Tensor>> spread_;  // the ranks' shares of each argument
  std::vector<Stack> locals_;
  std::vector<std::vector<Tensor>> made_;
  int legal_ = 0, illegal_ = 0;
};

class LegalityTest : public ::testing::TestWithParam<int> {};

void run_all(std::vector<Sample> (*samples)(int64_t), int ranks) {
  at::set_num_threads(1);
  torch::manual_seed(17);
  for (const Sample& sample : samples(ranks)) BruteForce(sample, ranks).run();
}

TEST_P(LegalityTest, ElementwiseOperators) { run_all(elementwise_samples, GetParam()); }
TEST_P(LegalityTest, Reductions) { run_all(reduction_samples, GetParam()); }
TEST_P(LegalityTest, Shapes) { run_all(shape_samples, GetParam()); }
TEST_P(LegalityTest, Layers) { run_all(layer_samples, GetParam()); }
TEST_P(LegalityTest, Products) { run_all(product_samples, GetParam()); }
TEST_P(LegalityTest, Collectives) { run_all(collective_samples, GetParam()); }

INSTANTIATE_TEST_SUITE_P(Ranks, LegalityTest, ::testing::Values(2, 3));

}  // namespace
}  // namespace smp::nn::rewrite::testing
