// SPDX-License-Identifier: Apache-2.0
#include "tools/job_folder.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <thread>

#include "tests/error_of.h"
#include "tests/temp_folder.h"

namespace smp::tools {
namespace {

namespace fs = std::filesystem;

constexpr const char* kAdvice = "Set TMPDIR";
constexpr const char* kMarker = "a folder of an smprun job\n";

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

/// A launcher that was killed leaves its folder, and no process has its lock any more.
TEST(JobFolder, ThoseOfTheDeadAreRemoved) {
  const smp::testing::TempFolder parent;
  const JobFolder living(parent.path(), kAdvice);
  fs::create_directories(parent.file("smprun-dead/copy"));
  std::ofstream(parent.file("smprun-dead/launcher")) << kMarker;
  fs::create_directories(parent.file("smprun-of-another-program"));
  fs::create_directories(parent.file("other"));
  const JobFolder next(parent.path(), kAdvice);
  EXPECT_NE(next.path(), living.path());
  EXPECT_TRUE(fs::exists(living.path()));
  EXPECT_FALSE(fs::exists(parent.file("smprun-dead")));
  EXPECT_TRUE(fs::exists(parent.file("smprun-of-another-program")));
  EXPECT_TRUE(fs::exists(parent.file("other")));
}

/// Folders of the same name, with a file of that name.
TEST(JobFolder, OthersAreLeftAlone) {
  const smp::testing::TempFolder parent;
  const auto make = [&](const std::string& name, const std::string& content) {
    fs::create_directories(parent.file(name));
    std::ofstream(parent.file(name + "/launcher")) << content;
    std::ofstream(parent.file(name + "/notes")) << "mine";
  };
  make("smprun-notes", "#!/bin/sh\n");
  make("smprun-longer", kMarker + std::string("and more"));
  make("smprun-empty", "");
  make("elsewhere", kMarker);
  fs::create_directory_symlink(parent.file("elsewhere"), parent.file("smprun-link"));
  fs::create_directories(parent.file("smprun-linked"));
  fs::create_symlink(parent.file("elsewhere/launcher"), parent.file("smprun-linked/launcher"));
  fs::create_directories(parent.file("smprun-fifo"));
  ASSERT_EQ(::mkfifo(parent.file("smprun-fifo/launcher").c_str(), 0600), 0);
  std::ofstream(parent.file("smprun-file")) << kMarker;
  { const JobFolder next(parent.path(), kAdvice); }
  for (const char* left :
       {"smprun-notes/notes", "smprun-longer/notes", "smprun-empty/notes", "elsewhere/notes",
        "smprun-link", "smprun-linked/launcher", "smprun-fifo/launcher", "smprun-file"}) {
    EXPECT_TRUE(fs::exists(parent.file(left))) << left;
  }
}

TEST(JobFolder, SaysWhyThereCanBeNone) {
  const smp::testing::TempFolder parent;
  rlimit before = {};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit none = {0, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  const std::string error =
      smp::testing::error_of<Error>([&] { JobFolder(parent.path(), kAdvice); });
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_NE(error.find("XXXXXX: Too many open files. Set TMPDIR"), std::string::npos) << error;
  EXPECT_TRUE(fs::is_empty(parent.path()));
}

/// Targets of links in it are another program's.
TEST(JobFolder, LinksAreNotFollowed) {
  const smp::testing::TempFolder parent;
  std::ofstream(parent.file("data")) << "mine";
  {
    const JobFolder folder(parent.path(), kAdvice);
    fs::create_directory_symlink(parent.path(), folder.path() + "/all");
    fs::create_symlink(parent.file("data"), folder.path() + "/one");
  }
  EXPECT_TRUE(fs::exists(parent.file("data")));
}

/// Ranks that have not ended yet make files while the folder is removed; the next launcher finds
/// the leftovers.
TEST(JobFolder, WhatIsLeftIsRemovedByTheNext) {
  const smp::testing::TempFolder parent;
  std::atomic<bool> ends{false};
  std::thread rank;
  {
    const JobFolder folder(parent.path(), kAdvice);
    rank = std::thread([&, path = folder.path()] {
      for (int i = 0; !ends; i = (i + 1) % 100)
        std::ofstream(path + "/" + std::to_string(i)).put('x');
    });
  }
  ends = true;
  rank.join();
  { const JobFolder next(parent.path(), kAdvice); }
  EXPECT_TRUE(fs::is_empty(parent.path()));
}

TEST(JobFolder, SaysWhereThereCanBeNone) {
  const std::string missing = ::testing::TempDir() + "no_job_folders";
  const std::string error = smp::testing::error_of<Error>([&] { JobFolder(missing, kAdvice); });
  EXPECT_NE(error.find("smprun: cannot create the folder " + missing +
                       "/smprun-XXXXXX: No such file or directory. Set TMPDIR"),
            std::string::npos)
      << error;
}

}  // namespace
}  // namespace smp::tools
