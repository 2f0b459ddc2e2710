// SPDX-License-Identifier: Apache-2.0
#include "tests/checkpoint/kill_saves.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <random>
#include <utility>

#include "checkpoint/catalog.h"
#include "checkpoint/reader.h"
#include "smp/smp.h"
#include "tests/checkpoint/file_calls.h"

namespace smp::testing {
namespace {

using checkpoint::Reader;
using Clock = std::chrono::steady_clock;

/// All rounds save after one step. Checkpoints of one step are removed in the order of their names,
/// and this one must not be first.
constexpr const char* kReplaced = "standing";
constexpr int kKept = 3;
constexpr int kSaves = 3;           // saves of a round
constexpr int kPatience = 300'000;  // naps until a child must have begun

struct NetImpl : torch::nn::Module {
  NetImpl() {
    first = register_module("first", torch::nn::Linear(24, 16));
    second = register_module("second", torch::nn::Linear(16, 8));
  }
  torch::Tensor forward(torch::Tensor x) { return second(torch::tanh(first(x))); }
  torch::nn::Linear first{nullptr}, second{nullptr};
};
TORCH_MODULE(Net);

/// The messages of a process to its parent, in memory that both map.
struct Progress {
  std::atomic<int> saved;  // saves of the round that were complete
  std::atomic<bool> saving;
  std::atomic<int64_t> calls;         // file calls of a round
  std::atomic<int64_t> microseconds;  // from the first save to the last
};

/// All parameters get the number of the round, so that one can see which a checkpoint is of.
void fill(DistributedModel<Net>& model, int round) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : model->local_parameters()) parameter.fill_(round);
}

/// The name of the checkpoint that is new in a round.
std::string fresh(int round) { return "round" + std::to_string(round); }

/// A round on one rank.
void save_all(const std::string& folder, int round, Progress& progress, Fault fault, int64_t call) {
  Net net;
  DistributedModel<Net> model(net);
  DistributedOptimizer<torch::optim::Adam> optimizer(model->parameters(), 0.1);
  auto train = step([&](torch::Tensor x) {
    auto loss = model(x).square().mean();
    model->backward(loss);
    return loss;
  });
  train(torch::ones({4, 24}));
  optimizer.step();
  fill(model, round);
  if (rank() == 0) {
    inject(folder, fault, call);
    progress.saving = true;
  }
  barrier();
  const auto begin = Clock::now();
  const auto options = SaveCheckpointOptions()
                           .user_content(nlohmann::json{{"round", round}}.dump())
                           .num_kept_partial_checkpoints(kKept);
  const auto is_saved = [&] {
    barrier();
    if (rank() == 0) ++progress.saved;
  };
  save_checkpoint(folder, kReplaced, model, optimizer, options);
  is_saved();
  save_checkpoint(folder, fresh(round), model, optimizer, options);
  is_saved();
  save_checkpoint(folder, kReplaced, model,
                  SaveCheckpointOptions(options).partial(false).asynchronous(true))
      .wait();
  is_saved();
  if (rank() > 0) return;
  progress.calls = calls_so_far();
  progress.microseconds =
      std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - begin).count();
}

[[noreturn]] void be_child(const std::string& folder, int round, Progress& progress, Fault fault,
                           int64_t call) {
  at::set_num_threads(1);
  torch::manual_seed(1);
  try {
    run_as_threads(2, Config().partitions(2).microbatches(2),
                   [&] { save_all(folder, round, progress, fault, call); });
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    _exit(1);
  }
  _exit(0);
}

/// Rounds, and the content of the folder after each.
class Killer {
 public:
  Killer(std::string folder, uint64_t seed) : folder_(std::move(folder)), random_(seed) {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
    void* memory =
        mmap(nullptr, sizeof(Progress), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(memory != MAP_FAILED, "no shared memory");
    progress_ = new (memory) Progress();
  }
  ~Killer() { munmap(progress_, sizeof(Progress)); }

  KillCount run(int rounds) {
    start(0, Fault::kNone, 0);
    const int status = wait();
    count_.calls = progress_->calls;
    microseconds_ = progress_->microseconds;
    check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the first round failed");
    for (int round = 1; round <= rounds && count_.problems.empty(); ++round) {
      const bool at_call = random_() % 3 > 0;
      at_call ? kill_at_call(round) : kill_at_time(round);
      look(round);
    }
    return count_;
  }

 private:
  void start(int round, Fault fault, int64_t call) {
    progress_->saved = 0;
    progress_->saving = false;
    child_ = fork();
    TORCH_CHECK(child_ >= 0, "cannot fork");
    if (child_ == 0) be_child(folder_, round, *progress_, fault, call);
  }

  int wait() {
    int status = 0;
    TORCH_CHECK(waitpid(child_, &status, 0) == child_, "lost a child");
    return status;
  }

  void kill_at_call(int round) {
    ++count_.at_calls;
    start(round, Fault::kKill, static_cast<int64_t>(random_() % count_.calls));
    note(round, wait());
  }

  void kill_at_time(int round) {
    ++count_.at_times;
    start(round, Fault::kNone, 0);
    for (int i = 0; i < kPatience && !progress_->saving; ++i) usleep(200);
    usleep(static_cast<useconds_t>(random_() % microseconds_));
    kill(child_, SIGKILL);
    note(round, wait());
  }

  void note(int round, int status) {
    if (WIFEXITED(status)) {
      check(WEXITSTATUS(status) == 0, "round " + std::to_string(round) + " failed");
      ++count_.finished;
    }
  }

  /// Checks the folder: everything that was complete, and nothing half.
  void look(int round) {
    const int saved = progress_->saved;
    const int partial = whole(std::string(kReplaced) + "_partial");
    (partial == round ? count_.next : count_.previous)++;
    check(partial == round || (partial == partial_round_ && saved < 1), "an older one replaced it");
    partial_round_ = partial;
    const int full = whole(kReplaced);
    check(full == round || (full == full_round_ && saved < kSaves), "an older one replaced it");
    full_round_ = full;
    if (saved >= 2) check(whole(fresh(round) + "_partial") == round, "the new one is missing");
    for (const auto& entry : checkpoint::list_checkpoints(folder_)) whole(entry.name);
    whole(checkpoint::read_newest(folder_));
  }

  /// The round that a checkpoint is of; everything in it is.
  int whole(const std::string& name) {
    try {
      Reader reader(folder_ + "/" + name);
      checkpoint::check_undamaged(name, reader.find_damage(Reader::Section::kAll));
      const int round = reader.index().run.user_content.at("round");
      for (const auto& [tensor, entry] : reader.index().model) {
        check((reader.read_model(tensor) == round).all().item<bool>(), name + " is of two rounds");
      }
      return round;
    } catch (const std::exception& error) {
      count_.problems.emplace_back(error.what());
      return -1;
    }
  }

  void check(bool ok, const std::string& problem) {
    if (!ok) count_.problems.push_back(problem);
  }

  const std::string folder_;
  std::mt19937_64 random_;
  Progress* progress_ = nullptr;
  pid_t child_ = -1;
  uint64_t microseconds_ = 0;  // that a round takes which is not killed
  KillCount count_;
  int partial_round_ = 0, full_round_ = 0;  // which those that are replaced are of
};

}  // namespace

KillCount kill_saves(const std::string& folder, int rounds, uint64_t seed) {
  return Killer(folder, seed).run(rounds);
}

}  // namespace smp::testing
