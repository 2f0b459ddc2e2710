// SPDX-License-Identifier: Apache-2.0
#include "runtime/save/kept_copy.h"

#include <ATen/ops/scalar_tensor.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <optional>

#include "checkpoint/file.h"
#include "checkpoint/save_lock.h"
#include "core/check.h"
#include "core/env.h"
#include "core/restart.h"
#include "runtime/save/background_save.h"
#include "runtime/save/saving.h"
#include "runtime/save/together.h"

namespace smp::runtime {
namespace {

bool keeps_copies(const Config& config) { return config.recovery() != "off"; }

/// A file that rank 0 makes for the others to see.
class Token {
 public:
  explicit Token(const std::string& folder) : path_(folder + "/seen-XXXXXX") {
    const int fd = mkstemp(path_.data());
    if (fd < 0) return;
    ::close(fd);
    is_made_ = true;
  }
  ~Token() {
    if (is_made_) ::unlink(path_.c_str());
  }
  Token(const Token&) = delete;
  Token& operator=(const Token&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
  bool is_made_ = false;
};

/// Whether every rank sees, under this name, the folder that rank 0 does.
bool is_seen_by_all(const std::string& folder, comm::Communicator& world) {
  std::optional<Token> token;
  if (world.rank() == 0) token.emplace(folder);
  const std::string path = comm::broadcast_bytes(world, token ? token->path() : "", 0);
  const auto all = comm::all_gather_bytes(world, ::access(path.c_str(), F_OK) == 0 ? "+" : "-");
  return std::find(all.begin(), all.end(), "-") == all.end();
}

/// Of how many calls one keeps a copy from now on, by what rank 0 has measured of the one before
/// this, which has ended. Neither the first nor one that failed says anything. On all ranks, for
/// all keep the same.
int64_t measured_interval(comm::Communicator& world, const CopyPace& pace,
                          CopyPace::Clock::time_point begin) {
  int64_t interval = pace.interval;
  const double took = pace.last_took ? pace.last_took->load() : 0;
  if (took > 0) {
    const std::chrono::duration<double> since = begin - pace.last_call;
    interval = next_interval(interval, took, since.count() / static_cast<double>(interval));
  }
  const at::Tensor agreed = at::scalar_tensor(interval, at::kLong);
  world.broadcast(agreed, 0);
  return agreed.item<int64_t>();
}

}  // namespace

void check_recovery_folder(const Config& config, comm::Communicator& world,
                           const std::vector<std::string>& hosts) {
  if (!keeps_copies(config)) return;
  const auto folder = core::env(core::kRecoveryDirVariable);
  SMP_CHECK_WITH(ConfigError, folder.has_value(), "config key \"recovery\": \"", config.recovery(),
                 "\" needs a launcher that starts the job again, and ", core::kRecoveryDirVariable,
                 ", the folder for what it goes on from, is not set. Start the program by smprun, or "
                 "by torchrun with that variable (docs/recovery.md)");
  const bool one_host = std::all_of(hosts.begin(), hosts.end(),
                                    [&](const std::string& host) { return host == hosts.front(); });
  if (one_host || is_seen_by_all(*folder, world)) return;
  core::fail<ConfigError>(
      "config key \"recovery\": ranks on other hosts do not see rank 0's folder ", *folder,
      ". Set ", core::kRecoveryDirVariable,
      " to an empty folder on a file system that all hosts share");
}

void keep_copy(Runtime& runtime, const Model& model, Optimizer& optimizer,
               const std::string& user_content) {
  const Config& config = runtime.config();
  if (!keeps_copies(config)) return;
  CopyPace& pace = CheckpointContext::of(runtime).copy_pace;
  if (pace.calls_to_next-- > 0) return;
  const auto begin = CopyPace::Clock::now();
  const int64_t interval = config.recovery_interval();
  if (interval > 0) pace.interval = interval;
  pace.calls_to_next = pace.interval - 1;  // also if this one fails
  const CopyPace::Seconds took = std::make_shared<std::atomic<double>>(0);
  SaveRequest request;
  request.call = "smp::keep_copy";
  request.path = *core::kept_copy_path();
  request.lock = checkpoint::lock_of_writer(request.path);
  request.asynchronous = true;
  request.medium = checkpoint::medium_of(*core::env(core::kRecoveryDirVariable));
  request.longest_write = runtime.world()->timeout();
  request.user_content = user_content;
  request.when_saved = [took, steps = runtime.progress.training_steps](double seconds) {
    *took = seconds;
    core::note_kept_copy(steps);
  };
  save(request, model, &optimizer);
  if (interval == 0) {
    pace.interval = measured_interval(*runtime.world(), pace, begin);
    pace.calls_to_next = pace.interval - 1;
  }
  pace.last_call = CopyPace::Clock::now();
  pace.last_took = took;
}

std::vector<std::string> checkpoints_before(const Runtime& runtime) {
  const auto all = together(*runtime.world(), [&]() -> std::string {
    if (runtime.rank() > 0 || !runtime.restart) return "[]";
    const core::JobProgress& before = runtime.restart->before;
    std::vector<std::string> paths;
    for (const core::SavedCheckpoint& saved : before.checkpoints) paths.push_back(saved.path);
    if (const auto copy = core::kept_copy_path(); copy && before.kept_steps) {
      paths.insert(before.copy_is_newest() ? paths.end() : paths.end() - 1, *copy);
    }
    return nlohmann::json(paths).dump();
  });
  return nlohmann::json::parse(all[0]).get<std::vector<std::string>>();
}

}  // namespace smp::runtime
