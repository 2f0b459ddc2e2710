// SPDX-License-Identifier: Apache-2.0
// Learns the sine function on any number of ranks.
#include <torch/torch.h>

#include <iostream>

#include "smp/smp.h"

int main() {
  smp::init(smp::Config().microbatches(4));  // the launcher's configuration wins over this one
  torch::set_num_threads(1);
  torch::manual_seed(1);

  torch::nn::Sequential net{torch::nn::Linear(1, 64), torch::nn::Tanh(), torch::nn::Linear(64, 64),
                            torch::nn::Tanh(), torch::nn::Linear(64, 1)};
  smp::DistributedModel<torch::nn::Sequential> model(net);
  smp::DistributedOptimizer<torch::optim::Adam> optimizer(model->parameters(), 0.01);

  auto train = smp::step([&](torch::Tensor x, torch::Tensor y) {
    auto loss = torch::mse_loss(model(x), y);
    model->backward(loss);
    return loss;
  });

  for (int step = 1; step <= 200; ++step) {
    auto whole = torch::rand({64, 1}) * 6;  // the same on every rank
    auto x = smp::shard(whole);             // this replica's share
    optimizer.zero_grad();
    auto loss = train(x, torch::sin(x)).reduce_mean();
    optimizer.step();
    if (step % 50 == 0 && smp::rank() == 0) {
      std::cout << "step " << step << "  loss " << loss.item<float>() << std::endl;
    }
  }
  smp::save("sine", model, optimizer);
}
