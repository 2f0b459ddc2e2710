#pragma once

#include <atomic>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <string>

#include "comm/communicator.h"
#include "runtime/runtime.h"

namespace smp::runtime {

/// A save on a thread of its own, or one that is done. Internal.
class BackgroundSave {
 public:
  /// Calls `write` on another thread, whose errors begin as this thread's do.
  explicit BackgroundSave(std::function<void()> write);
  /// One that is done.
  BackgroundSave() = default;

  bool is_done() const;
  /// Returns when it is done, or throws what it threw.
  void wait();
  /// Waits, too; the text of an error that no `wait` has thrown, or empty.
  std::string unseen_error();

 private:
  std::shared_future<void> future_;
  std::atomic<bool> seen_{false};
};

/// What a rank keeps between checkpoints. Internal.
class CheckpointContext {
 public:
  /// State beside models and optimizers, as text of JSON.
  struct Extra {
    std::function<std::string()> save;
    std::function<void(const std::string&)> load;
  };

  explicit CheckpointContext(comm::CommunicatorPtr world) : world_(std::move(world)) {}
  /// Waits for a save under way, and logs an error that nobody has asked for.
  ~CheckpointContext();
  CheckpointContext(const CheckpointContext&) = delete;
  CheckpointContext& operator=(const CheckpointContext&) = delete;

  /// That of a rank, made at the first call.
  static CheckpointContext& of(Runtime& runtime);

  std::map<std::string, Extra> extras;

  /// All ranks, for saves that go on beside steps. Collective over the world at the first call.
  const comm::CommunicatorPtr& group();

  /// Waits for the save under way. Throws a `CheckpointError` on all ranks if one has failed and
  /// some rank has not seen it. Collective.
  void finish();
  /// Begins a save; the one before has been finished.
  std::shared_ptr<BackgroundSave> start(std::function<void()> write);

 private:
  const comm::CommunicatorPtr world_;
  comm::CommunicatorPtr group_;
  std::shared_ptr<BackgroundSave> last_;
};

}  // namespace smp::runtime
