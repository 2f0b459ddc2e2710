// SPDX-License-Identifier: Apache-2.0
// usage: restarting_step FOLDER [MARK...]
//
// Trains eight steps and saves every second one as FOLDER/step_N_partial; with "recovery" it keeps
// a copy of each in memory and saves the last two. The first start of the job obeys the first MARK,
// the first restart the second and so on; one is WHERE:RANK:STEP:COUNT:
//
//   early   the rank exits before smp::init
//   begin   it is killed after smp::init
//   throw   its function throws in that step
//   action  it is killed at the COUNT-th action of that step; exit_at, throw_at, memory_at and
//           stop_at: it exits there, throws, asks for more memory than there is, or stops
//   update  it is killed between that step and the optimizer's
//   save    it is killed at the COUNT-th of its file calls in the save after that step
//   copy    the same while it keeps a copy
//   lose    its host forgets its copies before that step, and it is killed
//   down    the same, and there is a file /dev/shm/down from then on
//   stop    it stops (SIGSTOP) after that step, and others give it up after five seconds
//   asked   it gets SIGTERM at the COUNT-th action of that step, so with "preempt_seconds" the job
//           stops after it, and leaves FOLDER/asked_partial
//   end     it is killed when all is done
//
// In the environment: STEPS to train instead of eight, KEPT checkpoints instead of two, RESUME to
// go on from the newest checkpoint of FOLDER, if there is one, and TIMES, a file to which rank 0
// adds a line for each step that is done ("STEP MS") and a rank that a mark concerns one ("fault
// MS") before it fails, but for faults of file calls.
//
// Started by restart_test and fault_matrix.py through smprun.

#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

#include "core/restart.h"
#include "runtime/runtime.h"
#include "runtime/save/background_save.h"
#include "runtime/save/copy_holders.h"
#include "smp/smp.h"
#include "tests/action_hook.h"
#include "tests/checkpoint/file_calls.h"
#include "tests/failure/patience.h"
#include "tests/failure/stopped.h"
#include "tests/smp/models.h"

