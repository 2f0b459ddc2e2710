// SPDX-License-Identifier: Apache-2.0
// Linear layers, embeddings and the loss, against torch::nn's.

#include <ATen/autocast_mode.h>
#include <c10/util/ScopeExit.h>

#include <sstream>

#include "graph/deferred.h"
#include "graph/recording.h"
#include "smp/nn/cross_entropy.h"
#include "smp/nn/operators.h"
#include "smp/nn/parallel_embedding.h"
#include "smp/nn/parallel_linear.h"
#include "tests/nn/modules.h"

namespace smp::nn::testing {
namespace {

using torch::Tensor;

std::string print(const torch::nn::Module& module) {
  std::ostringstream stream;
  module.pretty_print(stream);
  return stream.str();
}

/// The parameters that `torch::nn` draws after seed 7, and the generator's next numbers.
template <class Holder>
std::pair<Named, Tensor> plain_parameters(const std::function<Holder()>& make) {
  torch::manual_seed(7);
  Holder module = make();
  Named parameters;
  for (const auto& item : module->named_parameters())
    parameters[item.key()] = item.value().detach();
  return {parameters, torch::rand({3})};
}

/// A divided module begins with the values of a plain one and leaves the generator where that does.
template <class Holder, class Plain>
void expect_same_start(const std::function<Holder()>& make, const std::function<Plain()>& plain) {
  const auto [parameters, next] = plain_parameters<Plain>(plain);
  for (const int ranks : {1, 2, 4}) {
    std::vector<Tensor> after(ranks);
    const std::function<Holder()> make_and_draw = [&] {
      Holder module = make();
      after[tensor_group()->rank()] = torch::rand({3});
      return module;
    };
    const Outcome run = run_module<Holder>(
        ranks, make_and_draw, [](Holder&) { return Tensors(); }, torch::kFloat);
    ASSERT_EQ(run.parameters.size(), parameters.size());
    for (const auto& [name, value] : parameters) {
      expect_equal(run.parameters.at(name), value, name);
    }
    for (const Tensor& drawn : after) expect_equal(drawn, next, "the generator afterwards");
  }
}

TEST(Start, IsThatOfPlainModules) {
  using Linear = torch::nn::Linear;
  using LinearOptions = torch::nn::LinearOptions;
  for (const bool bias : {true, false}) {
    const std::function<Linear()> plain = [=] { return Linear(LinearOptions(12, 24).bias(bias)); };
    for (const int64_t blocks : {1, 3}) {
      expect_same_start<ColumnParallelLinear, Linear>(
          [=] {
            return ColumnParallelLinear(
                ColumnParallelLinearOptions(12, 24).bias(bias).blocks(blocks));
          },
          plain);
    }
    expect_same_start<RowParallelLinear, Linear>(
        [=] { return RowParallelLinear(RowParallelLinearOptions(12, 24).bias(bias)); }, plain);
    expect_same_start<DistributedLinear, Linear>(
        [=] { return DistributedLinear(RowParallelLinearOptions(12, 24).bias(bias)); }, plain);
  }
  using Embedding = torch::nn::Embedding;
  expect_same_start<VocabParallelEmbedding, Embedding>(
      [] { return VocabParallelEmbedding(VocabParallelEmbeddingOptions(12, 8).padding_idx(5)); },
      [] { return Embedding(torch::nn::EmbeddingOptions(12, 8).padding_idx(5)); });
  expect_same_start<DistributedEmbedding, Embedding>(
      [] {
        return DistributedEmbedding(
            DistributedEmbeddingOptions(12, 8).padding_idx(-1).initializer_range(1));
      },
      [] { return Embedding(torch::nn::EmbeddingOptions(12, 8).padding_idx(11)); });
}

TEST(Start, OfANormalDistributionIsTheSameForAllDegrees) {
  const std::function<ColumnParallelLinear()> make = [] {
    return ColumnParallelLinear(ColumnParallelLinearOptions(64, 128).init_std(0.02));
  };
  const auto none = [](ColumnParallelLinear&) { return Tensors(); };
  const Outcome one = run_module<ColumnParallelLinear>(1, make, none);
  const Outcome four = run_module<ColumnParallelLinear>(4, make, none);
  EXPECT_NEAR(one.parameters.at("weight").std().item<double>(), 0.02, 0.001);
  ASSERT_EQ(four.parameters.size(), one.parameters.size());
  for (const auto& [name, value] : one.parameters) {
    expect_equal(four.parameters.at(name), value, name);
  }
}

TEST(Start, CanBeDrawnAgainAndCopied) {
  on_ranks(1, [](int) {
    torch::manual_seed(7);
    ColumnParallelLinear module(4, 6);
    const Tensor first = module->weight.detach().clone();
    module->reset_parameters();
    EXPECT_FALSE(torch::equal(module->weight, first));
    torch::manual_seed(7);
    module->reset_parameters();
    expect_equal(module->weight.detach(), first, "drawn again");
    const auto copy = std::dynamic_pointer_cast<ColumnParallelLinearImpl>(module->clone());
    expect_equal(copy->weight.detach(), first, "copied");
    EXPECT_FALSE(copy->weight.is_same(module->weight));
  });
}

/// Construction without memory gives the same values, when they are needed.
TEST(Start, IsTheSameWhenItIsDeferred) {
  std::mutex generator;
  on_ranks(2, [&](int) {
    const std::lock_guard<std::mutex> lock(generator);
    torch::manual_seed(7);
    const ColumnParallelLinear plain(64, 128);
    const Tensor next = torch::rand({3});
    torch::manual_seed(7);
    ColumnParallelLinear deferred{nullptr};
    {
      const graph::DeferredScope scope(graph::DeferredOptions().eager_bytes(0));
      deferred = ColumnParallelLinear(64, 128);
    }
    EXPECT_EQ(deferred->weight.storage().nbytes(), 0u);
    expect_equal(torch::rand({3}), next, "the generator afterwards");
    expect_equal(graph::value_of(deferred->weight).detach(), plain->weight.detach(), "weight");
    expect_equal(graph::value_of(deferred->bias).detach(), plain->bias.detach(), "bias");
  });
}

// ---------------------------------------------------------------------------------------------
// Their results

/// x [2, 4, 12] through a linear layer to 24 channels, with gradients.
template <class Holder>
void expect_linear(const std::function<Holder()>& make,
                   const std::function<Tensor(Holder&, const Tensor&)>& use,
                   const std::string& what, bool bias) {
  torch::manual_seed(1);
  const auto input = torch::randn({2, 4, 12}, torch::kDouble);
  const auto of_result = torch::randn({2, 4, 24}, torch::kDouble);
  for (const int ranks : {1, 2, 4}) {
    const Outcome run = run_module<Holder>(ranks, make, [&](Holder& module) -> Tensors {
      const Tensor x = input.clone().requires_grad_();
      const Tensor y = use(module, x);
      y.backward(of_result);
      return {y.detach(), x.grad()};
    });
    Named plain = leaves(run.parameters);
    const Tensor x = input.clone().requires_grad_();
    const Tensor y = torch::linear(x, plain.at("weight"), bias ? plain.at("bias") : Tensor());
    y.backward(of_result);
    expect_close(run, {y.detach(), x.grad()}, gradients_of(plain),
                 what + " on " + std::to_string(ranks) + " ranks");
  }
}

TEST(Linear, ColumnsComputeWhatAPlainLayerDoes) {
  for (const bool bias : {true, false}) {
    for (const int64_t blocks : {1, 3}) {
      for (const bool gathers : {true, false}) {
        for (const bool sequence : {true, false}) {
          const auto options = ColumnParallelLinearOptions(12, 24)
                                   .bias(bias)
                                   .blocks(blocks)
                                   .gather_output(gathers)
                                   .sequence_parallel(sequence);
          expect_linear<ColumnParallelLinear>(
              [=] { return ColumnParallelLinear(options); },
              [=](ColumnParallelLinear& module, const Tensor& x) {
                const Tensor y = module(sequence ? scatter_to_group(x, 1) : x);
                return gathers ? y : gather_from_group(y, -1, blocks);
              },
              c10::str("bias ", bias, " blocks ", blocks, " gathers ", gathers, " sequence ",
                       sequence),
              bias);
        }
      }
    }
  }
}

TEST(Linear, RowsComputeWhatAPlainLayerDoes) {
  for (const bool bias : {true, false}) {
    for (const bool parallel : {true, false}) {
      for (const bool sequence : {true, false}) {
        const auto options = RowParallelLinearOptions(12, 24)
                                 .bias(bias)
                                 .input_is_parallel(parallel)
                                 .sequence_parallel(sequence);
        expect_linear<RowParallelLinear>(
            [=] { return RowParallelLinear(options); },
            [=](RowParallelLinear& module, const Tensor& x) {
              const Tensor y = module(parallel ? scatter_to_group(x, -1) : x);
              return sequence ? gather_from_group(y, 1) : y;
            },
            c10::str("bias ", bias, " parallel ", parallel, " sequence ", sequence), bias);
      }
    }
    expect_linear<DistributedLinear>(
        [=] { return DistributedLinear(RowParallelLinearOptions(12, 24).bias(bias)); },
        [](DistributedLinear& module, const Tensor& x) { return module(x); }, "DistributedLinear",
        bias);
  }
}

/// In a group of one a layer has the very bits of a plain one.
TEST(Linear, InAGroupOfOneIsPlain) {
  const auto x = torch::randn({5, 12});
  on_ranks(1, [&](int) {
    torch::manual_seed(7);
    torch::nn::Linear plain(12, 24);
    torch::manual_seed(7);
    RowParallelLinear rows(12, 24);
    torch::manual_seed(7);
    ColumnParallelLinear columns(12, 24);
    expect_equal(rows(x).detach(), plain(x).detach(), "rows");
    expect_equal(columns(x).detach(), plain(x).detach(), "columns");
  });
}

/// Under autocast results have the type that a plain layer's have.
TEST(Linear, UnderAutocast) {
  torch::manual_seed(4);
  const auto x = torch::randn({2, 4, 12});
  torch::manual_seed(7);
  torch::nn::Linear plain(12, 24);
  const auto cast = [](const std::function<Tensor()>& run) {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    const auto restore =
        c10::make_scope_exit([] { at::autocast::set_autocast_enabled(at::kCPU, false); });
    return run();
  };
  const Tensor expected = cast([&] { return plain(x); });
  EXPECT_EQ(expected.scalar_type(), torch::kBFloat16);
  for (const bool sequence : {false, true}) {
    const Outcome outcome = run_module<RowParallelLinear>(
        2,
        [&] {
          return RowParallelLinear(
              RowParallelLinearOptions(12, 24).input_is_parallel(false).sequence_parallel(
                  sequence));
        },
        [&](RowParallelLinear& module) -> Tensors {
          const Tensor y = cast([&] { return module(x); });
          EXPECT_EQ(y.scalar_type(), torch::kBFloat16);
          return {(sequence ? gather_from_group(y, 1) : y).detach()};
        },
        torch::kFloat);
    expect_close(outcome.outputs[0], expected.detach(), "output", 1.0 / 64);
  }
}

template <class Holder>
void expect_embedding(const std::function<Holder()>& make, std::optional<int64_t> padding) {
  torch::manual_seed(2);
  const auto indices = torch::randint(12, {3, 5});
  const auto of_result = torch::randn({3, 5, 8}, torch::kDouble);
  for (const int ranks : {1, 2, 4}) {
    const Outcome run = run_module<Holder>(ranks, make, [&](Holder& module) -> Tensors {
      const Tensor y = module(indices);
      y.backward(of_result);
      return {y.detach()};
    });
    Named plain = leaves(run.parameters);
    const Tensor y = torch::embedding(plain.at("weight"), indices, padding.value_or(-1));
    y.backward(of_result);
    expect_close(run, {y.detach()}, gradients_of(plain), c10::str(ranks, " ranks"));
  }
}

TEST(Embedding, ComputesWhatAPlainOneDoes) {
  for (const auto padding : {std::optional<int64_t>(), std::optional<int64_t>(7)}) {
    expect_embedding<VocabParallelEmbedding>(
        [=] {
          return VocabParallelEmbedding(VocabParallelEmbeddingOptions(12, 8).padding_idx(padding));
        },
        padding);
    expect_embedding<DistributedEmbedding>(
        [=] {
          return DistributedEmbedding(DistributedEmbeddingOptions(12, 8).padding_idx(padding));
        },
        padding);
  }
}

TEST(Embedding, BeginsWithAWeightThatIsGiven) {
  const auto weight = torch::randn({6, 8});
  on_ranks(2, [&](int rank) {
    DistributedEmbedding module(DistributedEmbeddingOptions(6, 8)._weight(weight));
    expect_equal(module->weight.detach(), part_of(weight, 1, 1, 2, rank), "weight");
    expect_has(error_of<UsageError>([&] {
                 DistributedEmbedding(DistributedEmbeddingOptions(6, 4)._weight(weight));
               }),
               {"the weight given has sizes [6, 8]. Give the whole one, [6, 4]"});
  });
}

TEST(CrossEntropyModule, HasTorchsOptions) {
  torch::manual_seed(3);
  const auto logits = torch::randn({6, 8}, torch::kDouble);
  const auto target = torch::randint(8, {6});
  const auto weights = torch::rand({8}, torch::kDouble);
  for (const auto& options :
       {torch::nn::CrossEntropyLossOptions(),
        torch::nn::CrossEntropyLossOptions()
            .reduction(torch::kSum)
            .ignore_index(target[0].item<int64_t>()),
        torch::nn::CrossEntropyLossOptions().reduction(torch::kNone).label_smoothing(0.2),
        torch::nn::CrossEntropyLossOptions().weight(weights)}) {
    torch::nn::CrossEntropyLoss plain(options);
    on_ranks(2, [&](int rank) {
      VocabParallelCrossEntropyLoss loss(options);
      expect_close(loss(part_of(logits, 1, 1, 2, rank), target), plain(logits, target), "loss");
      EXPECT_EQ(loss->buffers().size(), options.weight().defined() ? 1u : 0u);
    });
  }
}

// ---------------------------------------------------------------------------------------------

TEST(Modules, SayWhatTheyAre) {
  on_ranks(2, [](int) {
    EXPECT_EQ(print(*ColumnParallelLinear(ColumnParallelLinearOptions(4, 12).blocks(3))),
              "smp::nn::ColumnParallelLinear(in_features=4, out_features=12, bias=true, ranks=2, "
              "blocks=3, gather_output=false, sequence_parallel=false)");
    EXPECT_EQ(print(*RowParallelLinear(4, 3)),
              "smp::nn::RowParallelLinear(in_features=4, out_features=3, bias=true, ranks=2, "
              "input_is_parallel=true, sequence_parallel=false)");
    EXPECT_EQ(print(*DistributedLinear(4, 3)),
              "smp::nn::DistributedLinear(in_features=4, out_features=3, bias=true, ranks=2, "
              "input_is_parallel=false, sequence_parallel=false)");
    EXPECT_EQ(print(*VocabParallelEmbedding(VocabParallelEmbeddingOptions(4, 3).padding_idx(1))),
              "smp::nn::VocabParallelEmbedding(num_embeddings=4, embedding_dim=3, padding_idx=1, "
              "ranks=2)");
    EXPECT_EQ(print(*DistributedEmbedding(3, 4)),
              "smp::nn::DistributedEmbedding(num_embeddings=3, embedding_dim=4, ranks=2)");
  });
}

TEST(Modules, SayWhatCannotBeDivided) {
  on_ranks(4, [](int) {
    expect_has(error_of<UsageError>([] { ColumnParallelLinear(3, 10); }),
               {"ColumnParallelLinear: out_features 10 cannot be divided among the 4 ranks of the "
                "tensor-parallel group",
                "Choose a tensor_parallel_degree that divides it, or another out_features"});
    expect_has(error_of<UsageError>(
                   [] { ColumnParallelLinear(ColumnParallelLinearOptions(3, 16).blocks(3)); }),
               {"out_features 16 in 3 blocks cannot be divided"});
    expect_has(error_of<UsageError>([] { RowParallelLinear(6, 4); }),
               {"RowParallelLinear: in_features 6 cannot be divided"});
    expect_has(error_of<UsageError>([] { DistributedLinear(6, 4); }),
               {"DistributedLinear: in_features 6 cannot be divided"});
    expect_has(error_of<UsageError>([] { VocabParallelEmbedding(50257, 8); }),
               {"VocabParallelEmbedding: num_embeddings 50257 cannot be divided"});
    expect_has(error_of<UsageError>([] { DistributedEmbedding(8, 6); }),
               {"DistributedEmbedding: embedding_dim 6 cannot be divided"});
    expect_has(error_of<UsageError>([] {
                 VocabParallelEmbedding(VocabParallelEmbeddingOptions(8, 4).padding_idx(8));
               }),
               {"VocabParallelEmbedding: padding_idx 8 is none of the 8 embeddings"});
    expect_has(error_of<UsageError>([] {
                 DistributedEmbedding(DistributedEmbeddingOptions(8, 4).max_norm(1).norm_type(0));
               }),
               {"DistributedEmbedding: norm_type must be finite and above 0, got 0"});
  });
}

}  // namespace
}  // namespace smp::nn::testing
