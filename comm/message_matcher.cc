// SPDX-License-Identifier: Apache-2.0
#include "comm/message_matcher.h"

#include <c10/util/StringUtil.h>

#include <cstring>
#include <iterator>
#include <utility>

namespace smp::comm {
namespace {

// Left uninitialised, unlike what std::make_unique makes.
std::unique_ptr<std::byte[]> make_buffer(size_t bytes) {
  return std::unique_ptr<std::byte[]>(new std::byte[bytes]);
}

int source_in_world(const Transfer& receive) {
  return receive.group().world_ranks[receive.message.peer];
}

}  // namespace

void MessageMatcher::post(Transfer receive) {
  const Address address{receive.group().context, receive.message.peer, receive.tag};
  std::unique_lock<std::mutex> lock(mutex_);
  if (aborted_) {
    return;
  }
  const auto found = queues_.find(address);
  if (found == queues_.end() || found->second.messages.empty()) {
    const auto departed = departed_.find(source_in_world(receive));
    if (departed == departed_.end()) {
      queues_[address].receives.push_back(std::move(receive));
      return;
    }
    const std::string error = departed->second;
    lock.unlock();
    receive.done(transport_, error);
    return;
  }
  const std::shared_ptr<Unexpected> message = std::move(found->second.messages.front());
  found->second.messages.pop_front();
  if (found->second.messages.empty()) {
    queues_.erase(found);
  }
  if (!message->is_complete) {
    message->receive = std::move(receive);
    return;
  }
  lock.unlock();
  complete(receive, message->data.get(), message->bytes);
}

void MessageMatcher::deliver(const Address& address, const void* data, size_t bytes) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (const Transfer receive = take_receive(address); receive.operation) {
    lock.unlock();
    complete(receive, data, bytes);
    return;
  }
  auto message = std::make_shared<Unexpected>(Unexpected{make_buffer(bytes), bytes, true});
  if (bytes > 0) {
    std::memcpy(message->data.get(), data, bytes);
  }
  keep(address, std::move(message));
}

// A message of another length than its receive expects goes into a buffer, too, so that the
// connection can go on to the next.
MessageMatcher::Arrival MessageMatcher::begin(const Address& address, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  Arrival arrival;
  Transfer receive = take_receive(address);
  if (receive.operation && receive.message.bytes == bytes) {
    arrival.data_ = static_cast<std::byte*>(receive.message.data);
    arrival.receive_ = std::move(receive);
    return arrival;
  }
  arrival.unexpected_ = std::make_shared<Unexpected>(Unexpected{make_buffer(bytes), bytes, false});
  arrival.data_ = arrival.unexpected_->data.get();
  if (receive.operation) {
    arrival.unexpected_->receive = std::move(receive);
  } else {
    keep(address, arrival.unexpected_);
  }
  return arrival;
}

void MessageMatcher::end(const Arrival& arrival) {
  if (!arrival.unexpected_) {
    arrival.receive_.done(transport_);
    return;
  }
  Unexpected& message = *arrival.unexpected_;
  Transfer receive;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    message.is_complete = true;
    receive = std::move(message.receive);
  }
  if (receive.operation) {
    complete(receive, message.data.get(), message.bytes);
  }
}

void MessageMatcher::depart(int world_rank) {
  const std::string error = c10::str("rank ", world_rank,
                                     " of the world has ended its part of the job. Check that all "
                                     "ranks make the same calls.");
  std::list<Transfer> failed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    departed_.emplace(world_rank, error);
    for (auto next = queues_.begin(); next != queues_.end();) {
      const auto one = next++;
      std::list<Transfer>& receives = one->second.receives;
      if (!receives.empty() && source_in_world(receives.front()) == world_rank) {
        failed.splice(failed.end(), receives);
        queues_.erase(one);
      }
    }
  }
  for (const Transfer& receive : failed) {
    receive.done(transport_, error);
  }
}

std::string MessageMatcher::departure(int world_rank) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto departed = departed_.find(world_rank);
  return departed == departed_.end() ? "" : departed->second;
}

void MessageMatcher::abort() {
  QueuesByAddress dropped;  // destroyed without the lock: tensors may free what calls back
  std::lock_guard<std::mutex> lock(mutex_);
  aborted_ = true;
  dropped.swap(queues_);
}

// The receive that is posted for a message; one without an operation if there is none.
Transfer MessageMatcher::take_receive(const Address& address) {
  const auto found = queues_.find(address);
  if (found == queues_.end() || found->second.receives.empty()) {
    return {};
  }
  std::list<Transfer>& receives = found->second.receives;
  Transfer receive = std::move(receives.front());
  receives.pop_front();
  if (receives.empty()) {
    queues_.erase(found);
  }
  return receive;
}

void MessageMatcher::keep(const Address& address, std::shared_ptr<Unexpected> message) {
  if (!aborted_) {
    queues_[address].messages.push_back(std::move(message));
  }
}

void MessageMatcher::complete(const Transfer& receive, const void* data, size_t bytes) {
  if (bytes != receive.message.bytes) {
    receive.done(transport_, length_mismatch(receive.message, bytes));
    return;
  }
  if (bytes > 0) {
    std::memcpy(receive.message.data, data, bytes);
  }
  receive.done(transport_);
}

}  // namespace smp::comm
