// SPDX-License-Identifier: Apache-2.0
#include "nn/tensor_group.h"

#include <mutex>
#include <utility>

#include "core/check.h"

namespace smp::nn {
namespace {

comm::CommunicatorPtr& of_thread() {
  thread_local comm::CommunicatorPtr group;
  return group;
}

/// A function of the program's runtime that finds something for the calling rank; ranks may be
/// threads.
template <class T>
class Provider {
 public:
  void set(std::function<T()> find) {
    const std::lock_guard<std::mutex> lock(mutex_);
    find_ = std::move(find);
  }
  std::function<T()> get() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return find_;
  }

 private:
  std::mutex mutex_;
  std::function<T()> find_;
};

Provider<comm::CommunicatorPtr>& group_provider() {
  static Provider<comm::CommunicatorPtr> of_process;
  return of_process;
}

Provider<std::string>& optimize_provider() {
  static Provider<std::string> of_process;
  return of_process;
}

}  // namespace

comm::CommunicatorPtr tensor_group() {
  if (of_thread()) return of_thread();
  const auto find = group_provider().get();
  SMP_CHECK_WITH(UsageError, find != nullptr,
                 "a tensor-parallel operator or module was used before smp::init; call "
                 "smp::init(config) at the start of main()");
  return find();
}

void set_tensor_group(std::function<comm::CommunicatorPtr()> provider_of_program) {
  group_provider().set(std::move(provider_of_program));
}

std::string default_optimize() {
  const auto find = optimize_provider().get();
  return find == nullptr ? "memory" : find();
}

void set_default_optimize(std::function<std::string()> provider_of_program) {
  optimize_provider().set(std::move(provider_of_program));
}

TensorGroupScope::TensorGroupScope(comm::CommunicatorPtr group)
    : before_(std::exchange(of_thread(), std::move(group))) {}

TensorGroupScope::~TensorGroupScope() { of_thread() = std::move(before_); }

}  // namespace smp::nn
