// SPDX-License-Identifier: Apache-2.0
#include "comm/shm/share.h"

#include <algorithm>

#include "core/check.h"
#include "core/log.h"

namespace smp::comm {
namespace {

// The introduction of a rank to the others.
struct Introduction {
  int32_t first_of_host;
  ProcessId process;
};

// The memory that the first rank of a host has made: 0 when it has none to offer.
struct ShareOffer {
  uint64_t memory;
  int32_t fd;
};

// Whether a rank has mapped the offered memory; if not, it waits for the descriptor.
struct ShareAnswer {
  bool mapped;
};

std::shared_ptr<SharedMemory> try_create(size_t bytes) {
  try {
    return SharedMemory::create(bytes);
  } catch (const CommError& error) {
    core::log_warning(error.what());
    return nullptr;
  }
}

// Each rank that waits has a mailbox of its own.
uint64_t mailbox_of(uint64_t memory, int rank) {
  return memory ^ (static_cast<uint64_t>(rank) + 1) * 0x9e3779b97f4a7c15U;
}

}  // namespace

bool HostLayout::is_contiguous() const {
  return std::all_of(hosts.begin(), hosts.end(), [](const std::vector<int>& ranks) {
    return ranks.back() - ranks.front() + 1 == static_cast<int>(ranks.size());
  });
}

bool HostLayout::is_one_process() const {
  const ProcessId self = this_process();
  return std::all_of(local().begin(), local().end(), [&](int rank) {
    return processes[rank].pid == self.pid && processes[rank].pid_namespace == self.pid_namespace;
  });
}

HostLayout find_hosts(const Transport& transport, const GroupState& group,
                      const MessageCollectives& messages) {
  int first = 0;
  while (first != group.rank &&
         !transport.shares_memory(group.world_rank, group.world_ranks[first])) {
    ++first;
  }
  const auto ranks = gather_values(messages, group.size, Introduction{first, this_process()});
  HostLayout layout;
  std::vector<int> host_of_first(group.size, -1);
  for (int rank = 0; rank < group.size; ++rank) {
    int& host = host_of_first[ranks[rank].first_of_host];
    if (host < 0) {
      host = static_cast<int>(layout.hosts.size());
      layout.hosts.emplace_back();
    }
    if (rank == group.rank) {
      layout.host = host;
      layout.local_rank = static_cast<int>(layout.hosts[host].size());
    }
    layout.hosts[host].push_back(rank);
    layout.processes.push_back(ranks[rank].process);
  }
  return layout;
}

std::shared_ptr<SharedMemory> share_memory(const GroupState& group, const HostLayout& layout,
                                           size_t bytes, const MessageCollectives& messages) {
  const int leader = layout.local().front();
  const bool leads = leader == group.rank;
  std::shared_ptr<SharedMemory> memory = leads ? try_create(bytes) : nullptr;
  const auto offers = gather_values(
      messages, group.size, memory ? ShareOffer{memory->id(), memory->fd()} : ShareOffer{0, -1});
  const ShareOffer& offer = offers[leader];
  if (!leads && offer.memory != 0) {
    memory = open_memory_of(layout.processes[leader], offer.fd, offer.memory, bytes);
  }
  std::unique_ptr<FdMailbox> mailbox;
  if (!memory && offer.memory != 0) {
    mailbox = std::make_unique<FdMailbox>(mailbox_of(offer.memory, group.rank));
  }
  const auto have_it = [](const std::vector<ShareAnswer>& answers) {
    return std::all_of(answers.begin(), answers.end(),
                       [](const ShareAnswer& a) { return a.mapped; });
  };
  auto answers = gather_values(messages, group.size, ShareAnswer{memory != nullptr});
  if (!have_it(answers)) {
    for (const int rank : layout.local()) {
      if (leads && memory && !answers[rank].mapped) {
        post_fd(mailbox_of(memory->id(), rank), memory->fd());
      }
    }
    gather_values(messages, group.size, ShareAnswer{});  // all descriptors are sent
    if (mailbox) {
      memory = SharedMemory::map(mailbox->take(), bytes, offer.memory);
    }
    answers = gather_values(messages, group.size, ShareAnswer{memory != nullptr});
  }
  if (leads && memory) {
    memory->close_fd();
  }
  if (!have_it(answers)) {
    if (group.rank == 0) {
      core::log_warning(
          c10::str("ranks of group '", group.name,
                   "' on one host cannot map each other's memory; their collectives send "
                   "messages instead, which is slower."));
    }
    return nullptr;
  }
  return memory;
}

}  // namespace smp::comm
