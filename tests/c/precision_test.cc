// SPDX-License-Identifier: Apache-2.0
// Half precision and loss scales in the C interface, against the same program in C++.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <string>
#include <vector>

#include "smp/smp.h"
#include "tests/c/interface.h"
#include "tests/error_of.h"
#include "tests/temp_folder.h"

namespace smp::testing {
namespace {

/// Results of a run.
struct Seen {
  std::vector<double> losses, scales;
  std::vector<bool> skipped;
  std::map<std::string, torch::Tensor> state;
};

void expect_equal(const Seen& got, const Seen& wanted) {
  EXPECT_EQ(got.losses, wanted.losses);
  EXPECT_EQ(got.scales, wanted.scales);
  EXPECT_EQ(got.skipped, wanted.skipped);
  ASSERT_EQ(got.state.size(), wanted.state.size());
  for (const auto& [name, tensor] : wanted.state) {
    EXPECT_EQ(got.state.at(name).scalar_type(), tensor.scalar_type());
    EXPECT_TRUE(torch::equal(got.state.at(name), tensor)) << name;
  }
}

Seen train_in_cpp(const Config& config, const LossScaleOptions& scale, double clip) {
  Seen seen;
  run_as_threads(1, config, [&] {
    DistributedModel<ExportedModule> model(load_exported(kTrain));
    DistributedOptimizer<torch::optim::AdamW> optimizer(model->parameters(),
                                                        torch::optim::AdamWOptions(0.01));
    optimizer.scale_loss(scale);
    auto run = step([&](torch::Tensor x, torch::Tensor y) {
      auto loss = torch::mse_loss(model(x).toTensor(), y);
      model->backward(loss);
      return loss;
    });
    for (const Batch& batch : batches(6)) {
      optimizer.zero_grad();
      seen.losses.push_back(run(batch.x, batch.y).reduce_mean().item<double>());
      optimizer.clip_master_grads(clip);
      optimizer.step();
      seen.scales.push_back(optimizer.loss_scale());
      seen.skipped.push_back(optimizer.overflow());
    }
    for (const auto& entry : model->state_dict()) seen.state[entry.key()] = entry.value();
  });
  return seen;
}

Seen train_in_c(const char* config, const char* options, torch::Dtype type) {
  Seen seen;
  smp_session* const session = open_session(config, "adamw", options);
  for (const Batch& batch : batches(6)) {
    const smp_tensor x = view(batch.x), y = view(batch.y);
    double loss = 0, scale = 0;
    int64_t skipped = -1;
    expect_ok(smp_train(session, &x, 1, "mse", &y, &loss));
    expect_ok(smp_loss_scale(session, &scale, &skipped));
    seen.losses.push_back(loss);
    seen.scales.push_back(scale);
    seen.skipped.push_back(skipped == 1);
  }
  int64_t count = 0;
  expect_ok(smp_gather_state(session, &count));
  for (int64_t i = 0; i < count; ++i) {
    smp_tensor tensor{};
    tensor.struct_size = sizeof tensor;
    expect_ok(smp_state(session, i, &tensor));
    EXPECT_EQ(tensor.dtype, type == torch::kFloat16 ? SMP_FLOAT16 : SMP_BFLOAT16);
    const std::vector<int64_t> sizes(tensor.sizes, tensor.sizes + tensor.dims);
    seen.state[tensor.name] = torch::from_blob(tensor.data, sizes, type).clone();
  }
  expect_ok(smp_close(session));
  return seen;
}

class CPrecision : public ::testing::Test {
 protected:
  void SetUp() override { expect_ok(smp_set_threads(1)); }
};

/// Scales that are too high first, so that steps are skipped.
TEST_F(CPrecision, DynamicLossScale) {
  const Seen seen = train_in_c(
      R"({"microbatches": 2, "fp16": true})",
      R"({"lr": 0.01, "clip_grad_norm": 0.5, "dynamic_loss_scale": true, "dynamic_loss_args":
          {"init_scale": 4194304, "scale_factor": 16, "scale_window": 2, "min_scale": 1,
           "delayed_shift": 1, "consecutive_hysteresis": false}})",
      torch::kFloat16);
  EXPECT_TRUE(seen.skipped.front());
  EXPECT_FALSE(seen.skipped.back());
  expect_equal(
      seen,
      train_in_cpp(Config().fp16(true).microbatches(2),
                   LossScaleOptions().dynamic_loss_scale(true).dynamic_loss_args(
                       DynamicLossArgs().init_scale(4194304).scale_factor(16).scale_window(2)),
                   0.5));
}

TEST_F(CPrecision, StaticLossScale) {
  const Seen seen = train_in_c(R"({"microbatches": 2, "bf16": true})",
                               R"({"lr": 0.01, "clip_grad_norm": 0.5, "static_loss_scale": 1024})",
                               torch::kBFloat16);
  expect_equal(seen, train_in_cpp(Config().bf16(true).microbatches(2),
                                  LossScaleOptions().static_loss_scale(1024), 0.5));
  EXPECT_EQ(seen.scales, std::vector<double>(6, 1024));
}

