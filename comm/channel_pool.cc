// SPDX-License-Identifier: Apache-2.0
#include "comm/channel_pool.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <numeric>
#include <tuple>

namespace smp::comm {
namespace {

constexpr int kKinds = 3;

// Channels of different kinds take different ways, so they share no lane.
int kind_of(const ChannelSpec& spec) {
  return spec.device.is_cpu() ? 0 : moves_on_device(spec) ? 1 : 2;
}

// The longest messages first, so that they meet the longest of other users on the first lanes.
std::vector<size_t> by_length(const std::vector<ChannelSpec>& specs) {
  std::vector<size_t> order(specs.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return specs[a].bytes > specs[b].bytes; });
  return order;
}

auto width_of(const ChannelSpec& spec) {
  return std::tie(spec.bytes, spec.held, spec.ahead, spec.host_bytes);
}

// The lanes that have no channel.
std::vector<ChannelPool::Lane*> closed(const std::vector<ChannelPool::Lane*>& lanes) {
  std::vector<ChannelPool::Lane*> result;
  std::copy_if(lanes.begin(), lanes.end(), std::back_inserter(result),
               [](const auto* lane) { return !lane->sender && !lane->receiver; });
  return result;
}

std::vector<ChannelSpec> specs_of(const std::vector<ChannelPool::Lane*>& lanes) {
  std::vector<ChannelSpec> specs;
  for (const auto* lane : lanes) {
    specs.push_back(lane->spec);
  }
  return specs;
}

}  // namespace

ChannelPool::Lanes ChannelPool::open(const std::vector<ChannelSpec>& outgoing,
                                     const std::vector<ChannelSpec>& incoming) {
  Lanes lanes{take(outgoing_, outgoing), take(incoming_, incoming)};
  const auto senders = closed(lanes.outgoing), receivers = closed(lanes.incoming);
  Channels opened = group_->open_channels(specs_of(senders), specs_of(receivers));
  for (size_t i = 0; i < senders.size(); ++i) {
    senders[i]->sender = std::move(opened.senders[i]);
  }
  for (size_t i = 0; i < receivers.size(); ++i) {
    receivers[i]->receiver = std::move(opened.receivers[i]);
  }
  return lanes;
}

std::vector<ChannelPool::Lane*> ChannelPool::take(LanesByTag& lanes,
                                                  const std::vector<ChannelSpec>& specs) {
  std::map<std::pair<int, int>, int> taken;  // taken channels by peer and kind
  std::vector<Lane*> result(specs.size());
  for (const size_t i : by_length(specs)) {
    ChannelSpec spec = specs[i];
    const int kind = kind_of(spec);
    spec.tag = kKinds * taken[{spec.peer, kind}]++ + kind;
    Lane& lane =
        lanes.try_emplace({spec.peer, spec.tag}, Lane{spec, nullptr, nullptr}).first->second;
    widen(lane, spec);
    result[i] = &lane;
  }
  return result;
}

// Lanes stay where they are.
void ChannelPool::close() {
  for (auto* const lanes : {&outgoing_, &incoming_}) {
    for (auto& [key, lane] : *lanes) lane = Lane{lane.spec, nullptr, nullptr};
  }
}

// The old channel goes before the new one comes, for its memory.
void ChannelPool::widen(Lane& lane, const ChannelSpec& spec) {
  ChannelSpec wide = spec;
  wide.held = std::max(spec.held, lane.spec.held);
  wide.ahead = std::max(spec.ahead, lane.spec.ahead);
  wide.host_bytes = std::max(spec.host_bytes, lane.spec.host_bytes);
  wide.bytes = wide.host_bytes + std::max(element_bytes(spec), element_bytes(lane.spec));
  if (width_of(wide) != width_of(lane.spec)) {
    lane = Lane{wide, nullptr, nullptr};
  }
}

}  // namespace smp::comm
