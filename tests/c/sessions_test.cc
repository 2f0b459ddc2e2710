// SPDX-License-Identifier: Apache-2.0
// Several sessions of the C interface at the same time, each as if it were alone.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <future>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/check.h"
#include "core/deterministic.h"
#include "core/status.h"
#include "smp/c/call.h"
#include "smp/smp.h"
#include "tests/c/interface.h"
#include "tests/error_of.h"

extern "C" {
int omp_get_max_threads();
void omp_set_num_threads(int number);
}

namespace smp::testing {
namespace {

using State = std::map<std::string, torch::Tensor>;

/// The kinds of sessions here.
struct Kind {
  const char* config;
  const char* optimizer;
  const char* options;
};
constexpr Kind kFirst = {R"({"microbatches": 2, "seed": 1})", "adamw", R"({"lr": 0.01})"};
constexpr Kind kSecond = {R"({"microbatches": 4, "deterministic": true})", "fused_sgd",
                          R"({"lr": 0.1, "momentum": 0.9})"};

smp_session* begin(const Kind& kind) {
  return open_session(kind.config, kind.optimizer, kind.options);
}

double train(smp_session* session, const Batch& batch) {
  const smp_tensor x = view(batch.x), y = view(batch.y);
  double loss = -1;
  expect_ok(smp_train(session, &x, 1, "mse", &y, &loss));
  return loss;
}

State state_of(smp_session* session) {
  State state;
  int64_t count = 0;
  expect_ok(smp_gather_state(session, &count));
  for (int64_t i = 0; i < count; ++i) {
    smp_tensor tensor{};
    tensor.struct_size = sizeof tensor;
    expect_ok(smp_state(session, i, &tensor));
    const std::vector<int64_t> sizes(tensor.sizes, tensor.sizes + tensor.dims);
    state[tensor.name] = torch::from_blob(tensor.data, sizes).clone();
  }
  return state;
}

/// Results of a session.
struct SessionSeen {
  std::vector<double> losses;
  State state;
};

SessionSeen train_alone(const Kind& kind, const std::vector<Batch>& data) {
  SessionSeen run;
  smp_session* const session = begin(kind);
  for (const Batch& batch : data) run.losses.push_back(train(session, batch));
  run.state = state_of(session);
  expect_ok(smp_close(session));
  return run;
}

void expect_equal_bytes(const SessionSeen& got, const SessionSeen& wanted) {
  EXPECT_EQ(got.losses, wanted.losses);
  ASSERT_EQ(got.state.size(), wanted.state.size());
  for (const auto& [name, tensor] : wanted.state) {
    EXPECT_TRUE(torch::equal(got.state.at(name), tensor)) << name;
  }
}

class Sessions : public ::testing::Test {
 protected:
  void SetUp() override {
    expect_ok(smp_set_threads(1));
    core::set_deterministic_workspace();
  }

