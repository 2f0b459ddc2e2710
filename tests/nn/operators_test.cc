// SPDX-License-Identifier: Apache-2.0
// The operators that move tensors, and dropout: forward and backward against one process on all
// ranks' tensors.

#include "smp/nn/operators.h"

#include <mutex>

#include "graph/keyed_random.h"
#include "tests/nn/harness.h"

namespace smp::nn::testing {
namespace {

using torch::Tensor;

template <class Signature, class... Arguments>
Tensor call(const char* name, Arguments&&... arguments) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>().call(
      std::forward<Arguments>(arguments)...);
}
Tensor call(const char* name, const Tensor& x) { return call<Tensor(const Tensor&)>(name, x); }
Tensor call(const char* name, const Tensor& x, int64_t a) {
  return call<Tensor(const Tensor&, int64_t)>(name, x, a);
}
Tensor call(const char* name, const Tensor& x, int64_t a, int64_t b) {
  return call<Tensor(const Tensor&, int64_t, int64_t)>(name, x, a, b);
}

Tensor sum_of(const Tensors& terms) {
  const auto type = terms[0].scalar_type();
  const bool half = type == torch::kBFloat16 || type == torch::kHalf;
  Tensor sum = half ? terms[0].to(torch::kFloat) : terms[0];
  for (size_t r = 1; r < terms.size(); ++r) sum = sum + terms[r].to(sum.scalar_type());
  return sum.to(type);
}

/// Each rank's result and gradient, from each rank's argument and the gradient of its result.
struct OperatorCase {
  std::string name;
  std::vector<int64_t> sizes;  ///< sizes of each rank's argument
  std::function<Tensor(const Tensor&)> run;
  std::function<Tensor(const Tensors& arguments, int rank)> result;
  std::function<Tensor(const Tensors& gradients, int rank)> gradient;
  bool same = false;  ///< all ranks' arguments are alike
};

Tensor exchanged(const Tensors& x, int64_t split_dim, int64_t join_dim, int rank) {
  Tensors received;
  for (const Tensor& of : x) {
    received.push_back(part_of(of, split_dim, 1, static_cast<int>(x.size()), rank));
  }
  return torch::cat(received, join_dim);
}

std::vector<OperatorCase> cases(int ranks) {
  std::vector<OperatorCase> all;
  all.push_back({"tp_copy",
                 {3, 5},
                 [](auto& x) { return call("smp::tp_copy", x); },
                 [](auto& x, int r) { return x[r]; },
                 [](auto& g, int) { return sum_of(g); },
                 true});
  all.push_back({"tp_reduce",
                 {3, 5},
                 [](auto& x) { return call("smp::tp_reduce", x); },
                 [](auto& x, int) { return sum_of(x); },
                 [](auto& g, int r) { return g[r]; }});
  for (const auto& [dim, blocks] :
       std::vector<std::pair<int64_t, int64_t>>{{0, 1}, {1, 1}, {2, 1}, {0, 3}, {2, 2}, {1, 3}}) {
    const int64_t d = dim, b = blocks;
    const std::string text = " " + std::to_string(d) + " in " + std::to_string(b);
    all.push_back({"tp_scatter" + text,
                   {12, 24, 8},
                   [=](auto& x) { return call("smp::tp_scatter", x, d, b); },
                   [=](auto& x, int r) { return part_of(x[r], d, b, ranks, r); },
                   [=](auto& g, int) { return whole_of(g, d, b); },
                   true});
    all.push_back({"tp_gather" + text,
                   {6, 3, 4},
                   [=](auto& x) { return call("smp::tp_gather", x, d, b); },
                   [=](auto& x, int) { return whole_of(x, d, b); },
                   [=](auto& g, int r) { return part_of(g[r], d, b, ranks, r); }});
  }
  for (int64_t d = 0; d < 3; ++d) {
    const std::string text = " " + std::to_string(d);
    all.push_back({"tp_all_gather" + text,
                   {2, 3, 4},
                   [=](auto& x) { return call("smp::tp_all_gather", x, d); },
                   [=](auto& x, int) { return whole_of(x, d); },
                   [=](auto& g, int r) { return part_of(sum_of(g), d, 1, ranks, r); }});
    all.push_back({"tp_reduce_scatter" + text,
                   {4, 8, 12},
                   [=](auto& x) { return call("smp::tp_reduce_scatter", x, d); },
                   [=](auto& x, int r) { return part_of(sum_of(x), d, 1, ranks, r); },
                   [=](auto& g, int) { return whole_of(g, d); }});
    for (int64_t j = 0; j < 3; ++j) {
      all.push_back({"tp_all_to_all" + text + " to " + std::to_string(j),
                     {4, 8, 12},
                     [=](auto& x) { return call("smp::tp_all_to_all", x, d, j); },
                     [=](auto& x, int r) { return exchanged(x, d, j, r); },
                     [=](auto& g, int r) { return exchanged(g, j, d, r); }});
    }
  }
  return all;
}

/// Arguments of rank `rank` are not contiguous, so that strides matter.
Tensor random_like(const std::vector<int64_t>& sizes, torch::Dtype dtype) {
  return torch::randn(sizes, torch::kDouble).to(dtype).transpose(0, 1).contiguous().transpose(0, 1);
}

TEST(Operators, ForwardAndBackwardAreThoseOfOneProcess) {
  torch::manual_seed(1);
  for (const int ranks : {1, 2, 4}) {
    for (const auto dtype : {torch::kDouble, torch::kFloat, torch::kBFloat16}) {
      for (const OperatorCase& test : cases(ranks)) {
        Tensors arguments, results(ranks), gradients(ranks), expected;
        for (int r = 0; r < ranks; ++r) {
          arguments.push_back(test.same && r > 0 ? arguments[0].clone()
                                                 : random_like(test.sizes, dtype));
        }
        for (int r = 0; r < ranks; ++r) expected.push_back(test.result(arguments, r));
        Tensors of_results;
        for (int r = 0; r < ranks; ++r) of_results.push_back(torch::randn_like(expected[r]));
        on_ranks(ranks, [&](int rank) {
          const Tensor x = arguments[rank].detach().clone().requires_grad_();
          const Tensor y = test.run(x);
          y.backward(of_results[rank]);
          results[rank] = y.detach();
          gradients[rank] = x.grad();
        });
        for (int r = 0; r < ranks; ++r) {
          const std::string what = test.name + " on rank " + std::to_string(r) + " of " +
                                   std::to_string(ranks) + " in " + c10::toString(dtype);
          expect_equal(results[r], expected[r], what);
          expect_equal(gradients[r], test.gradient(of_results, r), "gradient of " + what);
        }
      }
    }
  }
}

/// A copy is free, and who writes it is told that it is none.
TEST(Operators, CopiesShareMemory) {
  on_ranks(2, [&](int) {
    const Tensor x = torch::ones({2, 3}, torch::requires_grad());
    Tensor y = call("smp::tp_copy", x);
    EXPECT_EQ(y.data_ptr(), x.data_ptr());
    EXPECT_EQ(y.sizes(), x.sizes());
    expect_has(error_of<c10::Error>([&] { y.add_(1); }),
               {"is a view and is being modified inplace", "custom Function"});
    const torch::NoGradGuard no_grad;
    EXPECT_EQ(call("smp::tp_copy", x).data_ptr(), x.data_ptr());
  });
}

TEST(Operators, IntegersAreMoved) {
  const auto whole = torch::arange(24).view({4, 6});
  on_ranks(2, [&](int rank) {
    const Tensor part = scatter_to_group(whole, -1, 3);
    expect_equal(part, part_of(whole, 1, 3, 2, rank), "part");
    expect_equal(gather_from_group(part, -1, 3), whole, "whole");
  });
}

TEST(Operators, ComplexNumbersAreSummedAndMoved) {
  torch::manual_seed(4);
  const auto x = torch::randn({2, 4, 6}, torch::kComplexDouble);  // rows by rank
  on_ranks(2, [&](int rank) {
    const Tensor own = x[rank].conj();
    const Tensor sum = x[0].conj() + x[1].conj();
    expect_equal(call("smp::tp_reduce", own), sum, "sum");
    expect_equal(call("smp::tp_reduce_scatter", own, 1), part_of(sum, 1, 1, 2, rank), "part");
    expect_equal(call("smp::tp_gather", own, 0, 1), x.conj().flatten(0, 1).resolve_conj(), "whole");
    const Tensors all{x[0].conj().resolve_conj(), x[1].conj().resolve_conj()};
    expect_equal(call("smp::tp_all_to_all", own, 0, 1), exchanged(all, 0, 1, rank), "exchanged");
  });
}

TEST(Operators, AreNotCalledInAGroupOfOne) {
  on_ranks(1, [](int) {
    const Tensor x = torch::randn({2, 3});
    EXPECT_TRUE(copy_to_group(x).is_same(x));
    EXPECT_TRUE(reduce_from_group(x).is_same(x));
    EXPECT_TRUE(scatter_to_group(x, 0).is_same(x));
    EXPECT_TRUE(gather_from_group(x, 0).is_same(x));
    EXPECT_TRUE(all_gather_to_group(x, 0).is_same(x));
    EXPECT_TRUE(reduce_scatter_from_group(x, 0).is_same(x));
    EXPECT_TRUE(all_to_all_in_group(x, 0, 1).is_same(x));
  });
}

/// A computation that goes through all operators and whose result is whole.
Tensor through_all(const Tensor& x, const Tensor& weights, int rank, int ranks) {
  const Tensor w = part_of(weights, 0, 1, ranks, rank).sum(0);
  Tensor y = (copy_to_group(x) * w).sin();
  y = reduce_scatter_from_group(y, 0).cos();
  y = reduce_from_group(all_gather_to_group(y, 0) * w);
  y = scatter_to_group(y, 1, 2).tanh();
  y = all_to_all_in_group(y, 0, 1).exp();
  return gather_from_group(y, 0) * weights[0];
}

TEST(Operators, GradientsAreTheSlopesOfWhatIsComputed) {
  torch::manual_seed(2);
  for (const int ranks : {1, 2, 4}) {
    const auto weights = torch::randn({4, 8}, torch::kDouble);
    const auto x = torch::randn({4, 8}, torch::kDouble);
    const auto direction = torch::randn({4, 8}, torch::kDouble);
    on_ranks(ranks, [&](int rank) {
      const Tensor argument = x.clone().requires_grad_();
      through_all(argument, weights, rank, ranks).sum().backward();
      constexpr double kStep = 1e-5;
      const torch::NoGradGuard no_grad;
      const Tensor slope = (through_all(x + kStep * direction, weights, rank, ranks).sum() -
                            through_all(x - kStep * direction, weights, rank, ranks).sum()) /
                           (2 * kStep);
      expect_close((argument.grad() * direction).sum(), slope, "slope", 1e-8);
    });
  }
}

TEST(Operators, CanBeDifferentiatedTwice) {
  const auto x = torch::randn({4, 4}, torch::kDouble);
  Tensor plain;
  {
    const Tensor argument = x.clone().requires_grad_();
    const auto first =
        torch::autograd::grad({(2 * argument).pow(3).sum()}, {argument}, {}, true, true);
    plain = torch::autograd::grad({first[0].pow(2).sum()}, {argument})[0];
  }
  on_ranks(2, [&](int) {
    const Tensor argument = x.clone().requires_grad_();
    // Each rank has the same term, so the sum is twice it.
    const auto loss = reduce_from_group(copy_to_group(argument)).pow(3).sum();
    const auto first = torch::autograd::grad({loss}, {argument}, {}, true, true);
    expect_close(torch::autograd::grad({first[0].pow(2).sum()}, {argument})[0], plain,
                 "second gradient");
  });
}

TEST(Operators, TwoOrdersOfBackwardGiveTheSame) {
  torch::manual_seed(3);
  const auto x = torch::randn({4, 8});
  const auto gradient_of = [&](bool reversed) {
    Tensors results(2);
    on_ranks(2, [&](int rank) {
      const Tensor argument = x.clone().requires_grad_();
      const Tensor entered = copy_to_group(argument) * (rank + 1);
      std::vector<Tensor> losses{reduce_from_group(entered.sin()).sum(),
                                 gather_from_group(entered.cos(), 1).sum()};
      if (reversed) std::swap(losses[0], losses[1]);
      losses[0].backward({}, /*retain_graph=*/true);
      losses[1].backward();
      results[rank] = argument.grad();
    });
    return results;
  };
  const auto forward = gradient_of(false), reversed = gradient_of(true);
  for (int r = 0; r < 2; ++r) expect_equal(forward[r], reversed[r], "gradient");
}

TEST(Operators, RanksMayTakeUnequalTime) {
  const auto x = torch::randn({8, 8});
  on_ranks(4, [&](int rank) {
    Tensor y = x;
    for (int round = 0; round < 20; ++round) {
      auto work = torch::eye(32);
      for (int i = 0; i < 30 * ((rank + round) % 4); ++i) work = work.matmul(work);
      y = reduce_from_group(copy_to_group(y) * work[0][0] / 4);
    }
    expect_equal(y, x, "after twenty sums");
  });
}

// ---------------------------------------------------------------------------------------------
// Dropout

using OfDropout = Tensor(const Tensor&, double, bool, int64_t, int64_t);

TEST(Dropout, DrawsWhatOneProcessDraws) {
  std::mutex generator;
  for (const int ranks : {1, 2, 4}) {
    for (const auto dtype : {torch::kDouble, torch::kFloat, torch::kBFloat16}) {
      for (const auto& [dim, blocks] :
           std::vector<std::pair<int64_t, int64_t>>{{0, 1}, {1, 1}, {2, 1}, {1, 3}}) {
        const int64_t d = dim, b = blocks;
        const auto whole = torch::randn({4, 12, 32}, torch::kDouble).to(dtype).requires_grad_();
        torch::manual_seed(5);
        const auto expected = torch::dropout(whole, 0.3, true);
        const auto next = torch::rand({1});
        const auto of_result = torch::randn_like(expected);
        const auto gradient = torch::autograd::grad({expected}, {whole}, {of_result})[0];
        on_ranks(ranks, [&](int rank) {
          const Tensor x = part_of(whole.detach(), d, b, ranks, rank).requires_grad_();
          // Rank threads share the generator.
          const std::lock_guard<std::mutex> lock(generator);
          torch::manual_seed(5);
          const Tensor y = call<OfDropout>("smp::tp_dropout", x, 0.3, true, d, b);
          expect_equal(torch::rand({1}), next, "the generator afterwards");
          expect_equal(y, part_of(expected, d, b, ranks, rank), "dropout");
          y.backward(part_of(of_result, d, b, ranks, rank));
          expect_equal(x.grad(), part_of(gradient, d, b, ranks, rank), "gradient");
        });
      }
    }
  }
}

TEST(Dropout, IsCountedAsRandomAndDrawsFromKeyedStreams) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("smp::tp_dropout", "");
  EXPECT_TRUE(graph::is_random(op));
  const auto whole = torch::randn({4, 8});
  const graph::RandomKey key{3, 1, 2, 5};
  Tensors expected;
  {
    const graph::KeyedRandomScope random(key);
    for (int i = 0; i < 3; ++i) expected.push_back(torch::dropout(whole, 0.5, true));
  }
  on_ranks(4, [&](int rank) {
    const graph::KeyedRandomScope random(key);
    for (int i = 0; i < 3; ++i) {
      expect_equal(divided_dropout(part_of(whole, 1, 1, 4, rank), 0.5, true, -1),
                   part_of(expected[i], 1, 1, 4, rank), "dropout");
    }
  });
}

