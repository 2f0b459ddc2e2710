// SPDX-License-Identifier: Apache-2.0
// main() of the tests that run under mpirun or with torchrun's variables: every rank runs every
// test.

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <string>
#include <thread>

#include "comm/world.h"
#include "core/check.h"

namespace {

using smp::comm::CommunicatorPtr;

// Knows the current test: gtest cannot be asked for it while it reports a failure.
class FailureListener : public testing::EmptyTestEventListener {
 public:
  void OnTestStart(const testing::TestInfo& test) override {
    test_ = std::string(test.test_suite_name()) + "." + test.name();
  }
  void OnTestEnd(const testing::TestInfo& /*test*/) override { test_ = "no test"; }

 protected:
  std::string test_ = "no test";
};

// The report of this rank instead of gtest's report when it is not rank 0.
class FailurePrinter : public FailureListener {
 public:
  explicit FailurePrinter(int rank) : rank_(rank) {}

  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (result.failed()) {
      std::fprintf(stderr, "[rank %d] %s:%d: failure in %s\n%s\n", rank_,
                   result.file_name() ? result.file_name() : "", result.line_number(),
                   test_.c_str(), result.message());
    }
  }

 private:
  const int rank_;
};

// A rank that leaves a test early would let the others wait: it ends the job instead. After other
// failures the ranks are still in step and go on.
class AbortOnFatalFailure : public FailureListener {
 public:
  explicit AbortOnFatalFailure(CommunicatorPtr world) : world_(std::move(world)) {}

  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (result.fatally_failed()) {
      GTEST_FLAG_SET(fail_fast, true);  // no further tests: their communication cannot work
      world_->abort("test " + test_ + " failed: " + result.message());
    }
  }

 private:
  const CommunicatorPtr world_;
};

std::string failed_tests() {
  const testing::UnitTest& all = *testing::UnitTest::GetInstance();
  std::string names;
  for (int i = 0; i < all.total_test_suite_count(); ++i) {
    const testing::TestSuite& suite = *all.GetTestSuite(i);
    for (int j = 0; j < suite.total_test_count(); ++j) {
      const testing::TestInfo& test = *suite.GetTestInfo(j);
      if (test.result()->Failed()) {
        names += std::string(" ") + suite.name() + "." + test.name();
      }
    }
  }
  return names;
}

// After all tests: a failure of any rank is one of rank 0, whose report is the one that counts.
class CombineResults : public testing::Environment {
 public:
  explicit CombineResults(CommunicatorPtr world) : world_(std::move(world)) {}

  void TearDown() override {
    try {
      const auto failed = smp::comm::all_gather_bytes(*world_, failed_tests());
      for (int rank = 1; world_->rank() == 0 && rank < world_->size(); ++rank) {
        EXPECT_TRUE(failed[rank].empty()) << "rank " << rank << " failed in" << failed[rank];
      }
    } catch (const std::exception& e) {
      ADD_FAILURE() << e.what();
    }
  }

 private:
  const CommunicatorPtr world_;
};

// Not for ever: where the ranks cannot see each other's processes, any may have that number.
void wait_for_the_end_of(pid_t process) {
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (kill(process, 0) == 0 && std::chrono::steady_clock::now() < give_up) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

int run_tests(int* argc, char** argv) {
  at::set_num_threads(1);
  const CommunicatorPtr world = smp::comm::make_world();
  smp::core::set_error_context("smp rank " + std::to_string(world->rank()));
  const auto processes = smp::comm::all_gather_bytes(*world, std::to_string(getpid()));

  testing::TestEventListeners& listeners = testing::UnitTest::GetInstance()->listeners();
  if (world->rank() != 0) {
    GTEST_FLAG_SET(output, "");  // only rank 0 writes XML_OUTPUT_FILE
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new FailurePrinter(world->rank()));
  }
  listeners.Append(new AbortOnFatalFailure(world));
  testing::InitGoogleTest(argc, argv);
  testing::AddGlobalTestEnvironment(new CombineResults(world));
  const int result = RUN_ALL_TESTS();

  smp::comm::finalize_world();
  if (!smp::comm::world_aborted()) {
    return result;
  }
  if (world->rank() != 0) {
    // A launcher ends all ranks when the first one fails; rank 0 shall write its report first.
    wait_for_the_end_of(std::stoi(processes[0]));
  }
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run_tests(&argc, argv);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