namespace {

using smp::testing::TinyGpt;
using smp::testing::TinyGptImpl;

int64_t number_of(const char* variable, int64_t otherwise) {
  const char* number = std::getenv(variable);
  return number == nullptr ? otherwise : std::stoll(number);
}

struct Mark {
  std::string where;
  int rank = -1;
  int64_t step = 0, count = 0;
};

Mark mark_of_this_start(int argc, char** argv) {
  const auto restart = smp::core::this_restart();
  const int start = restart ? restart->number : 0;
  Mark mark;
  if (start + 2 >= argc) return mark;
  std::istringstream words(argv[start + 2]);
  std::getline(words, mark.where, ':');
  char colon = 0;
  words >> mark.rank >> colon >> mark.step >> colon >> mark.count;
  return mark;
}

void note_time(const std::string& what) {
  const char* file = std::getenv("TIMES");
  if (file == nullptr) return;
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
  std::ofstream(file, std::ios::app) << c10::str(what, " ", ms, "\n") << std::flush;
}

[[noreturn]] void die() {
  note_time("fault");
  kill(getpid(), SIGKILL);
  std::abort();
}

[[noreturn]] void lose_host(const smp::runtime::Runtime& runtime) {
  std::filesystem::remove_all(runtime.checkpoint_context->holders->folder());
  die();
}

void fail(const std::string& where) {
  if (where == "action") die();
  note_time("fault");
  if (where == "exit_at") std::_Exit(7);
  if (where == "throw_at") throw std::runtime_error("no such word");
  if (where == "memory_at") torch::empty({int64_t{1} << 55});
  kill(getpid(), where == "asked" ? SIGTERM : SIGSTOP);
}

/// All ranks have come as far, so that notes do not depend on time.
bool is_due(const Mark& mark, const std::string& where, int64_t step = 0) {
  if (mark.where != where || mark.step != step) return false;
  smp::barrier();
  return smp::rank() == mark.rank;
}

/// All ranks call it: the others wait for that rank then, and for each other's next calls, which
/// come at once.
void stop_and_wait(int rank) {
  constexpr std::chrono::seconds kLimit{5};
  auto& copies = *smp::runtime::Runtime::get().checkpoint_context;
  copies.finish();
  smp::testing::stop_one(rank);
  copies.group()->set_timeout(kLimit);
  smp::testing::wait_at_most(kLimit);
}

using Model = smp::DistributedModel<TinyGpt>;
using Optimizer = smp::DistributedOptimizer<torch::optim::AdamW>;

/// The run from which the job goes on, or nothing.
std::optional<smp::LoadedRun> resume(const std::string& folder, Model& model,
                                     Optimizer& optimizer) {
  const bool goes_on = std::getenv("RESUME") != nullptr;
  if (!goes_on) return smp::resume_after_restart(model, optimizer);
  if (!std::filesystem::exists(folder + "/newest")) return std::nullopt;
  return smp::resume_from_checkpoint(folder, std::nullopt, model, optimizer);
}

/// The program's exit status.
int train(const std::string& folder, const Mark& mark) {
  smp::init();
  auto& runtime = smp::runtime::Runtime::get();
  const bool keeps_copies = runtime.config().recovery() != "off";
  const int64_t steps = number_of("STEPS", 8);
  if (is_due(mark, "begin")) die();
  torch::manual_seed(1);
  TinyGpt net(/*tied=*/true, /*layers=*/2);
  Model model(net);
  Optimizer optimizer(model->parameters(), 1e-2);
  bool throws = false;
  auto step = smp::step([&](torch::Tensor x, torch::Tensor y) {
    if (throws) throw std::runtime_error("no such word");
    auto loss = net->loss(x, y);
    model->backward(loss);
    return loss;
  });
  const auto resumed = resume(folder, model, optimizer);
  const int64_t first = resumed ? resumed->step : 0;
  if (resumed && nlohmann::json::parse(resumed->user_content).at("saved_at") != first) std::abort();
  smp::testing::ActionHook hook;
  runtime.execution.observers.push_back(&hook);
  for (int64_t done = first; done < steps; ++done) {
    torch::manual_seed(100 + done);
    const auto batch = TinyGptImpl::batch(4);
    throws = is_due(mark, "throw", done);
    if (is_due(mark, "lose", done)) lose_host(runtime);
    if (is_due(mark, "down", done)) {
      std::ofstream("/dev/shm/down").flush();
      lose_host(runtime);
    }
    for (const char* where : {"action", "exit_at", "throw_at", "memory_at", "stop_at", "asked"}) {
      if (!is_due(mark, where, done)) continue;
      hook.function = [where, left = mark.count](const auto&) mutable {
        if (left-- == 0) fail(where);
      };
    }
    optimizer.zero_grad();
    step(smp::shard(batch[0]), smp::shard(batch[1]));
    if (is_due(mark, "update", done)) die();
    if (mark.where == "stop" && mark.step == done) stop_and_wait(mark.rank);
    optimizer.step();
    const std::string content = nlohmann::json{{"saved_at", done + 1}}.dump();
    if ((done + 1) % 2 == 0 && (!keeps_copies || done + 1 >= steps - 2)) {
      if (is_due(mark, "save", done)) {
        smp::testing::inject(folder, smp::testing::Fault::kKill, mark.count);
      }
      smp::save_checkpoint(folder, "step_" + std::to_string(done + 1), model, optimizer,
                           smp::SaveCheckpointOptions()
                               .user_content(content)
                               .num_kept_partial_checkpoints(number_of("KEPT", 2))
                               .asynchronous(done % 4 == 1))
          .wait();
    }
    if (is_due(mark, "copy", done)) {
      smp::testing::inject(runtime.checkpoint_context->holders->copy(), smp::testing::Fault::kKill,
                           mark.count);
    }
    smp::keep_copy(model, optimizer, content);
    if (smp::rank() == 0) note_time(std::to_string(done));
    if (smp::stop_requested()) {
      smp::save_checkpoint(folder, "asked", model, optimizer,
                           smp::SaveCheckpointOptions().user_content(content));
      return smp::kPreemptedStatus;
    }
  }
  if (is_due(mark, "end")) die();
  smp::shutdown();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const Mark mark = mark_of_this_start(argc, argv);
  const char* rank = std::getenv("OMPI_COMM_WORLD_RANK");
  if (mark.where == "early" && rank == std::to_string(mark.rank)) return 3;
  torch::set_num_threads(1);
  return train(argv[1], mark);
}