  const std::vector<Batch> data_ = batches(4);
};

TEST_F(Sessions, TakeTurns) {
  const SessionSeen first_alone = train_alone(kFirst, data_),
                    second_alone = train_alone(kSecond, data_);
  SessionSeen first, second;
  smp_session* const one = begin(kFirst);
  smp_session* const other = begin(kSecond);
  for (const Batch& batch : data_) {
    first.losses.push_back(train(one, batch));
    second.losses.push_back(train(other, batch));
  }
  first.state = state_of(one);
  second.state = state_of(other);
  expect_ok(smp_close(one));
  EXPECT_GT(train(other, data_.front()), 0);  // the one that began later goes on
  expect_ok(smp_close(other));
  expect_equal_bytes(first, first_alone);
  expect_equal_bytes(second, second_alone);
}

TEST_F(Sessions, OnThreadsOfTheirOwn) {
  const SessionSeen first_alone = train_alone(kFirst, data_),
                    second_alone = train_alone(kSecond, data_);
  auto second = std::async(std::launch::async, [&] { return train_alone(kSecond, data_); });
  expect_equal_bytes(train_alone(kFirst, data_), first_alone);
  expect_equal_bytes(second.get(), second_alone);
}

/// The thread that calls may be another than the one that has begun it.
TEST_F(Sessions, MoveBetweenThreads) {
  const SessionSeen alone = train_alone(kFirst, data_);
  SessionSeen run;
  smp_session* const session = begin(kFirst);
  for (const Batch& batch : data_) {
    run.losses.push_back(
        std::async(std::launch::async, [&] { return train(session, batch); }).get());
  }
  run.state = state_of(session);
  expect_ok(smp_close(session));
  expect_equal_bytes(run, alone);
}

TEST_F(Sessions, AnErrorEndsItsOwn) {
  const SessionSeen alone = train_alone(kFirst, data_);
  SessionSeen run;
  smp_session* const good = begin(kFirst);
  smp_session* const bad = begin(kSecond);
  for (size_t i = 0; i < data_.size(); ++i) {
    run.losses.push_back(train(good, data_[i]));
    if (i != 1) continue;
    const smp_tensor x = view(data_[i].x), y = view(data_[i].y);
    expect_error(smp_train(bad, &x, 1, "median", &y, nullptr), SMP_ERROR_USAGE,
                 {"there is no loss \"median\""});
    EXPECT_EQ(smp_is_alive(bad), 0);
    EXPECT_EQ(smp_is_alive(good), 1);
    expect_ok(smp_close(bad));
  }
  run.state = state_of(good);
  expect_ok(smp_close(good));
  expect_equal_bytes(run, alone);
}

/// Deterministic kernels are those of the session's calls alone.
TEST_F(Sessions, KernelsAreTheSessions) {
  smp_session* const other = begin(kFirst);
  smp_session* const session = begin(kSecond);
  struct Kernels {
    bool own = false, others = true;
  } seen;
  const smp_tensor x = view(data_.front().x);
  const auto look_as_own = [](void* pointer, int64_t, const smp_tensor*, smp_tensor*, int64_t) {
    static_cast<Kernels*>(pointer)->own = at::globalContext().deterministicAlgorithms();
    return 0;
  };
  const auto look_as_other = [](void* pointer, int64_t, const smp_tensor*, smp_tensor*, int64_t) {
    static_cast<Kernels*>(pointer)->others = at::globalContext().deterministicAlgorithms();
    return 0;
  };
  expect_ok(smp_train_by_gradient(session, &x, 1, look_as_own, &seen));
  EXPECT_FALSE(at::globalContext().deterministicAlgorithms());
  expect_ok(smp_train_by_gradient(other, &x, 1, look_as_other, &seen));
  EXPECT_TRUE(seen.own);
  EXPECT_FALSE(seen.others);
  expect_ok(smp_close(session));
  expect_ok(smp_close(other));
}

/// A thread that has computed before takes the number of `smp_set_threads`, too.
TEST_F(Sessions, ThreadsOfKernelsAreThoseOfAllThreads) {
  const auto threads_now = [] {
    int threads = 0;
    expect_ok(c::run([&](const c::MaskedTraps&) { threads = at::get_num_threads(); }));
    return threads;
  };
  std::promise<void> has_computed, is_set;
  auto other = std::async(std::launch::async, [&] {
    EXPECT_EQ(threads_now(), 1);
    has_computed.set_value();
    is_set.get_future().wait();
    EXPECT_EQ(threads_now(), 3);
  });
  has_computed.get_future().wait();
  expect_ok(smp_set_threads(3));
  is_set.set_value();
  other.get();
}

/// OpenMP's number is the caller's after calls and in callbacks.
TEST_F(Sessions, ThreadsOfTheCaller) {
  smp_session* const session = begin(kFirst);
  const smp_tensor x = view(data_.front().x);
  omp_set_num_threads(5);
  expect_ok(smp_set_threads(2));
  EXPECT_EQ(omp_get_max_threads(), 5);
  const auto look = [](void*, int64_t, const smp_tensor*, smp_tensor*, int64_t) {
    return omp_get_max_threads() == 5 ? 0 : 1;
  };
  expect_ok(smp_train_by_gradient(session, &x, 1, look, nullptr));
  EXPECT_EQ(omp_get_max_threads(), 5);
  expect_ok(smp_close(session));
  omp_set_num_threads(1);
}

/// Calls of several threads overlap in any order.
TEST_F(Sessions, DeterministicAsLongAsOneIs) {
  const auto is_deterministic = [] { return at::globalContext().deterministicAlgorithms(); };
  auto first = std::make_unique<core::DeterministicKernels>();
  auto second = std::make_unique<core::DeterministicKernels>();
  first = nullptr;
  EXPECT_TRUE(is_deterministic());
  second = nullptr;
  EXPECT_FALSE(is_deterministic());
}

/// A program in C++ that begins during such a call stays deterministic.
TEST_F(Sessions, DeterministicForGood) {
  auto call = std::make_unique<core::DeterministicKernels>();
  core::use_deterministic_kernels();
  call = nullptr;
  EXPECT_TRUE(at::globalContext().deterministicAlgorithms());
  at::globalContext().setDeterministicAlgorithms(false, false);
  at::globalContext().setDeterministicCuDNN(false);
}

/// A program in C++ has a runtime of its own.
TEST_F(Sessions, BesideAnInitialisedProgram) {
  const SessionSeen alone = train_alone(kFirst, data_);
  init(Config().microbatches(4));
  smp_session* const session = begin(kFirst);
  SessionSeen seen;
  for (const Batch& batch : data_) seen.losses.push_back(train(session, batch));
  seen.state = state_of(session);
  expect_ok(smp_close(session));
  expect_equal_bytes(seen, alone);
  EXPECT_TRUE(is_initialized());
  shutdown();
}

/// A rank that is a thread has a runtime of its own, which is there again after calls.
TEST_F(Sessions, InARankThatIsAThread) {
  const SessionSeen alone = train_alone(kFirst, data_);
  run_as_threads(2, Config().ddp(true), [&] {
    const int here = rank();
    const std::string context = core::error_context();
    core::Status* const status = core::this_status();
    smp_session* const session = begin(kFirst);
    EXPECT_EQ(size(), 2);
    SessionSeen seen;
    for (const Batch& batch : data_) seen.losses.push_back(train(session, batch));
    seen.state = state_of(session);
    EXPECT_EQ(core::this_status(), status);
    expect_ok(smp_close(session));
    expect_equal_bytes(seen, alone);
    EXPECT_EQ(size(), 2);
    EXPECT_EQ(rank(), here);
    EXPECT_EQ(core::error_context(), context);
    EXPECT_EQ(core::this_status(), status);
    barrier();
  });
}

TEST_F(Sessions, CallbacksMakeNoCalls) {
  smp_session* const session = begin(kFirst);
  smp_session* const other = begin(kSecond);
  const smp_tensor x = view(data_.front().x);
  const auto call = [](void* pointer, int64_t, const smp_tensor*, smp_tensor*, int64_t) {
    const char* const text = "a function of smp/c.h was called by the function that gives";
    int64_t count = 0;
    smp_model* model = nullptr;
    expect_error(smp_gather_state(static_cast<smp_session*>(pointer), &count), SMP_ERROR_USAGE,
                 {text});
    expect_error(smp_close(static_cast<smp_session*>(pointer)), SMP_ERROR_USAGE, {text});
    expect_error(smp_model_open(kEval, &model), SMP_ERROR_USAGE, {text});
    return 0;
  };
  expect_ok(smp_train_by_gradient(session, &x, 1, call, other));
  EXPECT_EQ(smp_is_alive(other), 1);
  expect_ok(smp_close(session));
  EXPECT_GT(train(other, data_.front()), 0);
  expect_ok(smp_close(other));
}

}  // namespace
}  // namespace smp::testing
