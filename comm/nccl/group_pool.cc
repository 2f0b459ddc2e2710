// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl/group_pool.h"

#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>
#include <vector>

#include "core/check.h"

namespace smp::comm {
namespace {

// How often the watcher looks for a rank that has aborted.
constexpr std::chrono::milliseconds kLookPeriod{200};

// On a device that has failed nothing goes on.
bool has_ended(const DeviceTransfer& transfer) noexcept {
  try {
    return transfer.work->isCompleted();
  } catch (const c10::Error&) {
    return true;
  }
}

}  // namespace

GroupPool::GroupPool(CommunicatorPtr host, at::Device device, MakeDeviceGroup make)
    : host_(std::move(host)), device_(device), make_(std::move(make)) {}

void GroupPool::close() {
  let_finish(
      [this] {
        const std::lock_guard<std::mutex> lock(mutex_);
        forget_ended();
        return kept_.empty() || !abort_text_.empty();
      },
      host_->timeout());
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
  }
  closes_.notify_one();
  if (watcher_.joinable()) {
    watcher_.join();
  }
  // Ranks let go of a group at different times, so it cannot end in step with the others'.
  end_groups();
  kept_.clear();
}

void GroupPool::watch() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!closes_.wait_for(lock, kLookPeriod, [this] { return closing_; })) {
    lock.unlock();
    std::string text = host_->abort_text();
    lock.lock();
    if (text.empty()) {
      continue;
    }
    abort_text_ = std::move(text);
    lock.unlock();
    end_groups();
    return;
  }
}

void GroupPool::end_groups() noexcept {
  std::map<std::string, DeviceGroup> groups;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    groups.swap(groups_);
  }
  for (const auto& [name, group] : groups) {
    try {
      group->abort();
    } catch (const std::exception& error) {  // it could not be ended in time
      TORCH_WARN("device group '", name, "' of '", host_->name(), "': ", error.what());
    }
  }
}

void GroupPool::check_abort() {
  if (!abort_text_.empty()) {
    core::fail<CommError>("the device groups of group '", host_->name(),
                          "' were ended when a rank failed: ", abort_text_);
  }
}

DeviceGroup GroupPool::get(const std::string& name, int rank, int size, GroupUse use) {
  const std::lock_guard<std::mutex> lock(mutex_);
  check_abort();
  DeviceGroup& group = groups_[name];
  if (!group) {
    group = make_(name, rank, size, use);
  }
  if (!watcher_.joinable()) {
    watcher_ = std::thread([this] { watch(); });
  }
  return group;
}

DeviceGroup GroupPool::of_all() {
  return get("all", host_->rank(), host_->size(), GroupUse::kCollectives);
}

DeviceGroup GroupPool::of_lane(int peer, Tag tag, bool sends) {
  const int sender = sends ? host_->rank() : peer, receiver = sends ? peer : host_->rank();
  const std::string name = c10::str("port ", tag, " from ", sender, " to ", receiver);
  const bool is_new = [&] {
    const std::lock_guard<std::mutex> lock(mutex_);
    return groups_.count(name) == 0;
  }();
  DeviceGroup group = get(name, sends ? kSenderRank : kReceiverRank, 2, GroupUse::kLane);
  if (is_new) {
    std::vector<at::Tensor> token = {at::zeros({1}, at::TensorOptions(at::kByte).device(device_))};
    const auto work = sends ? group->send(token, kReceiverRank, /*tag=*/0)
                            : group->recv(token, kSenderRank, /*tag=*/0);
    work->wait();
  }
  return group;
}

void GroupPool::set_timeout(std::chrono::milliseconds timeout) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [name, group] : groups_) {
    group->setTimeout(timeout);
  }
}

void GroupPool::keep(DeviceTransfer transfer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  forget_ended();
  kept_.push_back(std::move(transfer));
}

void GroupPool::forget_ended() {
  kept_.erase(std::remove_if(kept_.begin(), kept_.end(), has_ended), kept_.end());
}

void let_finish(const std::function<bool()>& finished, std::chrono::milliseconds at_most) noexcept {
  const auto end = std::chrono::steady_clock::now() + at_most;
  try {
    while (std::uncaught_exceptions() == 0 && !finished() &&
           std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  } catch (const c10::Error&) {
    // The device has failed, and nothing on it goes on.
  }
}

}  // namespace smp::comm
