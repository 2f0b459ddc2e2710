// SPDX-License-Identifier: Apache-2.0
// Jobs in which a seed decides the faults: ranks die or stop before any of their operations, the
// disk is full at any of its calls, and everything takes as long as it likes. The job is started
// again, each time in another layout, as `smprun` does: half of the jobs go on from the copy that
// they keep in memory, some of those on several hosts, which may lose their copies; the others go
// on from their newest checkpoint. Their weights are those of the undisturbed run, bit for bit,
// none of its starts hangs, and each that fails says why.
//
// Seeds from SMP_SIMULATION_SEED on (default 1), SMP_SIMULATION_COUNT of them (default 12);
// tools/soak goes on for as long as it is told.

#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>

#include "core/failure.h"
#include "core/restart.h"
#include "pipeline/generators.h"
#include "runtime/runtime.h"
#include "runtime/save/background_save.h"
#include "runtime/save/copy_holders.h"
#include "smp/smp.h"
#include "tests/chaos/chaos.h"
#include "tests/checkpoint/file_calls.h"
#include "tests/smp/models.h"
#include "tests/smp/oracle.h"
#include "tests/temp_folder.h"

namespace smp::testing {
namespace {

using Random = std::mt19937_64;

constexpr int kSteps = 5;
constexpr int kMostFaults = 3;
constexpr auto kLongest = std::chrono::seconds(120);

int64_t below(Random& random, int64_t end) {
  return static_cast<int64_t>(random() % static_cast<uint64_t>(end));
}

/// Ends the process when a start takes longer than any may.
class Watchdog {
 public:
  explicit Watchdog(uint64_t seed) : thread_([this, seed] { watch(seed); }) {}
  ~Watchdog() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      is_over_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

 private:
  void watch(uint64_t seed) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (changed_.wait_for(lock, kLongest, [this] { return is_over_; })) return;
    std::fprintf(stderr, "SMP_SIMULATION_SEED=%llu hangs\n", static_cast<unsigned long long>(seed));
    std::abort();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_over_ = false;
  std::thread thread_;
};

/// One start of a job.
struct Start {
  int ranks = 1;
  std::string config;
  Chaos chaos;
  std::optional<int64_t> disk_full_at;  // the call on a file, of checkpoints or of copies

  bool stalls() const { return chaos.fault && chaos.fault->kind == RankFault::Kind::kStall; }
};

/// Another layout each time: the gradient shards and the microbatches of all replicas stay.
Start draw_start(Random& random, bool disturbed, bool keeps_copies) {
  constexpr std::array<std::pair<int, int>, 4> kLayouts = {{{1, 2}, {2, 1}, {3, 1}, {2, 2}}};
  const auto [stages, replicas] = kLayouts[static_cast<size_t>(below(random, kLayouts.size()))];
  std::vector<std::string> pipelines;
  for (const auto& kind : pipeline::schedule_kinds()) {
    if (kind.trains) pipelines.push_back(kind.name);
  }
  const auto kind = below(random, 32);
  Start start;
  start.ranks = stages * replicas;
  start.config = c10::str(
      R"({"partitions": )", stages, R"(, "microbatches": )", 8 / replicas,
      R"(, "gradient_shards": 2, "seed": 11, "timeout_seconds": )", disturbed && kind == 0 ? 3 : 60,
      R"(, "pipeline": ")",
      pipelines[static_cast<size_t>(below(random, static_cast<int64_t>(pipelines.size())))], '"');
  if (keeps_copies) start.config += R"(, "recovery": "restart", "recovery_interval": 1)";
  if (replicas > 1) {
    start.config += R"(, "ddp": true, "shard_optimizer_state": )";
    start.config += below(random, 2) == 0 ? "true" : "false";
  }
  start.config += "}";
  start.chaos.seed = random();
  start.chaos.channels =
      below(random, 2) == 0 ? ChannelKind::kMessages : ChannelKind::kSharedMemory;
  start.chaos.delays = below(random, 4) == 0;
  if (!disturbed) return start;
  if (kind < 18) {
    start.chaos.fault = {kind == 0 ? RankFault::Kind::kStall : RankFault::Kind::kDeath,
                         static_cast<int>(below(random, start.ranks)), below(random, 300)};
  } else if (kind < 26) {
    start.disk_full_at = below(random, 200);
  }
  return start;
}

/// The same on every rank; ranks that are threads share libtorch's generator.
TinyGpt make_net() {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  torch::manual_seed(1);
  return TinyGpt(/*tied=*/true, /*layers=*/2);
}

const std::vector<std::vector<torch::Tensor>>& batches() {
  static const auto all = [] {
    torch::manual_seed(100);
    std::vector<std::vector<torch::Tensor>> result;
    for (int i = 0; i < kSteps; ++i) result.push_back(TinyGptImpl::batch(8));
    return result;
  }();
  return all;
}

/// The hosts of a job, which keep copies in folders of their own.
struct Hosts {
  int count = 1;
  std::string memory;

