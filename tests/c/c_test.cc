// SPDX-License-Identifier: Apache-2.0
// The C interface on one process, against plain libtorch.
#include "smp/c.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cfenv>
#include <cmath>
#include <future>
#include <string>
#include <vector>

#include "smp/exported.h"
#include "smp/save_load.h"
#include "tests/c/interface.h"
#include "tests/error_of.h"
#include "tests/temp_folder.h"

namespace smp::testing {
namespace {

class CInterface : public ::testing::Test {
 protected:
  void SetUp() override { expect_ok(smp_set_threads(1)); }
  void TearDown() override { EXPECT_EQ(smp_close(session_), SMP_OK) << smp_last_error(); }

  void open(const char* config = kTwoMicrobatches) { expect_ok(smp_open(config, &session_)); }
  void close() {
    expect_ok(smp_close(session_));
    session_ = nullptr;
  }
  void open_with_model() {
    open();
    expect_ok(smp_load(session_, kTrain, kEval));
  }
  void open_for_training() { session_ = open_session(); }

  void expect_state_of(const torch::nn::Module& module) { expect_state(session_, module); }

  smp_session* session_ = nullptr;
};

TEST_F(CInterface, TrainsAsPlainLibtorch) {
  auto model = load_exported(kTrain);
  torch::optim::AdamW optimizer(model->parameters(),
                                torch::optim::AdamWOptions(0.01).betas({0.9, 0.95}));
  open_for_training();
  for (const Batch& batch : batches()) {
    step_plainly(model, optimizer, batch, [](const torch::Tensor& y, const torch::Tensor& t) {
      torch::mse_loss(y, t).backward();
    });
    const smp_tensor x = view(batch.x), y = view(batch.y);
    double loss = -1;
    expect_ok(smp_train(session_, &x, 1, "mse", &y, &loss));
    EXPECT_GT(loss, 0);
  }
  expect_state_of(*model);
  EXPECT_EQ(smp_is_alive(session_), 1);
}

TEST_F(CInterface, TakesTheCallersGradient) {
  auto model = load_exported(kTrain);
  torch::optim::AdamW optimizer(model->parameters(),
                                torch::optim::AdamWOptions(0.01).betas({0.9, 0.95}));
  open_for_training();
  for (Batch& batch : batches()) {
    step_plainly(model, optimizer, batch, [](const torch::Tensor& y, const torch::Tensor& t) {
      y.backward((y.detach() - t) * 3);
    });
    const smp_tensor x = view(batch.x);
    struct Context {
      torch::Tensor target;
      std::vector<int64_t> microbatches;
    } context{batch.y, {}};
    const auto gradient = [](void* pointer, int64_t microbatch, const smp_tensor* outputs,
                             smp_tensor* gradients, int64_t count) {
      auto& given = *static_cast<Context*>(pointer);
      given.microbatches.push_back(microbatch);
      if (count != 1 || outputs->dims != 2 || outputs->sizes[0] != 4) return 1;
      const auto y = torch::from_blob(outputs->data, {4, 2});
      const auto t = given.target.narrow(0, 4 * microbatch, 4);
      torch::from_blob(gradients->data, {4, 2}).copy_((y - t) * 3);
      return 0;
    };
    expect_ok(smp_train_by_gradient(session_, &x, 1, gradient, &context));
    EXPECT_EQ(context.microbatches, (std::vector<int64_t>{0, 1}));
  }
  expect_state_of(*model);
}

TEST_F(CInterface, EvaluatesAndRunsAsPlainLibtorch) {
  const torch::NoGradGuard no_grad;
  auto model = load_exported(ExportedPrograms().eval(kEval));
  const Batch batch = batches(1).front();
  const auto wanted = torch::cat({model->forward(batch.x.narrow(0, 0, 4).clone()).toTensor(),
                                  model->forward(batch.x.narrow(0, 4, 4).clone()).toTensor()});
  const auto got = torch::zeros({8, 2});
  const smp_tensor x = view(batch.x), y = view(batch.y);
  smp_tensor output = view(got);
  open_with_model();
  double loss = -1;
  expect_ok(smp_evaluate(session_, &x, 1, "mse", &y, &loss, &output, 1));
  EXPECT_TRUE(torch::equal(got, wanted));
  EXPECT_NEAR(loss, torch::mse_loss(wanted, batch.y).item<double>(), 1e-6);
  expect_ok(smp_evaluate(session_, &x, 1, nullptr, nullptr, nullptr, nullptr, 0));
}

TEST_F(CInterface, RunsWithoutASession) {
  const torch::NoGradGuard no_grad;
  auto model = load_exported(ExportedPrograms().eval(kEval));
  const auto x = batches(1).front().x;
  const auto wanted = model->forward(x).toTensor();
  smp_model* loaded = nullptr;
  expect_ok(smp_model_open(kEval, &loaded));

  smp_tensor unknown{};
  unknown.struct_size = sizeof unknown;
  const smp_tensor input = view(x);
  expect_ok(smp_model_run(loaded, &input, 1, &unknown, 1));
  EXPECT_EQ(unknown.data, nullptr);
  EXPECT_EQ(unknown.dtype, SMP_FLOAT32);
  EXPECT_EQ(unknown.sizes[0] * 100 + unknown.sizes[1], 802);

  // Fortran's arrays on both sides, and a part of a larger one.
  const auto column_major = x.t().contiguous().t();
  const auto got = torch::zeros({2, 8}).t();
  const smp_tensor from = view(column_major, SMP_COLUMN_MAJOR);
  smp_tensor to = view(got, SMP_COLUMN_MAJOR);
  expect_ok(smp_model_run(loaded, &from, 1, &to, 1));
  EXPECT_TRUE(torch::equal(got, wanted));
  const auto wide = torch::zeros({8, 6});
  wide.slice(1, 0, 6, 2).copy_(x);
  const smp_tensor part = view(wide.slice(1, 0, 6, 2), SMP_STRIDED);
  got.zero_();
  expect_ok(smp_model_run(loaded, &part, 1, &to, 1));
  EXPECT_TRUE(torch::equal(got, wanted));

  auto wrong = view(torch::zeros({8, 3}));
  expect_error(smp_model_run(loaded, &input, 1, &wrong, 1), SMP_ERROR_USAGE,
               {"output 0: the model returns Float of sizes [8, 2], and there is memory for"});
  expect_error(smp_model_run(loaded, &input, 1, &to, 2), SMP_ERROR_USAGE,
               {"2 outputs were asked for, and the model returns 1 tensors"});
  expect_error(smp_model_run(loaded, &input, 1, nullptr, 1), SMP_ERROR_USAGE,
               {"the array of outputs is NULL. Pass the address"});
  expect_error(smp_model_open("tests/c/absent.pt2", &loaded), SMP_ERROR_CHECKPOINT, {"absent.pt2"});
  EXPECT_EQ(loaded, nullptr);
}

/// The model takes an input by name, and returns a dictionary of a loss, a number and a tuple.
TEST_F(CInterface, InputsByNameAndStructuredResults) {
  const Batch batch = batches(1).front();
  const auto scale = torch::full({8, 1}, 2.0);
  smp_tensor inputs[2] = {view(scale), view(batch.x)};
  inputs[0].name = "scale";
  auto model = load_exported(kNamed);
  const auto result = model(batch.x, ExportedModuleImpl::Named{{"scale", scale}});
  const auto loss = result.toGenericDict().at("loss").toTensor();
  const auto wanted = result.toGenericDict().at("both").toTuple()->elements()[0].toTensor();

  smp_model* loaded = nullptr;
  expect_ok(smp_model_open(kNamed, &loaded));
  const auto got_loss = torch::zeros({}), y = torch::zeros({8, 2}), x = torch::zeros({8, 3});
  smp_tensor outputs[3] = {view(got_loss), view(y), view(x)};
  expect_ok(smp_model_run(loaded, inputs, 2, outputs, 3));
  EXPECT_TRUE(torch::equal(got_loss, loss));
  EXPECT_TRUE(torch::equal(y, wanted));
  EXPECT_TRUE(torch::equal(x, batch.x));
  expect_ok(smp_model_close(loaded));

  open("{}");
  expect_ok(smp_load(session_, kNamed, nullptr));
  expect_ok(smp_optimizer(session_, "sgd", nullptr));
  double value = 0;
  expect_ok(smp_train(session_, inputs, 2, "output", nullptr, &value));
  EXPECT_EQ(value, loss.item<double>());
}

TEST_F(CInterface, SavesAndGoesOn) {
  const TempFolder folder;
  const auto data = batches();
  const auto train = [&](size_t first, size_t last) {
    for (size_t i = first; i < last; ++i) {
      const smp_tensor x = view(data[i].x), y = view(data[i].y);
      expect_ok(smp_train(session_, &x, 1, "mse", &y, nullptr));
    }
  };
  int64_t steps = -1;
  open_for_training();
  expect_ok(smp_resume(session_, folder.path().c_str(), nullptr, &steps));
  EXPECT_EQ(steps, 0);  // there is none
  train(0, 2);
  expect_ok(smp_save(session_, folder.path().c_str(), "two"));
  train(2, 3);
  expect_ok(smp_save_weights(session_, folder.path().c_str(), "three"));
  close();

  open_for_training();
  expect_ok(smp_resume(session_, folder.path().c_str(), "two", &steps));
  EXPECT_EQ(steps, 2);
  train(2, 3);
  auto model = load_exported(ExportedPrograms().eval(kEval));
  smp_model* loaded = nullptr;
  expect_ok(smp_model_open(kEval, &loaded));
  expect_ok(smp_model_load(loaded, folder.file("three").c_str()));
  smp_model_close(loaded);
  load_into_module(folder.file("three"), *model);
  expect_state_of(*model);

  // All ranks know of files that are wrong, and the session goes on.
  expect_error(smp_save(session_, "/proc/none", "x"), SMP_ERROR_CHECKPOINT, {"/proc/none"});
  EXPECT_EQ(smp_is_alive(session_), 1);
  train(0, 1);
}

TEST_F(CInterface, WritesTrainedPrograms) {
  const TempFolder folder;
  const std::string train = folder.file("train.pt2"), eval = folder.file("eval.pt2");
  const Batch batch = batches(1).front();
  const smp_tensor x = view(batch.x), y = view(batch.y);
  open_for_training();
  expect_ok(smp_save_program(session_, nullptr, folder.file("untrained.pt2").c_str()));
  expect_ok(smp_train(session_, &x, 1, "mse", &y, nullptr));
  expect_ok(smp_save_program(session_, nullptr, eval.c_str()));
  expect_ok(smp_save_program(session_, kTrain, train.c_str()));
  expect_ok(smp_save_weights(session_, folder.path().c_str(), "weights"));
  expect_state_of(*load_exported(train));
  expect_state_of(*load_exported(ExportedPrograms().eval(eval)));

  // The written program gives the outputs of the model with the same weights.
  const auto run = [&](const std::string& program, const std::string& weights) {
    auto outputs = torch::zeros({8, 2});
    smp_tensor output = view(outputs);
    smp_model* model = nullptr;
    expect_ok(smp_model_open(program.c_str(), &model));
    if (!weights.empty()) expect_ok(smp_model_load(model, weights.c_str()));
    expect_ok(smp_model_run(model, &x, 1, &output, 1));
    expect_ok(smp_model_close(model));
    return outputs;
  };
  const auto outputs = run(eval, "");
  EXPECT_TRUE(torch::equal(outputs, run(kEval, folder.file("weights"))));
  EXPECT_TRUE(torch::equal(run(folder.file("untrained.pt2"), ""), run(kEval, "")));
  EXPECT_FALSE(torch::equal(outputs, run(kEval, "")));

  // It trains as the session goes on.
  smp_session* other = nullptr;
  expect_ok(smp_open(kTwoMicrobatches, &other));
  expect_ok(smp_load(other, train.c_str(), nullptr));
  expect_ok(smp_optimizer(other, "sgd", nullptr));
  double goes_on = 0, anew = 0;
  expect_ok(smp_train(session_, &x, 1, "mse", &y, &goes_on));
  expect_ok(smp_train(other, &x, 1, "mse", &y, &anew));
  EXPECT_EQ(goes_on, anew);
  expect_ok(smp_close(other));

  // Files that cannot be read or written end nothing.
  expect_error(smp_save_program(session_, "tests/c/absent.pt2", eval.c_str()), SMP_ERROR_CHECKPOINT,
               {"absent.pt2"});
  expect_error(smp_save_program(session_, kNamed, eval.c_str()), SMP_ERROR_CHECKPOINT, {"named"});
  expect_error(smp_save_program(session_, nullptr, "/proc/none/x.pt2"), SMP_ERROR_CHECKPOINT,
               {"/proc/none"});
  EXPECT_EQ(smp_is_alive(session_), 1);
  expect_error(smp_save_program(session_, nullptr, nullptr), SMP_ERROR_USAGE, {"the path is NULL"});
}

TEST_F(CInterface, LearningRatesAndClipping) {
  const Batch batch = batches(1).front();
  auto model = load_exported(kTrain);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.5).momentum(0.9));
  step_plainly(model, optimizer, batch, [&](const torch::Tensor& y, const torch::Tensor& t) {
    torch::l1_loss(y, t).backward();
  });
  open_with_model();
  expect_ok(smp_optimizer(session_, "sgd", R"({"momentum": 0.9, "clip_grad_norm": 1e6})"));
  expect_ok(smp_set_learning_rate(session_, 0.5));
  const smp_tensor x = view(batch.x), y = view(batch.y);
  expect_ok(smp_train(session_, &x, 1, "l1", &y, nullptr));
  expect_state_of(*model);
}

