// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <ostream>
#include <vector>

#include "graph/absent.h"
#include "tests/smp/sharded_state.h"

// Norms and clipped gradients of ranks, against torch::nn::utils in one plain process, to the bit.
namespace smp {
namespace {

using namespace testing;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// The clipping that a program asks for.
struct Clip {
  double max_norm;
  double norm_type;
};

std::ostream& operator<<(std::ostream& out, const Clip& clip) {
  return out << "order " << clip.norm_type << ", at most " << clip.max_norm;
}

/// Compares norms, gradients and weights.
void expect_as_plain(const Clip& clip, const Training& run, const Config& config) {
  auto tested =
      sharded_case(run, recipe<torch::optim::SGD>(torch::optim::SGDOptions(0.5).momentum(0.9)));
  tested.config = config;
  tested.max_norm = clip.max_norm;
  tested.norm_type = clip.norm_type;
  tested.decays = false;
  const auto got = tested.run_on_ranks();
  const auto expected = tested.run_plain();
  EXPECT_EQ(got.norms, expected.norms);
  EXPECT_EQ(got.largest, expected.largest);
  expect_equal(got.weights, expected.weights, "value");
}

const std::vector<Clip> kClips{{0.05, 2},   {0.05, kInfinity}, {0.05, 1},          {0.05, 3.5},
                               {0.05, 0.5}, {1e-8, -1},        {1e-9, -kInfinity}, {0.5, 0}};

class ClipGradNorm : public ::testing::TestWithParam<Clip> {};

/// Whole gradients, one to three stages, replicas.
TEST_P(ClipGradNorm, OfStages) {
  for (const Training& run : {Training{1, 1, false}, Training{2, 1, false}, Training{3, 1, false},
                              Training{2, 2, false}}) {
    SCOPED_TRACE(c10::str(run));
    expect_as_plain(GetParam(), run, config_of(run));
  }
}

/// Replicas have pieces of gradients.
TEST_P(ClipGradNorm, OfShardedOptimizerState) {
  for (const Training& run : {Training{1, 2}, Training{1, 3}, Training{2, 2}}) {
    SCOPED_TRACE(c10::str(run));
    expect_as_plain(GetParam(), run, config_of(run));
  }
}

/// Ranks have shards of parameters; small ones are whole.
TEST_P(ClipGradNorm, OfShardedParameters) {
  Training run{1, 4, false};
  run.microbatches = 1;
  for (const int degree : {2, 4}) {
    SCOPED_TRACE(c10::str("degree ", degree, " of 4 replicas"));
    expect_as_plain(GetParam(), run,
                    stages(1)
                        .microbatches(1)
                        .ddp(true)
                        .sharded_data_parallel_degree(degree)
                        .sdp_param_persistence_threshold(100)
                        .sdp_reduce_bucket_size(1000)
                        .sdp_gradient_clipping(1e9));
  }
}

INSTANTIATE_TEST_SUITE_P(Orders, ClipGradNorm, ::testing::ValuesIn(kClips));

/// One step of an Mlp on two stages, then `body(model)` on each rank.
template <class Body>
void after_a_step(const Body& body, torch::Dtype dtype = torch::kFloat, int replicas = 1,
                  bool sharded = false) {
  torch::set_num_threads(1);
  const auto config = stages(2).ddp(replicas > 1).shard_optimizer_state(sharded);
  std::vector<Mlp> nets;
  for (int i = 0; i < 2 * replicas; ++i) nets.push_back(make_mlp(3, dtype));
  torch::manual_seed(4);
  const auto x = torch::randn({4, MlpImpl::kWidth}).to(dtype);
  run_as_threads(2 * replicas, config, [&] {
    DistributedModel<Mlp> model(nets[rank()]);
    auto train = step([&](torch::Tensor input) {
      auto loss = model(input).square().mean();
      model->backward(loss);
      return loss;
    });
    EXPECT_EQ(clip_grad_norm_(model, 1), 0);  // no gradients yet
    train(x);
    body(model);
  });
}

/// Plain gradients of the same.
Tensors plain_gradients(const Mlp& net) {
  const auto dtype = net->parameters()[0].scalar_type();
  torch::manual_seed(4);
  const auto x = torch::randn({4, MlpImpl::kWidth}).to(dtype);
  const auto parameters = unique_parameters(*net);
  plain_backward(parameters, 1, 2,
                 [&](int m) { return Mlp(net)->forward(part(x, 2, m)).square().mean(); });
  return parameters;
}

void expect_gradients(DistributedModel<Mlp>& model, const Tensors& expected) {
  const auto parameters = model->parameters();
  for (const auto& item : model->local_named_parameters()) {
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (!parameters[i].is_same(item.value())) continue;
      EXPECT_TRUE(torch::allclose(item.value().grad(), expected[i].grad(), 0, 0, true))
          << item.key() << " on rank " << rank();
    }
  }
}

TEST(ClipGrad, HalfAndDoublePrecision) {
  for (const auto dtype : {torch::kBFloat16, torch::kHalf, torch::kDouble}) {
    for (const double norm_type : {2.0, kInfinity}) {
      const auto net = make_mlp(3, dtype);
      const auto plain = plain_gradients(net);
      const double expected = torch::nn::utils::clip_grad_norm_(plain, 0.01, norm_type);
      after_a_step(
          [&](DistributedModel<Mlp>& model) {
            EXPECT_EQ(clip_grad_norm_(model, 0.01, norm_type), expected);
            expect_gradients(model, plain);
          },
          dtype);
    }
  }
}

/// Some of the parameters, in another order, and some twice.
TEST(ClipGrad, ListsOfParameters) {
  const auto net = make_mlp();
  const auto plain = plain_gradients(net);
  const Tensors some{plain[7], plain[2], plain[3], plain[0]};
  const double expected = torch::nn::utils::clip_grad_norm_(some, 0.01);
  after_a_step([&](DistributedModel<Mlp>& model) {
    const auto all = model->parameters();
    EXPECT_EQ(clip_grad_norm_({all[7], all[2], all[3], all[7], all[0], all[2]}, 0.01), expected);
    expect_gradients(model, plain);
    EXPECT_EQ(grad_norm(Tensors{}).item<double>(), 0);
    EXPECT_EQ(clip_grad_norm_({all[7]}, 1e9),
              plain[7].grad().norm().item<double>());  // one: its own norm
  });
}

TEST(ClipGrad, SeveralModels) {
  torch::set_num_threads(1);
  const auto x = torch::full({4, MlpImpl::kWidth}, 0.3);
  auto one = make_mlp(1), two = make_mlp(2);
  Tensors plain = unique_parameters(*one);
  for (const auto& parameter : unique_parameters(*two)) plain.push_back(parameter);
  plain_backward(plain, 1, 2, [&](int m) {
    return one(part(x, 2, m)).square().mean() + two(part(x, 2, m)).abs().mean();
  });
  const double expected = torch::nn::utils::clip_grad_norm_(plain, 0.01);
  std::vector<std::pair<Mlp, Mlp>> nets;
  for (int i = 0; i < 2; ++i) nets.emplace_back(make_mlp(1), make_mlp(2));
  run_as_threads(2, stages(2), [&] {
    DistributedModel<Mlp> a(nets[rank()].first, ModelOptions().name("a"));
    DistributedModel<Mlp> b(nets[rank()].second, ModelOptions().name("b"));
    auto train = step([&](torch::Tensor input) {
      auto loss = a(input).square().mean() + b(input).abs().mean();
      a->backward(loss);
      return loss;
    });
    train(x);
    auto all = a->parameters();
    for (const auto& parameter : b->parameters()) all.push_back(parameter);
    EXPECT_EQ(clip_grad_norm_(all, 0.01), expected);
    for (size_t i = 0; i < all.size(); ++i) {
      if (graph::is_absent(all[i].grad())) continue;
      EXPECT_TRUE(torch::equal(all[i].grad(), plain[i].grad())) << i;
    }
  });
}

/// One gradient on one rank is not finite: as in one process, everywhere.
TEST(ClipGrad, NormsThatAreNotFinite) {
  for (const double value : {kInfinity, -kInfinity, std::nan("")}) {
    for (const double norm_type : {2.0, kInfinity}) {
      const auto net = make_mlp();
      const auto plain = plain_gradients(net);
      plain[0].mutable_grad()[1][2] = value;
      after_a_step([&](DistributedModel<Mlp>& model) {
        const auto first = model->parameters()[0];
        if (first.grad().defined()) first.mutable_grad()[1][2] = value;
        const auto text = error_of<UsageError>([&] { clip_grad_norm_(model, 1, norm_type, true); });
        expect_has(text, {"of the gradients is", "so they cannot be clipped. Nothing was changed"});
        expect_gradients(model, plain);
      });
      const double expected = torch::nn::utils::clip_grad_norm_(plain, 1, norm_type);
      EXPECT_FALSE(std::isfinite(expected));
      after_a_step([&](DistributedModel<Mlp>& model) {
        const auto first = model->parameters()[0];
        if (first.grad().defined()) first.mutable_grad()[1][2] = value;
        const double norm = clip_grad_norm_(model, 1, norm_type);
        EXPECT_TRUE(norm == expected || (std::isnan(norm) && std::isnan(expected)));
        expect_gradients(model, plain);
      });
    }
  }
}

TEST(ClipGrad, Values) {
  const auto net = make_mlp();
  const auto plain = plain_gradients(net);
  torch::nn::utils::clip_grad_value_(plain, 0.01);
  after_a_step([&](DistributedModel<Mlp>& model) {
    clip_grad_value_(model, 0.01);
    expect_gradients(model, plain);
  });
  // Pieces: every element of every gradient is in one.
  after_a_step(
      [&](DistributedModel<Mlp>& model) {
        clip_grad_value_(model, 1e-6);
        for (const auto& piece : model->local_virtual_parameters()) {
          EXPECT_LE(piece.grad().abs().max().item<float>(), 1e-6f);
          EXPECT_GT(piece.grad().abs().max().item<float>(), 0);
        }
        EXPECT_NEAR(grad_norm(model, kInfinity).item<double>(), 1e-6, 1e-12);
      },
      torch::kFloat, 2, true);
}

TEST(ClipGradErrors, OtherListsOnOtherRanks) {
  after_a_step([&](DistributedModel<Mlp>& model) {
    const auto local =
        error_of<UsageError>([&] { clip_grad_norm_(model->local_parameters(), 1.0); });
    expect_has(local, {"smp::clip_grad_norm_ was called with other arguments on other ranks",
                       "such as model->parameters() (not local_parameters())"});
    error_of<UsageError>([&] { clip_grad_norm_(model, rank() == 0 ? 1.0 : 2.0); });
    error_of<UsageError>([&] { grad_norm(model, rank() == 0 ? 1.0 : 2.0); });
    EXPECT_GT(clip_grad_norm_(model, 1), 0);  // goes on
  });
}

TEST(ClipGradErrors, WhereAndWhat) {
  after_a_step([&](DistributedModel<Mlp>&) {
    const auto text = error_of<UsageError>([&] { clip_grad_value_({torch::ones({3})}, 1.0); });
    expect_has(text, {"smp::clip_grad_value_: tensor 0 of shape [3] is not a parameter of a "
                      "DistributedModel"});
  });
  const auto inside = error_of_run<UsageError>(1, stages(1), [&] {
    DistributedModel<Mlp> model(make_mlp());
    step([&](torch::Tensor input) {
      auto loss = model(input).sum();
      model->backward(loss);
      clip_grad_norm_(model, 1.0);
      return loss;
    })(torch::ones({4, MlpImpl::kWidth}));
  });
  expect_has(inside, {"smp::clip_grad_norm_ was called inside a step function. Gradients are "
                      "complete when the step has returned"});
}

}  // namespace
}  // namespace smp
