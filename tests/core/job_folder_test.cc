// SPDX-License-Identifier: Apache-2.0
#include "tools/job_folder.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <optional>

#include "tests/core/error_text.h"
#include "tests/temp_folder.h"

namespace smp::tools {
namespace {

namespace fs = std::filesystem;

constexpr const char* kAdvice = "Set TMPDIR";

TEST(JobFolder, GoesAwayWithItsObject) {
  const smp::testing::TempFolder parent;
  std::optional<JobFolder> folder(std::in_place, parent.path(), kAdvice);
  const std::string path = folder->path();
  EXPECT_EQ(path.rfind(parent.file("smprun-"), 0), 0u) << path;
  struct stat entry = {};
  ASSERT_EQ(::stat(path.c_str(), &entry), 0);
  EXPECT_EQ(entry.st_mode & 0777, 0700u);
  std::ofstream(path + "/copy") << "of a job";
  folder.reset();
  EXPECT_TRUE(fs::is_empty(parent.path()));
}

/// A launcher that was killed leaves its folder, and nobody has its lock any more.
TEST(JobFolder, ThoseOfTheDeadAreRemoved) {
  const smp::testing::TempFolder parent;
  const JobFolder living(parent.path(), kAdvice);
  fs::create_directories(parent.file("smprun-dead/copy"));
  std::ofstream(parent.file("smprun-dead/launcher")) << "";
  fs::create_directories(parent.file("smprun-of-another-program"));
  fs::create_directories(parent.file("other"));
  const JobFolder next(parent.path(), kAdvice);
  EXPECT_NE(next.path(), living.path());
  EXPECT_TRUE(fs::exists(living.path()));
  EXPECT_FALSE(fs::exists(parent.file("smprun-dead")));
  EXPECT_TRUE(fs::exists(parent.file("smprun-of-another-program")));
  EXPECT_TRUE(fs::exists(parent.file("other")));
}

TEST(JobFolder, SaysWhereThereCanBeNone) {
  const std::string error =
      smp::testing::error_text<Error>([] { JobFolder("/nowhere/at/all", kAdvice); });
  EXPECT_NE(error.find("smprun: cannot create the folder /nowhere/at/all/smprun-XXXXXX: No such "
                       "file or directory. Set TMPDIR"),
            std::string::npos)
      << error;
}

}  // namespace
}  // namespace smp::tools
