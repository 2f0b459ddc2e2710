// SPDX-License-Identifier: Apache-2.0
#include "graph/offload_store.h"

#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <filesystem>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

#include "core/check.h"
#include "core/kept_tensors.h"
#include "graph/memory_layout.h"
#include "graph/scratch_file.h"

namespace smp::graph {
namespace {

using c10::impl::VirtualGuardImpl;

c10::Stream current_stream(c10::Device device) {
  return VirtualGuardImpl(device.type()).getStream(device);
}

/// The work that the calling thread's stream of the device has so far.
std::optional<c10::Event> work_so_far(c10::Device device) {
  if (device.is_cpu()) return std::nullopt;
  c10::Event event(device.type());
  event.record(current_stream(device));
  return event;
}

/// Memory of the host to which devices copy by themselves. Its allocator keeps it until the copies
/// that it is used in are done.
at::Tensor pinned_like(const at::Tensor& tensor) {
  return at::empty(tensor.sizes(), at::TensorOptions(tensor.scalar_type()).pinned_memory(true));
}

}  // namespace

/// A tensor on its way out, away or on its way back. All members but `layout_` are the queue's.
class OffloadStore::Item final : public StoredTensor, public std::enable_shared_from_this<Item> {
 public:
  enum class State {
    kWaiting,  ///< waiting to be copied away
    kLeaving,  ///< is being copied
    kAway,
    kReturning,  ///< is being fetched, or waits for that
    kHere,       ///< was never away, or is back
    kFailed,
  };

  /// The streams of a device on which tensors leave and return, beside those that compute and each
  /// other.
  struct CopyStreams {
    explicit CopyStreams(c10::Device device)
        : out(VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device)),
          back(VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device)) {}

    c10::Stream out, back;
  };

  Item(std::shared_ptr<Queue> queue, const at::Tensor& tensor)
      : layout_(tensor),
        queue_(std::move(queue)),
        tensor_(tensor),
        made_(work_so_far(tensor.device())) {}
  ~Item() override;

  void prefetch() override;
  at::Tensor get() override;

 private:
  friend class OffloadStore::Queue;

  c10::Device device() const { return layout_.options.device(); }
  bool is_of_host() const { return device().is_cpu(); }

  const MemoryLayout layout_;
  const std::shared_ptr<Queue> queue_;
  State state_ = State::kWaiting;
  bool needed_ = false;                 // while it is leaving
  at::Tensor tensor_;                   // undefined when away
  std::optional<CopyStreams> streams_;  // streams of a device's tensor
  std::optional<c10::Event> made_;
  std::optional<c10::Event> back_;  // event of a device's tensor that was away: when it has come
  at::Tensor host_copy_;            // host's copy of a device's tensor; pinned
  int64_t offset_ = -1;             // in the file
  std::exception_ptr error_;
};

/// The state that items, the store and its thread share.
class OffloadStore::Queue {
 public:
  using ItemPtr = std::shared_ptr<Item>;

  explicit Queue(std::string directory) : directory_(std::move(directory)) {}

