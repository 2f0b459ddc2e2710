#include "nn/tensor_group.h"

#include <mutex>
#include <utility>

#include "smp/core/error.h"

namespace smp::nn {
namespace {

comm::CommunicatorPtr& of_thread() {
  thread_local comm::CommunicatorPtr group;
  return group;
}

/// How to find the group without a scope; ranks may be threads.
struct Provider {
  std::mutex mutex;
  std::function<comm::CommunicatorPtr()> find;
};

Provider& provider() {
  static Provider of_process;
  return of_process;
}

}  // namespace

comm::CommunicatorPtr tensor_group() {
  if (of_thread()) return of_thread();
  const auto find = [] {
    const std::lock_guard<std::mutex> lock(provider().mutex);
    return provider().find;
  }();
  SMP_CHECK_WITH(UsageError, find != nullptr,
                 "a tensor-parallel operator or module was used before smp::init; call "
                 "smp::init(config) at the start of main()");
  return find();
}

void set_tensor_group(std::function<comm::CommunicatorPtr()> provider_of_program) {
  const std::lock_guard<std::mutex> lock(provider().mutex);
  provider().find = std::move(provider_of_program);
}

TensorGroupScope::TensorGroupScope(comm::CommunicatorPtr group)
    : before_(std::exchange(of_thread(), std::move(group))) {}

TensorGroupScope::~TensorGroupScope() { of_thread() = std::move(before_); }

}  // namespace smp::nn
