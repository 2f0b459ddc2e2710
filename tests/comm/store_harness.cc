// SPDX-License-Identifier: Apache-2.0
#include <exception>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/store/store_communicator.h"
#include "core/check.h"
#include "tests/comm/harness.h"

namespace smp::comm {
namespace {

struct Rank {
  CommunicatorPtr world;
  std::exception_ptr thrown;
};

void run(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
         const std::function<void(const CommunicatorPtr&)>& body, Rank& result) {
  core::set_error_context("smp rank " + std::to_string(rank));
  try {
    result.world = make_store_world(store, rank, size, std::chrono::seconds(30));
    result.world->set_timeout(std::chrono::seconds(30));
    body(result.world);
  } catch (const std::exception& error) {
    result.thrown = std::current_exception();
    if (result.world) result.world->abort(error.what());
  }
}

}  // namespace

std::vector<int> group_sizes() { return {1, 2, 3}; }

void on_every_rank(int size, const std::function<void(const CommunicatorPtr&)>& body) {
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  std::vector<Rank> ranks(size);  // no rank leaves before all have ended
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] { run(store, rank, size, body, ranks[rank]); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const Rank& rank : ranks) {
    if (rank.thrown) std::rethrow_exception(rank.thrown);
  }
}

}  // namespace smp::comm
