// SPDX-License-Identifier: Apache-2.0
// A linear layer of the ranks' joined input, which keeps a part of it: against one process, which
// has the whole.

#include <map>
#include <utility>

#include "core/node.h"
#include "graph/autograd_entry.h"
#include "graph/saved_tensors.h"
#include "graph/split_backward.h"
#include "smp/nn/operators.h"
#include "tests/nn/harness.h"

namespace smp::nn::testing {
namespace {

using torch::Tensor;

constexpr int64_t kOutputs = 6;  // width of the outputs of a rank

Tensor gathered(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                int64_t dim) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow("smp::tp_gathered_linear", "")
      .typed<Tensor(const Tensor&, const Tensor&, const std::optional<Tensor>&, int64_t)>()
      .call(x, weight, bias, dim);
}

/// The tensors of one rank.
struct Rank {
  Tensor x, weight, bias;  // leaves
  Tensor of_result;        // gradient
};

struct Case {
  std::vector<int64_t> sizes;  // sizes of each rank's part
  int64_t dim;
  bool bias = true;
  bool transposed = false;  // weights that are not contiguous
};

std::vector<Rank> make_ranks(const Case& test, int ranks, torch::Dtype dtype) {
  const auto draw = [&](std::vector<int64_t> sizes) {
    return torch::randn(sizes, torch::kDouble).to(dtype);
  };
  const int64_t channels = test.sizes.back();
  auto sizes = test.sizes;
  sizes[test.dim] *= ranks;
  sizes.back() = kOutputs;
  std::vector<Rank> all(ranks);
  for (Rank& rank : all) {
    rank.x = draw(test.sizes).requires_grad_();
    rank.weight = test.transposed ? draw({channels, kOutputs}).t() : draw({kOutputs, channels});
    rank.weight.requires_grad_();
    if (test.bias) rank.bias = draw({kOutputs}).requires_grad_();
    rank.of_result = draw(sizes);
  }
  return all;
}

/// A result and the gradients of x, weight and bias.
using Results = std::vector<Tensor>;

Results gradients_of(const Tensor& result, const Rank& rank) {
  result.backward(rank.of_result);
  return {result.detach(), rank.x.grad(), rank.weight.grad(),
          rank.bias.defined() ? rank.bias.grad() : Tensor()};
}

Tensor whole_input(const std::vector<Rank>& all, int64_t dim) {
  Tensors parts;
  for (const Rank& rank : all) parts.push_back(rank.x.detach());
  return whole_of(parts, dim);
}

/// Each rank's, by one process that has all.
std::vector<Results> in_one_process(const std::vector<Rank>& all, int64_t dim) {
  const int ranks = static_cast<int>(all.size());
  std::vector<Results> results;
  Tensor sum;  // in float32 for half precision
  for (const Rank& own : all) {
    Rank rank{whole_input(all, dim).requires_grad_(), own.weight.detach().requires_grad_(),
              own.bias.defined() ? own.bias.detach().requires_grad_() : Tensor(), own.of_result};
    results.push_back(gradients_of(torch::linear(rank.x, rank.weight, rank.bias), rank));
    const Tensor& term = results.back()[1];
    const auto type = term.scalar_type() == torch::kBFloat16 ? torch::kFloat : term.scalar_type();
    sum = sum.defined() ? sum + term.to(type) : term.to(type);
  }
  for (int r = 0; r < ranks; ++r) {
    results[r][1] = part_of(sum, dim, 1, ranks, r).to(all[r].x.scalar_type());
  }
  return results;
}

TEST(GatheredLinear, HasTheBitsOfOneProcess) {
  torch::set_num_threads(1);
  torch::manual_seed(11);
  const std::vector<Case> cases = {{{3, 5}, 0},
                                   {{2, 3, 5}, 0},
                                   {{2, 3, 5}, 1},
                                   {{2, 3, 5}, 1, /*bias=*/false},
                                   {{2, 3, 5}, 1, true, /*transposed=*/true},
                                   {{2, 3, 4, 5}, 2},
                                   {{2, 3, 4, 5}, 1, false},
                                   {{4, 32, 48}, 1}};
  for (const int ranks : {1, 2, 4}) {
    for (const auto dtype : {torch::kDouble, torch::kFloat, torch::kBFloat16}) {
      for (const Case& test : cases) {
        const auto all = make_ranks(test, ranks, dtype);
        const auto expected = in_one_process(all, test.dim);
        std::vector<Results> got(ranks);
        on_ranks(ranks, [&](int r) {
          const Rank& own = all[r];
          got[r] = gradients_of(gathered(own.x, own.weight, own.bias, test.dim), own);
        });
        for (int r = 0; r < ranks; ++r) {
          for (size_t i = 0; i < expected[r].size(); ++i) {
            if (!expected[r][i].defined()) continue;
            expect_equal(got[r][i], expected[r][i],
                         std::to_string(i) + " of rank " + std::to_string(r) + " of " +
                             std::to_string(ranks) + " in " + c10::toString(dtype) + " of " +
                             std::to_string(test.sizes.size()) + " dimensions, along " +
                             std::to_string(test.dim));
          }
        }
      }
    }
  }
}

TEST(GatheredLinear, OfComplexNumbersHasTheBitsOfOneProcess) {
  torch::set_num_threads(1);
  torch::manual_seed(12);
  Case test{{2, 3, 5}, 1};
  auto all = make_ranks(test, 2, torch::kComplexDouble);
  for (Rank& rank : all) {
    for (Tensor* tensor : {&rank.x, &rank.weight, &rank.bias, &rank.of_result}) {
      *tensor = torch::randn(tensor->sizes(), torch::kComplexDouble);
    }
    for (Tensor* tensor : {&rank.x, &rank.weight, &rank.bias}) tensor->requires_grad_();
  }
  const auto expected = in_one_process(all, test.dim);
  on_ranks(2, [&](int r) {
    const auto got = gradients_of(gathered(all[r].x, all[r].weight, all[r].bias, 1), all[r]);
    for (size_t i = 0; i < got.size(); ++i) {
      expect_equal(got[i], expected[r][i], std::to_string(i) + " of rank " + std::to_string(r));
    }
  });
}

/// The bytes of the tensors that functions save.
class Saved final : public graph::SavedTensorKeeper {
 public:
  size_t pack(const Tensor& tensor) override {
    tensors_.push_back(tensor.detach());
    return tensors_.size() - 1;
  }
  Tensor unpack(size_t number) override { return tensors_.at(number); }
  void release(size_t) noexcept override {}

