// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi/mpi_transport.h"

#include <algorithm>
#include <climits>
#include <cstring>
#include <utility>

#include "comm/mpi/backoff.h"
#include "comm/mpi/mpi_error.h"

namespace smp::comm {
namespace {

constexpr int kControlTag = 0;
constexpr std::chrono::milliseconds kControlPeriod{100};
constexpr std::chrono::milliseconds kAbortFlush{100};

MPI_Comm duplicate(MPI_Comm comm) {
  MPI_Comm copy;
  check_mpi(MPI_Comm_dup(comm, &copy), "MPI_Comm_dup");
  check_mpi(MPI_Comm_set_errhandler(copy, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return copy;
}

// How `bytes` bytes are told to MPI, whose counts are ints: as bytes, or beyond 2 GiB as one
// element of a type of its own, which MPI keeps alive as long as a request needs it.
class ByteCount {
 public:
  explicit ByteCount(size_t bytes) {
    if (bytes <= INT_MAX) {
      count_ = static_cast<int>(bytes);
      return;
    }
    constexpr size_t kBlock = size_t{1} << 30;
    const int blocks = static_cast<int>(bytes / kBlock);
    const int rest = static_cast<int>(bytes % kBlock);
    MPI_Datatype block;
    check_mpi(MPI_Type_contiguous(static_cast<int>(kBlock), MPI_BYTE, &block),
              "MPI_Type_contiguous");
    const int lengths[] = {blocks, rest};
    const MPI_Aint offsets[] = {0, static_cast<MPI_Aint>(blocks * kBlock)};
    const MPI_Datatype types[] = {block, MPI_BYTE};
    check_mpi(MPI_Type_create_struct(2, lengths, offsets, types, &type_), "MPI_Type_create_struct");
    check_mpi(MPI_Type_commit(&type_), "MPI_Type_commit");
    check_mpi(MPI_Type_free(&block), "MPI_Type_free");
    count_ = 1;
  }
  ~ByteCount() {
    if (type_ != MPI_BYTE) {
      MPI_Type_free(&type_);
    }
  }
  ByteCount(const ByteCount&) = delete;
  ByteCount& operator=(const ByteCount&) = delete;

  int count() const { return count_; }
  MPI_Datatype type() const { return type_; }

 private:
  int count_ = 0;
  MPI_Datatype type_ = MPI_BYTE;
};

void post(const PendingMessage& transfer, MPI_Comm comm, MPI_Request* request) {
  const Message& message = transfer.message;
  const ByteCount bytes(message.bytes);
  if (message.direction == Message::Direction::kSend) {
    check_mpi(MPI_Isend(message.data, bytes.count(), bytes.type(), message.peer, transfer.tag, comm,
                        request),
              "MPI_Isend");
  } else {
    const int source = message.peer == kAnyRank ? MPI_ANY_SOURCE : message.peer;
    check_mpi(
        MPI_Irecv(message.data, bytes.count(), bytes.type(), source, transfer.tag, comm, request),
        "MPI_Irecv");
  }
}

// Why a transfer that MPI calls complete has failed; empty when it has not. Notes who has sent.
std::string end_of(PendingMessage& transfer, int code, const MPI_Status& status) {
  Message& message = transfer.message;
  int error_class = MPI_SUCCESS;
  if (code != MPI_SUCCESS) {
    MPI_Error_class(code, &error_class);
  }
  if (code != MPI_SUCCESS && error_class != MPI_ERR_TRUNCATE) {
    return "MPI says: " + mpi_text(code);
  }
  if (message.direction == Message::Direction::kSend) {
    return "";
  }
  if (message.peer == kAnyRank) {
    message.peer = status.MPI_SOURCE;
  }
  MPI_Count got = 0;
  const int count_code = MPI_Get_elements_x(&status, MPI_BYTE, &got);
  if (count_code != MPI_SUCCESS) {
    return "MPI_Get_elements_x failed: " + mpi_text(count_code);
  }
  return static_cast<size_t>(got) == message.bytes ? "" : transfer.length_mismatch(got);
}

}  // namespace

MpiTransport::MpiTransport(LocalRanks local_ranks) : local_ranks_(std::move(local_ranks)) {
  contexts_.push_back(duplicate(MPI_COMM_WORLD));
  control_ = duplicate(MPI_COMM_WORLD);
  check_mpi(MPI_Irecv(control_text_.data(), static_cast<int>(control_text_.size()), MPI_CHAR,
                      MPI_ANY_SOURCE, kControlTag, control_, &control_request_),
            "MPI_Irecv");
  thread_ = std::thread([this] { progress_loop(); });
}

MpiTransport::~MpiTransport() { stop_thread(); }

void MpiTransport::stop_thread() {
  {
    std::lock_guard<std::mutex> lock(queue_mutex_);
    stop_ = true;
  }
  needed_.notify_one();
  if (thread_.joinable()) {
    thread_.join();
  }
}

void MpiTransport::close() {
  stop_thread();
  check_mpi(MPI_Cancel(&control_request_), "MPI_Cancel");
  check_mpi(MPI_Wait(&control_request_, MPI_STATUS_IGNORE), "MPI_Wait");
}

void MpiTransport::start(PendingMessage transfer) {
  if (aborted()) {
    return;  // every wait throws; peers may no longer answer
  }
  MPI_Request request;
  try {
    post(transfer, context(transfer.group().context), &request);
  } catch (const CommError& e) {
    transfer.done(*this, e.what());
    return;
  }
  // Short sends, and receives whose message is here, end at once and wake no thread.
  int complete = 0;
  MPI_Status status;
  const int code = MPI_Test(&request, &complete, &status);
  if (complete || code != MPI_SUCCESS) {
    const std::string error = end_of(transfer, code, status);
    transfer.done(*this, error);
    return;
  }
  std::lock_guard<std::mutex> lock(queue_mutex_);
  started_.push_back({request, std::move(transfer)});
  ++pending_;
  if (waiters_ == 0) {
    needed_.notify_one();
  }
}

bool MpiTransport::wait_until(Clock::time_point deadline, const std::function<bool()>& ready) {
  if (ready()) {
    return true;
  }
  ++waiters_;  // nothing below throws
  Backoff backoff;
  while (!ready() && Clock::now() < deadline) {
    if (progress()) {
      backoff.reset();
    } else {
      backoff.pause();
    }
  }
  if (--waiters_ == 0 && pending_ > 0) {
    std::lock_guard<std::mutex> lock(queue_mutex_);
    needed_.notify_one();
  }
  return ready();
}

// All ranks of the parent have just met (see TransportCommunicator::split), so that this blocks
// only briefly inside MPI.
int MpiTransport::make_context(const GroupState& parent, int first_member) {
  MPI_Comm comm;
  check_mpi(MPI_Comm_split(context(parent.context), first_member, parent.rank, &comm),
            "MPI_Comm_split");
  check_mpi(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  std::lock_guard<std::mutex> lock(contexts_mutex_);
  contexts_.push_back(comm);
  return static_cast<int>(contexts_.size()) - 1;
}

bool MpiTransport::shares_memory(int /*this_rank*/, int other) const {
  const std::vector<int>& ranks = local_ranks_.world_ranks;
  return std::find(ranks.begin(), ranks.end(), other) != ranks.end();
}

MPI_Comm MpiTransport::context(int number) {
  std::lock_guard<std::mutex> lock(contexts_mutex_);
  return contexts_[number];
}

// True when something has completed. Makes progress in MPI, unless another thread is at it.
bool MpiTransport::progress() {
  const std::vector<Completed> completed = take_completed();
  for (const Completed& one : completed) {
    one.transfer.done(*this, one.error);  // may start other transfers, and reduce
  }
  return !completed.empty();
}

std::vector<MpiTransport::Completed> MpiTransport::take_completed() {
  std::unique_lock<std::mutex> poll_lock(poll_mutex_, std::try_to_lock);
  if (!poll_lock || aborted()) {
    return {};
  }
  {
    std::lock_guard<std::mutex> lock(queue_mutex_);
    for (Pending& pending : started_) {
      requests_.push_back(pending.request);
      transfers_.push_back(std::move(pending.transfer));
    }
    started_.clear();
  }
  read_control();  // which also makes the progress whose results are read now
  const int count = static_cast<int>(requests_.size());
  indices_.resize(count);
  statuses_.resize(count);
  int found = 0;
  const int code = MPI_Testsome(count, requests_.data(), &found, indices_.data(), statuses_.data());
  if (code != MPI_SUCCESS && code != MPI_ERR_IN_STATUS) {
    set_abort_text("MPI_Testsome failed: " + mpi_text(code));
    return {};
  }
  std::vector<Completed> completed;
  for (int i = 0; i < std::max(found, 0); ++i) {  // MPI_UNDEFINED when there is no request
    const int error = code == MPI_ERR_IN_STATUS ? statuses_[i].MPI_ERROR : MPI_SUCCESS;
    requests_[indices_[i]] = MPI_REQUEST_NULL;  // also where MPI left one that failed
    PendingMessage& transfer = transfers_[indices_[i]];
    std::string text = end_of(transfer, error, statuses_[i]);
    completed.push_back({std::move(transfer), std::move(text)});
  }
  forget_completed();
  pending_ -= completed.size();
  return completed;
}

// Drops the transfers whose request has become MPI_REQUEST_NULL and keeps the order of the rest.
void MpiTransport::forget_completed() {
  size_t kept = 0;
  for (size_t i = 0; i < requests_.size(); ++i) {
    if (requests_[i] == MPI_REQUEST_NULL) {
      continue;
    }
    if (kept != i) {
      requests_[kept] = requests_[i];
      transfers_[kept] = std::move(transfers_[i]);
    }
    ++kept;
  }
  requests_.resize(kept);
  transfers_.erase(transfers_.begin() + kept, transfers_.end());
}

void MpiTransport::read_control() {
  int complete = 0;
  const int code = MPI_Test(&control_request_, &complete, MPI_STATUS_IGNORE);
  if (code != MPI_SUCCESS) {
    set_abort_text("MPI_Test of the control channel failed: " + mpi_text(code));
  } else if (complete && control_text_[0] != '\0') {
    set_abort_text(control_text_.data());
  }
}

// Tells every rank and gives MPI a moment to let the messages out. Errors here are not reported:
// the job ends anyway, and mpirun ends those that were not reached.
void MpiTransport::abort(int world_rank, const std::string& reason) noexcept {
  std::string text = c10::str("rank ", world_rank, " failed: ", reason);
  text.resize(std::min(text.size(), control_text_.size() - 1));
  if (!set_abort_text(text)) {
    return;
  }
  abort_message_ = std::move(text);
  int size = 0;
  MPI_Comm_size(control_, &size);
  abort_sends_.assign(size, MPI_REQUEST_NULL);
  for (int peer = 0; peer < size; ++peer) {
    if (peer != world_rank) {
      MPI_Isend(abort_message_.c_str(), static_cast<int>(abort_message_.size()) + 1, MPI_CHAR, peer,
                kControlTag, control_, &abort_sends_[peer]);
    }
  }
  const Clock::time_point end = Clock::now() + kAbortFlush;
  for (int complete = 0; !complete && Clock::now() < end; std::this_thread::yield()) {
    MPI_Testall(size, abort_sends_.data(), &complete, MPI_STATUSES_IGNORE);
  }
}

void MpiTransport::progress_loop() {
  Backoff backoff;
  while (sleep_until_needed()) {
    if (progress()) {
      backoff.reset();
    } else {
      backoff.pause();
    }
  }
}

// False when the thread shall end.
bool MpiTransport::sleep_until_needed() {
  std::unique_lock<std::mutex> lock(queue_mutex_);
  needed_.wait_for(lock, kControlPeriod,
                   [this] { return stop_ || (pending_ > 0 && waiters_ == 0 && !aborted()); });
  return !stop_;
}

}  // namespace smp::comm
