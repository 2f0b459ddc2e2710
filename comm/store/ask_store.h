// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/Exception.h>

#include <future>
#include <memory>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

#include "comm/store/socket.h"
#include "core/check.h"

namespace smp::comm {

/// The part of an error's text that says what has happened.
inline std::string first_line(const c10::Error& error) {
  const std::string text = error.what_without_backtrace();
  return text.substr(0, text.find('\n'));
}

/// Runs `call()` on a thread of its own and returns its result or error. The thread goes on if the
/// caller stops waiting: c10d's store waits for ever for a process that is stopped. `call` owns all
/// that it uses.
template <class Call>
auto call_apart(Call call) {
  using Result = decltype(call());
  auto task = std::make_shared<std::packaged_task<Result()>>(
      [call = std::move(call), context = core::error_context()]() mutable {
        core::set_error_context(context);
        return call();
      });
  std::future<Result> result = task->get_future();
  std::thread([task] { (*task)(); }).detach();
  return result;
}

/// Returns the result of `ask(store)`. Throws a `TimeoutError` if the store has not answered by the
/// deadline and a `CommError` if it has failed; they name `what`, for which it was asked.
template <class Ask>
auto ask_store(const c10::intrusive_ptr<c10d::Store>& store, TimePoint deadline,
               const std::string& what, Ask ask) {
  auto answer = call_apart([store, ask = std::move(ask)] { return ask(store); });
  SMP_CHECK_WITH(TimeoutError, answer.wait_until(deadline) == std::future_status::ready, what,
                 ": the store has not answered within the time-out. The process that opened it, "
                 "mostly rank 0, is stopped, or its host cannot be reached.");
  try {
    return answer.get();
  } catch (const c10::DistError& error) {
    core::fail<CommError>(what, ": the store does not answer: ", first_line(error),
                          ". It ends with the process that opened it, mostly rank 0: look at the "
                          "output of that rank.");
  }
}

}  // namespace smp::comm
