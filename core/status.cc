// SPDX-License-Identifier: Apache-2.0
#include "core/status.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <exception>
#include <new>
#include <optional>
#include <utility>

#include "core/stack_request.h"
#include "core/text.h"

namespace smp::core {
namespace {

static_assert(std::atomic<uint64_t>::is_always_lock_free &&
              std::atomic<uint32_t>::is_always_lock_free);
static_assert(sizeof(StatusMemory::Doing) == 64 && sizeof(StatusMemory::Waiting) == 64 &&
              sizeof(StatusMemory::Stack) == 256);

int64_t ns(Status::Clock::time_point time) { return time.time_since_epoch().count(); }

// Only one thread writes a part at a time. Release orders each store after the odd number.
template <class Part, class Write>
void write_part(Part& part, const Write& write) {
  const uint32_t version = part.version.load(std::memory_order_relaxed);
  part.version.store(version + 1, std::memory_order_relaxed);
  write();
  part.version.store(version + 2, std::memory_order_release);
}

template <class T>
void put(std::atomic<T>& where, T value) {
  where.store(value, std::memory_order_release);
}

void put(StatusMemory::SharedLabel& where, const Label& label) {
  for (size_t i = 0; i < where.size(); ++i) put(where[i], label.words()[i]);
}

// The status that a thread was given; without one the process's is its own.
struct ThreadStatus {
  std::optional<std::shared_ptr<Status>> status;
  const void* server = nullptr;
};

ThreadStatus& thread_status() {
  thread_local ThreadStatus status;
  return status;
}

// Threads may still ask when static objects have ended.
struct ProcessStatus {
  std::mutex mutex;
  std::shared_ptr<Status> owner;
  std::atomic<Status*> status{nullptr};
};

ProcessStatus& process_status() {
  static auto* const status = new ProcessStatus();
  return *status;
}

}  // namespace

Status::Status(const StatusOwner& owner, std::chrono::nanoseconds stall)
    : job_id_(printable(owner.job_id)), stall_(stall), action_(kUsersCode) {
  std::string text = job_id_ + "\n" + printable(owner.job) + "\n" +
                     printable(program_invocation_short_name) + "\n";
  for (const std::string& host : owner.hosts) text += printable(host) + "\n";
  bytes_ = sizeof(StatusMemory) + text.size();
  fd_ = memfd_create("smp-status", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  // Readers take only memory that cannot become shorter while they read it.
  if (fd_ >= 0 && (ftruncate(fd_, static_cast<off_t>(bytes_)) != 0 ||
                   fcntl(fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)) {
    close(std::exchange(fd_, -1));
  }
  // Without a descriptor no other process will see it.
  void* const data = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                          MAP_SHARED | (fd_ < 0 ? MAP_ANONYMOUS : 0), fd_, 0);
  if (data == MAP_FAILED) throw std::bad_alloc();
  memory_ = static_cast<StatusMemory*>(data);
  std::memcpy(static_cast<std::byte*>(data) + sizeof(StatusMemory), text.data(), text.size());
  StatusMemory::Owner& own = memory_->owner;
  own.rank = owner.rank;
  own.process = getpid();
  own.thread = static_cast<pid_t>(syscall(SYS_gettid));
  own.text_bytes = static_cast<uint32_t>(text.size());
  own.started = ns(Clock::now());
  set_action(action_);
  this_status();  // so that a signal's handler is not the first to ask on this thread
  put(memory_->stack.version, answer_stack_requests() ? uint32_t{2} : uint32_t{0});
  own.magic = StatusMemory::kMagic;
}

Status::~Status() {
  munmap(memory_, bytes_);
  if (fd_ >= 0) close(fd_);
}

std::string Status::call() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return call_;
}

bool Status::enter_call(const std::string& call) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!call_.empty()) return false;
  call_ = call;
  if (!still_answers_stack_requests()) put(memory_->stack.version, uint32_t{0});
  return true;
}

