// SPDX-License-Identifier: Apache-2.0
#include "comm/exit_gate.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

namespace smp::comm {
namespace {

TEST(ExitGate, ClosesWhenNobodyIsInside) {
  ExitGate gate;
  std::atomic<bool> inside{false}, leave{false}, closed{false};
  std::thread caller([&] {
    gate.pass([&] {
      inside = true;
      while (!leave) {
        std::this_thread::yield();
      }
    });
  });
  while (!inside) {
    std::this_thread::yield();
  }
  EXPECT_TRUE(gate.pass([] {}));  // several at a time
  std::thread closer([&] {
    gate.close();
    closed = true;
  });
  while (!gate.is_closed()) {
    std::this_thread::yield();
  }
  EXPECT_FALSE(closed);
  EXPECT_FALSE(gate.pass([] { ADD_FAILURE(); }));
  leave = true;
  caller.join();
  closer.join();
  EXPECT_FALSE(gate.pass([] { ADD_FAILURE(); }));
}

// The process's own gate, so this comes last.
TEST(ExitGate, WhatIsLetGoStaysOnceItIsClosed) {
  const auto value = std::make_shared<int>(1);
  let_go(std::shared_ptr<int>(value));
  EXPECT_EQ(value.use_count(), 1);
  ExitGate::get().close();
  let_go(std::shared_ptr<int>(value));
  EXPECT_EQ(value.use_count(), 2);
}

}  // namespace
}  // namespace smp::comm