  /// The thread's function.
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      work_.wait(lock, [&] { return stopped_ || !returning_.empty() || !leaving_.empty(); });
      if (stopped_) return;
      auto& list = returning_.empty() ? leaving_ : returning_;
      ItemPtr item = list.front().lock();
      list.pop_front();
      if (item != nullptr && item->state_ == Item::State::kReturning) fetch(*item, lock);
      if (item != nullptr && item->state_ == Item::State::kWaiting) take_away(*item, lock);
      lock.unlock();
      item.reset();  // may be the last to hold it, and that asks for the lock
      lock.lock();
    }
  }

  void stop() {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopped_ = true;
    work_.notify_all();
  }

  void add(const ItemPtr& item) {
    std::unique_lock<std::mutex> lock(mutex_);
    arrived_.forget_done();
    const int64_t bytes = item->layout_.nbytes();
    done_.wait(lock, [&] {
      return error_ != nullptr || waiting_ == 0 || waiting_ + bytes <= kMostWaiting;
    });
    if (error_ != nullptr) std::rethrow_exception(error_);
    if (item->is_of_host() && file_ == nullptr) file_ = std::make_unique<ScratchFile>(directory_);
    if (!item->is_of_host()) item->streams_ = streams_of(item->device());
    waiting_ += bytes;
    ++puts_;
    leaving_.push_back(item);
    work_.notify_all();
  }

  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [&] { return waiting_ == 0; });
  }

  void prefetch(Item& item) {
    const std::lock_guard<std::mutex> lock(mutex_);
    arrived_.forget_done();
    begin_return(item, /*first=*/false);
  }

  at::Tensor get(Item& item) {
    std::unique_lock<std::mutex> lock(mutex_);
    begin_return(item, /*first=*/true);
    if (stopped_ && item.state_ == Item::State::kReturning) fetch(item, lock);
    done_.wait(lock, [&] { return item.state_ != Item::State::kReturning; });
    if (item.state_ == Item::State::kFailed) std::rethrow_exception(item.error_);
    if (item.back_) take_over(item);
    return item.tensor_;
  }

  void forget(Item& item) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (item.state_ == Item::State::kWaiting) no_longer_waiting(item);
    free(item);
  }

  int64_t puts() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return puts_;
  }
  int64_t bytes_out() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return bytes_out_;
  }
  int64_t bytes_back() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return bytes_back_;
  }

 private:
  /// The memory of a tensor that came back is the copying stream's. This thread's stream, which is
  /// to use it, copies it into memory of its own, since to record the use would not do
  /// (`core::KeptTensors`).
  void take_over(Item& item) {
    const c10::Stream current = current_stream(item.device());
    item.back_->block(current);
    const at::Tensor own = copy_as_laid_out(item.tensor_);
    item.back_.reset();  // after the calls that may throw: the next get waits again
    arrived_.keep({std::exchange(item.tensor_, own)}, current);
  }

  const Item::CopyStreams& streams_of(c10::Device device) {
    return streams_.try_emplace(device, device).first->second;
  }

  /// `first`: before the others to be fetched.
  void begin_return(Item& item, bool first) {
    if (item.state_ == Item::State::kWaiting) {
      no_longer_waiting(item);
      item.state_ = Item::State::kHere;
    } else if (item.state_ == Item::State::kLeaving) {
      item.needed_ = true;
    } else if (item.state_ == Item::State::kAway) {
      item.state_ = Item::State::kReturning;
      returning_.insert(first ? returning_.begin() : returning_.end(), item.weak_from_this());
      work_.notify_all();
    }
  }

  void take_away(Item& item, std::unique_lock<std::mutex>& lock) {
    item.state_ = Item::State::kLeaving;
    if (item.is_of_host()) item.offset_ = file_->allocate(item.layout_.nbytes());
    lock.unlock();
    std::exception_ptr error;
    at::Tensor copy;
    try {
      copy = copy_away(item);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    no_longer_waiting(item);
    item.host_copy_ = std::move(copy);
    bytes_out_ += item.layout_.nbytes();
    if (item.needed_ || error != nullptr) free(item);
    item.state_ = error != nullptr ? Item::State::kFailed
                  : item.needed_   ? Item::State::kHere
                                   : Item::State::kAway;
    item.error_ = error;
    if (error != nullptr) error_ = error;
    at::Tensor gone;
    if (item.state_ == Item::State::kAway) std::swap(gone, item.tensor_);
    done_.notify_all();
  }

  /// Returns the copy of a device's tensor, which may go then.
  at::Tensor copy_away(const Item& item) const {
    const at::Tensor flat = item.layout_.flat(item.tensor_);
    if (item.is_of_host()) {
      file_->write(item.offset_, flat.const_data_ptr(), item.layout_.nbytes());
      return {};
    }
    const c10::StreamGuard guard(item.streams_->out);
    item.made_->block(item.streams_->out);
    const at::Tensor copy = pinned_like(flat).copy_(flat, /*non_blocking=*/true);
    c10::Event left(item.device().type());
    left.record(item.streams_->out);
    left.synchronize();
    return copy;
  }

  /// A device's tensor is here when its copy is enqueued.
  void fetch(Item& item, std::unique_lock<std::mutex>& lock) {
    lock.unlock();
    std::exception_ptr error;
    at::Tensor tensor;
    std::optional<c10::Event> back;
    try {
      if (item.is_of_host()) {
        tensor = item.layout_.allocate();
        file_->read(item.offset_, item.layout_.flat(tensor).mutable_data_ptr(),
                    item.layout_.nbytes());
      } else {
        const c10::StreamGuard guard(item.streams_->back);
        tensor = item.layout_.allocate();
        item.layout_.flat(tensor).copy_(item.host_copy_, /*non_blocking=*/true);
        back.emplace(item.device().type());
        back->record(item.streams_->back);
      }
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    free(item);
    item.tensor_ = std::move(tensor);
    item.back_ = std::move(back);
    bytes_back_ += item.layout_.nbytes();
    item.state_ = error == nullptr ? Item::State::kHere : Item::State::kFailed;
    item.error_ = error;
    done_.notify_all();
  }

  void no_longer_waiting(const Item& item) {
    waiting_ -= item.layout_.nbytes();
    done_.notify_all();
  }

  void free(Item& item) {
    item.host_copy_ = at::Tensor();
    if (item.offset_ >= 0) file_->free(std::exchange(item.offset_, -1), item.layout_.nbytes());
  }

  const std::string directory_;
  mutable std::mutex mutex_;
  std::condition_variable work_, done_;
  bool stopped_ = false;
  std::deque<std::weak_ptr<Item>> leaving_, returning_;
  int64_t waiting_ = 0;  // bytes
  std::unique_ptr<ScratchFile> file_;
  std::unordered_map<c10::Device, Item::CopyStreams> streams_;
  core::KeptTensors arrived_;  // that are copied once more
  std::exception_ptr error_;
  int64_t puts_ = 0, bytes_out_ = 0, bytes_back_ = 0;
};

OffloadStore::Item::~Item() { queue_->forget(*this); }
void OffloadStore::Item::prefetch() { queue_->prefetch(*this); }
at::Tensor OffloadStore::Item::get() { return queue_->get(*this); }

OffloadStore::OffloadStore(std::string directory)
    : queue_(std::make_shared<Queue>(
          directory.empty() ? std::filesystem::temp_directory_path().string() : directory)),
      thread_([queue = queue_] { queue->serve(); }) {}

OffloadStore::~OffloadStore() {
  queue_->stop();
  thread_.join();
}

std::shared_ptr<StoredTensor> OffloadStore::put(const at::Tensor& tensor) {
  auto item = std::make_shared<Item>(queue_, tensor);
  queue_->add(item);
  return item;
}

void OffloadStore::wait() { queue_->wait(); }
int64_t OffloadStore::puts() const { return queue_->puts(); }
int64_t OffloadStore::bytes_out() const { return queue_->bytes_out(); }
int64_t OffloadStore::bytes_back() const { return queue_->bytes_back(); }

}  // namespace smp::graph
