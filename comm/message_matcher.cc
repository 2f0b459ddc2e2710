// SPDX-License-Identifier: Apache-2.0
#include "comm/message_matcher.h"

#include <c10/util/StringUtil.h>

#include <cstring>
#include <iterator>
#include <utility>

namespace smp::comm {
namespace {

// Left uninitialised, unlike that of std::make_unique.
std::unique_ptr<std::byte[]> make_buffer(size_t bytes) {
  return std::unique_ptr<std::byte[]>(new std::byte[bytes]);
}

}  // namespace

void MessageMatcher::post(PendingMessage receive) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (aborted_) {
    return;
  }
  const auto found = find_message(receive);
  if (found == queues_.end()) {
    const std::string error = departure_of_sources(receive);
    if (error.empty()) {
      const Address address{receive.group().context, receive.message.peer, receive.tag};
      queues_[address].receives.push_back({std::move(receive), count_++});
      return;
    }
    lock.unlock();
    receive.done(transport_, error);
    return;
  }
  receive.message.peer = std::get<1>(found->first);
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
  if (const PendingMessage receive = take_receive(address); receive.operation) {
    lock.unlock();
    complete(receive, data, bytes);
    return;
  }
  auto message =
      std::make_shared<Unexpected>(Unexpected{make_buffer(bytes), bytes, true, count_++});
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
  PendingMessage receive = take_receive(address);
  if (receive.operation && receive.message.bytes == bytes) {
    arrival.data_ = static_cast<std::byte*>(receive.message.data);
    arrival.receive_ = std::move(receive);
    return arrival;
  }
  arrival.unexpected_ =
      std::make_shared<Unexpected>(Unexpected{make_buffer(bytes), bytes, false, count_++});
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
  PendingMessage receive;
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
  std::list<Receive> failed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    departed_.emplace(world_rank, error);
    for (auto next = queues_.begin(); next != queues_.end();) {
      const auto one = next++;
      std::list<Receive>& receives = one->second.receives;
      if (!receives.empty() && !departure_of_sources(receives.front().transfer).empty()) {
        failed.splice(failed.end(), receives);
        queues_.erase(one);
      }
    }
  }
  for (const Receive& receive : failed) {
    receive.transfer.done(transport_, error);
  }
}

std::string MessageMatcher::departure(int world_rank) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto departed = departed_.find(world_rank);
  return departed == departed_.end() ? "" : departed->second;
}

void MessageMatcher::abort() {
  QueuesByAddress dropped;  // destroyed without the lock: freeing tensors may call back
  std::lock_guard<std::mutex> lock(mutex_);
  aborted_ = true;
  dropped.swap(queues_);
}

// Where the message lies that a receive takes: of those that it may take, the first that has come.
MessageMatcher::QueuesByAddress::iterator MessageMatcher::find_message(
    const PendingMessage& receive) {
  const int peer = receive.message.peer;
  const int begin = peer == kAnyRank ? 0 : peer;
  const int end = peer == kAnyRank ? receive.group().size : peer + 1;
  auto first = queues_.end();
  for (int source = begin; source < end; ++source) {
    const auto found = queues_.find({receive.group().context, source, receive.tag});
    if (found != queues_.end() && !found->second.messages.empty() &&
        (first == queues_.end() ||
         found->second.messages.front()->number < first->second.messages.front()->number)) {
      first = found;
    }
  }
  return first;
}

// Where the receive lies that takes a message: the first posted.
MessageMatcher::QueuesByAddress::iterator MessageMatcher::find_receive(const Address& address) {
  const auto [context, source, tag] = address;
  const auto one = queues_.find(address);
  const auto any = queues_.find({context, kAnyRank, tag});
  if (one == queues_.end() || one->second.receives.empty()) {
    return any;
  }
  return any != queues_.end() &&
                 any->second.receives.front().number < one->second.receives.front().number
             ? any
             : one;
}

// Why no message can come for this receive; empty while one can.
std::string MessageMatcher::departure_of_sources(const PendingMessage& receive) const {
  const GroupState& group = receive.group();
  std::string error;
  for (int rank = 0; rank < group.size; ++rank) {
    const bool is_source =
        receive.message.peer == kAnyRank ? rank != group.rank : rank == receive.message.peer;
    if (!is_source) {
      continue;
    }
    const auto departed = departed_.find(group.world_ranks[rank]);
    if (departed == departed_.end()) {
      return "";
    }
    error = departed->second;
  }
  return error;
}

// The receive that is posted for a message; one without an operation if there is none.
PendingMessage MessageMatcher::take_receive(const Address& address) {
  const auto found = find_receive(address);
  if (found == queues_.end()) {
    return {};
  }
  std::list<Receive>& receives = found->second.receives;
  PendingMessage receive = std::move(receives.front().transfer);
  receives.pop_front();
  if (receives.empty()) {
    queues_.erase(found);
  }
  receive.message.peer = std::get<1>(address);
  return receive;
}

void MessageMatcher::keep(const Address& address, std::shared_ptr<Unexpected> message) {
  if (!aborted_) {
    queues_[address].messages.push_back(std::move(message));
  }
}

void MessageMatcher::complete(const PendingMessage& receive, const void* data, size_t bytes) {
  if (bytes != receive.message.bytes) {
    receive.done(transport_, receive.length_mismatch(bytes));
    return;
  }
  if (bytes > 0) {
    std::memcpy(receive.message.data, data, bytes);
  }
  receive.done(transport_);
}

}  // namespace smp::comm
