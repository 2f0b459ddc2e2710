// SPDX-License-Identifier: Apache-2.0
#include "comm/process_end.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <cstdlib>
#include <mutex>

#include "core/check.h"

namespace smp::comm {
namespace {

std::atomic<void (*)(int status)> at_end{nullptr};

// The last handler is called first, and leaves the others nothing to do.
void install_handler() {
  const auto call = [](int status, void*) {
    if (auto* const end = at_end.exchange(nullptr)) end(status);
  };
  SMP_INTERNAL_ASSERT(on_exit(call, nullptr) == 0, "nothing would end the job at exit");
}

}  // namespace

void at_process_end(void (*end)(int status)) {
  at_end = end;
  install_handler();
}

void end_before_objects_of(c10::Device device) {
  if (at_end.load() == nullptr) return;
  static std::once_flag once;
  std::call_once(once, [&] {
    c10::impl::VirtualGuardImpl(device.type()).getDevice();  // makes them, at the latest
    install_handler();
  });
}

}  // namespace smp::comm