TEST_F(CInterface, OptimizersByName) {
  for (const char* name : {"sgd", "fused_sgd", "adam", "fused_adam", "adamw", "fused_adamw",
                           "adagrad", "fused_adagrad", "rmsprop"}) {
    SCOPED_TRACE(name);
    open_with_model();
    expect_ok(smp_optimizer(session_, name, R"({"lr": 0.5, "weight_decay": 0.1})"));
    close();
  }
}

TEST_F(CInterface, ErrorsOfOptimizers) {
  const auto expect_refused = [&](const char* name, const char* options,
                                  std::initializer_list<std::string> parts) {
    open_with_model();
    expect_error(smp_optimizer(session_, name, options), SMP_ERROR_CONFIG, parts);
    EXPECT_EQ(smp_is_alive(session_), 0);
    close();
  };
  expect_refused("lbfgs", nullptr, {"there is no optimizer \"lbfgs\". There are \"adagrad\""});
  expect_refused("sgd", R"({"betas": [0, 1]})",
                 {"optimizer \"sgd\" has no option \"betas\". It has \"dampening\""});
  expect_refused("adam", R"({"betas": [0]})", {"expected a list of two numbers"});
  expect_refused("adam", R"({"lr": "high"})", {"the options of optimizer \"adam\"", "lr"});
  expect_refused("adam", "[]", {"expected an object"});
  expect_refused("sgd", R"({"lr": -1})",
                 {"the options of optimizer \"sgd\": Invalid learning rate"});
  expect_refused("sgd", R"({"clip_grad_norm": -1})", {"expected a number above 0"});
}

