// SPDX-License-Identifier: Apache-2.0
// Trains replicas and fails in the way its first argument names, on the last rank. Started by
// replica_failure_test through smprun.

#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <stdexcept>
#include <string>
#include <thread>

#include "smp/ddp.h"

namespace {

void train(const std::string& how) {
  torch::set_num_threads(1);
  smp::init();
  const bool culprit = smp::rank() == smp::size() - 1;
  smp::DistributedDataParallel<torch::nn::Linear> model(
      torch::nn::Linear(8, 2), smp::DDPOptions().first_bucket_cap_mb(1e-5).bucket_cap_mb(1e-5));
  const int steps = how == "batches" && culprit ? 3 : 4;
  for (int step = 0; step < steps; ++step) {
    if (culprit && step == 2) {
      if (how == "kill") kill(getpid(), SIGKILL);
      if (how == "stall") std::this_thread::sleep_for(std::chrono::seconds(60));
      if (how == "exception") throw std::runtime_error("no data file");
    }
    model->zero_grad();
    model(torch::ones({2, 8})).sum().backward();
  }
  smp::shutdown();
}

}  // namespace

int main(int argc, char** argv) {
  train(argc > 1 ? argv[1] : "");
  return 0;
}
