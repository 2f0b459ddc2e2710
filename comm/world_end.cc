// SPDX-License-Identifier: Apache-2.0
#include "comm/world_end.h"

#include "comm/communicator.h"

namespace smp::comm {

void WorldEnd::let_go() {
  std::unique_lock lock(mutex_);
  while (!holders_.empty()) {
    const auto let_go = std::move(holders_.back().second);
    holders_.pop_back();
    lock.unlock();
    let_go();  // may end others
    lock.lock();
  }
}

AtWorldEnd::AtWorldEnd(const Communicator& group, std::function<void()> let_go)
    : world_(group.world_end()) {
  const std::lock_guard lock(world_->mutex_);
  world_->holders_.emplace_back(this, std::move(let_go));
}

AtWorldEnd::~AtWorldEnd() {
  const std::lock_guard lock(world_->mutex_);
  world_->holders_.remove_if([this](const auto& holder) { return holder.first == this; });
}

}  // namespace smp::comm
