// SPDX-License-Identifier: Apache-2.0
// The program of docs/from/others.md.
#include <vector>

#include "smp/smp.h"
#include "tests/docs/from/training.h"

int main() {
  torch::set_num_threads(1);
  const auto batches = make_batches();
  std::vector<double> losses;

  smp::init(smp::Config().partitions(2).microbatches(4).pipeline("1f1b"));

  Net net;  // the whole, on every rank
  smp::DistributedModel<Net> model(net);
  smp::set_partition(net->fc2, 1);  // or leave the cut to the library
  smp::set_partition(net->fc3, 1);

  auto train = smp::step([&](torch::Tensor data, torch::Tensor target) {
    auto loss = torch::cross_entropy_loss(model(data), target);
    model->backward(loss);
    return loss;
  });
  smp::DistributedOptimizer<torch::optim::AdamW> optimizer(model->parameters(), 1e-3);

  for (const auto& [data, target] : batches) {
    optimizer.zero_grad();
    auto loss = train(data, target);  // on all ranks, with the whole batch
    optimizer.step();
    losses.push_back(loss.reduce_mean().item<double>());
  }

  return check_losses(losses, plain_losses());
}
