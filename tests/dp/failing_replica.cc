// SPDX-License-Identifier: Apache-2.0
// Trains replicas and fails in the way its first argument names, on the last rank. Started by
// replica_failure_test through smprun.

#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <stdexcept>
#include <string>

#include "comm/group_core.h"
#include "smp/ddp.h"
#include "tests/failure/stopped.h"

namespace {

constexpr int kCommonSteps = 3;

/// One rank sleeps for ever. The other goes on when it does.
void stall(bool culprit) {
  const int process = smp::testing::processes_of_ranks().back();
  smp::barrier();
  while (culprit) pause();
  smp::testing::sleep_until([&] { return smp::testing::state_of(process).letter == 'S'; });
}

void train(const std::string& how) {
  torch::set_num_threads(1);
  smp::init();
  const bool culprit = smp::rank() == smp::size() - 1;
  smp::DistributedDataParallel<torch::nn::Linear> model(
      torch::nn::Linear(8, 2), smp::DDPOptions().first_bucket_cap_mb(1e-5).bucket_cap_mb(1e-5));
  smp::comm::CommunicatorPtr replicas;  // those of the model alone
  model.register_comm_hook([&](const smp::GradBucket& bucket) {
    replicas = bucket.group.core().communicator();
    return smp::all_reduce_hook(bucket);
  });
  const int steps = how == "batches" && culprit ? kCommonSteps : kCommonSteps + 1;
  for (int step = 0; step < steps; ++step) {
    if (how == "stall" && step == 2) stall(culprit);
    // The other does not come any more, so that a short wait is as good as a long one.
    const bool is_alone = how == "stall" ? step == 2 : how == "batches" && step == kCommonSteps;
    if (is_alone) replicas->set_timeout(std::chrono::seconds(1));
    if (culprit && step == 2) {
      if (how == "kill") kill(getpid(), SIGKILL);
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
