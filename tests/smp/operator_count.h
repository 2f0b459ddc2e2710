// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/record_function.h>

#include <atomic>
#include <memory>
#include <string>

namespace smp::testing {

/// How often an operator was called, by all threads, while it lives.
class OperatorCount {
 public:
  explicit OperatorCount(const char* name) {
    name_ = name;
    count_ = 0;
    handle_ = at::addGlobalCallback(at::RecordFunctionCallback(&count));
  }
  ~OperatorCount() { at::removeCallback(handle_); }
  int value() const { return count_; }

 private:
  static std::unique_ptr<at::ObserverContext> count(const at::RecordFunction& call) {
    if (std::string(call.name()) == name_) ++count_;
    return nullptr;
  }
  static inline std::string name_;
  static inline std::atomic<int> count_{0};
  at::CallbackHandle handle_;
};

}  // namespace smp::testing