TEST_F(CInterface, AnErrorEndsTheSession) {
  open_for_training();
  const Batch batch = batches(1).front();
  const smp_tensor x = view(batch.x), y = view(batch.y);
  expect_error(smp_train(session_, &x, 1, "median", &y, nullptr), SMP_ERROR_USAGE,
               {"there is no loss \"median\". There are \"bce_with_logits\"",
                "The session has ended on all its ranks"});
  EXPECT_EQ(smp_is_alive(session_), 0);
  expect_error(smp_train(session_, &x, 1, "mse", &y, nullptr), SMP_ERROR_ENDED,
               {"the session has ended by an earlier error", "median"});
  close();
  open_for_training();  // another one
  expect_ok(smp_train(session_, &x, 1, "mse", &y, nullptr));
}

TEST_F(CInterface, RanksOfASession) {
  open();
  int64_t rank = -1, size = -1, replica = -1, replicas = -1;
  expect_ok(smp_rank(session_, &rank, &size));
  expect_ok(smp_replica(session_, &replica, &replicas));
  EXPECT_EQ((std::vector<int64_t>{rank, size, replica, replicas}),
            (std::vector<int64_t>{0, 1, 0, 1}));
}

TEST_F(CInterface, OneThreadAtATime) {
  open_for_training();
  const Batch batch = batches(1).front();
  const smp_tensor x = view(batch.x);
  const auto ask = [](void* session, int64_t, const smp_tensor*, smp_tensor*, int64_t) {
    auto second = std::async(std::launch::async, [&] {
      int64_t count = 0;
      const int code = smp_gather_state(static_cast<smp_session*>(session), &count);
      expect_has(smp_last_error(), {"another thread is in a call with this handle"});
      return code;
    });
    return second.get() == SMP_ERROR_BUSY ? 0 : 1;
  };
  expect_ok(smp_train_by_gradient(session_, &x, 1, ask, session_));
  EXPECT_EQ(smp_is_alive(session_), 1);
}

