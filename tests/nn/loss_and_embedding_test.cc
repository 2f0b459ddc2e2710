// SPDX-License-Identifier: Apache-2.0
// Operators that compute with a part of a vocabulary, against torch's on the whole.

#include <ATen/autocast_mode.h>
#include <ATen/core/Reduction.h>
#include <c10/util/ScopeExit.h>

#include <limits>

#include "smp/nn/operators.h"
#include "tests/nn/harness.h"

namespace smp::nn::testing {
namespace {

using torch::Tensor;

struct Loss {
  Tensor logits, target;
  std::optional<Tensor> weight;
  int64_t reduction = at::Reduction::Mean;
  int64_t ignore_index = -100;
  double label_smoothing = 0;
};

/// Calls the operator itself, in a group of one too.
Tensor operator_loss(const Tensor& logits, const Loss& loss) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow("smp::tp_cross_entropy", "")
      .typed<Tensor(const Tensor&, const Tensor&, const std::optional<Tensor>&, int64_t, int64_t,
                    double)>()
      .call(logits, loss.target, loss.weight, loss.reduction, loss.ignore_index,
            loss.label_smoothing);
}

void expect_as_torch(const Loss& loss, int ranks, const std::string& what,
                     double relative = 1e-12) {
  const Tensor whole = loss.logits.detach().clone().requires_grad_();
  const Tensor expected = at::cross_entropy_loss(whole, loss.target, loss.weight, loss.reduction,
                                                 loss.ignore_index, loss.label_smoothing);
  const Tensor of_result = torch::randn_like(expected);
  expected.backward(of_result);
  Tensors gradients(ranks);
  on_ranks(ranks, [&](int rank) {
    const Tensor logits = part_of(loss.logits, 1, 1, ranks, rank).requires_grad_();
    const Tensor got = operator_loss(logits, loss);
    expect_close(got.detach(), expected.detach(), what, relative);
    got.backward(of_result);
    gradients[rank] = logits.grad();
  });
  expect_close(whole_of(gradients, 1), whole.grad(), "gradient of " + what, relative);
}

TEST(CrossEntropy, IsThatOfTorch) {
  torch::manual_seed(1);
  for (const int ranks : {1, 2, 4}) {
    for (const auto& sizes : std::vector<std::vector<int64_t>>{{7, 8}, {2, 12, 3}, {2, 4, 2, 3}}) {
      auto target_sizes = sizes;
      target_sizes.erase(target_sizes.begin() + 1);
      for (const double smoothing : {0.0, 0.1}) {
        for (const auto reduction :
             {at::Reduction::None, at::Reduction::Mean, at::Reduction::Sum}) {
          for (const int extra : {0, 1, 2}) {  // ignored targets, then weights, too
            Loss loss;
            loss.logits = torch::randn(sizes, torch::kDouble) * 3;
            loss.target = torch::randint(sizes[1], target_sizes);
            loss.reduction = reduction;
            loss.label_smoothing = smoothing;
            if (extra > 0) {
              loss.ignore_index = extra == 1 ? -100 : 2;
              loss.target.view(-1)[1] = loss.ignore_index;
              loss.target.view(-1)[3] = loss.ignore_index;
            }
            if (extra == 2) loss.weight = torch::rand({sizes[1]}, torch::kDouble);
            expect_as_torch(loss, ranks,
                            c10::str("loss of ", sizes, " on ", ranks, " ranks, reduction ",
                                     reduction, ", smoothing ", smoothing, ", extra ", extra));
          }
        }
      }
    }
  }
}

TEST(CrossEntropy, OfLargeLogits) {
  torch::manual_seed(2);
  for (const double magnitude : {1e3, 1e6, 1e30}) {
    Loss loss;
    loss.logits = torch::randn({9, 8}, torch::kDouble) * magnitude;
    loss.target = torch::randint(8, {9});
    expect_as_torch(loss, 4, c10::str("loss of logits of ", magnitude));
  }
}

/// Classes that cannot be are -inf: some that are the first of a rank's part, and all of a part.
TEST(CrossEntropy, OfAMaskedVocabulary) {
  torch::manual_seed(3);
  const double infinity = std::numeric_limits<double>::infinity();
  for (const auto reduction : {at::Reduction::None, at::Reduction::Mean, at::Reduction::Sum}) {
    Loss loss;
    loss.reduction = reduction;
    loss.logits = torch::randn({6, 8}, torch::kDouble);
    for (const int64_t masked : {0, 4, 6, 7}) loss.logits.select(1, masked).fill_(-infinity);
    loss.target = torch::tensor({1, 2, 3, 5, 1, 5});
    for (const int ranks : {1, 2, 4}) {
      expect_as_torch(loss, ranks, c10::str("loss of a masked vocabulary on ", ranks, " ranks"));
    }
  }
}

TEST(CrossEntropy, OfNothingButIgnoredTargets) {
  Loss loss;
  loss.logits = torch::randn({3, 4}, torch::kDouble);
  loss.target = torch::full({3}, -100, torch::kLong);
  on_ranks(2, [&](int rank) {
    const Tensor logits = part_of(loss.logits, 1, 1, 2, rank);
    EXPECT_TRUE(operator_loss(logits, loss).isnan().item<bool>());  // like torch's: 0 / 0
    Loss sum = loss;
    sum.reduction = at::Reduction::Sum;
    EXPECT_EQ(operator_loss(logits, sum).item<double>(), 0);
  });
}

TEST(CrossEntropy, InFloat32AndHalfPrecision) {
  torch::manual_seed(3);
  Loss loss;
  loss.logits = torch::randn({16, 32}) * 4;
  loss.target = torch::randint(32, {16});
  expect_as_torch(loss, 4, "float32", 1e-6);
  loss.logits = loss.logits.to(torch::kBFloat16);
  Loss exact = loss;
  exact.logits = loss.logits.to(torch::kFloat);
  const double expected = at::cross_entropy_loss(exact.logits, exact.target).item<double>();
  on_ranks(4, [&](int rank) {
    const Tensor got = operator_loss(part_of(loss.logits, 1, 1, 4, rank), loss);
    EXPECT_EQ(got.scalar_type(), torch::kBFloat16);
    EXPECT_NEAR(got.item<double>(), expected, expected / 256);  // one rounding to 8 bits
  });
}

/// The loss is computed in float32 under autocast, like torch's.
TEST(CrossEntropy, UnderAutocast) {
  torch::manual_seed(4);
  Loss loss;
  loss.logits = torch::randn({8, 8}).to(torch::kBFloat16);
  loss.target = torch::randint(8, {8});
  on_ranks(2, [&](int rank) {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    const auto restore =
        c10::make_scope_exit([] { at::autocast::set_autocast_enabled(at::kCPU, false); });
    const Tensor expected = at::cross_entropy_loss(loss.logits, loss.target);
    const Tensor got = operator_loss(part_of(loss.logits, 1, 1, 2, rank), loss);
    EXPECT_EQ(expected.scalar_type(), torch::kFloat);
    EXPECT_EQ(got.scalar_type(), torch::kFloat);
    expect_close(got, expected, "loss", 1e-6);
  });
}

TEST(CrossEntropy, NeverGathersTheLogits) {
  Loss loss;
  loss.logits = torch::randn({5, 64});
  loss.target = torch::randint(64, {5});
  for (const double smoothing : {0.0, 0.1}) {
    loss.label_smoothing = smoothing;
    std::vector<std::shared_ptr<CountingGroup>> groups(2);
    on_ranks(
        2,
        [&](int rank) {
          operator_loss(part_of(loss.logits, 1, 1, 2, rank).requires_grad_(), loss).backward();
        },
        [&](const comm::CommunicatorPtr& group) {
          return groups[group->rank()] = std::make_shared<CountingGroup>(group);
        });
    // The maximum, then the target's logit, the sum, and with smoothing the sum of logits.
    EXPECT_EQ(groups[0]->elements(), 5 * (smoothing > 0 ? 4 : 3));
    EXPECT_EQ(groups[0]->calls().size(), 2u);
  }
}

TEST(CrossEntropy, SaysWhatItCannotDo) {
  on_ranks(2, [](int) {
    Loss loss;
    loss.logits = torch::randn({3, 4});
    loss.target = torch::randn({3, 4});
    expect_has(error_of<UsageError>([&] { operator_loss(loss.logits, loss); }),
               {"logits of sizes [3, 4]", "class indices (int64)",
                "class probabilities as the target are not supported"});
    loss.target = torch::tensor({1, 8, 2});
    expect_has(
        error_of<UsageError>([&] { operator_loss(loss.logits, loss); }),
        {"target 8 is none of the 8 classes of the logits of all ranks", "nor ignore_index -100"});
    loss.target = torch::tensor({1, 7, 2});
    loss.weight = torch::ones({4});
    expect_has(error_of<UsageError>([&] { operator_loss(loss.logits, loss); }),
               {"the weight of the classes has sizes [4]", "have 8 classes",
                "Give every rank the weights of all classes"});
    loss.weight = std::nullopt;
    loss.label_smoothing = 2;
    expect_has(error_of<UsageError>([&] { operator_loss(loss.logits, loss); }),
               {"a label smoothing between 0 and 1 was expected, got 2"});
    loss.label_smoothing = 0;
    loss.logits.requires_grad_();
    expect_has(error_of<UsageError>([&] {
                 torch::autograd::grad({operator_loss(loss.logits, loss)}, {loss.logits}, {}, true,
                                       /*create_graph=*/true);
               }),
               {"its gradient cannot be differentiated again", "without create_graph"});
  });
}

// ---------------------------------------------------------------------------------------------
// Embedding

using OfEmbedding = Tensor(const Tensor&, const Tensor&, int64_t, int64_t, bool);

Tensor operator_rows(const Tensor& weight, const Tensor& indices, int64_t rows, int64_t padding,
                     bool scale) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow("smp::tp_embedding", "")
      .typed<OfEmbedding>()
      .call(weight, indices, rows, padding, scale);
}

