// SPDX-License-Identifier: Apache-2.0
#include "comm/session_world.h"

#include <cstdlib>
#include <exception>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

#include "comm/mpi/caller_ranks.h"
#include "comm/store/socket.h"
#include "comm/threads/thread_world.h"
#include "core/check.h"
#include "core/env.h"
#include "core/failure.h"
#include "core/host.h"
#include "core/libtorch.h"
#include "core/vector_math.h"

namespace smp::comm {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;
using std::chrono::milliseconds;

// The first letter of a rank's text.
constexpr char kHere = '+', kProblem = '-';

void check_all_begin(const std::vector<std::string>& texts) {
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    SMP_CHECK_WITH(CommError, texts[rank].front() == kHere, "rank ", rank,
                   " of the communicator cannot begin the session, so that none does: ",
                   texts[rank].substr(1));
  }
}

// Rank 0 tells the others so: the address and port of the store that it opens for them.
std::string open_store(milliseconds timeout, StorePtr& store) {
  try {
    int port = 0;
    store = serve_store(timeout, port);
    return c10::str(kHere, address_of_this_host(core::env("SMP_SOCKET_IFNAME").value_or(""), ""),
                    " ", port);
  } catch (const std::exception& error) {
    return c10::str(kProblem, core::message_of(error));
  }
}

}  // namespace

SessionWorld SessionWorld::alone() {
  core::check_libtorch();
  core::prepare_vector_math();
  StoreWorld world;
  world.world = make_thread_world(1).front();
  world.hosts = {core::host_name()};
  return SessionWorld(std::move(world));
}

SessionWorld SessionWorld::meet(int64_t communicator, milliseconds timeout,
                                const std::string& problem) {
  core::check_libtorch();
  core::prepare_vector_math();
  StorePtr store;
  const CallerRanks ranks = exchange_texts(communicator, [&](int rank) {
    if (!problem.empty()) return kProblem + problem;
    return rank == 0 ? open_store(timeout, store) : std::string(1, kHere);
  });
  check_all_begin(ranks.texts);
  const std::string& place = ranks.texts[0];
  const size_t space = place.rfind(' ');
  if (store == nullptr) {
    store = connect_to_store(place.substr(1, space - 1), std::atoi(place.c_str() + space), timeout);
  }
  const int size = static_cast<int>(ranks.texts.size());
  return SessionWorld(open_store_world(store, ranks.rank, size, MeetingTime(timeout), "world"));
}

void SessionWorld::finish() {
  world_.world->world_end()->let_go();
  finish_store_world(world_);
}

}  // namespace smp::comm
