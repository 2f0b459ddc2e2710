// SPDX-License-Identifier: Apache-2.0
// Options of optimizers in the C interface, against plain libtorch.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "smp/exported.h"
#include "tests/c/interface.h"

namespace smp::testing {
namespace {

template <class Optimizer, class Options>
void expect_updates(const char* name, const char* text, const Options& options) {
  SCOPED_TRACE(name);
  expect_ok(smp_set_threads(1));
  auto model = load_exported(kTrain);
  Optimizer optimizer(model->parameters(), options);
  smp_session* const session = open_session(kTwoMicrobatches, name, text);
  for (const Batch& batch : batches()) {
    step_plainly(model, optimizer, batch, [](const torch::Tensor& y, const torch::Tensor& t) {
      torch::l1_loss(y, t).backward();
    });
    const smp_tensor x = view(batch.x), y = view(batch.y);
    expect_ok(smp_train(session, &x, 1, "l1", &y, nullptr));
  }
  expect_state(session, *model);
  expect_ok(smp_close(session));
}

// They are set by the names under which libtorch serialises them.
TEST(CInterfaceOptimizers, HaveAllOptionsOfTheirClass) {
  using namespace torch::optim;  // NOLINT(google-build-using-namespace)
  expect_updates<SGD>("sgd",
                      R"({"lr": 1, "momentum": 0.75, "nesterov": true, "weight_decay": 0.25})",
                      SGDOptions(1).momentum(0.75).nesterov(true).weight_decay(0.25));
  expect_updates<SGD>("sgd", R"({"momentum": 0.75, "dampening": 0.5})",
                      SGDOptions(1e-3).momentum(0.75).dampening(0.5));
  constexpr const char* kAdam =
      R"({"lr": 0.5, "betas": [0.25, 0.75], "eps": 0.125, "weight_decay": 0.5, "amsgrad": true})";
  expect_updates<Adam>(
      "adam", kAdam,
      AdamOptions(0.5).betas({0.25, 0.75}).eps(0.125).weight_decay(0.5).amsgrad(true));
  expect_updates<AdamW>(
      "adamw", kAdam,
      AdamWOptions(0.5).betas({0.25, 0.75}).eps(0.125).weight_decay(0.5).amsgrad(true));
  expect_updates<Adagrad>(
      "adagrad",
      R"({"lr_decay": 0.5, "weight_decay": 0.25, "initial_accumulator_value": 2, "eps": 0.125})",
      AdagradOptions(1e-3).lr_decay(0.5).weight_decay(0.25).initial_accumulator_value(2).eps(
          0.125));
  expect_updates<RMSprop>(
      "rmsprop", R"({"alpha": 0.5, "eps": 0.125, "weight_decay": 0.25,
                                         "momentum": 0.75, "centered": true})",
      RMSpropOptions(1e-3).alpha(0.5).eps(0.125).weight_decay(0.25).momentum(0.75).centered(true));
}

}  // namespace
}  // namespace smp::testing
