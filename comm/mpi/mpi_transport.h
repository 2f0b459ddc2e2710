// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <mpi.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/transport.h"

namespace smp::comm {

/// The ranks of this host.
struct LocalRanks {
  std::vector<int> world_ranks;
  bool has_core_for_each = false;
};

/// Messages over MPI, without copies: MPI reads and writes the tensors. One per process.
///
/// Who polls: a thread in wait_until() polls itself; while there is none, the progress thread polls
/// as long as something is pending, and otherwise sleeps, but for a look at the control channel
/// ten times a second. Only one thread polls at a time.
///
/// The control channel is a duplicate of the world on which each rank has a receive posted, for
/// the one message that abort() sends.
class MpiTransport final : public Transport {
 public:
  /// MPI is initialised. Collective.
  explicit MpiTransport(LocalRanks local_ranks);
  ~MpiTransport() override;

  void start(PendingMessage transfer) override;
  void poll() override { progress(); }
  bool wait_until(Clock::time_point deadline, const std::function<bool()>& ready) override;
  void notify() override {}  // waits poll
  int make_context(const GroupState& parent, int first_member) override;
  bool shares_memory(int this_rank, int other) const override;
  bool has_core_for_each_rank() const override { return local_ranks_.has_core_for_each; }
  void abort(int world_rank, const std::string& reason) noexcept override;

  /// Ends the progress thread; afterwards only waits make progress. Safe to call twice.
  void stop_thread();

  /// Before MPI_Finalize: ends the thread and takes the control channel's receive back. All
  /// operations must be complete.
  void close();

 private:
  // A transfer that MPI works on.
  struct Pending {
    MPI_Request request;
    PendingMessage transfer;
  };
  struct Completed {
    PendingMessage transfer;
    std::string error;
  };

  MPI_Comm context(int number);
  bool progress();
  std::vector<Completed> take_completed();
  void forget_completed();
  void read_control();
  void progress_loop();
  bool sleep_until_needed();

  const LocalRanks local_ranks_;

  std::mutex contexts_mutex_;
  std::vector<MPI_Comm> contexts_;

  MPI_Comm control_ = MPI_COMM_NULL;
  std::array<char, 4096> control_text_{};
  std::vector<MPI_Request> abort_sends_;
  std::string abort_message_;

  // Requests that the poller looks at; control_request_ is the posted receive of the channel.
  std::mutex poll_mutex_;
  MPI_Request control_request_ = MPI_REQUEST_NULL;
  std::vector<MPI_Request> requests_;
  std::vector<PendingMessage> transfers_;  // transfers of the same index
  std::vector<int> indices_;
  std::vector<MPI_Status> statuses_;

  std::mutex queue_mutex_;
  std::condition_variable needed_;  // the progress thread is
  std::vector<Pending> started_;    // not yet seen by the poller
  bool stop_ = false;
  std::atomic<size_t> pending_{0};
  std::atomic<int> waiters_{0};
  std::thread thread_;
};

}  // namespace smp::comm