  std::string folder_of(int host) const { return memory + "/host" + std::to_string(host); }
};

/// The checkpoint from which a restarted job should go on; empty if there is nothing.
std::string newest_saved() {
  const auto restart = core::this_restart();
  if (!restart) return "";
  if (restart->before.copy_is_newest())
    return runtime::Runtime::get().checkpoint_context->holders->copy();
  return restart->before.checkpoints.empty() ? "" : restart->before.checkpoints.back().path;
}

/// The job's program on each rank. `asynchronous`: some saves are; these may wait hours for a rank
/// that writes.
void train(const std::string& folder, bool asynchronous, bool forgets_optimizer,
           const Hosts& hosts = {}) {
  auto& runtime = runtime::Runtime::get();
  if (hosts.count > 1 && runtime.checkpoint_context->holders) {
    runtime.checkpoint_context->holders = std::make_shared<runtime::CopyHolders>(
        runtime::CopyHolders::find(hosts.folder_of(rank() % hosts.count), *runtime.world()));
  }
  TinyGpt net = make_net();
  barrier();  // captures draw from the generator that other ranks' models are drawn from
  DistributedModel<TinyGpt> model(net);
  DistributedOptimizer<torch::optim::AdamW> optimizer(model->parameters(), 1e-2);
  auto step = smp::step([&](torch::Tensor x, torch::Tensor y) {
    auto loss = net->loss(x, y);
    model->backward(loss);
    return loss;
  });
  int64_t done = 0;
  const std::string newest = forgets_optimizer ? newest_saved() : "";
  if (!newest.empty()) {
    done = load(newest, model).step;
  } else if (const auto resumed = resume_after_restart(model, optimizer)) {
    done = resumed->step;
  }
  const bool keeps_copies = runtime.config().recovery() != "off";
  for (; done < kSteps; ++done) {
    const auto& batch = batches()[static_cast<size_t>(done)];
    optimizer.zero_grad();
    step(shard(batch[0]), shard(batch[1]));
    optimizer.step();
    if (!keeps_copies || done + 1 == kSteps) {
      save_checkpoint(folder, "step_" + std::to_string(done + 1), model, optimizer,
                      SaveCheckpointOptions().num_kept_partial_checkpoints(2).asynchronous(
                          asynchronous && done % 2 == 1))
          .wait();
    }
    // The last one would be of no use, and one that fails at the end goes unheard.
    if (done + 1 < kSteps) keep_copy(model, optimizer);
  }
}

/// The events seen in many jobs.
using Counts = std::map<std::string, int>;

class Job {
 public:
  Job(uint64_t seed, bool forgets_optimizer, Counts& counts)
      : seed_(seed), forgets_optimizer_(forgets_optimizer), counts_(counts), random_(seed) {
    batches();  // before any rank: they draw from the generator that the models are drawn from
    setenv(core::kFailureDirVariable, notes_.path().c_str(), 1);
    setenv(core::kRecoveryDirVariable, memory_.path().c_str(), 1);
  }
  ~Job() {
    unsetenv(core::kFailureDirVariable);
    unsetenv(core::kRecoveryDirVariable);
    unsetenv(core::kRestartVariable);
  }

  /// The weights at the end.
  Named run() {
    for (int number = 0;; ++number) {
      if (start(draw_start(random_, number < kMostFaults, keeps_copies_))) break;
      lose_a_host();
      const auto progress = core::read_progress(notes_.path());
      const core::Restart restart{number + 1, progress.value_or(core::JobProgress())};
      setenv(core::kRestartVariable, restart.to_text().c_str(), 1);
    }
    TinyGpt net = make_net();
    load_into_module(core::read_progress(notes_.path())->checkpoints.back().path, *net);
    return to_map(net->named_parameters());
  }

 private:
  /// Loses a host, if there are several, and not always: its copies are gone.
  void lose_a_host() {
    if (hosts_.count == 1 || below(random_, 2) == 0) return;
    std::filesystem::remove_all(hosts_.folder_of(static_cast<int>(below(random_, hosts_.count))));
    ++counts_["lost hosts"];
  }

