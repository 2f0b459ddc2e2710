// SPDX-License-Identifier: Apache-2.0
// The program of docs/from/smp.md.
#include "smp/smp.h"

#include <vector>

#include "tests/docs/from/training.h"

int main() {
  enter_test_folder();
  torch::set_num_threads(1);
  const auto batches = make_batches();
  std::vector<double> losses;

  smp::init(smp::Config().partitions(2).microbatches(4));

  Net net;
  smp::DistributedModel<Net> model(net);
  smp::DistributedOptimizer<torch::optim::AdamW> optimizer(model->parameters(), 1e-3);

  auto train_step = smp::step([&](torch::Tensor data, torch::Tensor target) {
    auto output = model(data);
    auto loss = torch::cross_entropy_loss(output, target);
    model->backward(loss);
    return std::make_tuple(output, loss);
  });

  for (const auto& [data, target] : batches) {
    optimizer.zero_grad();
    auto [output, loss] = train_step(data, target);
    optimizer.step();
    losses.push_back(loss.reduce_mean().item<double>());
  }
  smp::save_checkpoint("checkpoints", "last", model, optimizer);

  return check_losses(losses, plain_losses());
}