TEST_F(CInterface, TrapsAreMaskedInCalls) {
  open_for_training();
  Batch batch = batches(1).front();
  batch.x[0][0] = std::numeric_limits<float>::infinity();  // makes NaN of it, which is no error
  const smp_tensor x = view(batch.x), y = view(batch.y);
  const int traps = FE_DIVBYZERO | FE_INVALID | FE_OVERFLOW;
  std::feclearexcept(FE_ALL_EXCEPT);
  ASSERT_NE(feenableexcept(traps), -1) << "this processor has no traps";
  const int code = smp_train(session_, &x, 1, "mse", &y, nullptr);
  int in_callback = 0;
  const auto gradient = [](void* seen, int64_t, const smp_tensor*, smp_tensor*, int64_t) {
    *static_cast<int*>(seen) = fegetexcept();
    return 0;
  };
  const int second = smp_train_by_gradient(session_, &x, 1, gradient, &in_callback);
  const int after = fegetexcept();
  fedisableexcept(FE_ALL_EXCEPT);
  expect_ok(code);
  expect_ok(second);
  EXPECT_EQ(after, traps);
  EXPECT_EQ(in_callback, traps);
  EXPECT_EQ(std::fetestexcept(traps), 0);
}

TEST_F(CInterface, ErrorsOfCallbacks) {
  const Batch batch = batches(1).front();
  const smp_tensor x = view(batch.x);
  open_for_training();
  expect_error(smp_train_by_gradient(session_, &x, 1, nullptr, nullptr), SMP_ERROR_USAGE,
               {"the function that gives gradients is NULL"});
  close();
  open_for_training();
  const auto failing = [](void*, int64_t, const smp_tensor*, smp_tensor*, int64_t) { return 7; };
  expect_error(
      smp_train_by_gradient(session_, &x, 1, failing, nullptr), SMP_ERROR_USAGE,
      {"the function that gives gradients has returned 7 for microbatch 0, and so has failed"});
  close();
  open(R"({"replay_check": 1})");
  expect_ok(smp_load(session_, kTrain, kEval));
  expect_ok(smp_optimizer(session_, "sgd", nullptr));
  expect_error(smp_train_by_gradient(session_, &x, 1, failing, nullptr), SMP_ERROR_USAGE,
               {"a step whose gradients the caller gives cannot run again"});
}