void Status::leave_call() {
  const std::lock_guard<std::mutex> lock(mutex_);
  call_.clear();
}

int Status::rank() const { return memory_->owner.rank; }

void Status::set_step(int64_t step) { put(memory_->doing.step, static_cast<uint32_t>(step)); }

void Status::set_action(const Label& action) {
  action_ = action;
  StatusMemory::Doing& doing = memory_->doing;
  write_part(doing, [&] {
    put(doing.since, ns(Clock::now()));
    put(doing.action, action);
  });
}

bool Status::is_served_by_this_thread() const {
  const void* const server = thread_status().server;
  return server == nullptr || server == server_;
}

bool Status::set_wait(Clock::time_point since, const Label& call, const std::vector<int>& ranks) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!is_served_by_this_thread()) return false;
  StatusMemory::Waiting& waiting = memory_->waiting;
  write_part(waiting, [&] {
    put(waiting.count, static_cast<uint32_t>(ranks.size()));
    put(waiting.since, ns(since));
    for (size_t i = 0; i < std::min(ranks.size(), waiting.ranks.size()); ++i) {
      put(waiting.ranks[i], ranks[i]);
    }
    put(waiting.call, call);
  });
  return true;
}

void Status::clear_wait() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!is_served_by_this_thread()) return;
  StatusMemory::Waiting& waiting = memory_->waiting;
  write_part(waiting, [&] { put(waiting.count, uint32_t{0}); });
}

void Status::end_wait() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    server_ = nullptr;
  }
  clear_wait();
}

void Status::set_stack(void* const* begin, void* const* end) {
  StatusMemory::Stack& stack = memory_->stack;
  write_part(stack, [&] {
    const size_t count = std::min<size_t>(end - begin, stack.frames.size());
    put(stack.count, static_cast<uint32_t>(count));
    for (size_t i = 0; i < count; ++i) put(stack.frames[i], reinterpret_cast<uint64_t>(begin[i]));
  });
}

void Status::set_warned() { put(memory_->owner.warned, ns(Clock::now())); }

Status* this_status() {
  const auto& own = thread_status().status;
  return own ? own->get() : process_status().status.load(std::memory_order_acquire);
}

std::shared_ptr<Status> share_this_status() {
  if (const auto& own = thread_status().status) return *own;
  ProcessStatus& process = process_status();
  const std::lock_guard<std::mutex> lock(process.mutex);
  return process.owner;
}

void set_process_status(std::shared_ptr<Status> status) {
  ProcessStatus& process = process_status();
  const std::lock_guard<std::mutex> lock(process.mutex);
  process.status = status.get();
  process.owner = std::move(status);
}

void set_thread_status(std::shared_ptr<Status> status) {
  thread_status().status.reset();
  if (status) thread_status().status = std::move(status);
}

ServingThread::ServingThread(std::shared_ptr<Status> status, const void* server) {
  thread_status() = {std::move(status), server};
}

ServingThread::~ServingThread() { thread_status() = {}; }

const void* this_server() { return thread_status().server; }

ServedBy::ServedBy(const void* server)
    : status_(this_status()), exceptions_(std::uncaught_exceptions()) {
  if (status_ != nullptr) status_->server_ = server;
}

ServedBy::~ServedBy() {
  if (status_ != nullptr && std::uncaught_exceptions() == exceptions_) status_->end_wait();
}

CallScope::CallScope(const std::string& call, std::string_view action,
                     std::optional<std::string_view> kind)
    : status_(this_status()), is_outermost_(status_ != nullptr && status_->enter_call(call)) {
  if (this_public_call().text().empty()) compared_.emplace(PublicCall(call, kind.value_or(call)));
  if (!is_outermost_) return;
  status_->end_wait();  // one that failed in the call before
  action_.set(Label(action.empty() ? call : action));
}

CallScope::~CallScope() {
  if (is_outermost_) status_->leave_call();
}

}  // namespace smp::core