  const Tensors& tensors() const { return tensors_; }

 private:
  Tensors tensors_;
};

TEST(GatheredLinear, KeepsThePart) {
  const auto all = make_ranks({{2, 3, 5}, 1}, 2, torch::kDouble);
  on_ranks(2, [&](int r) {
    const Rank& own = all[r];
    const auto saved = std::make_shared<Saved>();
    const graph::SavedTensorScope scope(saved);
    const Tensor result = gathered(own.x, own.weight, own.bias, 1);
    ASSERT_EQ(saved->tensors().size(), 2u);
    expect_equal(saved->tensors()[0], own.x.detach(), "the part");
    expect_equal(saved->tensors()[1], own.weight.detach(), "the weight");
  });
}

using Calls = std::vector<std::string>;

/// Counts the calls in the group of the calling rank until the end of the block.
struct Counted {
  std::shared_ptr<CountingGroup> group = std::make_shared<CountingGroup>(tensor_group());
  TensorGroupScope scope{group};
};

TEST(GatheredLinear, MovesWhatTheGradientsAskedForNeed) {
  const auto all = make_ranks({{2, 3, 5}, 1}, 2, torch::kDouble);
  const Calls gather{"all_gather"}, sum{"reduce_scatter"};
  on_ranks(2, [&](int r) {
    const Rank& own = all[r];
    const auto calls_for = [&](const Tensors& wanted) {
      const Counted counted;
      const Tensor result = gathered(own.x, own.weight, own.bias, 1);
      EXPECT_EQ(counted.group->calls(), gather);
      EXPECT_EQ(counted.group->elements(), own.x.numel());
      torch::autograd::grad({result}, wanted, {own.of_result});
      return Calls(counted.group->calls().begin() + 1, counted.group->calls().end());
    };
    EXPECT_EQ(calls_for({own.x}), sum);
    EXPECT_EQ(calls_for({own.weight}), gather);
    EXPECT_EQ(calls_for({own.bias}), Calls());
    EXPECT_EQ(calls_for({own.x, own.weight, own.bias}), (Calls{"reduce_scatter", "all_gather"}));
  });
}

/// A backward pass for the inputs, and one for the weights later, as zero-bubble schedules have it.
TEST(GatheredLinear, SplitsItsBackwardPass) {
  torch::set_num_threads(1);
  torch::manual_seed(13);
  const auto all = make_ranks({{2, 3, 5}, 1}, 2, torch::kDouble);
  const auto expected = in_one_process(all, 1);
  on_ranks(2, [&](int r) {
    const Rank& own = all[r];
    std::map<std::string, graph::GradientSinkPtr> sinks;
    const auto enter = [&](const char* name, const Tensor& tensor) {
      sinks[name] = core::make_node<graph::GradientSink>();
      return graph::enter(tensor.detach(), sinks[name]);
    };
    const Counted counted;
    std::vector<torch::autograd::Edge> starts;
    {
      const Tensor x = enter("x", own.x), weight = enter("weight", own.weight);
      starts.push_back(graph::start_of_backward(gathered(x, weight, enter("bias", own.bias), 1)));
    }
    graph::SplitBackward split(starts, {own.of_result}, {sinks["x"]});
    starts.clear();
    EXPECT_EQ(counted.group->calls(), (Calls{"all_gather", "reduce_scatter"}));
    expect_equal(sinks["x"]->gradient, expected[r][1], "gradient of x");
    EXPECT_FALSE(sinks["weight"]->gradient.defined());
    EXPECT_FALSE(sinks["bias"]->gradient.defined());
    split.run_weights();
    EXPECT_EQ(counted.group->calls(), (Calls{"all_gather", "reduce_scatter", "all_gather"}));
    expect_equal(sinks["weight"]->gradient, expected[r][2], "gradient of the weight");
    expect_equal(sinks["bias"]->gradient, expected[r][3], "gradient of the bias");
  });
}

/// Gradients of a function of the first gradients, of all ranks together.
Tensors second_gradients(const Tensor& loss, const Tensors& arguments) {
  const auto first = torch::autograd::grad({loss}, arguments, {}, true, /*create_graph=*/true);
  Tensor next;
  for (const Tensor& gradient : first) {
    const Tensor term = gradient.pow(3).sum();
    next = next.defined() ? next + term : term;
  }
  return torch::autograd::grad({next}, arguments);
}

TEST(GatheredLinear, CanBeDifferentiatedTwice) {
  torch::manual_seed(14);
  const auto all = make_ranks({{2, 3, 5}, 1}, 2, torch::kDouble);
  const Tensor whole = whole_input(all, 1).requires_grad_();
  const Tensor loss = torch::linear(whole, all[0].weight, all[0].bias).sin().sum() +
                      torch::linear(whole, all[1].weight, all[1].bias).sin().sum();
  const Tensors expected =
      second_gradients(loss, {whole, all[0].weight, all[0].bias, all[1].weight, all[1].bias});
  on_ranks(2, [&](int r) {
    const Rank& own = all[r];
    const auto got = second_gradients(gathered(own.x, own.weight, own.bias, 1).sin().sum(),
                                      {own.x, own.weight, own.bias});
    expect_close(got[0], part_of(expected[0], 1, 1, 2, r), "x");
    expect_close(got[1], expected[1 + 2 * r], "weight");
    expect_close(got[2], expected[2 + 2 * r], "bias");
  });
}

TEST(GatheredLinear, IsCastUnderAutocastAndGathersTheLowerPrecision) {
  torch::set_num_threads(1);
  torch::manual_seed(15);
  const auto all = make_ranks({{2, 3, 5}, 1}, 2, torch::kFloat);
  // Casts like one process: its input before all else.
  std::vector<Rank> cast;
  for (const Rank& rank : all) {
    cast.push_back({rank.x.detach().to(torch::kBFloat16), rank.weight, rank.bias,
                    rank.of_result.to(torch::kBFloat16)});
  }
  std::vector<Results> expected;
  {
    const Autocast autocast;
    expected = in_one_process(cast, 1);
  }
  on_ranks(2, [&](int r) {
    const Rank& own = all[r];
    const Counted counted;
    Tensor result;
    {
      const Autocast autocast;
      result = gathered(own.x, own.weight, own.bias, 1);
    }
    EXPECT_EQ(counted.group->bytes(), own.x.numel() * 2);
    const auto got = gradients_of(result, {own.x, own.weight, own.bias, cast[r].of_result});
    expect_equal(got[0], expected[r][0], "result");
    for (size_t i = 1; i < got.size(); ++i) {
      EXPECT_EQ(got[i].scalar_type(), torch::kFloat);
      expect_equal(got[i], expected[r][i].to(torch::kFloat), "gradient " + std::to_string(i));
    }
  });
}

TEST(GatheredLinear, GivesShapesWithoutData) {
  on_ranks(2, [](int) {
    const auto meta = torch::TensorOptions(torch::kFloat).device(torch::kMeta);
    const Counted counted;
    const Tensor result =
        gathered(torch::empty({2, 3, 5}, meta), torch::empty({6, 5}, meta), std::nullopt, 1);
    EXPECT_EQ(result.sizes(), (std::vector<int64_t>{2, 6, 6}));
    EXPECT_TRUE(result.is_meta());
    EXPECT_EQ(counted.group->calls(), Calls());
  });
}

TEST(GatheredLinear, IsPlainInAGroupOfOneAndSaysWhatItCannotGather) {
  const Tensor x = torch::randn({2, 3, 5}), weight = torch::randn({6, 5});
  on_ranks(1, [&](int) {
    expect_equal(gathered_linear(x, weight, std::nullopt, -2), torch::linear(x, weight), "plain");
  });
  on_ranks(2, [&](int) {
    expect_has(error_of<UsageError>([&] { gathered_linear(x, weight, std::nullopt, -1); }),
               {"smp::tp_gathered_linear: along dimension 2 of a tensor of sizes [2, 3, 5]",
                "Expected is a dimension before the last"});
    expect_has(error_of<UsageError>([&] { gathered_linear(x, weight, std::nullopt, 3); }),
               {"gathered_linear along dimension 3", "there is no such dimension"});
  });
}

}  // namespace
}  // namespace smp::nn::testing
