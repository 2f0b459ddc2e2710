// SPDX-License-Identifier: Apache-2.0
// Models that are constructed without memory, against the same models constructed plainly.

#include <functional>
#include <mutex>
#include <string>

#include "graph/allocations.h"
#include "tests/smp/models.h"
#include "tests/smp/oracle.h"
#include "tests/temp_folder.h"

namespace smp::testing {
namespace {

constexpr uint64_t kInitial = 5;

/// Rank threads share the default generator and the default type.
std::mutex& construction() {
  static std::mutex mutex;
  return mutex;
}

ModelCreationOptions everything() { return ModelCreationOptions().eager_bytes(0); }

template <class Net>
Net make_plain(const std::function<Net()>& make, uint64_t seed = kInitial) {
  torch::manual_seed(seed);
  return make();
}

/// Constructs on this rank; `after` gets the generator's next numbers.
template <class Net>
Net make_delayed(const std::function<Net()>& make,
                 const ModelCreationOptions& options = everything(), uint64_t seed = kInitial,
                 torch::Tensor* after = nullptr) {
  const std::lock_guard<std::mutex> lock(construction());
  torch::manual_seed(seed);
  Net net{nullptr};
  {
    const auto scope = model_creation(options);
    net = make();
  }
  if (after != nullptr) *after = torch::randn({3});
  return net;
}

size_t bytes_of(const Tensors& tensors) {
  size_t bytes = 0;
  for (const auto& tensor : tensors) bytes += tensor.storage().nbytes();
  return bytes;
}

/// Compares tensors that this rank holds as soon as they have been made with a plain module's.
template <class Net>
void compare_when_made(DistributedModel<Net>& model, const Named& expected) {
  model->register_post_partition_hook([&model, expected] {
    Tensors local;
    for (const auto& dict : {model->local_named_parameters(), model->local_named_buffers()}) {
      for (const auto& item : dict) {
        expect_equal(item.value().detach(), expected.at(item.key()), item.key());
      }
    }
    const Tensors own = model->local_parameters();
    EXPECT_EQ(bytes_of(model->parameters()), bytes_of(own));
    for (const auto& parameter : own) EXPECT_GT(parameter.storage().nbytes(), 0u);
  });
}

/// Buffers of a plain module that plays several replicas, of which each updates its own.
class ReplicaBuffers {
 public:
  ReplicaBuffers(const torch::nn::Module& module, int replicas)
      : buffers_(module.buffers()), copies_(replicas, clones()) {}

  /// The module goes on as `replica`.
  void use(int replica) {
    const torch::NoGradGuard no_grad;
    copies_[current_] = clones();
    current_ = replica;
    for (size_t i = 0; i < buffers_.size(); ++i) buffers_[i].copy_(copies_[replica][i]);
  }

 private:
  Tensors clones() const {
    Tensors result;
    for (const auto& buffer : buffers_) result.push_back(buffer.clone());
    return result;
  }

  Tensors buffers_;
  std::vector<Tensors> copies_;
  int current_ = 0;
};

class ModelCreationTest : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override { torch::set_num_threads(1); }

