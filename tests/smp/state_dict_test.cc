// SPDX-License-Identifier: Apache-2.0
// State dictionaries of a `DistributedModel`, whole and local.

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "tests/smp/api.h"
#include "tests/smp/models.h"
#include "tests/smp/parity.h"

namespace smp::testing {
namespace {

using StateDict = ApiTest;

TEST_F(StateDict, StateDictIsTheSameOnAllRanksAndLoadsIntoThePlainModule) {
  torch::manual_seed(7);
  TinyConvNet prototype;
  const auto batch = TinyConvNetImpl::batch(8);
  const auto initial = state_of(*prototype);
  std::map<int, Named> before, after;
  run_as_threads(2, stages(2), [&] {
    TinyConvNet net;
    copy_values(*prototype, *net);
    DistributedModel<TinyConvNet> model(net);
    const auto first = to_map(model->state_dict());
    auto train = step([&](torch::Tensor x, torch::Tensor y) {
      auto loss = torch::nll_loss(model(x), y);
      model->backward(loss);
      return loss;
    });
    DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(),
                                                      torch::optim::SGDOptions(0.1));
    train(batch[0], batch[1]);
    optimizer.step();
    const auto state = model->state_dict();
    TinyConvNet plain;
    auto parameters = plain->named_parameters();
    auto buffers = plain->named_buffers();
    for (const auto& item : state) {
      auto* place = parameters.find(item.key());
      (place != nullptr ? *place : buffers[item.key()]).detach().copy_(item.value());
    }
    expect_equal(state_of(*plain), to_map(state), "plain module");
    // They are copies: later steps do not change them.
    const auto kept = state["fc1.bias"].clone();
    train(batch[0], batch[1]);
    optimizer.step();
    expect_equal(state["fc1.bias"], kept, "a copy");
    const std::lock_guard<std::mutex> lock(mutex_);
    before[rank()] = first;
    after[rank()] = to_map(state);
  });
  expect_equal(before[0], initial, "state before partitioning");
  expect_equal(before[1], initial, "state before partitioning");
  expect_equal(after[0], after[1], "state");
  EXPECT_EQ(after[0].size(), initial.size());
  EXPECT_FALSE(torch::equal(after[0]["fc1.bias"], initial.at("fc1.bias")));
  EXPECT_EQ(after[0]["norm2.num_batches_tracked"].item<int64_t>(), 2);
}

/// Ranks may construct other values: those of world rank 0 count, and so they do before.
TEST_F(StateDict, StateDictBeforeTheFirstStepHasTheValuesOfTraining) {
  for (const bool delayed : {false, true}) {
    for (const int count : {1, 2}) {
      SCOPED_TRACE(c10::str(count, delayed ? " stages, delayed" : " stages"));
      std::vector<Mlp> nets;
      for (int r = 0; r < 2 * count; ++r) nets.push_back(make_mlp(20 + r));
      const Named first = state_of(*nets[0]);
      run_as_threads(2 * count, stages(count).ddp(true), [&] {
        Mlp net{nullptr};
        {
          const std::lock_guard<std::mutex> lock(mutex_);  // the ranks share a generator
          torch::manual_seed(20 + rank());
          const auto scope = model_creation(ModelCreationOptions().delayed(delayed).eager_bytes(0));
          net = Mlp();
        }
        DistributedModel<Mlp> model(net);
        expect_equal(to_map(model->state_dict()), first, "before the first step");
        const Named on_one = to_map(model->state_dict(/*gather_to_rank0=*/true));
        expect_equal(on_one, mp_rank() == 0 ? first : Named(), "on one rank");
        step([&](torch::Tensor x) { return model(x); })(x_);
        expect_equal(to_map(model->state_dict()), first, "after it");
      });
    }
  }
}

TEST_F(StateDict, LocalStateDictsTogetherAreTheStateDict) {
  Named together, whole;
  run_as_threads(2, stages(2), [&] {
    DistributedModel<Mlp> model(make_net());
    auto train = make_training(model);
    train(x_, y_);
    const auto state = to_map(model->state_dict());
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& item : model->local_state_dict()) together[item.key()] = item.value();
    whole = state;
  });
  expect_equal(together, whole, "state");
}

