// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>

#include "core/check.h"
#include "tests/error_of.h"

namespace smp::checkpoint {

/// A folder of the running test's own, removed at the end of the test.
class FolderTest : public ::testing::Test {
 protected:
  explicit FolderTest(const std::string& parent = ::testing::TempDir()) {
    const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
    folder_ = parent + "/" + info->test_suite_name() + "." + info->name();
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }
  ~FolderTest() override { std::filesystem::remove_all(folder_); }

  std::string path(const std::string& name) const { return folder_ + "/" + name; }

 private:
  std::string folder_;
};

inline std::string slurp(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

inline void spill(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

/// The message of the CheckpointError that `action` must throw.
inline std::string checkpoint_error(const std::function<void()>& action) {
  return smp::testing::error_of<CheckpointError>(action);
}

}  // namespace smp::checkpoint
