// Each case runs in a process of its own, since MKL looks at the CPU once a process.
#include "core/vector_math.h"

#include <ATen/Context.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/tanh.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <string>

#include "comm/threads/run_ranks.h"
#include "smp/init.h"

namespace smp {
namespace {

/// The bytes of hyperbolic tangents that a child process computes after `prepare`.
std::string computed_after(const std::function<void()>& prepare) {
  int ends[2];
  EXPECT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    prepare();
    const auto result = at::tanh(at::linspace(-2, 2, 1 << 13, at::kFloat));
    const ssize_t bytes = static_cast<ssize_t>(result.nbytes());
    _exit(write(ends[1], result.const_data_ptr(), bytes) == bytes ? 0 : 1);
  }
  close(ends[1]);
  std::string bytes;
  char buffer[4096];
  for (ssize_t count; (count = read(ends[0], buffer, sizeof(buffer))) > 0;) {
    bytes.append(buffer, count);
  }
  close(ends[0]);
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  return bytes;
}

/// From here on MKL takes the CPU for an old one, unless it has looked before.
void pretend(const char* type) { setenv("MKL_VML_DEBUG_CPU_TYPE", type, 1); }

class VectorMath : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasMKL()) GTEST_SKIP() << "this libtorch computes without MKL";
    plain_ = computed_after([] {});
    ASSERT_FALSE(plain_.empty());
    for (const char* type : {"0", "1"}) {
      if (computed_after([type] { pretend(type); }) != plain_) other_ = type;
    }
    // Or the cases below would pass whatever is called.
    ASSERT_NE(other_, nullptr) << "an old CPU has the same bits";
  }

  std::string plain_;            ///< of libtorch alone
  const char* other_ = nullptr;  ///< a type of CPU that has other bits
};

TEST_F(VectorMath, KnowsTheCpuOncePrepared) {
  EXPECT_EQ(plain_, computed_after([this] {
              prepare_vector_math();
              pretend(other_);
            }));
}

TEST_F(VectorMath, IsPreparedByInit) {
  EXPECT_EQ(plain_, computed_after([this] {
              init();
              pretend(other_);
            }));
}

TEST_F(VectorMath, IsPreparedBeforeRanksAreThreads) {
  EXPECT_EQ(plain_, computed_after([this] {
              comm::run_ranks(2, [](const comm::CommunicatorPtr&) {});
              pretend(other_);
            }));
}

}  // namespace
}  // namespace smp
