// SPDX-License-Identifier: Apache-2.0
#include "comm/process_end.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <cstdlib>
#include <list>
#include <mutex>
#include <utility>

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

/// Those that have objects of devices. Outlives static objects.
struct Holders {
  std::mutex mutex;
  // Guarded by mutex, in the order in which they were made.
  std::list<std::pair<const AtWorldEnd*, std::function<void()>>> all;

  static Holders& get() {
    static auto* const holders = new Holders;
    return *holders;
  }
};

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

AtWorldEnd::AtWorldEnd(std::function<void()> let_go) {
  const std::lock_guard lock(Holders::get().mutex);
  Holders::get().all.emplace_back(this, std::move(let_go));
}

AtWorldEnd::~AtWorldEnd() {
  const std::lock_guard lock(Holders::get().mutex);
  Holders::get().all.remove_if([this](const auto& holder) { return holder.first == this; });
}

void let_go_of_devices() {
  Holders& holders = Holders::get();
  std::unique_lock lock(holders.mutex);
  while (!holders.all.empty()) {
    const auto let_go = std::move(holders.all.back().second);
    holders.all.pop_back();
    lock.unlock();
    let_go();  // may end others
    lock.lock();
  }
}

}  // namespace smp::comm
