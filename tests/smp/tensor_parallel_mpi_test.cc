// SPDX-License-Identifier: Apache-2.0
// Runs on 4 ranks under mpirun: 2 stages x 2 ranks that divide layers, compared with one plain
// libtorch process.

#include "tests/smp/tensor_parallel_run.h"

namespace smp::testing {
namespace {

const TensorLayout kLayout{2, 2};

class MpiTensorParallel : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    if (!is_initialized()) init(config_of(kLayout));
  }
};

TEST_F(MpiTensorParallel, AModelThatKnowsNothingOfItIsThatOfOneProcess) {
  torch::set_num_threads(1);
  // The same on every rank: each compares with a plain run of its own.
  const auto plain = make_model<PlainModel>(5);
  const auto parameters = unique_parameters(*plain);
  torch::optim::SGD plain_optimizer(parameters, kOptions);
  const auto net = make_model<PlainModel>(rank() == 0 ? 5 : 6);
  set_tensor_parallelism(*net);
  ModelOf<PlainModel> model(net);
  DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), kOptions);
  auto train = step([&](torch::Tensor x, torch::Tensor y) {
    auto loss = net->loss(x, y);
    model->backward(loss);
    return loss;
  });
  for (int i = 0; i < kSteps; ++i) {
    const auto batch = token_batch(i);
    plain_optimizer.zero_grad();
    const auto expected = plain_backward(parameters, 1, kMicrobatches, [&](int m) {
      const KeyedRandom random(kSeed, "step 0", i, m);
      return plain->loss(part(batch[0], kMicrobatches, m), part(batch[1], kMicrobatches, m));
    });
    optimizer.zero_grad();
    const auto losses = train(own_batch(kLayout, batch[0]), own_batch(kLayout, batch[1]));
    for (size_t m = 0; m < losses.outputs().size(); ++m) {
      expect_close(losses.outputs()[m], expected[dp_rank() * losses.outputs().size() + m],
                   "loss " + std::to_string(m));
    }
    const double norm = clip_grad_norm_(model, kMaxNorm);
    EXPECT_NEAR(norm, torch::nn::utils::clip_grad_norm_(parameters, kMaxNorm), 1e-12 * norm);
    plain_optimizer.step();
    optimizer.step();
  }
  EXPECT_FALSE(model->scaled_batch_reducer_named_parameters().is_empty());
  expect_close(to_map(model->state_dict()), state_of(*plain), "value");
}

}  // namespace
}  // namespace smp::testing