TEST_F(CInterface, CallsInTheWrongOrder) {
  const Batch batch = batches(1).front();
  const smp_tensor x = view(batch.x), y = view(batch.y);
  const auto expect_refused = [&](int code, std::initializer_list<std::string> parts) {
    expect_error(code, SMP_ERROR_USAGE, parts);
    close();
  };
  open();
  expect_refused(smp_optimizer(session_, "sgd", nullptr), {"the session has no model yet"});
  open_with_model();
  expect_refused(smp_train(session_, &x, 1, "mse", &y, nullptr),
                 {"the session has no optimizer yet"});
  open_with_model();
  expect_refused(smp_load(session_, kTrain, nullptr),
                 {"the session has a model already, and it has one"});
  open_for_training();
  expect_refused(smp_optimizer(session_, "sgd", nullptr), {"the session has an optimizer already"});
  open_for_training();
  expect_refused(smp_train(session_, &x, 1, "mse", nullptr, nullptr),
                 {"the loss \"mse\" takes a target, and none was given"});
  open_for_training();
  expect_refused(smp_train(session_, &x, 1, "output", &y, nullptr),
                 {"the loss \"output\" takes no target, and one was given"});
  open_for_training();
  expect_refused(smp_state(session_, 3, nullptr),
                 {"there is no tensor 3: smp_gather_state has gathered 0"});
}

