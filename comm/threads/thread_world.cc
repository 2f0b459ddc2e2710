#include "comm/threads/thread_world.h"

#include <cstring>
#include <utility>

#include "comm/cores.h"

namespace smp::comm {

ThreadWorld::ThreadWorld(int ranks, std::vector<int> hosts) : hosts_(std::move(hosts)) {
  const cpu_set_t cores = cores_of_this_process();
  has_core_for_each_rank_ = ranks <= CPU_COUNT(&cores);
}

void ThreadWorld::start(Transfer transfer) {
  if (transfer.message.direction == Message::Direction::kSend) {
    send(std::move(transfer));
  } else {
    receive(std::move(transfer));
  }
}

// Straight into a posted receive, otherwise by way of a copy in the mailbox. Bytes are copied
// without the lock.
void ThreadWorld::send(Transfer transfer) {
  const Message& message = transfer.message;
  const Address address{transfer.group().context, transfer.group().rank, message.peer,
                        transfer.tag};
  std::unique_lock<std::mutex> lock(mutex_);
  Mailbox& mailbox = mailboxes_[address];
  if (mailbox.posted.empty()) {
    Mail mail{std::unique_ptr<std::byte[]>(new std::byte[message.bytes]), message.bytes};
    if (message.bytes > 0) {
      std::memcpy(mail.data.get(), message.data, message.bytes);
    }
    mailbox.mail.push_back(std::move(mail));
    lock.unlock();
  } else {
    const Transfer receive = std::move(mailbox.posted.front());
    mailbox.posted.pop_front();
    erase_if_empty(address);
    lock.unlock();
    deliver(receive, message.data, message.bytes);
  }
  transfer.done(*this);
}

void ThreadWorld::receive(Transfer transfer) {
  const Address address{transfer.group().context, transfer.message.peer, transfer.group().rank,
                        transfer.tag};
  std::unique_lock<std::mutex> lock(mutex_);
  Mailbox& mailbox = mailboxes_[address];
  if (mailbox.mail.empty()) {
    mailbox.posted.push_back(std::move(transfer));
    return;
  }
  const Mail mail = std::move(mailbox.mail.front());
  mailbox.mail.pop_front();
  erase_if_empty(address);
  lock.unlock();
  deliver(transfer, mail.data.get(), mail.bytes);
}

// Every collective has its own address; without this the map would grow for ever.
void ThreadWorld::erase_if_empty(const Address& address) {
  const auto position = mailboxes_.find(address);
  if (position->second.mail.empty() && position->second.posted.empty()) {
    mailboxes_.erase(position);
  }
}

void ThreadWorld::deliver(const Transfer& receive, const void* data, size_t bytes) {
  if (bytes != receive.message.bytes) {
    receive.done(*this, length_mismatch(receive.message, bytes));
    return;
  }
  if (bytes > 0) {
    std::memcpy(receive.message.data, data, bytes);
  }
  receive.done(*this);
}

bool ThreadWorld::wait_until(Clock::time_point deadline, const std::function<bool()>& ready) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_until(lock, deadline, ready);
}

void ThreadWorld::notify() {
  // With the lock, so that no wait can be between its look at `ready` and its sleep.
  std::lock_guard<std::mutex> lock(mutex_);
  changed_.notify_all();
}

// The ranks of a group come here one after the other, and may be at their next split while others
// are still at this one: the number of the split tells which is meant.
int ThreadWorld::make_context(const GroupState& parent, int first_member) {
  std::lock_guard<std::mutex> lock(mutex_);
  const int split = splits_[{parent.context, parent.rank}]++;
  const auto [position, is_new] =
      split_contexts_.insert({{parent.context, split, first_member}, contexts_});
  contexts_ += is_new ? 1 : 0;
  return position->second;
}

void ThreadWorld::abort(int world_rank, const std::string& reason) noexcept {
  if (set_abort_text("rank " + std::to_string(world_rank) + " failed: " + reason)) {
    aborting_rank_ = world_rank;
    notify();
  }
}

}  // namespace smp::comm