  /// Trains a model that was constructed without memory and a plain one, and compares.
  template <class Net>
  void check(const std::function<Net()>& make, int replicas = 1) {
    constexpr int kMicrobatches = 2, kSteps = 3;
    const int count = GetParam(), parts = replicas * kMicrobatches;
    Net plain = make_plain(make);
    const auto drawn = torch::randn({3});
    const Named initial = state_of(*plain);
    std::vector<Tensors> batches;
    for (int i = 0; i < kSteps; ++i) batches.push_back(Net::ContainedType::batch(2 * parts));
    const Tensors parameters = unique_parameters(*plain);
    const auto options = torch::optim::SGDOptions(0.1).momentum(0.9);
    torch::optim::SGD plain_optimizer(parameters, options);
    ReplicaBuffers buffers(*plain, replicas);
    std::vector<Tensors> expected;
    for (int i = 0; i < kSteps; ++i) {
      plain_optimizer.zero_grad();
      expected.push_back(plain_backward(parameters, replicas, kMicrobatches, [&](int m) {
        buffers.use(m / kMicrobatches);
        const KeyedRandom random(kSeed, "step 0", i, m);
        return plain->loss(part(batches[i][0], parts, m), part(batches[i][1], parts, m));
      }));
      plain_optimizer.step();
    }
    buffers.use(0);
    const Named trained = state_of(*plain);
    run_as_threads(count * replicas, stages(count).ddp(replicas > 1), [&] {
      torch::Tensor after;
      Net net = make_delayed(make, everything(), kInitial, &after);
      expect_equal(after, drawn, "drawn after construction");
      EXPECT_EQ(bytes_of(net->parameters()) + bytes_of(net->buffers()), 0u);
      torch::optim::SGD optimizer(unique_parameters(*net), options);
      DistributedModel<Net> model(net);
      compare_when_made(model, initial);
      auto train = step([&](torch::Tensor x, torch::Tensor y) {
        auto loss = net->loss(x, y);
        model->backward(loss);
        return loss;
      });
      for (int i = 0; i < kSteps; ++i) {
        optimizer.zero_grad();
        const auto losses = train(part(batches[i][0], replicas, dp_rank()),
                                  part(batches[i][1], replicas, dp_rank()))
                                .outputs();
        const auto first = expected[i].begin() + dp_rank() * kMicrobatches;
        expect_equal(losses, Tensors(first, first + kMicrobatches), "loss");
        optimizer.step();
      }
      const auto state = to_map(model->state_dict());
      for (const auto& item : model->named_parameters()) {
        expect_equal(state.at(item.key()), trained.at(item.key()), item.key());
      }
      if (dp_rank() == 0) expect_equal(state, trained, "trained");
    });
  }
};

TEST_P(ModelCreationTest, TiedGpt) {
  check<TinyGpt>([] { return TinyGpt(true); });
}

TEST_P(ModelCreationTest, UntiedGpt) {
  check<TinyGpt>([] { return TinyGpt(false); });
}

TEST_P(ModelCreationTest, ConvolutionsAndRunningStatistics) {
  check<TinyConvNet>([] { return TinyConvNet(); });
}

TEST_P(ModelCreationTest, Replicas) {
  check<TinyConvNet>([] { return TinyConvNet(); }, 2);
}

TEST_P(ModelCreationTest, FastModeDoesNotDependOnTheNumberOfStages) {
  std::mutex mutex;
  std::vector<Named> states;
  const auto x = torch::randn({4, MlpImpl::kWidth}), y = torch::randn({4, 1});
  const std::function<Mlp()> make = [] { return Mlp(4); };
  for (int count : {1, GetParam()}) {
    run_as_threads(count, stages(count), [&] {
      DistributedModel<Mlp> model(make_delayed(make, everything().fast(true)));
      const auto hook = [&] {
        const std::lock_guard<std::mutex> lock(mutex);
        if (pp_rank() == 0) states.emplace_back();
      };
      model->register_post_partition_hook(hook);
      auto train = make_training(model);
      train(x, y);
      const auto state = to_map(model->state_dict());
      const std::lock_guard<std::mutex> lock(mutex);
      if (pp_rank() == 0) states.back() = state;
    });
  }
  ASSERT_EQ(states.size(), 2u);
  expect_equal(states[1], states[0], "parameter");
  EXPECT_FALSE(torch::equal(states[0].at("in.weight"), make_plain(make)->in->weight));
}

TEST_P(ModelCreationTest, RankZeroCountsWhereGeneratorsDiffer) {
  const std::function<Mlp()> make = [] { return Mlp(4); };
  const Named initial = state_of(*make_plain(make));
  const auto x = torch::randn({4, MlpImpl::kWidth}), y = torch::randn({4, 1});
  run_as_threads(GetParam(), stages(GetParam()), [&] {
    DistributedModel<Mlp> model(make_delayed(make, everything(), kInitial + rank()));
    compare_when_made(model, initial);
    make_training(model)(x, y);
  });
}

TEST_P(ModelCreationTest, BesideAModelWithData) {
  const std::function<Mlp()> make = [] { return Mlp(3); };
  const Named initial = state_of(*make_plain(make));
  const auto x = torch::randn({4, MlpImpl::kWidth}), y = torch::randn({4, 1});
  run_as_threads(GetParam(), stages(GetParam()), [&] {
    Mlp other{nullptr};
    {
      const std::lock_guard<std::mutex> lock(construction());
      other = make_plain(make);
    }
    DistributedModel<Mlp> plain(other, ModelOptions().name("plain"));
    DistributedModel<Mlp> delayed(make_delayed(make), ModelOptions().name("delayed"));
    compare_when_made(plain, initial);
    compare_when_made(delayed, initial);
    auto train = step([&](torch::Tensor x, torch::Tensor y) {
      const auto loss = torch::mse_loss(plain(x), y) + torch::mse_loss(delayed(x), y);
      delayed->backward(loss);
      return loss;
    });
    train(x, y);
  });
}

TEST_P(ModelCreationTest, HalfPrecision) {
  const std::function<Mlp()> make = [] { return Mlp(4); };
  torch::set_default_dtype(caffe2::TypeMeta::Make<at::BFloat16>());
  const Named initial = state_of(*make_plain(make));
  torch::set_default_dtype(caffe2::TypeMeta::Make<float>());
  ASSERT_EQ(initial.at("head.weight").scalar_type(), torch::kBFloat16);
  const auto x = torch::randn({4, MlpImpl::kWidth}).to(torch::kBFloat16);
  const auto y = torch::randn({4, 1}).to(torch::kBFloat16);
  run_as_threads(GetParam(), stages(GetParam()), [&] {
    DistributedModel<Mlp> model(make_delayed(make, everything().dtype(torch::kBFloat16)));
    compare_when_made(model, initial);
    make_training(model)(x, y);
  });
  EXPECT_EQ(torch::empty({1}).scalar_type(), torch::kFloat);
}

/// Layers of one size; in front the largest parameter, which is made by way of another one.
struct WideImpl : torch::nn::Module {
  WideImpl() {
    table = register_parameter("table", torch::randn({kRows, kWidth}) * 0.02);
    for (int i = 0; i < kLayers; ++i) {
      layers.push_back(
          register_module("layer" + std::to_string(i), torch::nn::Linear(kWidth, kWidth)));
    }
  }