TEST_F(CInterface, ArgumentsThatAreNone) {
  smp_model* model = nullptr;
  expect_ok(smp_model_open(kEval, &model));
  const auto data = batches(1).front();
  const auto expect_refused = [&](const std::function<void(smp_tensor&)>& change,
                                  std::initializer_list<std::string> parts) {
    smp_tensor x = view(data.x);
    change(x);
    expect_error(smp_model_run(model, &x, 1, nullptr, 0), SMP_ERROR_USAGE, parts);
  };
  expect_refused([](smp_tensor& x) { x.struct_size = 0; },
                 {"input 0: struct_size is 0, and a tensor takes"});
  expect_refused([](smp_tensor& x) { x.struct_size -= 8; },
                 {"input 0: struct_size is 184, and a tensor takes 192 bytes. Set it"});
  expect_refused([](smp_tensor& x) { x.device = 7; },
                 {"input 0: device 7 is none of smp_device. Set it, for example to SMP_CPU"});
  expect_refused([](smp_tensor& x) { x.struct_size += 8; },
                 {"more than the", "The program was compiled with a newer smp/c.h"});
  expect_refused([](smp_tensor& x) { x.dtype = 99; }, {"dtype 99 is none of smp_dtype"});
  expect_refused([](smp_tensor& x) { x.layout = 3; }, {"layout 3 is none of smp_layout"});
  expect_refused([](smp_tensor& x) { x.dims = 9; },
                 {"it has 9 dimensions, and a tensor has 0 to 8"});
  expect_refused([](smp_tensor& x) { x.sizes[0] = x.sizes[1] = int64_t{1} << 40; },
                 {"which no memory has"});
  expect_refused([](smp_tensor& x) { x.sizes[1] = -1; },
                 {"size 1 is -1, which no memory has. Sizes are numbers of elements, 0 or more"});
  expect_refused([](smp_tensor& x) { x.data = nullptr; },
                 {"input 0: data is NULL. Set it to the address"});
  expect_refused(
      [](smp_tensor& x) {
        x.layout = SMP_STRIDED;
        x.strides[0] = -3;
      },
      {"the stride -3 is negative. Strides are 0 or more elements"});
  expect_refused([](smp_tensor& x) { x.name = "z"; }, {"\"z\""});
  expect_error(smp_model_run(model, nullptr, 2, nullptr, 0), SMP_ERROR_USAGE,
               {"inputs: 2 tensors at", "are no array. Pass the address of the first"});
  expect_ok(smp_model_close(model));

  expect_error(smp_model_open(nullptr, &model), SMP_ERROR_USAGE,
               {"the name of the program is NULL. Pass a text that ends with 0"});
  expect_error(smp_model_open(kEval, nullptr), SMP_ERROR_USAGE,
               {"the place for the model is NULL. Pass an address"});
  expect_error(smp_model_run(nullptr, nullptr, 0, nullptr, 0), SMP_ERROR_USAGE,
               {"the model is NULL"});
  expect_error(smp_load(nullptr, kTrain, kEval), SMP_ERROR_USAGE, {"the session is NULL"});
  expect_error(smp_set_threads(0), SMP_ERROR_USAGE, {"0 is no number of threads: expected 1"});
  EXPECT_EQ(smp_close(nullptr), SMP_OK);
  EXPECT_EQ(smp_model_close(nullptr), SMP_OK);
  EXPECT_EQ(smp_is_alive(nullptr), 0);
  EXPECT_EQ(smp_c_version(), SMP_C_VERSION);
}

TEST_F(CInterface, WithoutAGpu) {
  open_with_model();
  expect_ok(smp_set_device(session_, SMP_CPU, 0));
  const char* const text =
      "device is SMP_GPU, and this process has no GPU: the library is built without CUDA, or sees "
      "none. Use memory of the host (SMP_CPU)";
  expect_error(smp_set_device(session_, SMP_GPU, 0), SMP_ERROR_USAGE, {"the session: ", text});
  EXPECT_EQ(smp_is_alive(session_), 1);
  smp_model* model = nullptr;
  expect_ok(smp_model_open(kEval, &model));
  smp_tensor x = view(batches(1).front().x);
  x.device = SMP_GPU;
  expect_error(smp_model_run(model, &x, 1, nullptr, 0), SMP_ERROR_USAGE, {"input 0: ", text});
  expect_ok(smp_model_close(model));
}

TEST_F(CInterface, StateNeedsAPlace) {
  open_with_model();
  int64_t count = 0;
  expect_ok(smp_gather_state(session_, &count));
  expect_error(smp_state(session_, 0, nullptr), SMP_ERROR_USAGE,
               {"the place for a tensor is NULL. Pass the address of an smp_tensor"});
  EXPECT_EQ(smp_is_alive(session_), 1);
}

