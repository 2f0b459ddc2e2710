// SPDX-License-Identifier: Apache-2.0
#include "comm/c10d/group_work.h"

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <set>
#include <utility>

#include "comm/exit_gate.h"
#include "comm/messages.h"
#include "core/check.h"

namespace smp::comm {
namespace {

using c10::ivalue::Future;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr std::chrono::microseconds kShortestPause{20};
constexpr std::chrono::microseconds kLongestPause{1000};

// The title in profilers, which keep the pointer; null while there is none.
const char* profiling_title(const std::string& backend, const char* verb) {
  if (!at::hasCallbacks()) {
    return nullptr;
  }
  static std::mutex mutex;
  static auto* const titles = new std::set<std::string>();
  std::lock_guard<std::mutex> lock(mutex);
  return titles->insert(backend + ":" + verb).first->c_str();
}

// The devices of results, but for the CPU.
std::vector<c10::Device> devices_of(const std::vector<at::Tensor>& results) {
  std::vector<c10::Device> devices;
  for (const at::Tensor& result : results) {
    const bool known = std::count(devices.begin(), devices.end(), result.device()) > 0;
    if (!result.is_cpu() && !known) {
      devices.push_back(result.device());
    }
  }
  return devices;
}

std::optional<c10::Stream> stream_of(const std::vector<at::Tensor>& results) {
  const std::vector<c10::Device> devices = devices_of(results);
  if (devices.empty()) {
    return std::nullopt;
  }
  return c10::impl::VirtualGuardImpl(devices.front().type()).getStream(devices.front());
}

}  // namespace

GroupWork::GroupWork(std::shared_ptr<const WorkContext> context, const WorkCall& call,
                     std::vector<WorkPtr> works, std::function<void()> after,
                     const std::vector<at::Tensor>& inputs, std::vector<at::Tensor> results)
    : c10d::Work(context->rank, call.type, profiling_title(context->backend, call.verb),
                 at::hasCallbacks() ? std::optional(inputs) : std::nullopt),
      context_(std::move(context)),
      call_(call),
      works_(std::move(works)),
      results_(std::move(results)),
      stream_(stream_of(results_)),
      after_(std::move(after)) {}

bool GroupWork::isCompleted() {
  for (const WorkPtr& work : works_) {
    if (!work->test()) {
      return false;
    }
  }
  settle();
  return true;
}

bool GroupWork::wait(milliseconds timeout) {
  if (timeout != kNoTimeout) {
    await(timeout);
  }
  settle();
  if (const std::exception_ptr failure = exception()) {
    std::rethrow_exception(failure);
  }
  return true;
}

void GroupWork::await(milliseconds timeout) {
  const Clock::time_point deadline = Clock::now() + timeout;
  auto pause = kShortestPause;
  while (!isCompleted()) {
    SMP_CHECK_WITH(TimeoutError, Clock::now() < deadline, "c10d ", call_.verb, " on group '",
                   context_->group, "' was not complete within the timeout of ",
                   timeout.count() / 1000.0,
                   " s that its wait was given. Check that the other ranks make the matching call; "
                   "if they only compute for long, wait for longer.");
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongestPause);
  }
}

int GroupWork::sourceRank() const {
  if (call_.type != c10d::OpType::RECV && call_.type != c10d::OpType::RECVANYSOURCE) {
    return c10d::Work::sourceRank();  // which throws
  }
  const auto* any = dynamic_cast<const ReceiveWork*>(works_.front().get());
  return any ? any->source() : call_.source;
}

void GroupWork::settle() {
  const std::exception_ptr failure = finish_communication();
  std::lock_guard<std::mutex> lock(settle_mutex_);
  if (settled_) {
    return;
  }
  settled_ = true;
  std::exception_ptr error = failure;
  try {
    const at::AutoDispatchBelowADInplaceOrView as_the_communicator;
    const c10::OptionalStreamGuard stream(stream_);
    if (!error && after_) {
      after_();
    }
  } catch (...) {
    error = std::current_exception();
  }
  after_ = nullptr;
  finish(error);
}

std::exception_ptr GroupWork::finish_communication() {
  try {
    for (const WorkPtr& work : works_) {
      work->wait();
    }
    return nullptr;
  } catch (...) {
    return std::current_exception();
  }
}

c10::intrusive_ptr<Future> GroupWork::getFuture() {
  if (c10d::isP2POp(call_.type)) {
    return c10d::Work::getFuture();  // which throws
  }
  c10::intrusive_ptr<Future> future;
  {
    std::lock_guard<std::mutex> lock(future_mutex_);
    if (future_) {
      return future_;
    }
    future_ = c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()),
                                          devices_of(results_));
    future = future_;
  }
  context_->completer->push(c10::intrusive_ptr<GroupWork>::unsafe_reclaim_from_nonowning(this));
  return future;
}

void GroupWork::deliver() {
  if (const std::exception_ptr failure = exception()) {
    future_->setError(failure);
  } else {
    future_->markCompleted(c10::IValue(results_));
  }
}

void Completer::push(WorkPtr work) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (stopped_ || ExitGate::get().is_closed()) {
    lock.unlock();
    work->settle();
    work->deliver();
    return;
  }
  works_.push_back(std::move(work));
  if (!one_waits_) {
    start_thread_if_none_is_idle();
  }
}

void Completer::stop() {
  std::unique_lock<std::mutex> lock(mutex_);
  stopped_ = true;
  changed_.notify_all();
  while (!threads_.empty()) {
    std::thread thread = std::move(threads_.back());
    threads_.pop_back();
    lock.unlock();
    if (thread.get_id() == std::this_thread::get_id()) {
      thread.detach();  // it holds this object
    } else {
      thread.join();
    }
    lock.lock();
  }
}

// Requires the lock. A thread has to take the first work.
void Completer::start_thread_if_none_is_idle() {
  if (idle_ > 0) {
    changed_.notify_one();
  } else {
    threads_.emplace_back([self = shared_from_this()] { self->loop(); });
  }
}

void Completer::loop() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    ++idle_;
    changed_.wait(lock, [this] { return !one_waits_ && (stopped_ || !works_.empty()); });
    --idle_;
    if (works_.empty()) {
      return;
    }
    WorkPtr work = std::move(works_.front());
    works_.pop_front();
    one_waits_ = true;
    lock.unlock();
    work->settle();
    lock.lock();
    one_waits_ = false;
    if (!works_.empty()) {
      start_thread_if_none_is_idle();
    }
    if (stopped_) {
      changed_.notify_all();
    }
    lock.unlock();
    deliver(std::move(work));
    lock.lock();
  }
}

// The callbacks are the interpreter's, and this may be the last to hold the work.
void Completer::deliver(WorkPtr work) {
  const bool delivered = ExitGate::get().pass([&work] {
    work->deliver();
    work.reset();
  });
  if (!delivered) {
    work.release();
  }
}

}  // namespace smp::comm
