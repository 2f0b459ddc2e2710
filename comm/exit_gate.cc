// SPDX-License-Identifier: Apache-2.0
#include "comm/exit_gate.h"

#include <chrono>
#include <thread>

namespace smp::comm {

ExitGate& ExitGate::get() {
  static ExitGate* const gate = new ExitGate();  // threads may outlive static objects
  return *gate;
}

void ExitGate::close() {
  state_.fetch_or(kClosed);
  while (state_.load() != kClosed && getpid() == process_) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace smp::comm
