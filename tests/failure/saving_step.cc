// SPDX-License-Identifier: Apache-2.0
// usage: saving_step FOLDER [CALL]
//
// Trains and saves in the background, over an earlier checkpoint; the last rank is killed at the
// CALL-th of its file calls in the second save. Started by saving_test through smprun.

#include <string>

#include "smp/smp.h"
#include "tests/checkpoint/file_calls.h"
#include "tests/smp/models.h"

int main(int argc, char** argv) {
  using smp::testing::TinyGpt;
  using smp::testing::TinyGptImpl;
  const std::string folder = argv[1];
  torch::set_num_threads(1);
  torch::manual_seed(1);
  smp::init();
  TinyGpt net(/*tied=*/true, /*layers=*/2);
  smp::DistributedModel<TinyGpt> model(net);
  smp::DistributedOptimizer<torch::optim::AdamW> optimizer(model->parameters(), 1e-2);
  auto step = smp::step([&](torch::Tensor x, torch::Tensor y) {
    auto loss = net->loss(x, y);
    model->backward(loss);
    return loss;
  });
  const auto train = [&] {
    const auto batch = TinyGptImpl::batch(4);
    optimizer.zero_grad();
    step(batch[0], batch[1]);
    optimizer.step();
  };
  train();
  smp::save_async(folder + "/a", model, optimizer, R"({"save": 1})").wait();
  train();
  smp::save(folder + "/expected", model, optimizer, R"({"save": 2})");
  if (argc > 2 && smp::rank() == smp::size() - 1) {
    smp::testing::inject(folder, smp::testing::Fault::kKill, std::stoi(argv[2]));
  }
  const auto handle = smp::save_async(folder + "/a", model, optimizer, R"({"save": 2})");
  for (int i = 0; i < 3; ++i) train();  // other values everywhere
  handle.wait();
  smp::shutdown();
  return 0;
}