TEST_F(StateDict, StateDictOnTheFirstRankOnly) {
  for (const bool partitioned : {false, true}) {
    run_as_threads(4, stages(2).ddp(true), [&] {
      DistributedModel<Mlp> model(make_net());
      if (partitioned) make_training(model)(x_, y_);
      const auto state = to_map(model->state_dict(/*gather_to_rank0=*/true));
      if (mp_rank() == 0) {
        expect_equal(state, state_of(*prototype_), "state");
      } else {
        EXPECT_TRUE(state.empty());
      }
    });
  }
}

/// Two layers of one size behind a weight that has two names, all on the second stage.
struct TwiceNamed : torch::nn::Module {
  TwiceNamed() {
    const auto options = torch::nn::LinearOptions(4, 4).bias(false);
    first = register_module("first", torch::nn::Linear(options));
    one = register_module("one", torch::nn::Linear(options));
    two = register_module("two", torch::nn::Linear(options));
    again = register_parameter("again", one->weight);
    set_partition(*first, 0);
    set_partition(*one, 1);
    set_partition(*two, 1);
  }
  torch::Tensor forward(torch::Tensor x) { return two(torch::linear(one(first(x)), again)); }
  torch::nn::Linear first{nullptr}, one{nullptr}, two{nullptr};
  torch::Tensor again;
};

TEST_F(StateDict, StateDictOnTheFirstRankSendsATiedParameterOnce) {
  run_as_threads(2, stages(2), [&] {
    DistributedModel<std::shared_ptr<TwiceNamed>> model(std::make_shared<TwiceNamed>());
    step([&](torch::Tensor x) { return model(x); })(torch::ones({2, 4}));
    const auto all = to_map(model->state_dict());
    const auto first = to_map(model->state_dict(/*gather_to_rank0=*/true));
    if (rank() == 0) expect_equal(first, all, "state");
  });
}

/// A rank gets back its own saved state, in a run that is partitioned alike.
TEST_F(StateDict, LocalStateDictsAreLoadedIntoTheSamePartition) {
  const auto config = stages(2).skip_tracing(true);
  torch::manual_seed(99);
  Mlp wanted(4);
  std::vector<torch::OrderedDict<std::string, torch::Tensor>> saved(2);
  run_as_threads(2, config, [&] {
    Mlp net = make_net();
    copy_values(*wanted, *net);
    DistributedModel<Mlp> model(net);
    make_training(model)(x_, y_);
    saved[rank()] = model->local_state_dict();
  });
  run_as_threads(2, config, [&] {
    DistributedModel<Mlp> model(make_net());
    auto train = make_training(model);
    model->load_state_dict(saved[rank()], /*strict=*/true, /*same_partition_load=*/true);
    expect_equal(train(x_, y_).outputs(), plain_losses(wanted), "loaded before the first step");
    for (auto& item : saved[rank()]) item.value().zero_();
    model->load_state_dict(saved[rank()], /*strict=*/true, /*same_partition_load=*/true);
    for (const auto& [name, tensor] : to_map(model->state_dict())) {
      EXPECT_FALSE(tensor.any().item<bool>()) << name;
    }
    const auto others = error_of<CheckpointError>(
        [&] { model->load_state_dict(saved[1 - rank()], true, /*same_partition_load=*/true); });
    expect_has(others, {"the local state dictionary does not fit what this rank owns:", "missing",
                        "unexpected", "With same_partition_load, give each rank what its"});
  });
}

