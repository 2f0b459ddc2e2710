// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "smp/nn.h"
#include "tests/smp/tensor_parallel_run.h"

// Options of embeddings that libtorch's have, too, against one process of plain libtorch.
namespace smp::testing {
namespace {

constexpr int64_t kRows = DividedModel::kVocabulary, kColumns = 8;

struct PlainTable {
  using Module = torch::nn::Embedding;
  static torch::nn::EmbeddingOptions options() { return {kRows, kColumns}; }
};

struct DividedTable {
  using Module = nn::DistributedEmbedding;
  static nn::DistributedEmbeddingOptions options() {
    return nn::DistributedEmbeddingOptions(kRows, kColumns).initializer_range(1);
  }
};

/// Rows drawn from a normal distribution have norms about 2.8.
template <class Table>
struct Shortened : Table {
  static auto options() { return Table::options().max_norm(2).padding_idx(3); }
};

template <class Table>
struct ShortenedByCubes : Table {
  static auto options() { return Table::options().max_norm(1.5).norm_type(3); }
};

template <class Table>
struct Sparse : Table {
  static auto options() { return Table::options().sparse(true); }
};

template <class Table>
struct TableNet : torch::nn::Module {
  TableNet() {
    tokens = register_module("tokens", typename Table::Module(Table::options()));
    head = register_module("head", torch::nn::Linear(kColumns, kRows));
  }
  torch::Tensor forward(torch::Tensor ids) { return head(tokens(ids)); }
  torch::Tensor loss(torch::Tensor ids, torch::Tensor targets) {
    const auto logits = 10 * forward(ids);  // so that gradients are large enough to be clipped
    return torch::nn::functional::cross_entropy(logits.flatten(0, 1), targets.flatten());
  }
  typename Table::Module tokens{nullptr};
  torch::nn::Linear head{nullptr};
};

template <template <class> class Options>
void check_shortened() {
  const auto expected = run_plain<TableNet<Options<PlainTable>>>();
  const auto without = run_plain<TableNet<PlainTable>>();
  EXPECT_FALSE(
      torch::equal(expected.weights.at("tokens.weight"), without.weights.at("tokens.weight")));
  for (const TensorLayout& layout : {TensorLayout{1}, TensorLayout{2}, TensorLayout{1, 2},
                                     TensorLayout{2, 2}, TensorLayout{4, 1, 1, true}}) {
    SCOPED_TRACE(c10::str(layout));
    expect_close(run_on_ranks<TableNet<Options<DividedTable>>>(layout), expected);
  }
}

TEST(EmbeddingOptions, RowsHaveAtMostTheNorm) { check_shortened<Shortened>(); }

TEST(EmbeddingOptions, RowsHaveAtMostTheNormOfAnotherOrder) { check_shortened<ShortenedByCubes>(); }

TEST(EmbeddingOptions, ReplicasWouldShortenOtherRows) {
  const TensorLayout layout{1, 1, 2};
  const auto text = error_of_run<UsageError>(2, config_of(layout), [&] {
    const auto net = make_model<TableNet<Shortened<DividedTable>>>(5);
    ModelOf<TableNet<Shortened<DividedTable>>> model(net);
    auto evaluate = step([&](torch::Tensor x, torch::Tensor y) { return net->loss(x, y); });
    const auto batch = token_batch(0);
    evaluate(own_batch(layout, batch[0]), own_batch(layout, batch[1]));
  });
  expect_has(text, {"ShortenedRows\" writes parameter \"tokens.weight\", by its batch, of which "
                    "each of 2 replicas has another, so that they would part. Train one replica"});
}

/// Gradients are dense in a step: with the bits of a plain model whose gradients are.
TEST(EmbeddingOptions, SparseGradientsAreDense) {
  const auto expected = run_plain<TableNet<PlainTable>>();
  expect_close(run_on_ranks<TableNet<Sparse<DividedTable>>>({2, 2}), expected);
  for (const TensorLayout& layout : {TensorLayout{1}, TensorLayout{1, 2}}) {
    const auto got = run_on_ranks<TableNet<Sparse<PlainTable>>>(layout);
    for (const auto& [name, weight] : expected.weights) {
      EXPECT_TRUE(torch::equal(got.weights.at(name), weight)) << name;
    }
  }
  const auto mark = [](TableNet<Sparse<PlainTable>>& net) { set_tensor_parallelism(net); };
  expect_close(run_on_ranks<TableNet<Sparse<PlainTable>>>({2}, mark), expected);
}

}  // namespace
}  // namespace smp::testing
