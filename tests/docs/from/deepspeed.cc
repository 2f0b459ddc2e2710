// SPDX-License-Identifier: Apache-2.0
// The program of docs/from/others.md.
#include <vector>

#include "smp/smp.h"
#include "tests/docs/from/training.h"

int main() {
  enter_test_folder();
  torch::set_num_threads(1);
  const auto batches = make_batches();
  std::vector<double> losses;

  smp::init(smp::Config().partitions(2).microbatches(4));

  Net net;  // any module, not a list of layers
  smp::DistributedModel<Net> model(net);
  smp::DistributedOptimizer<torch::optim::AdamW> optimizer(model->parameters(), 1e-3);

  auto train = smp::step([&](torch::Tensor data, torch::Tensor target) {
    auto loss = torch::cross_entropy_loss(model(data), target);
    model->backward(loss);
    return loss;
  });

  for (const auto& [data, target] : batches) {
    optimizer.zero_grad();
    auto loss = train(data, target).reduce_mean();
    smp::clip_grad_norm_(model, 0.5);
    optimizer.step();
    losses.push_back(loss.item<double>());
  }
  smp::save("checkpoints", model, optimizer);

  return check_losses(losses, plain_losses(/*max_norm=*/0.5));
}