/// The scale multiplies gradients that the caller gives, too, and divides them again.
TEST_F(CPrecision, ScaledGradientsOfTheCaller) {
  std::vector<torch::Tensor> weights;
  for (const char* options : {R"({"lr": 0.5})", R"({"lr": 0.5, "static_loss_scale": 4096})"}) {
    smp_session* const session = open_session(kTwoMicrobatches, "sgd", options);
    const Batch batch = batches(1).front();
    const smp_tensor x = view(batch.x);
    const auto gradient = [](void*, int64_t, const smp_tensor* outputs, smp_tensor* gradients,
                             int64_t) {
      torch::from_blob(gradients->data, {4, 2}).copy_(torch::from_blob(outputs->data, {4, 2}) / 8);
      return 0;
    };
    expect_ok(smp_train_by_gradient(session, &x, 1, gradient, nullptr));
    int64_t count = 0;
    smp_tensor tensor{};
    tensor.struct_size = sizeof tensor;
    expect_ok(smp_gather_state(session, &count));
    expect_ok(smp_state(session, 0, &tensor));
    weights.push_back(torch::from_blob(tensor.data, {tensor.sizes[0], tensor.sizes[1]}).clone());
    expect_ok(smp_close(session));
  }
  EXPECT_TRUE(torch::equal(weights[0], weights[1]));  // a power of two rounds nothing
  EXPECT_FALSE(torch::equal(weights[0], load_exported(kTrain)->parameters().front()));
}

TEST_F(CPrecision, ScalesGoOnFromCheckpoints) {
  const TempFolder folder;
  const char* const config = R"({"microbatches": 2, "fp16": true})";
  const char* const options =
      R"({"lr": 0.01, "dynamic_loss_scale": true, "dynamic_loss_args": {"init_scale": 4194304}})";
  const Batch batch = batches(1).front();
  const smp_tensor x = view(batch.x), y = view(batch.y);
  double saved = 0, resumed = 0;
  int64_t skipped = -1, steps = 0;
  smp_session* session = open_session(config, "sgd", options);
  expect_ok(smp_train(session, &x, 1, "mse", &y, nullptr));
  expect_ok(smp_loss_scale(session, &saved, &skipped));
  EXPECT_LT(saved, 4194304);
  EXPECT_EQ(skipped, 1);
  expect_ok(smp_save(session, folder.path().c_str(), "one"));
  expect_ok(smp_close(session));
  session = open_session(config, "sgd", options);
  expect_ok(smp_resume(session, folder.path().c_str(), "one", &steps));
  expect_ok(smp_train(session, &x, 1, "mse", &y, nullptr));
  expect_ok(smp_loss_scale(session, &resumed, &skipped));
  EXPECT_LT(resumed, saved);
  expect_ok(smp_close(session));
}

TEST_F(CPrecision, ErrorsOfLossScales) {
  const auto expect_refused = [](const char* options, std::initializer_list<std::string> parts) {
    smp_session* session = nullptr;
    expect_ok(smp_open(nullptr, &session));
    expect_ok(smp_load(session, kTrain, nullptr));
    expect_error(smp_optimizer(session, "sgd", options), SMP_ERROR_CONFIG, parts);
    expect_ok(smp_close(session));
  };
  expect_refused(R"({"static_loss_scale": 0})", {"static_loss_scale", "a number above 0"});
  expect_refused(R"({"dynamic_loss_scale": 1})", {"dynamic_loss_scale"});
  expect_refused(R"({"dynamic_loss_args": 3})", {"dynamic_loss_args", "an object"});
  expect_refused(R"({"dynamic_loss_args": {"scale": 3}})",
                 {"an object of \"consecutive_hysteresis\", \"delayed_shift\""});
  expect_refused(R"({"dynamic_loss_args": {"init_scale": 65536}})",
                 {"the options of optimizer \"sgd\": dynamic_loss_args were given, and the loss "
                  "scale is not dynamic. Give \"dynamic_loss_scale\": true"});
  expect_refused(R"({"dynamic_loss_scale": true, "static_loss_scale": 8})",
                 {"static_loss_scale and dynamic_loss_scale were both given. Give one of them"});
  expect_refused(R"({"dynamic_loss_scale": true, "dynamic_loss_args": {"scale_factor": 1}})",
                 {"the options of optimizer \"sgd\": the options of a loss scale are wrong"});
  smp_session* session = nullptr;
  double scale = 0;
  int64_t skipped = 0;
  expect_ok(smp_open(nullptr, &session));
  expect_error(smp_loss_scale(session, &scale, &skipped), SMP_ERROR_USAGE,
               {"the session has no optimizer yet"});
  EXPECT_EQ(smp_is_alive(session), 1);
  expect_ok(smp_close(session));
}

}  // namespace
}  // namespace smp::testing