TEST(Dropout, DrawsNothingInEvaluationAndAtTheEnds) {
  on_ranks(1, [](int) {
    const auto x = torch::randn({2, 3});
    torch::manual_seed(1);
    const auto next = torch::rand({1});
    torch::manual_seed(1);
    expect_equal(call<OfDropout>("smp::tp_dropout", x, 0.5, false, 0, 1), x, "evaluation");
    expect_equal(call<OfDropout>("smp::tp_dropout", x, 0., true, 0, 1), x, "p = 0");
    expect_equal(call<OfDropout>("smp::tp_dropout", x, 1., true, 0, 1), x * 0, "p = 1");
    expect_equal(torch::rand({1}), next, "the generator afterwards");
  });
}

// ---------------------------------------------------------------------------------------------
// Misuse

TEST(Operators, SayWhatCannotBeDivided) {
  on_ranks(2, [](int) {
    const auto x = torch::randn({3, 4});
    expect_has(error_of<UsageError>([&] { scatter_to_group(x, 0); }),
               {"[3, 4] along dimension 0 over 2 ranks", "multiple of blocks x ranks (2)",
                "Choose a tensor_parallel_degree that divides it"});
    expect_has(error_of<UsageError>([&] { scatter_to_group(x, 1, 4); }), {"in 4 blocks"});
    expect_has(error_of<UsageError>([&] { reduce_scatter_from_group(x, 0); }),
               {"cannot be divided"});
    expect_has(error_of<UsageError>([&] { all_to_all_in_group(x, 0, 1); }), {"cannot be divided"});
    expect_has(error_of<UsageError>([&] { gather_from_group(x, 2); }),
               {"gather_from_group along dimension 2 of a tensor of sizes [3, 4]",
                "there is no such dimension"});
    expect_has(error_of<UsageError>([&] { divided_dropout(x, 1.5, true, 0); }),
               {"a probability between 0 and 1 was expected, got 1.5"});
  });
}

TEST(Operators, NeedAGroup) {
  expect_has(
      error_of<UsageError>([] { copy_to_group(torch::ones({1})); }),
      {"a tensor-parallel operator or module was used before smp::init", "call smp::init(config)"});
}

}  // namespace
}  // namespace smp::nn::testing
