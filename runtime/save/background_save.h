// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <deque>
#include <exception>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/save_lock.h"
#include "comm/communicator.h"
#include "runtime/save/copy_holders.h"
#include "runtime/save/copy_pace.h"
#include "smp/removable_handle.h"

namespace smp::runtime {

class ProgramTensors;

/// A save on a thread of its own, or one that is done. Internal.
class BackgroundSave {
 public:
  /// Calls `write` on another thread, whose errors begin as this thread's do.
  explicit BackgroundSave(std::function<void()> write);
  /// One that is done.
  BackgroundSave() = default;

  bool is_done() const;
  /// Returns when it is done, or throws its error.
  void wait();
  /// Waits, too; an error that no `wait` has thrown, or null.
  std::exception_ptr unseen_error();

 private:
  void await() const;

  std::shared_future<void> future_;
  std::atomic<bool> seen_{false};
};

/// The state that a rank keeps for checkpoints, and between them. Internal.
class CheckpointContext {
 public:
  /// State beside models and optimizers, as text of JSON.
  struct Extra {
    std::function<std::string()> save;
    std::function<void(const std::string&)> load;
    /// For state that goes with the optimizer's, null for other: throws a `CheckpointError` unless
    /// `load` can take it.
    std::function<void(const std::string&)> check = nullptr;
  };

  CheckpointContext(comm::CommunicatorPtr world, std::shared_ptr<const CopyHolders> holders)
      : holders(std::move(holders)), world_(std::move(world)) {}
  ~CheckpointContext() { end(); }
  CheckpointContext(const CheckpointContext&) = delete;
  CheckpointContext& operator=(const CheckpointContext&) = delete;

  /// Waits for a save under way, logs an error that no call has asked for, and gives back the locks
  /// and the program's functions: objects of the program may have this for longer.
  void end();

  /// The ranks that keep copies; null: `"recovery"` is off.
  std::shared_ptr<const CopyHolders> holders;
  /// Whether this rank notes how far the job has come: rank 0, and where the notes lie with the
  /// copies, a rank of each holder.
  bool notes_progress() const;

  std::map<std::string, Extra> extras;
  /// Tensors of the program, one for a parameter.
  std::vector<std::shared_ptr<ProgramTensors>> tensors;
  /// The content of the checkpoint that was loaded with its optimizer, kept for objects that are
  /// made later.
  std::map<std::string, std::string> unclaimed;

  /// Where copies are kept: when the next one is due, and the time of the last one.
  CopyPace copy_pace;

  /// All ranks, for saves that go on beside steps. Collective over the world at the first call.
  const comm::CommunicatorPtr& group();

  /// Waits for the save under way. Throws a `CheckpointError` on all ranks if one has failed and
  /// some rank has not seen it, and a `CommError` where the ranks have lost each other in it.
  /// Collective.
  void finish();
  /// Locks the place to which this job saves against other jobs until it ends, by the lock's file.
  /// Only the last places saved to stay locked.
  std::shared_ptr<checkpoint::SaveLock> lock(const std::string& file);

  /// Begins a save; the one before has been finished.
  std::shared_ptr<BackgroundSave> start(std::function<void()> write);

 private:
  const comm::CommunicatorPtr world_;
  comm::CommunicatorPtr group_;
  std::shared_ptr<BackgroundSave> last_;
  // Files and their locks.
  std::deque<std::pair<std::string, std::shared_ptr<checkpoint::SaveLock>>> locks_;
};

/// Has checkpoints hold a state under a name. One that goes with the optimizer's is loaded at once
/// if the checkpoint that was loaded had it. `call` is the user's call, for errors. Throws
/// `UsageError` for a name that is taken.
RemovableHandle register_extra(const std::shared_ptr<CheckpointContext>& context,
                               const std::string& call, const std::string& name,
                               CheckpointContext::Extra extra);

}  // namespace smp::runtime
