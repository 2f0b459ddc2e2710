// SPDX-License-Identifier: Apache-2.0
#include "dp/parameter_pieces.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include "comm/threads/run_ranks.h"
#include "core/check.h"
#include "dp/gradient_buckets.h"
#include "tests/error_of.h"

namespace smp::dp {
namespace {

const std::vector<std::string> kPieceNames{"a",      "scalar",  "transposed", "gaps",  "half",
                                           "double", "complex", "large",      "unused"};

/// The parameters of all kinds: dense in another order, with gaps in memory, of other dtypes.
std::vector<at::Tensor> make_divided() {
  std::vector<at::Tensor> result{at::zeros({5, 30}),
                                 at::zeros({}),
                                 at::zeros({40, 6}).t(),
                                 at::zeros({20, 8}).narrow(1, 0, 5),
                                 at::zeros({130}, at::kHalf),
                                 at::zeros({9, 9}, at::kDouble),
                                 at::zeros({70}, at::kComplexFloat),
                                 at::zeros({33, 31}),
                                 at::zeros({3})};
  for (size_t i = 0; i < result.size(); ++i) {
    at::manual_seed(i);
    result[i].copy_(at::randn(result[i].sizes(), result[i].options()));
    result[i].requires_grad_();
  }
  return result;
}

constexpr size_t kUnused = 8;

at::Tensor make_gradient(const at::Tensor& parameter, size_t index, int microbatch) {
  at::manual_seed(100 * (index + 1) + microbatch);
  return at::randn(parameter.sizes(), parameter.options().requires_grad(false));
}

/// Ranks as threads share the default generator: their data are drawn before.
struct Data {
  Data(int replicas, int microbatches) : parameters(replicas) {
    for (auto& own : parameters) own = make_divided();
    for (size_t i = 0; i < kPieceNames.size(); ++i) {
      gradients.emplace_back();
      for (int m = 0; m < replicas * microbatches; ++m) {
        gradients[i].push_back(make_gradient(parameters[0][i], i, m));
      }
    }
  }
  std::vector<std::vector<at::Tensor>> parameters;  // parameters by replica
  std::vector<std::vector<at::Tensor>> gradients;   // gradients by parameter and global microbatch
};

std::shared_ptr<ParameterPieces> make_pieces(const std::vector<at::Tensor>& parameters,
                                             const comm::CommunicatorPtr& group,
                                             int64_t bucket_bytes = 2048) {
  return std::make_shared<ParameterPieces>(parameters, kPieceNames, group, bucket_bytes);
}

class ParameterPiecesTest : public ::testing::TestWithParam<int> {};

TEST_P(ParameterPiecesTest, DivideEveryParameterEvenly) {
  const int replicas = GetParam();
  const Data data(replicas, 1);
  comm::run_ranks(replicas, [&](const comm::CommunicatorPtr& group) {
    const auto pieces = make_pieces(data.parameters[group->rank()], group);
    std::vector<int64_t> owned(replicas, 0);
    int64_t all = 0;
    for (size_t i = 0; i < kPieceNames.size(); ++i) {
      int64_t next = 0;
      for (int r = 0; r < replicas; ++r) {
        const auto [begin, end] = pieces->owned(i, r);
        owned[r] += end - begin;
        if (begin == end) continue;
        const auto [offset, length] = pieces->range(i);
        EXPECT_EQ(begin, next) << kPieceNames[i];
        EXPECT_EQ(begin % 64, 0) << kPieceNames[i];  // where vectors of kernels end
        EXPECT_EQ((offset + begin - r * length) % (replicas > 1 ? 64 : 8), 0) << kPieceNames[i];
        next = end;
      }
      EXPECT_EQ(next, pieces->parameters()[i].numel()) << kPieceNames[i];
      all += next;
    }
    // Each bucket is divided evenly, but for the padding of a gradient and the bucket.
    const auto buckets = static_cast<int64_t>(pieces->layout().size());
    const int64_t slack = 64 * (static_cast<int64_t>(kPieceNames.size()) + replicas * buckets);
    for (int r = 0; r < replicas; ++r) EXPECT_NEAR(owned[r], all / replicas, slack);
  });
}

/// The numbers of a piece, by brute force from the whole.
at::Tensor brute_force(const at::Tensor& whole, const at::Tensor& parameter,
                       const std::pair<int64_t, int64_t>& elements) {
  at::Tensor order = whole;  // order of the parameter's memory
  if (parameter.is_non_overlapping_and_dense() && !parameter.is_contiguous()) order = whole.t();
  return order.contiguous().view({-1}).slice(0, elements.first, elements.second);
}

TEST_P(ParameterPiecesTest, ShareMemoryAndAreGatheredFromAll) {
  const int replicas = GetParam();
  const Data data(replicas, 1);
  const Data expected(1, 1);
  comm::run_ranks(replicas, [&](const comm::CommunicatorPtr& group) {
    const auto& parameters = data.parameters[group->rank()];
    const auto pieces = make_pieces(parameters, group);
    at::NoGradGuard no_grad;
    for (size_t i = 0; i < kPieceNames.size(); ++i) {
      const auto& piece = pieces->own()[i];
      const auto owned = pieces->owned(i, group->rank());
      EXPECT_EQ(piece.defined(), owned.first < owned.second);
      if (!piece.defined()) continue;
      EXPECT_TRUE(piece.requires_grad() && piece.is_leaf());
      EXPECT_TRUE(at::equal(piece, brute_force(parameters[i], parameters[i], owned)))
          << kPieceNames[i];
      EXPECT_EQ(piece.is_alias_of(parameters[i]), kPieceNames[i] != "gaps");
      piece.mul_(2);
    }
    pieces->all_gather(std::vector<bool>(kPieceNames.size(), true));
    for (size_t i = 0; i < kPieceNames.size(); ++i) {
      EXPECT_TRUE(at::equal(parameters[i], expected.parameters[0][i] * 2)) << kPieceNames[i];
    }
  });
}

TEST_P(ParameterPiecesTest, OnlyUpdatedBucketsAreGathered) {
  const int replicas = GetParam();
  const Data data(replicas, 1);
  const Data old(1, 1);
  comm::run_ranks(replicas, [&](const comm::CommunicatorPtr& group) {
    const auto& parameters = data.parameters[group->rank()];
    const auto pieces = make_pieces(parameters, group, 1);  // a bucket each
    at::NoGradGuard no_grad;
    for (const auto& piece : pieces->own()) {
      if (piece.defined()) piece.add_(1);
    }
    std::vector<bool> updated(kPieceNames.size(), false);
    updated[7] = true;
    pieces->all_gather(updated);
    EXPECT_TRUE(at::equal(parameters[7], old.parameters[0][7] + 1));
    EXPECT_EQ(at::equal(parameters[0], old.parameters[0][0] + 1), replicas == 1);
  });
}

/// A parameter may be given other memory, and keeps its piece.
TEST_P(ParameterPiecesTest, FollowTheParametersMemory) {
  const int replicas = GetParam();
  const Data data(replicas, 1);
  comm::run_ranks(replicas, [&](const comm::CommunicatorPtr& group) {
    auto parameters = data.parameters[group->rank()];
    const auto pieces = make_pieces(parameters, group);
    parameters[7].set_data(at::full({33, 31}, 7.));
    pieces->bind();
    const auto& piece = pieces->own()[7];
    if (!piece.defined()) return;
    EXPECT_TRUE(at::equal(piece, at::full({piece.numel()}, 7.)));
  });
}

struct PiecesCase {
  int replicas;
  int local_shards;
  bool views;
};

class GradientsInPieces : public ::testing::TestWithParam<PiecesCase> {};

/// Against a formula, and the neighbours' pieces are others.
TEST_P(GradientsInPieces, HaveTheBitsOfTheWhole) {
  const PiecesCase& test = GetParam();
  constexpr int kMicrobatches = 2;
  const Data data(test.replicas, kMicrobatches);
  BucketOptions options;
  options.bucket_bytes = 2048;
  options.microbatches = kMicrobatches;
  options.gradient_shards = test.replicas * test.local_shards;
  options.divisor = 3;
  options.gradient_as_bucket_view = test.views;
  const int per_shard = kMicrobatches / test.local_shards;
  std::vector<at::Tensor> sums;
  for (size_t i = 0; i < kPieceNames.size(); ++i) {
    at::Tensor total;
    for (int shard = 0; shard < options.gradient_shards; ++shard) {
      at::Tensor sum;
      for (int m = shard * per_shard; m < (shard + 1) * per_shard; ++m) {
        auto term = data.gradients[i][m];
        if (term.scalar_type() == at::kHalf) term = term.to(at::kFloat);
        sum = sum.defined() ? sum + term : term;
      }
      total = total.defined() ? total + sum : sum;
    }
    sums.push_back((total / options.divisor).to(data.gradients[i][0].scalar_type()));
  }
  comm::run_ranks(test.replicas, [&](const comm::CommunicatorPtr& group) {
    const auto& parameters = data.parameters[group->rank()];
    const auto pieces = make_pieces(parameters, group);
    GradientBuckets buckets(pieces, options);
    for (int step = 1; step <= 3; ++step) {
      for (int m = 0; m < kMicrobatches; ++m) {
        for (size_t i = 0; i < kUnused; ++i) {
          buckets.add(i, m, data.gradients[i][group->rank() * kMicrobatches + m]);
        }
      }
      buckets.reduce();
      buckets.finish();
      for (size_t i = 0; i < kPieceNames.size(); ++i) {
        const auto& piece = pieces->own()[i];
        EXPECT_EQ(parameters[i].grad().defined(), i != kUnused) << kPieceNames[i];
        if (!piece.defined()) continue;
        EXPECT_EQ(piece.grad().defined(), i != kUnused) << kPieceNames[i];
        if (i == kUnused) continue;
        // The second step adds to the first, the third begins anew.
        const auto want = step == 2 ? sums[i] + sums[i] : sums[i];
        const auto owned = pieces->owned(i, group->rank());
        EXPECT_TRUE(at::equal(piece.grad(), brute_force(want, parameters[i], owned)))
            << kPieceNames[i] << " step " << step;
        for (int other = 0; other < test.replicas; ++other) {
          const auto neighbour = pieces->owned(i, other);
          if (other == group->rank() || neighbour.first == neighbour.second) continue;
          EXPECT_FALSE(at::equal(piece.grad(), brute_force(want, parameters[i], neighbour)));
        }
      }
      if (step != 2) continue;
      for (const auto& parameter : parameters) parameter.mutable_grad().reset();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Replicas, ParameterPiecesTest, ::testing::Values(1, 2, 3, 4));
INSTANTIATE_TEST_SUITE_P(Cases, GradientsInPieces,
                         ::testing::Values(PiecesCase{1, 1, false}, PiecesCase{2, 1, false},
                                           PiecesCase{3, 1, false}, PiecesCase{4, 1, false},
                                           PiecesCase{1, 2, false}, PiecesCase{2, 2, false},
                                           PiecesCase{3, 2, false}, PiecesCase{2, 1, true},
                                           PiecesCase{3, 1, true}));

/// `.grad` of a parameter says that there is a gradient, and has no numbers.
TEST(ParameterPieces, GradientsOfParametersHaveNoNumbers) {
  comm::run_ranks(1, [&](const comm::CommunicatorPtr& group) {
    const auto parameters = make_divided();
    const auto pieces = make_pieces(parameters, group);
    const auto& piece = pieces->own()[0];
    const auto gradient = at::ones({150});
    EXPECT_FALSE(pieces->has_gradient(0));
    pieces->add_gradient(0, gradient);
    EXPECT_TRUE(pieces->has_gradient(0));
    EXPECT_EQ(parameters[0].grad().sizes(), parameters[0].sizes());
    EXPECT_THROW(parameters[0].grad().sum().item(), c10::Error);

    // Dropped by whatever means: the next one is the first.
    parameters[0].mutable_grad().reset();
    EXPECT_FALSE(pieces->has_gradient(0));
    EXPECT_FALSE(piece.grad().defined());
    pieces->add_gradient(0, gradient);
    parameters[0].mutable_grad().reset();
    pieces->add_gradient(0, gradient);
    EXPECT_TRUE(at::equal(piece.grad(), at::ones({150})));

    // Changes of numbers that are not there are errors.
    const auto scaled = smp::testing::error_of<Error>([&] { parameters[0].grad().mul_(0.5); });
    EXPECT_NE(scaled.find("needs .grad of parameter \"a\", which is in pieces on the replicas"),
              std::string::npos);
    const std::string text = "the program has changed .grad of parameter \"a\", which holds no";
    parameters[0].mutable_grad() = at::ones({5, 30});
    EXPECT_NE(smp::testing::error_of<Error>([&] { pieces->add_gradient(0, gradient); }).find(text),
              std::string::npos);
  });
}

}  // namespace
}  // namespace smp::dp
