// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <functional>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "comm/device/device_communicator.h"
#include "comm/store/store_communicator.h"
#include "tests/device/fake_device.h"

namespace smp::testing {

/// Two ranks on the fake device: this process, and a child of it.
class TwoProcesses : public ::testing::Test {
 protected:
  using Body = std::function<void(const comm::CommunicatorPtr& group, at::Device device)>;

  /// Calls `here` on rank 0 and `there` on rank 1, whose process ends with 0 unless a check failed.
  void run(const Body& here, const Body& there) {
    c10d::TCPStoreOptions options;
    options.port = 0;
    options.isServer = true;
    options.waitWorkers = false;
    const auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
    c10d::TCPStoreOptions others;
    others.port = store->getPort();
    child_ = fork();
    if (child_ == 0) {
      alarm(120);
      call(there, c10::make_intrusive<c10d::TCPStore>("127.0.0.1", others), 1);
      _exit(HasFailure() ? 1 : 0);
    }
    call(here, store, 0);
  }

  /// Waits for the end of rank 1's process; its status as `waitpid` gives it.
  int end_of_other() const {
    int status = -1;
    waitpid(child_, &status, 0);
    return status;
  }
  void kill_other() const { kill(child_, SIGKILL); }

 private:
  static void call(const Body& body, const c10::intrusive_ptr<c10d::Store>& store, int rank) {
    const auto world = comm::make_store_world(store, rank, 2, std::chrono::seconds(60));
    body(comm::make_device_communicator(world, fake_device()), fake_device());
  }

  pid_t child_ = -1;
};

}  // namespace smp::testing
