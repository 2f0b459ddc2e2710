// SPDX-License-Identifier: Apache-2.0
// Each case runs in a process of its own, since MKL looks at the CPU once a process.
#include "core/vector_math.h"

#include <ATen/Context.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/tanh.h>
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <string_view>

#include "comm/threads/run_ranks.h"
#include "smp/init.h"

namespace {

/// How often MKL's vector mathematics looked for the CPU, on any CPU: it asks for this variable.
std::atomic<int> looks = 0;

}  // namespace

/// Stands before the C library's, for libtorch's shared libraries too.
extern "C" char* getenv(const char* name) noexcept {
  static const auto original = reinterpret_cast<char* (*)(const char*)>(dlsym(RTLD_NEXT, "getenv"));
  if (std::string_view(name) == "MKL_VML_DEBUG_CPU_TYPE") ++looks;
  return original(name);
}

namespace smp {
namespace {

/// Whether MKL looks for the CPU in the first hyperbolic tangents of a process that has called
/// `prepare`.
bool looks_after(const std::function<void()>& prepare) {
  constexpr int kLooks = 10, kDoesNot = 11;
  const pid_t child = fork();
  if (child == 0) {
    prepare();
    const int before = looks;
    at::tanh(at::linspace(-2, 2, 1 << 13, at::kFloat));
    _exit(looks > before ? kLooks : kDoesNot);
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  EXPECT_TRUE(code == kLooks || code == kDoesNot) << "the child's status is " << status;
  return code == kLooks;
}

class VectorMath : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasMKL()) GTEST_SKIP() << "this libtorch computes without MKL";
    // Or the cases below would pass whatever is called.
    ASSERT_TRUE(looks_after([] {})) << "MKL no longer asks for the variable";
  }
};

TEST_F(VectorMath, KnowsTheCpuOncePrepared) {
  EXPECT_FALSE(looks_after([] { core::prepare_vector_math(); }));
}

TEST_F(VectorMath, IsPreparedByInit) {
  EXPECT_FALSE(looks_after([] { init(); }));
}

TEST_F(VectorMath, IsPreparedBeforeRanksAreThreads) {
  EXPECT_FALSE(looks_after([] { comm::run_ranks(2, [](const comm::CommunicatorPtr&) {}); }));
}

}  // namespace
}  // namespace smp
