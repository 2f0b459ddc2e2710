// SPDX-License-Identifier: Apache-2.0
#include "comm/threads/run_ranks.h"

#include <ATen/Parallel.h>

#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "comm/threads/thread_world.h"
#include "core/check.h"
#include "core/failure.h"
#include "core/libtorch.h"
#include "core/vector_math.h"

namespace smp::comm {
namespace {

// Exceptions of the rank threads. The cause is the exception of the rank whose abort came first;
// that may have been inside `fn`, before the exception arrived here.
class Failures {
 public:
  explicit Failures(int ranks) : exceptions_(ranks) {}

  void record(Communicator& world, std::exception_ptr exception, const std::string& what) {
    exceptions_[world.rank()] = std::move(exception);
    world.abort(what);
  }

  void rethrow(int aborting_rank) const {
    if (aborting_rank >= 0 && exceptions_[aborting_rank]) {
      std::rethrow_exception(exceptions_[aborting_rank]);
    }
    // The rank that aborted caught its own exception; the others saw the consequence.
    for (const std::exception_ptr& exception : exceptions_) {
      if (exception) std::rethrow_exception(exception);
    }
  }

 private:
  std::vector<std::exception_ptr> exceptions_;  // exceptions by rank; each thread writes its own
};

void run_rank(const CommunicatorPtr& world, const std::function<void(CommunicatorPtr)>& fn,
              Failures& failures) {
  core::set_error_context("smp rank " + std::to_string(world->rank()));
  // libtorch does so at a thread's first loop of its own, which may be after kernels of oneDNN's
  // and MKL's, whose bits depend on it.
  at::init_num_threads();
  try {
    fn(world);
  } catch (const std::exception& e) {
    failures.record(*world, std::current_exception(), core::message_of(e));
  } catch (...) {
    failures.record(*world, std::current_exception(), "an exception that is no std::exception");
  }
}

}  // namespace

void run_ranks(int size, const std::function<void(CommunicatorPtr)>& fn,
               const std::vector<int>& hosts) {
  core::check_libtorch();
  core::prepare_vector_math();
  const auto shared = std::make_shared<ThreadWorld>(size, hosts);
  const auto ranks = make_thread_world(size, shared);
  Failures failures(size);
  std::vector<std::thread> threads;
  for (const CommunicatorPtr& world : ranks) {
    threads.emplace_back([&fn, &failures, world] { run_rank(world, fn, failures); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  failures.rethrow(shared->aborting_rank());
}

}  // namespace smp::comm