TEST_F(StateDict, LoadStateDictBeforeAndAfterPartitioning) {
  torch::manual_seed(99);
  Mlp wanted(4);
  torch::OrderedDict<std::string, torch::Tensor> state;
  for (const auto& [name, tensor] : state_of(*wanted)) state.insert(name, tensor);
  run_as_threads(2, stages(2), [&] {
    DistributedModel<Mlp> model(make_net());
    auto train = make_training(model);
    model->load_state_dict(state);
    expect_equal(train(x_, y_).outputs(), plain_losses(wanted), "loaded before the first step");
  });
  run_as_threads(2, stages(2), [&] {
    DistributedModel<Mlp> model(make_net());
    auto train = make_training(model);
    expect_equal(train(x_, y_).outputs(), plain_losses(prototype_), "not loaded");
    model->load_state_dict(state);
    expect_equal(train(x_, y_).outputs(), plain_losses(wanted), "loaded after the first step");
    expect_equal(to_map(model->state_dict()), to_map(state), "state");
  });
}

TEST_F(StateDict, LoadStateDictListsAllThatDoesNotFitAndChangesNothing) {
  torch::OrderedDict<std::string, torch::Tensor> state;
  for (const auto& [name, tensor] : state_of(*prototype_)) {
    if (name == "hidden1.bias") continue;
    state.insert(name, tensor + 1);
  }
  state.insert("surplus.weight", torch::ones({1}));
  torch::OrderedDict<std::string, torch::Tensor> wrong = state;
  wrong["in.weight"] = torch::ones({7, 5});
  wrong["head.bias"] = torch::ones({1}, torch::kDouble);
  run_as_threads(2, stages(2), [&] {
    DistributedModel<Mlp> model(make_net());
    auto train = make_training(model);
    for (const bool partitioned : {false, true}) {
      if (partitioned) train(x_, y_);
      const auto text = error_of<CheckpointError>([&] { model->load_state_dict(wrong); });
      expect_has(text,
                 {"the state dictionary does not fit the model:", "hidden1.bias", "surplus.weight",
                  "in.weight", "[6, 6]", "[7, 5]", "head.bias", "missing", "unexpected",
                  "Nothing was loaded. Pass strict = false to accept missing and unexpected "
                  "names"});
      // Other shapes and dtypes are no matter of strictness.
      const auto loose = error_of<CheckpointError>([&] { model->load_state_dict(wrong, false); });
      expect_has(loose, {"in.weight", "head.bias"});
      EXPECT_EQ(loose.find("surplus.weight"), std::string::npos) << loose;
      expect_equal(to_map(model->state_dict()), state_of(*prototype_), "after an error");
    }
    model->load_state_dict(state, false);
    const auto got = to_map(model->state_dict());
    expect_equal(got.at("in.bias"), prototype_->in->bias.detach() + 1, "loaded loosely");
    expect_equal(got.at("hidden1.bias"), prototype_->hidden[1]->bias.detach(), "missing");
  });
}

/// Complex numbers as a parameter and as a buffer, which cross from stage to stage.
struct RotatedImpl : torch::nn::Module {
  RotatedImpl() {
    in = register_module("in", torch::nn::Linear(kWidth, kWidth));
    rotation = register_parameter("rotation", torch::randn({kWidth}, torch::kComplexFloat));
    frequencies = register_buffer(
        "frequencies", torch::polar(torch::ones({kWidth}), torch::arange(kWidth, torch::kFloat)));
    out = register_module("out", torch::nn::Linear(kWidth, kWidth));
  }
  torch::Tensor loss(torch::Tensor x, torch::Tensor y) {
    x = torch::tanh(in(x));
    const auto z = torch::complex(x, x * 0.5) * rotation * frequencies;
    return (out(torch::real(z) + torch::imag(z)) - y).pow(2).mean();
  }
  static Tensors batch(int64_t size) {
    return {torch::randn({size, kWidth}), torch::randn({size, kWidth})};
  }
  static constexpr int64_t kWidth = 6;
  torch::nn::Linear in{nullptr}, out{nullptr};
  torch::Tensor rotation, frequencies;
};
TORCH_MODULE(Rotated);

TEST(ComplexNumbers, GoOnFromACheckpoint) {
  parity::check_resumed<Rotated, torch::optim::Adam>(torch::optim::AdamOptions(1e-2));
}

}  // namespace
}  // namespace smp::testing
