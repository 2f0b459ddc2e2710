// SPDX-License-Identifier: Apache-2.0
#include "tests/smp/errors.h"

#include <filesystem>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "comm/nccl/nccl_groups.h"

namespace smp::testing {
namespace {

using InsideAStep = ErrorsTest;
using Inputs = ErrorsTest;
using Capture = ErrorsTest;
using Program = ErrorsTest;

TEST_F(InsideAStep, OptimizerCallsAreRefused) {
  std::optional<DistributedOptimizer<torch::optim::SGD>> optimizer;
  const auto make = [&](DistributedModel<Mlp> & model) -> auto& {
    optimizer.emplace(model->parameters(), torch::optim::SGDOptions(0.1));
    return *optimizer;
  };
  expect_has(error_in_step([&](DistributedModel<Mlp>& model) { make(model).step(); }),
             {"optimizer.step() was called inside a step function. Gradients are complete when the "
              "step has returned: call it after the step"});
  expect_has(error_in_step([&](DistributedModel<Mlp>& model) { make(model).zero_grad(); }),
             {"optimizer.zero_grad()", "inside a step function"});
  optimizer.reset();
  expect_has(error_in_step([](DistributedModel<Mlp>& model) {
               torch::optim::SGD plain(model->parameters(), torch::optim::SGDOptions(0.1));
               distributed(plain).step();
             }),
             {"optimizer.step()", "inside a step function"});
}

TEST_F(InsideAStep, ModelCallsThatBelongOutsideAreRefused) {
  expect_has(error_in_step([](DistributedModel<Mlp>& model) { model->zero_grad(); }),
             {"zero_grad was called inside a step function; call it before or after the step"});
  expect_has(error_in_step([](DistributedModel<Mlp>& model) { model->state_dict(); }),
             {"state_dict", "inside a step function"});
  expect_has(error_in_step([](DistributedModel<Mlp>& model) {
               model->load_state_dict(ModelCore::TensorDict());
             }),
             {"load_state_dict", "inside a step function"});
  Mlp other(1);
  expect_has(error_in_step([&](DistributedModel<Mlp>&) {
               DistributedModel<Mlp> another(other, ModelOptions().name("another"));
             }),
             {"a DistributedModel was made inside a step function; make it before the first step"});
  expect_has(error_in_step([](DistributedModel<Mlp>& model) { save("nowhere", model); }),
             {"smp::save was called inside a step function; call it after the step"});
  expect_has(error_in_step([](DistributedModel<Mlp>& model) { load("nowhere", model); }),
             {"smp::load was called inside a step function; call it before or after the step"});
}

TEST_F(Program, NcclNeedsABuildThatHasIt) {
  if (comm::has_nccl()) GTEST_SKIP() << "this build has NCCL";
  expect_has(error_of_run<ConfigError>(1, Config().ddp(true).ddp_dist_backend("nccl"), [] {}),
             {"\"ddp_dist_backend\": \"nccl\" needs a build with NCCL, which this is not. Build "
              "for CUDA"});
}

TEST_F(Program, OnlyForwardHasNoBackward) {
  const auto config = stages(2).pipeline("_only_forward");
  run_as_threads(2, config, [&] {
    torch::nn::Sequential net(torch::nn::Linear(MlpImpl::kWidth, 4), torch::nn::Linear(4, 3));
    DistributedModel<torch::nn::Sequential> model(net);
    auto evaluate = step([&](torch::Tensor x) { return model(x); });
    const auto got = evaluate(x_).outputs();
    const auto state = model->state_dict();
    for (int m = 0; m < 2; ++m) {
      const auto hidden = torch::linear(part(x_, 2, m), state["0.weight"], state["0.bias"]);
      expect_equal(got[m], torch::linear(hidden, state["1.weight"], state["1.bias"]), "output");
    }
  });
  expect_has(error_of_run<UsageError>(2, config,
                                      [&] {
                                        DistributedModel<Mlp> model(Mlp(4));
                                        make_training(model)(x_, y_);
                                      }),
             {"calls model->backward, and \"pipeline\": \"_only_forward\" runs forwards only"});
}

TEST_F(InsideAStep, AnotherStepIsRefused) {
  expect_has(error_in_step([](DistributedModel<Mlp>& model) {
               auto inner = step([&](torch::Tensor x) { return model(x); });
               inner(torch::ones({8, MlpImpl::kWidth}));
             }),
             {"inside another step function"});
}

TEST_F(InsideAStep, ASecondBackwardIsRefused) {
  expect_has(error_of_training<UsageError>(
                 1, stages(1),
                 [](int, DistributedModel<Mlp>& model, torch::Tensor x, torch::Tensor y) {
                   auto loss = torch::mse_loss(model(x), y);
                   model->backward(loss);  // and once more by the caller
                   return loss;
                 }),
             {"train", "backward was called a second time on the history of operator"});
}

TEST_F(InsideAStep, BackwardOfTheTensorItselfIsRefused) {
  const auto text = error_of_training<c10::Error>(
      1, stages(1), [](int, DistributedModel<Mlp>& model, torch::Tensor x, torch::Tensor y) {
        auto loss = torch::mse_loss(model(x), y);
        loss.backward();
        return loss;
      });
  expect_has(text, {"\"train\"", "backward()", "model->backward(loss)"});
}

TEST_F(InsideAStep, BackwardNeedsAGradientForEachTensor) {
  expect_has(error_of_training<UsageError>(
                 1, stages(1),
                 [](int, DistributedModel<Mlp>& model, torch::Tensor x, torch::Tensor) {
                   const auto out = model(x);
                   model->backward({out, out * 2}, {torch::ones_like(out)});
                   return out.sum();
                 }),
             {"step function \"train\"",
              "backward got 2 tensors and 1 gradients; give one gradient "
              "for each tensor, or none"});
}

TEST_F(InsideAStep, BackwardNeedsAScalarThatDependsOnParameters) {
  expect_has(error_of_training<UsageError>(2, stages(2),
                                           [](int, DistributedModel<Mlp>& model, torch::Tensor x,
                                              torch::Tensor) { return model(x); }),
             {"backward", "scalar"});
  expect_has(error_of_training<c10::Error>(2, stages(2),
                                           [](int, DistributedModel<Mlp>& model, torch::Tensor x,
                                              torch::Tensor) { return model(x).detach().sum(); }),
             {"backward", "does not depend on a parameter"});
}

/// The function gets it, so its use is libtorch's error.
TEST_F(Inputs, UndefinedTensorThatAnOperatorReads) {
  const auto text = error_of_run<Error>(2, stages(2), [&] {
    DistributedModel<Mlp> model(Mlp(4));
    auto train = make_training(model);
    train(x_, torch::Tensor());
  });
  expect_has(text, {"step function \"step 0\", in or after module \"head\""});
}

TEST_F(Inputs, TensorWithoutTheAxisToCut) {
  const auto program = [&](StepOptions options, torch::Tensor extra) {
    return error_of_run<UsageError>(1, stages(1), [&] {
      DistributedModel<Mlp> model(Mlp(4));
      auto forward =
          step([&](torch::Tensor x, torch::Tensor more) { return model(x) + more.sum(); }, options);
      forward(x_, extra);
    });
  };
  expect_has(program(StepOptions(), torch::ones({})),
             {"input tensor 1 of shape [] has no axis 0 to cut into microbatches",
              "Pass it by smp::whole(x), or name its argument in "
              "StepOptions().non_split_inputs({...}), to give every microbatch the whole"});
  expect_has(program(StepOptions().input_split_axes({{1, 2}}), torch::ones({2, 2})),
             {"input tensor 1", "no axis 2"});
}

TEST_F(Inputs, ArgumentThatTheFunctionDoesNotHave) {
  const auto program = [&](StepOptions options) {
    return error_of_run<UsageError>(1, stages(1), [&] {
      DistributedModel<Mlp> model(Mlp(4));
      make_training(model, options.name("train"))(x_, y_);
    });
  };
  expect_has(program(StepOptions().non_split_inputs({2})),
             {"\"train\": StepOptions().non_split_inputs names argument 2, but the function is "
              "called with 2. Arguments are counted from 0"});
  expect_has(program(StepOptions().input_split_axes({{-1, 0}})),
             {"StepOptions().input_split_axes names argument -1, but the function is called with"});
}

TEST_F(Inputs, TensorOnAnotherDevice) {
  const auto text = error_of_run<UsageError>(1, stages(1), [&] {
    DistributedModel<Mlp> model(Mlp(4));
    make_training(model)(x_, y_.to(torch::kMeta));
  });
  expect_has(text, {"input tensor 1 is on device meta, and this rank computes on cpu. Leave the "
                    "input on the CPU, or move it there: x.to(smp::device())"});
}

TEST_F(Inputs, TensorThatRequiresAGradient) {
  const auto text = error_of_run<CaptureError>(1, stages(1), [&] {
    DistributedModel<Mlp> model(Mlp(4));
    make_training(model)(x_.clone().requires_grad_(), y_);
  });
  expect_has(text, {"input 0 requires a gradient; a step trains the parameters of its models only. "
                    "Pass input.detach()"});
}

/// Takes another way for the second microbatch.
struct Switch {
  bool doubles;
  Switch smp_slice(int64_t, int64_t microbatch, int64_t) const { return {microbatch == 1}; }
};

TEST_F(Inputs, ObjectsThatLeadMicrobatchesDifferentWays) {
  const auto text = error_of_run<CaptureError>(1, stages(1), [&] {
    DistributedModel<Mlp> model(Mlp(4));
    auto forward = step(
        [&](torch::Tensor x, Switch option) { return option.doubles ? model(x) * 2 : model(x); },
        StepOptions().name("forward"));
    forward(x_, Switch{false});
  });
  expect_has(text, {"\"forward\" calls other operators on microbatch 1 than on microbatch 0: ",
                    "aten::mul",
                    "by an object that slices itself (smp_slice) or with \"guard\": "
                    "\"every_microbatch\", but all take the same way"});
}

TEST_F(Inputs, EmptyBatch) {
  const auto text = error_of_run<UsageError>(1, stages(1), [&] {
    DistributedModel<Mlp> model(Mlp(4));
    auto train = make_training(model);
    train(x_.narrow(0, 0, 0), y_.narrow(0, 0, 0));
  });
  expect_has(text, {"input tensor 0 of shape [0, 6] is empty: its batch has no samples (0 on axis "
                    "0). Leave out the call on all ranks"});
}

TEST_F(Inputs, StepWithoutAModel) {
  const auto text = error_of_run<UsageError>(1, stages(1), [&] {
    auto forward = step([](torch::Tensor x) { return x * 2; });
    forward(x_);
  });
  expect_has(text, {"a step function ran, but no module was wrapped. Write smp::DistributedModel "
                    "model(net) before the first step and call model(x) in it"});
}

TEST_F(Inputs, NegativeNumberOfMicrobatches) {
  const auto text = error_of_run<UsageError>(1, stages(1), [&] {
    step([](torch::Tensor x) { return x; }, StepOptions().microbatches(-2));
  });
  expect_has(text, {"StepOptions().microbatches must be positive, got -2"});
}

/// A module that looks at a value.
struct PeekingImpl : torch::nn::Module {
  PeekingImpl() { fc = register_module("fc", torch::nn::Linear(MlpImpl::kWidth, 1)); }
  torch::Tensor forward(torch::Tensor x) {
    x = fc(x);
    if (peeks && x.sum().item<float>() > 0) x = x * 2;
    return x;
  }
  bool peeks = true;
  torch::nn::Linear fc{nullptr};
};
TORCH_MODULE(Peeking);

struct OuterImpl : torch::nn::Module {
  OuterImpl() { block = register_module("block", Peeking()); }
  torch::Tensor forward(torch::Tensor x) { return block(x); }
  Peeking block{nullptr};
};
TORCH_MODULE(Outer);

TEST_F(Capture, ItemIsRefusedInTheFirstStepAndLater) {
  for (int when : {0, 1}) {
    SCOPED_TRACE("in step " + std::to_string(when));
    const auto text = error_of_run<CaptureError>(2, stages(2), [&] {
      Outer net;
      DistributedModel<Outer> model(net);
      auto train = make_training(model, StepOptions().name("train"));
      for (int i = 0; i < 2; ++i) {
        net->block->peeks = i >= when;
        train(x_, y_);
      }
    });
    // Step function, operator, module path.
    expect_has(text, {"\"train\"", "item", "block"});
  }
}

TEST_F(Capture, ReadingTheDataOfALossInAStepIsRefused) {
  const auto text = error_of_training<c10::Error>(
      1, stages(1), [](int, DistributedModel<Mlp>& model, torch::Tensor x, torch::Tensor y) {
        auto loss = torch::mse_loss(model(x), y);
        if (loss.item<float>() > 1e9) throw std::runtime_error("diverged");
        return loss;
      });
  expect_has(text, {"\"train\"", "item"});
}

TEST_F(Capture, OtherThingsThatNeedValues) {
  const std::vector<std::pair<std::string, std::function<torch::Tensor(torch::Tensor)>>> cases = {
      {"nonzero", [](torch::Tensor x) { return x.nonzero().sum() + x.sum(); }},
      {"masked_select", [](torch::Tensor x) { return x.masked_select(x > 0).sum(); }},
      {"equal", [](torch::Tensor x) { return torch::equal(x, x * 1) ? x.sum() : x.mean(); }},
  };
  for (const auto& [name, body] : cases) {
    SCOPED_TRACE(name);
    const auto& function = body;
    const auto text = error_of_training<CaptureError>(
        1, stages(1), [&](int, DistributedModel<Mlp>& model, torch::Tensor x, torch::Tensor) {
          return function(model(x));
        });
    expect_has(text, {"\"train\"", name});
  }
}

TEST_F(Capture, ErrorsOfLibtorchSayWhere) {
  const auto text = error_of_training<Error>(
      2, stages(2), [&](int, DistributedModel<Mlp>& model, torch::Tensor x, torch::Tensor) {
        return model(x).matmul(torch::ones({3, 3})).sum();
      });
  expect_has(text, {"[smp rank ", "step function \"train\", in or after module \"",
                    "mat1 and mat2 shapes cannot be multiplied"});
}

TEST_F(Program, ModulesThatCannotBeWrapped) {
  expect_has(
      error_of_run<UsageError>(1, stages(1), [] { DistributedModel<Mlp> model(Mlp(nullptr)); }),
      {"DistributedModel was given an empty module holder", "construct the module first"});
  expect_has(error_of_run<UsageError>(1, stages(1),
                                      [] {
                                        Mlp net(1);
                                        DistributedModel<Mlp> first(net), second(net);
                                      }),
             {"this module is wrapped in a DistributedModel already"});
  expect_has(error_of_run<UsageError>(1, stages(1),
                                      [&] {
                                        DistributedModel<Mlp> first{Mlp(1)}, second{Mlp(1)};
                                        make_training(first)(x_, y_);
                                      }),
             {"two tensors are registered as \"",
              "a name of its own: smp::DistributedModel model(net, smp::ModelOptions().name("});
}

/// Its buffer is the weight under another name, and is used on the other partition.
struct SharedMemoryImpl : torch::nn::Module {
  SharedMemoryImpl() {
    first = register_module("first", torch::nn::Linear(4, 4));
    second = register_module("second", torch::nn::Linear(4, 4));
    view = register_buffer("view", first->weight.detach());
  }
  torch::Tensor forward(torch::Tensor x) {
    {
      const auto scope = partition(0);
      x = first(x);
    }
    const auto scope = partition(1);
    return second(x) + x.matmul(view);
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
  torch::Tensor view;
};
TORCH_MODULE(SharedMemory);

TEST_F(Program, MemoryThatTwoPartitionsWouldCopy) {
  const auto text = error_of_run<UsageError>(2, stages(2), [] {
    DistributedModel<SharedMemory> model{SharedMemory()};
    auto train = step([&](torch::Tensor x) {
      const auto loss = model(x).pow(2).mean();
      model->backward(loss);
      return loss;
    });
    train(torch::ones({4, 4}));
  });
  expect_has(text, {"\"first.weight\" and \"view\" lie on the same memory, and partitions 0 and 1",
                    "keep what uses them on one partition with smp::partition"});
}

TEST_F(Program, ParametersThatComeTooLate) {
  expect_has(error_of_run<UsageError>(1, stages(1),
                                      [] {
                                        Mlp net(1);
                                        DistributedModel<Mlp> model(net);
                                        net->register_parameter("late", torch::zeros({3}));
                                        model->state_dict();
                                      }),
             {"a parameter or buffer of shape [3] was registered after its module was wrapped in a "
              "DistributedModel. Register all of them before"});
}

TEST_F(Program, CallsAtTheWrongTime) {
  expect_has(error_of_run<UsageError>(1, stages(1), [] { init(stages(1)); }),
             {"smp::init was called twice", "at the start of main()"});
  expect_has(error_of<UsageError>([] { rank(); }),
             {"smp is not initialised; call smp::init(config) at the start of main()"});
  expect_has(error_of_run<UsageError>(1, stages(1),
                                      [&] {
                                        DistributedModel<Mlp> model(Mlp(1));
                                        make_training(model)(x_, y_);
                                        model->to(torch::kCPU);
                                      }),
             {"model->to(cpu) was called after partitioning", "gather it with model->cpu()"});
}

TEST_F(Program, ResultsThatCannotBePutTogether) {
  expect_has(error_of<UsageError>([] { std::ignore = StepOutput().reduce_mean(); }),
             {"a StepOutput without outputs was reduced"});
  const StepOutput losses(Tensors{torch::ones({}), torch::ones({})});
  expect_has(error_of<UsageError>([&] { std::ignore = losses.concat(); }),
             {"StepOutput::concat needs tensors with a batch axis", "Use stack()"});
}

TEST_F(Capture, BuffersThatRequireAGradient) {
  for (const bool trains : {true, false}) {
    const auto run = [&] {
      torch::nn::Linear net(MlpImpl::kWidth, 3);
      const auto scale = net->register_buffer("scale", torch::ones({3}, torch::requires_grad()));
      DistributedModel<torch::nn::Linear> model(net);
      step([&](torch::Tensor x) {
        const auto loss = (model(x) * scale).sum();
        if (trains) model->backward(loss);
        return loss;
      })(x_);
    };
    if (!trains) {
      EXPECT_NO_THROW(run_as_threads(1, stages(1), run));
      continue;
    }
    expect_has(error_of_run<CaptureError>(1, stages(1), run),
               {"calls backward and reads buffer \"scale\", which requires a gradient",
                "Register it with register_parameter, or call requires_grad_(false) on it before "
                "the step"});
  }
}

TEST_F(Program, FilesThatAreNotThere) {
  const std::string folder = ::testing::TempDir() + "smp_errors_test";
  std::filesystem::remove_all(folder);
  expect_has(error_of_run<CheckpointError>(1, stages(1),
                                           [&] {
                                             DistributedModel<Mlp> model(Mlp(1));
                                             DistributedOptimizer<torch::optim::SGD> optimizer(
                                                 model->parameters(), 0.1);
                                             save(folder, model);
                                             load(folder, model, optimizer);
                                           }),
             {"holds no optimizer", "smp::load(path, model)"});
  expect_has(error_of_run<CheckpointError>(1, stages(1),
                                           [] {
                                             DistributedModel<Mlp> model(Mlp(1));
                                             save("", model);
                                           }),
             {"cannot save a checkpoint: its path is empty"});
  const std::string file = folder + "/missing/plan.json";
  expect_has(error_of_run<ConfigError>(1, stages(1).partition_file(file),
                                       [&] {
                                         DistributedModel<Mlp> model(Mlp(1));
                                         make_training(model)(x_, y_);
                                       }),
             {file, "cannot write the partition", "Give \"partition_file\" a path"});
  expect_has(error_of_run<ConfigError>(2, stages(2).partition_file(file).load_partition(true),
                                       [&] {
                                         DistributedModel<Mlp> model(Mlp(4));
                                         make_training(model)(x_, y_);
                                       }),
             {file + ": cannot load the partition: there is no such file on world rank 0, or it is "
                     "empty. Run once without \"load_partition\" to save one."});
  std::filesystem::remove_all(folder);
}

TEST_F(Program, DataOfAParameterOfAnotherRank) {
  expect_has(
      error_of_run<c10::Error>(2, stages(2),
                               [&] {
                                 DistributedModel<Mlp> model(Mlp(4));
                                 make_training(model)(x_, y_);
                                 for (const auto& p : model->parameters()) p.sum().item<float>();
                               }),
      {"which pp rank ",
       " owns: this rank does not have these numbers. Between steps go over "
       "model->local_parameters(), or local_named_parameters(), which are those of this rank"});
}

}  // namespace
}  // namespace smp::testing
