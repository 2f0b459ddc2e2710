#include "comm/threads/run_ranks.h"

#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/threads/thread_communicator.h"
#include "smp/core/error.h"

namespace smp::comm {
namespace {

// Keeps the first exception; only then tells the others, whose exceptions come later.
class FirstFailure {
 public:
  void record(Communicator& world, std::exception_ptr exception, const std::string& what) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!exception_) {
        exception_ = std::move(exception);
      }
    }
    world.abort(what);
  }

  void rethrow() const {
    if (exception_) {
      std::rethrow_exception(exception_);
    }
  }

 private:
  std::mutex mutex_;
  std::exception_ptr exception_;
};

void run_rank(const CommunicatorPtr& world, const std::function<void(CommunicatorPtr)>& fn,
              FirstFailure& failure) {
  set_error_context("smp rank " + std::to_string(world->rank()));
  try {
    fn(world);
  } catch (const std::exception& e) {
    failure.record(*world, std::current_exception(), e.what());
  } catch (...) {
    failure.record(*world, std::current_exception(), "an exception that is no std::exception");
  }
}

}  // namespace

void run_ranks(int size, const std::function<void(CommunicatorPtr)>& fn) {
  FirstFailure failure;
  std::vector<std::thread> threads;
  for (const CommunicatorPtr& world : make_thread_world(size)) {
    threads.emplace_back([&fn, &failure, world] { run_rank(world, fn, failure); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  failure.rethrow();
}

}  // namespace smp::comm