  torch::Tensor forward(torch::Tensor x) {
    x = x.matmul(table);
    for (auto& layer : layers) x = torch::tanh(layer(x));
    return x.mean(1, true);
  }

  static constexpr int64_t kRows = 768, kWidth = 256, kLayers = 24;
  static constexpr int kRandomOperators = 1 + 2 * kLayers;
  torch::Tensor table;
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Wide);

TEST_P(ModelCreationTest, PeakIsTheOwnParametersAndTheLargestOne) {
  const std::function<Wide()> make = [] { return Wide(); };
  int64_t whole = 0, largest = 0;
  {
    const graph::Allocations allocations;
    const Wide plain = make_plain(make);
    for (const auto& parameter : plain->parameters()) {
      whole += static_cast<int64_t>(parameter.nbytes());
      largest = std::max(largest, static_cast<int64_t>(parameter.nbytes()));
    }
    EXPECT_GE(allocations.peak(), whole) << "the count misses something";
  }
  // The generator's states, and the library's memory besides parameters.
  const auto state =
      static_cast<int64_t>(at::detail::getDefaultCPUGenerator().get_state().nbytes());
  const int64_t small = WideImpl::kRandomOperators * state + (64 << 10);
  ASSERT_LT(small, largest);
  const auto x = torch::randn({4, WideImpl::kRows}), y = torch::randn({4, 1});
  run_as_threads(GetParam(), stages(GetParam()), [&] {
    const graph::Allocations allocations;
    DistributedModel<Wide> model(make_delayed(make));
    EXPECT_LE(allocations.peak(), largest + small) << "at construction";
    bool made = false;
    model->register_post_partition_hook([&] {
      made = true;
      const auto own = static_cast<int64_t>(bytes_of(model->local_parameters()));
      EXPECT_LE(own, whole / GetParam() + largest) << "a fair share";
      EXPECT_GE(allocations.peak(), own);
      EXPECT_LE(allocations.peak(), own + largest + small) << "of which own " << own;
    });
    make_training(model)(x, y);
    EXPECT_TRUE(made);
  });
}

TEST_P(ModelCreationTest, ValuesLoadedBeforeTheFirstStepCount) {
  const std::function<Mlp()> make = [] { return Mlp(4); };
  const Mlp other = make_plain(make, kInitial + 1);
  const Named loaded = state_of(*other);
  const auto x = torch::randn({4, MlpImpl::kWidth}), y = torch::randn({4, 1});
  const TempFolder folder;
  run_as_threads(1, stages(1), [&] {
    const DistributedModel<Mlp> model(other);
    save(folder.file("run"), model);
  });
  for (bool from_file : {true, false}) {
    run_as_threads(GetParam(), stages(GetParam()), [&] {
      DistributedModel<Mlp> model(make_delayed(make));
      if (from_file) {
        load(folder.file("run"), model);
      } else {
        ModelCore::TensorDict state;
        for (const auto& [name, tensor] : loaded) state.insert(name, tensor);
        model->load_state_dict(state);
      }
      EXPECT_EQ(bytes_of(model->parameters()), 0u);
      compare_when_made(model, loaded);
      make_training(model)(x, y);
    });
  }
}

TEST_P(ModelCreationTest, StateBeforeTheFirstStep) {
  const std::function<Mlp()> make = [] { return Mlp(4); };
  const Named initial = state_of(*make_plain(make));
  run_as_threads(GetParam(), stages(GetParam()), [&] {
    DistributedModel<Mlp> model(make_delayed(make));
    barrier();  // ranks that are threads share the generator that the others are seeding
    expect_equal(to_map(model->state_dict()), initial, "copy");
    EXPECT_EQ(bytes_of(model->parameters()), 0u);
    model->cpu();
    expect_equal(state_of(*model.get_module()), initial, "gathered");
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, ModelCreationTest, ::testing::Values(1, 2, 3, 4));

TEST(ModelCreationScope, FollowsTheConfiguration) {
  for (bool delayed : {true, false}) {
    run_as_threads(1, stages(1).delayed_parameter_initialization(delayed), [&] {
      const auto scope = model_creation(ModelCreationOptions().eager_bytes(0));
      EXPECT_EQ(torch::ones({4}).storage().nbytes() == 0, delayed);
    });
  }
}

TEST(ModelCreationScope, Nests) {
  const auto scope = model_creation(everything().delayed(true));
  EXPECT_EQ(torch::ones({4}).storage().nbytes(), 0u);
  {
    const auto at_once = delayed_parameter_initialization(false);
    EXPECT_EQ(torch::ones({4}).storage().nbytes(), 16u);
    const auto type = model_creation(ModelCreationOptions().delayed(false).dtype(torch::kHalf));
    EXPECT_EQ(torch::ones({4}).scalar_type(), torch::kHalf);
  }
  EXPECT_EQ(torch::ones({4}).storage().nbytes(), 0u);
  EXPECT_EQ(torch::ones({4}).scalar_type(), torch::kFloat);
  // Small tensors are made at once by default.
  const auto usual = delayed_parameter_initialization();
  EXPECT_EQ(torch::ones({4}).storage().nbytes(), 16u);
  EXPECT_EQ(torch::ones({100, 100}).storage().nbytes(), 0u);
}

TEST(ModelCreationScope, PartitionScopesCountInsideAndAround) {
  for (bool delayed : {true, false}) {
    torch::nn::Linear inside{nullptr}, around{nullptr}, neither{nullptr};
    {
      const auto creation = model_creation(everything().delayed(delayed));
      const auto scope = partition(1);
      inside = torch::nn::Linear(3, 4);
    }
    {
      const auto scope = partition(2);
      const auto creation = model_creation(everything().delayed(delayed));
      around = torch::nn::Linear(3, 4);
    }
    {
      const auto creation = model_creation(everything().delayed(delayed));
      neither = torch::nn::Linear(3, 4);
    }
    for (const auto& weight : {inside->weight, around->weight, neither->weight}) {
      EXPECT_EQ(weight.storage().nbytes() == 0, delayed);
    }
    EXPECT_EQ(pinned_partition(inside->weight), 1) << delayed;
    EXPECT_EQ(pinned_partition(around->bias), 2) << delayed;
    EXPECT_EQ(pinned_partition(neither->weight), -1) << delayed;
  }
}

TEST(ModelCreationScope, MaterializeNeedsNoStep) {
  const std::function<Mlp()> make = [] { return Mlp(4); };
  const Named initial = state_of(*make_plain(make));
  const Mlp net = make_delayed(make, everything().delayed(true));
  materialize(*net);
  expect_equal(state_of(*net), initial, "parameter");
}

TEST(ModelCreationErrors, Texts) {
  const std::function<Mlp()> make = [] { return Mlp(4); };
  expect_has(error_of<UsageError>([] {
               const auto scope = model_creation(ModelCreationOptions().dtype(torch::kInt));
             }),
             {"dtype must be a floating point type such as torch::kBFloat16, got Int"});
  expect_has(error_of_run<UsageError>(1, stages(1),
                                      [&] {
                                        const DistributedModel<Mlp> model(make_delayed(make));
                                        save("never", model);
                                      }),
             {"smp::save was called before the first step", "Save after a step"});
  expect_has(error_of_run<c10::Error>(1, stages(1),
                                      [&] { make_delayed(make)->head->weight.detach().zero_(); }),
             {"made under delayed parameter initialization was read or written",
              "Initialise parameters in the scope of smp::model_creation"});
  const auto x = torch::randn({4, MlpImpl::kWidth}), y = torch::randn({4, 1});
  expect_has(
      error_of_run<UsageError>(1, stages(1),
                               [&] {
                                 DistributedModel<Mlp> model(make_delayed(make));
                                 ModelCore::TensorDict state;
                                 for (const auto& item : make_plain(make)->named_parameters()) {
                                   state.insert(item.key(), item.value().detach());
                                 }
                                 model->load_state_dict(state);
                                 state["head.weight"].zero_();
                                 make_training(model)(x, y);
                               }),
      {"load_state_dict: a tensor that was given for a delayed parameter has changed",
       "Give a copy"});
  expect_has(
      error_of_run<UsageError>(1, stages(1),
                               [&] {
                                 const auto options = everything().fast(true);
                                 const DistributedModel<Mlp> model(make_delayed(make, options));
                                 model->state_dict();
                               }),
      {"needed before the first step", "Leave out fast(true)"});
  expect_has(error_of_run<UsageError>(2, stages(2),
                                      [&] {
                                        const std::function<Mlp()> other = [] {
                                          Mlp net(4);
                                          const torch::NoGradGuard no_grad;
                                          net->head->weight.mul_(1.0 + rank());
                                          return net;
                                        };
                                        DistributedModel<Mlp> model(make_delayed(other));
                                        make_training(model)(x, y);
                                      }),
             {"constructed in different ways", "rank 0 has aten::mul_", "rank 1 has aten::mul_",
              "Construct the same model on every rank"});
  const std::vector<Mlp> nets = {make_delayed(make, everything().delayed(true)),
                                 make_delayed(make, everything().delayed(true))};
  expect_has(error_of_run<UsageError>(2, stages(2),
                                      [&] {
                                        DistributedModel<Mlp> model(nets[rank()]);
                                        make_training(model)(x, y);
                                      }),
             {"one thread constructed models of several ranks under delayed parameter "
              "initialization",
              "Construct the model of a rank on its own thread, after smp::init"});
  expect_has(error_of_run<UsageError>(2, stages(2),
                                      [&] {
                                        const auto options = everything().delayed(rank() == 0);
                                        DistributedModel<Mlp> model(make_delayed(make, options));
                                        make_training(model)(x, y);
                                      }),
             {"the model differs between ranks", "(delayed)"});
}

TEST(ModelCreationErrors, ValuesThatChangeAfterTheyWereGiven) {
  const std::function<Mlp()> make = [] { return Mlp(4); };
  const auto x = torch::randn({4, MlpImpl::kWidth}), y = torch::randn({4, 1});
  ModelCore::TensorDict state;
  for (const auto& [name, tensor] : state_of(*make_plain(make))) state.insert(name, tensor);
  expect_has(error_of_run<UsageError>(1, stages(1),
                                      [&] {
                                        DistributedModel<Mlp> model(make_delayed(make));
                                        model->load_state_dict(state);
                                        for (auto& item : state) item.value().zero_();
                                        make_training(model)(x, y);
                                      }),
             {"load_state_dict: a tensor that was given for a delayed parameter has changed before "
              "the first step",
              "Give a copy"});
}

TEST(ModelCreationErrors, DataOfOtherRanksCannotBeRead) {
  const auto x = torch::randn({4, MlpImpl::kWidth}), y = torch::randn({4, 1});
  run_as_threads(2, stages(2), [&] {
    DistributedModel<Mlp> model{Mlp(4)};
    make_training(model)(x, y);
    const auto local = to_map(model->local_named_parameters());
    for (const auto& item : model->named_parameters()) {
      if (local.count(item.key()) > 0) continue;
      expect_has(error_of<UsageError>([&] { item.value().sum().item<float>(); }),
                 {"which pp rank ", " owns: this rank does not have these numbers",
                  "model->state_dict()"});
    }
  });
}

}  // namespace
}  // namespace smp::testing
