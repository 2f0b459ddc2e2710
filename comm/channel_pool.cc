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

// Channels of different kinds take different ways, so they share no port.
int kind_of(const ChannelSpec& spec) {
  return spec.device.is_cpu() ? 0 : moves_on_device(spec) ? 1 : 2;
}

// The longest messages first, so that they meet the longest of other users on the first ports.
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

// The ports that have no channel.
std::vector<ChannelPool::Port*> closed(const std::vector<ChannelPool::Port*>& ports) {
  std::vector<ChannelPool::Port*> result;
  std::copy_if(ports.begin(), ports.end(), std::back_inserter(result),
               [](const auto* port) { return !port->sender && !port->receiver; });
  return result;
}

std::vector<ChannelSpec> specs_of(const std::vector<ChannelPool::Port*>& ports) {
  std::vector<ChannelSpec> specs;
  for (const auto* port : ports) {
    specs.push_back(port->spec);
  }
  return specs;
}

}  // namespace

ChannelPool::Ports ChannelPool::open(const std::vector<ChannelSpec>& outgoing,
                                     const std::vector<ChannelSpec>& incoming) {
  Ports ports{take(outgoing_, outgoing), take(incoming_, incoming)};
  const auto senders = closed(ports.outgoing), receivers = closed(ports.incoming);
  Channels opened = group_->open_channels(specs_of(senders), specs_of(receivers));
  for (size_t i = 0; i < senders.size(); ++i) {
    senders[i]->sender = std::move(opened.senders[i]);
  }
  for (size_t i = 0; i < receivers.size(); ++i) {
    receivers[i]->receiver = std::move(opened.receivers[i]);
  }
  return ports;
}

std::vector<ChannelPool::Port*> ChannelPool::take(PortsByTag& ports,
                                                  const std::vector<ChannelSpec>& specs) {
  std::map<std::pair<int, int>, int> taken;  // taken channels by peer and kind
  std::vector<Port*> result(specs.size());
  for (const size_t i : by_length(specs)) {
    ChannelSpec spec = specs[i];
    const int kind = kind_of(spec);
    spec.tag = kKinds * taken[{spec.peer, kind}]++ + kind;
    Port& port =
        ports.try_emplace({spec.peer, spec.tag}, Port{spec, nullptr, nullptr}).first->second;
    widen(port, spec);
    result[i] = &port;
  }
  return result;
}

// Ports stay where they are.
void ChannelPool::close() {
  for (auto* const ports : {&outgoing_, &incoming_}) {
    for (auto& [key, port] : *ports) port = Port{port.spec, nullptr, nullptr};
  }
}

// The old channel goes before the new one comes, for its memory.
void ChannelPool::widen(Port& port, const ChannelSpec& spec) {
  ChannelSpec wide = spec;
  wide.held = std::max(spec.held, port.spec.held);
  wide.ahead = std::max(spec.ahead, port.spec.ahead);
  wide.host_bytes = std::max(spec.host_bytes, port.spec.host_bytes);
  wide.bytes = wide.host_bytes + std::max(element_bytes(spec), element_bytes(port.spec));
  if (width_of(wide) != width_of(port.spec)) {
    port = Port{wide, nullptr, nullptr};
  }
}

}  // namespace smp::comm