TEST_F(CInterface, WithoutMpiThereIsNoCommunicator) {
  expect_error(smp_open_mpi(nullptr, 0, &session_), SMP_ERROR_USAGE,
               {"a communicator was given, and MPI has not started"});
  EXPECT_EQ(session_, nullptr);
}

TEST_F(CInterface, PlacesOfElements) {
  smp_model* model = nullptr;
  expect_ok(smp_model_open(kEval, &model));
  const auto data = batches(1).front();
  smp_tensor x = view(data.x, SMP_STRIDED), y = view(data.y, SMP_STRIDED);
  x.strides[0] = int64_t{1} << 62;  // libtorch would end the process
  expect_error(smp_model_run(model, &x, 1, nullptr, 0), SMP_ERROR_USAGE,
               {"input 0: the stride of dimension 0 is 4611686018427387904, which no memory has"});
  x = view(data.x);
  y.strides[0] = 1;
  expect_error(smp_model_run(model, &x, 1, &y, 1), SMP_ERROR_USAGE,
               {"output 0: with strides", "elements lie on each other. Give each a place"});
  y.data = nullptr;  // fields that the caller has set for its memory stay
  y.layout = SMP_COLUMN_MAJOR;
  y.name = "y";
  expect_ok(smp_model_run(model, &x, 1, &y, 1));
  EXPECT_EQ(y.layout, SMP_COLUMN_MAJOR);
  EXPECT_STREQ(y.name, "y");
  smp_tensor twice[2] = {x, x};
  twice[0].name = twice[1].name = "input";
  expect_error(smp_model_run(model, twice, 2, nullptr, 0), SMP_ERROR_USAGE,
               {"two inputs have the name \"input\". Give each"});
  expect_ok(smp_model_close(model));
}

TEST_F(CInterface, CallersRounding) {
  const Batch batch = batches(1).front();
  const smp_tensor x = view(batch.x), y = view(batch.y);
  double nearest = 0, upward = 0;
  for (double* loss : {&nearest, &upward}) {
    open_for_training();
    std::fesetround(loss == &upward ? FE_UPWARD : FE_TONEAREST);
    for (int i = 0; i < 3; ++i) smp_train(session_, &x, 1, "mse", &y, loss);
    EXPECT_EQ(std::fegetround(), loss == &upward ? FE_UPWARD : FE_TONEAREST);
    std::fesetround(FE_TONEAREST);
    close();
  }
  EXPECT_EQ(nearest, upward);
}

TEST_F(CInterface, NumbersWithoutMeaning) {
  open_for_training();
  expect_error(smp_set_learning_rate(session_, std::nan("")), SMP_ERROR_USAGE,
               {"is no learning rate: expected a number of 0 or more"});
  EXPECT_EQ(smp_is_alive(session_), 1);
  const Batch batch = batches(1).front();
  const auto column = batch.y.slice(1, 0, 1).contiguous();
  const smp_tensor x = view(batch.x), y = view(column);
  expect_error(
      smp_train(session_, &x, 1, "mse", &y, nullptr), SMP_ERROR_USAGE,
      {"the target has sizes [4, 1] in a microbatch, and the model's first output [4, 2]"});
}

TEST_F(CInterface, SessionsLeaveTheProcessAsItWas) {
  open(R"({"deterministic": true})");
  close();
  EXPECT_FALSE(at::globalContext().deterministicAlgorithms());
  expect_error(smp_open(R"({"preempt_seconds": 3})", &session_), SMP_ERROR_CONFIG,
               {"config key \"preempt_seconds\": a program in C cannot ask"});
  expect_error(smp_open(nullptr, nullptr), SMP_ERROR_USAGE, {"the place for the session is NULL"});
}

TEST_F(CInterface, ConfigurationsThatAreNone) {
  for (const auto& [config, text] : std::vector<std::pair<const char*, const char*>>{
           {R"({"microbatches": 0})", "microbatches"},
           {R"({"microbatches": )", "the configuration given"},
           {"tests/c/absent.json", "tests/c/absent.json"}}) {
    EXPECT_EQ(smp_open(config, &session_), SMP_ERROR_CONFIG);
    expect_has(smp_last_error(), {text});
    EXPECT_EQ(session_, nullptr);
  }
  const TempFolder folder;
  open(folder.write("smp.json", kTwoMicrobatches).c_str());
}

}  // namespace
}  // namespace smp::testing
