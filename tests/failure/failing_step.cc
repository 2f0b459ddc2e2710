// SPDX-License-Identifier: Apache-2.0
// A training program that fails in the way its first argument names, on the last rank if it can.
// Started by failure_test through smprun.

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <stdexcept>
#include <string>

#include "core/status_reader.h"
#include "smp/smp.h"
#include "tests/failure/patience.h"
#include "tests/failure/stopped.h"
#include "tests/smp/models.h"

namespace {

using smp::testing::processes_of_ranks;
using smp::testing::sleep_until;
using smp::testing::state_of;
using smp::testing::stop_one;
using smp::testing::wait_at_most;

/// A process that this rank forks, and that ends as a rank must not.
void fork_one(bool throws) {
  const pid_t child = fork();
  if (child == 0 && throws) std::terminate();
  if (child == 0) std::exit(3);
  int status = 0;
  waitpid(child, &status, 0);
  std::cout << (throws ? "forked, signal " : "forked, status ")
            << (throws ? WTERMSIG(status) : WEXITSTATUS(status)) << std::endl;
}

/// One rank computes for ever. The other returns when it does.
void busy_one(bool culprit) {
  const int process = processes_of_ranks().back();
  for (volatile bool busy = true; culprit && busy;) {
  }
  const int64_t before = state_of(process).ticks;
  sleep_until([&] { return state_of(process).ticks > before + 10; });
}

/// Whether a rank waits for the end of the job.
bool is_at_the_end(int rank) {
  const auto job = smp::core::read_own_job();
  const auto* status = job ? job->find(rank) : nullptr;
  return status != nullptr && status->is_waiting() && status->action == "smp::shutdown";
}

void train(const std::string& how) {
  torch::set_num_threads(1);
  smp::init();
  if (how == "init_again") {
    smp::shutdown();
    smp::init();
    throw std::runtime_error("nobody catches this");
  }
  if (how == "idle") {
    std::cout << "rank pid " << getpid() << std::endl;
    pause();
  }
  const bool culprit = smp::rank() == smp::size() - 1;
  smp::testing::TinyGpt net(false, how == "other_model" && culprit ? 4 : 3);
  smp::DistributedModel<smp::testing::TinyGpt> model(net);
  double weight = 1;
  int steps = 0;
  auto step = smp::step(
      [&](torch::Tensor x, torch::Tensor y) {
        if (how == "exception" && culprit && steps == 2) {
          throw std::runtime_error("the user's function failed");
        }
        auto loss = net->loss(x, y) * weight;
        if (how == "item" && steps == 1) std::cout << loss.item<float>();
        model->backward(loss);
        return loss;
      },
      smp::StepOptions().name("train"));
  for (; steps < 4; ++steps) {
    torch::manual_seed(steps);
    auto batch = smp::testing::TinyGptImpl::batch(4);
    if (how == "two_batches") batch[1] = batch[1].narrow(0, 0, 2);
    if (how == "other_batch" && culprit && steps == 1) batch[0] = 16 - batch[0];
    if (how == "loss_weight" && culprit && steps == 1) weight = 0.5;
    if (how == "fork" && steps == 1) {
      fork_one(false);
      fork_one(true);
    }
    if (how == "last_words" && culprit && steps == 1) {
      std::cout << "last words of " << smp::rank() << "\n";  // not flushed
      std::exit(5);
    }
    if (how == "exit" && culprit && steps == 1) std::_Exit(7);
    if (how == "caught_outside" && culprit && steps == 1) throw std::runtime_error("no data file");
    if (how == "kill" && culprit && steps == 1) kill(getpid(), SIGKILL);
    if (how == "caught_barrier" && steps == 1) {
      if (culprit) kill(getpid(), SIGKILL);
      smp::barrier();
    }
    if ((how == "stop" || how == "pause") && steps == 1) stop_one(smp::size() - 1);
    if (how == "busy" && steps == 1) busy_one(culprit);
    if ((how == "stop" || how == "busy") && steps == 1) wait_at_most(std::chrono::seconds(1));
    if (how == "saves_alone" && !culprit && steps == 1) smp::save("saved_alone", model);
    if (how == "ends_early" && culprit) std::exit(0);
    for (int fd = 3; how == "closes_files" && culprit && steps == 1 && fd < 400; ++fd) close(fd);
    if (how == "libtorch" && culprit && steps == 1)
      torch::mm(torch::ones({2, 3}), torch::ones({2, 3}));
    step(batch[0], batch[1]);
  }
  if (how == "stop_at_end") {
    stop_one(smp::size() - 1);
    wait_at_most(std::chrono::seconds(1));
  }
  if (how == "closes_files") {
    smp::barrier();
    wait_at_most(std::chrono::seconds(12));  // longer than a busy machine may stop before the end
  }
  if (how == "steps_at_end") {
    smp::barrier();
    if (!culprit) {
      sleep_until([] { return is_at_the_end(smp::size() - 1); });
      wait_at_most(std::chrono::seconds(3));
    }
    const auto batch = smp::testing::TinyGptImpl::batch(4);
    if (!culprit) step(batch[0], batch[1]);
    return;  // the job ends after main()
  }
  smp::shutdown();
}

}  // namespace

int main(int argc, char** argv) {
  const std::string how = argc > 1 ? argv[1] : "";
  if (how.rfind("caught", 0) != 0) {
    train(how);
    return 0;
  }
  try {
    train(how == "caught" ? "exception" : how);
  } catch (const std::exception& error) {
    std::cerr << "caught: " << error.what() << "\n";
    return 1;
  }
  return 0;
}