  /// Whether it came to its end.
  bool start(const Start& start) {
    const Watchdog watchdog(seed_);
    ++counts_["starts"];
    bool happened = false;
    ++counts_[keeps_copies_ ? "starts with copies" : "starts with checkpoints"];
    const std::string& disk = keeps_copies_ ? memory_.path() : saves_.path();
    if (start.disk_full_at) inject(disk, Fault::kNoSpace, *start.disk_full_at);
    try {
      run_in_chaos(
          start.ranks, Config::from_json(start.config, "simulation"), start.chaos,
          [&] { train(saves_.path(), !start.stalls(), forgets_optimizer_, hosts_); }, &happened);
    } catch (const std::exception& e) {
      note_failure(start, happened, e.what());
      inject("", Fault::kNone, 0);
      return false;
    }
    inject("", Fault::kNone, 0);
    EXPECT_FALSE(happened) << "nobody heard of a fault in " << start.config;
    return true;
  }

  void note_failure(const Start& start, bool happened, const std::string& text) {
    if (start.disk_full_at) {
      ++counts_["full disks"];
      EXPECT_THAT(text, ::testing::HasSubstr("No space left on device")) << start.config;
      return;
    }
    ASSERT_TRUE(happened) << start.config << "\n" << text;
    const std::string rank = std::to_string(start.chaos.fault->rank);
    if (start.stalls()) {
      ++counts_["stalls"];  // a rank that waits for it is named, too, if others wait for both
      EXPECT_THAT(text, ::testing::ContainsRegex("ranks? ([0-9]+, )*" + rank)) << start.config;
    } else {
      ++counts_["deaths"];
      EXPECT_THAT(text, ::testing::HasSubstr("simulated death of rank " + rank)) << start.config;
    }
  }

  const uint64_t seed_;
  const bool forgets_optimizer_;
  Counts& counts_;
  const bool keeps_copies_ = seed_ % 2 == 0;
  Random random_;
  const TempFolder saves_, notes_, memory_;
  const Hosts hosts_{
      seed_ % 4 == 0 && !forgets_optimizer_ ? 2 + static_cast<int>(seed_ / 4 % 2) : 1,
      memory_.path()};
};

const Named& undisturbed() {
  static const Named weights = [] {
    const TempFolder saves, notes;
    setenv(core::kFailureDirVariable, notes.path().c_str(), 1);
    run_as_threads(
        1,
        Config::from_json(R"({"microbatches": 8, "gradient_shards": 2, "seed": 11})", "simulation"),
        [&] { train(saves.path(), /*asynchronous=*/true, /*forgets_optimizer=*/false); });
    unsetenv(core::kFailureDirVariable);
    TinyGpt net = make_net();
    load_into_module(core::read_progress(notes.path())->checkpoints.back().path, *net);
    return to_map(net->named_parameters());
  }();
  return weights;
}

bool same(const Named& a, const Named& b) {
  return a.size() == b.size() && std::all_of(a.begin(), a.end(), [&](const auto& item) {
           return b.count(item.first) == 1 && torch::equal(item.second, b.at(item.first));
         });
}

TEST(Simulation, JobsComeToTheUndisturbedWeights) {
  at::set_num_threads(1);
  const int64_t first = number_in("SMP_SIMULATION_SEED", 1);
  const int64_t count = number_in("SMP_SIMULATION_COUNT", 12);
  Counts counts;
  for (int64_t seed = first; seed < first + count && !HasFailure(); ++seed) {
    SCOPED_TRACE("SMP_SIMULATION_SEED=" + std::to_string(seed));
    const auto weights = Job(static_cast<uint64_t>(seed), false, counts).run();
    EXPECT_TRUE(same(weights, undisturbed()));
  }
  for (const auto& [what, number] : counts) std::printf("%s: %d\n", what.c_str(), number);
  if (count < 12 || HasFailure()) return;
  for (const char* what : {"deaths", "stalls", "full disks", "lost hosts", "starts with copies",
                           "starts with checkpoints"}) {
    EXPECT_GT(counts[what], 0) << what;
  }
  EXPECT_GT(counts["starts"], count);
}

/// A planted bug: a restart forgets the moments of the optimizer.
TEST(Simulation, FindsARestartThatForgetsState) {
  at::set_num_threads(1);
  for (const uint64_t kind : {0, 1}) {  // kinds: with copies, with checkpoints
    Counts counts;
    bool found = false;
    for (uint64_t seed = 2 + kind; seed <= 25 && !found; seed += 2) {
      found = !same(Job(seed, /*forgets_optimizer=*/true, counts).run(), undisturbed());
    }
    EXPECT_TRUE(found) << kind;
  }
}

}  // namespace
}  // namespace smp::testing