TEST(Embedding, OfAVocabularyInPartsIsThatOfTorch) {
  torch::manual_seed(5);
  const auto indices = torch::randint(12, {5, 7});
  for (const int ranks : {1, 2, 4}) {
    for (const int64_t padding : {-1, 0, 7, 11}) {
      for (const bool scale : {false, true}) {
        const auto whole = torch::randn({12, 6}, torch::kDouble).requires_grad_();
        const auto expected = torch::embedding(whole, indices, padding, scale, false);
        const auto of_result = torch::randn_like(expected);
        expected.backward(of_result);
        on_ranks(ranks, [&](int rank) {
          const Tensor weight = part_of(whole.detach(), 0, 1, ranks, rank).requires_grad_();
          const Tensor own = operator_rows(weight, indices, 12, padding, scale);
          const Tensor elsewhere = indices.div(12 / ranks, "floor").ne(rank);
          EXPECT_EQ(own.detach().abs().sum(-1).masked_select(elsewhere).sum().item<double>(), 0);
          const Tensor rows = reduce_from_group(own);
          expect_equal(rows.detach(), expected.detach(), "rows");
          rows.backward(of_result);
          expect_equal(weight.grad(), part_of(whole.grad(), 0, 1, ranks, rank), "gradient");
        });
      }
    }
  }
}

TEST(Embedding, SaysWhatItCannotDo) {
  on_ranks(2, [](int) {
    const auto weight = torch::randn({6, 2});
    expect_has(
        error_of<UsageError>([&] { operator_rows(weight, torch::tensor({1}), 11, -1, false); }),
        {"[6, 2] on each of 2 ranks is not a vocabulary of 11",
         "that the tensor_parallel_degree divides"});
    expect_has(error_of<UsageError>([&] {
                 operator_rows(weight, torch::tensor({1, 12}), 12, -1, false);
               }),
               {"indices from 1 to 12 in a vocabulary of 12", "must be less than num_embeddings"});
  });
}

}  // namespace
}  // namespace smp::nn::testing
