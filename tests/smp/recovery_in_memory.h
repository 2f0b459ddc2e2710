// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "checkpoint/file.h"
#include "core/env.h"
#include "core/restart.h"

namespace smp::testing {

/// The copy that a job keeps, or would.
inline std::string kept_copy() {
  return core::kept_copy_path(core::env(core::kRecoveryDirVariable).value());
}

/// While it lives, copies are kept in a folder in memory, as smprun makes one.
class RecoveryInMemory {
 public:
  RecoveryInMemory() {
    char name[] = "/dev/shm/smp-test-XXXXXX";
    path_ = mkdtemp(name);
    EXPECT_EQ(checkpoint::medium_of(path_), checkpoint::Medium::kMemory);
    setenv(core::kRecoveryDirVariable, path_.c_str(), 1);
  }
  ~RecoveryInMemory() {
    unsetenv(core::kRecoveryDirVariable);
    std::filesystem::remove_all(path_);
  }
  RecoveryInMemory(const RecoveryInMemory&) = delete;
  RecoveryInMemory& operator=(const RecoveryInMemory&) = delete;

 private:
  std::string path_;
};

}  // namespace smp::testing
