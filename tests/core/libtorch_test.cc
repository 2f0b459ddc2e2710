// SPDX-License-Identifier: Apache-2.0
#include "core/libtorch.h"

#include <c10/util/StringUtil.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/version.h>

#include <string>

#include "smp/error.h"
#include "smp/version.h"

namespace smp {
namespace {

using testing::HasSubstr;

constexpr uint64_t version_of(uint64_t major, uint64_t minor, uint64_t patch) {
  return major << 56 | minor << 48 | patch << 40;
}

std::string text_of(uint64_t compiled, uint64_t loaded) {
  try {
    core::check_libtorch(compiled, loaded);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

TEST(Libtorch, AnotherPatchReleaseIsAccepted) {
  EXPECT_EQ(text_of(version_of(2, 11, 0), version_of(2, 11, 3)), "");
  EXPECT_EQ(text_of(version_of(2, 11, 3), version_of(2, 11, 0)), "");
}

TEST(Libtorch, AnotherMinorOrMajorVersionIsRefusedWithBoth) {
  EXPECT_THAT(
      text_of(version_of(2, 11, 0), version_of(2, 12, 1)),
      HasSubstr("smp was compiled with libtorch 2.11.0, and libtorch 2.12.1 is loaded. Build "
                "smp with that one"));
  EXPECT_THAT(text_of(version_of(2, 11, 0), version_of(2, 10, 0)), HasSubstr("2.10.0 is loaded"));
  EXPECT_THAT(text_of(version_of(2, 11, 0), version_of(3, 11, 0)), HasSubstr("3.11.0 is loaded"));
}

TEST(Libtorch, TheOneThatIsLoadedIsTheOneOfTheHeaders) { EXPECT_NO_THROW(core::check_libtorch()); }

TEST(Version, IsThatOfTheHeaders) {
  EXPECT_EQ(version(), c10::str(SMP_VERSION_MAJOR, ".", SMP_VERSION_MINOR, ".", SMP_VERSION_PATCH));
  EXPECT_STREQ(libtorch_version(), TORCH_VERSION);
}

}  // namespace
}  // namespace smp
