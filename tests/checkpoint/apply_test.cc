// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/apply.h"

#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>

#include "checkpoint/reader.h"
#include "optim/state_dict.h"
#include "tests/checkpoint/test_util.h"
#include "tests/optim/set_state.h"

namespace smp::checkpoint {
namespace {

using ::testing::HasSubstr;

/// `tied`: the output layer reads the embedding's weight. Buffers: the norm's.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(bool tied = true, int64_t hidden = 3) {
    embedding = register_module("embedding", torch::nn::Linear(hidden, 4));
    norm = register_module("norm", torch::nn::BatchNorm1d(hidden));
    output = register_parameter(
        "output", tied ? embedding->weight : torch::full({4, hidden}, 0.5).requires_grad_());
  }

  torch::Tensor forward(const torch::Tensor& x) {
    return torch::linear(norm(x), output) + embedding(x);
  }

  torch::nn::Linear embedding{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::Tensor output;
};
TORCH_MODULE(Net);

using Optimizer = torch::optim::Adam;

void train(Net& net, Optimizer& optimizer, int64_t seed) {
  torch::manual_seed(seed);
  net->zero_grad();
  net->forward(torch::randn({5, 3})).square().sum().backward();
  optimizer.step();
}

/// Module::to would convert integers, too.
void convert(Net& net, torch::Dtype dtype) {
  for (const auto& item : state_dict(*net)) {
    torch::Tensor tensor = item.value();
    if (tensor.is_floating_point()) tensor.set_data(tensor.detach().to(dtype));
  }
}

void expect_equal(const torch::nn::Module& a, const torch::nn::Module& b) {
  const StateDict left = state_dict(a);
  const StateDict right = state_dict(b);
  ASSERT_EQ(left.keys(), right.keys());
  for (const auto& item : left) {
    EXPECT_TRUE(torch::equal(item.value(), right[item.key()])) << item.key();
  }
}

class ApplyTest : public FolderTest {
 protected:
  void SetUp() override {
    at::set_num_threads(1);
    torch::manual_seed(3);
  }

  void save(const Shard& shard) {
    const Writer writer(path("c"));
    writer.begin();
    writer.commit({writer.write_shard(0, 1, shard)}, {});
  }
  void save(const torch::nn::Module& module) {
    Shard shard;
    shard.model = named_tensors(state_dict(module));
    save(shard);
  }

  /// The error of loading into `net`, which must stay as it was.
  std::string load_error(Net& net, bool strict = true, bool converts = false) {
    std::vector<torch::Tensor> before;
    for (const auto& item : state_dict(*net)) {
      before.push_back(item.value().clone());
    }
    const std::string message = checkpoint_error([&] {
      load_into_module(*net, path("c"), {strict, converts});
    });
    const std::vector<torch::Tensor> after = state_dict(*net).values();
    for (size_t i = 0; i < before.size(); ++i) {
      EXPECT_TRUE(torch::equal(before[i], after[i])) << i;
    }
    return message;
  }
};

TEST_F(ApplyTest, StateDictNamesParametersAndBuffers) {
  Net net;
  EXPECT_EQ(state_dict(*net).keys(),
            (std::vector<std::string>{"output", "embedding.weight", "embedding.bias", "norm.weight",
                                      "norm.bias", "norm.running_mean", "norm.running_var",
                                      "norm.num_batches_tracked"}));
  const std::vector<NamedTensor> tensors = named_tensors(state_dict(*net));
  ASSERT_EQ(tensors.size(), 7u);
  EXPECT_EQ(tensors[0].name, "output");
  EXPECT_EQ(tensors[0].aliases, (std::vector<std::string>{"embedding.weight"}));
}

TEST_F(ApplyTest, LoadsParametersAndBuffersIntoTheSameTensors) {
  Net net;
  Optimizer optimizer(net->parameters());
  train(net, optimizer, 1);
  save(*net);
  Net copy;
  const torch::Tensor weight = copy->embedding->weight;
  load_into_module(*copy, path("c"));
  expect_equal(*copy, *net);
  EXPECT_TRUE(weight.is_same(copy->output));
  EXPECT_TRUE(weight.requires_grad());
  EXPECT_EQ(copy->norm->num_batches_tracked.item<int64_t>(), 1);
}

TEST_F(ApplyTest, RunContinuesBitForBitFromACheckpoint) {
  Net net;
  Optimizer optimizer(net->embedding->parameters(), torch::optim::AdamOptions(0.01));
  for (int64_t i = 0; i < 3; ++i) {
    train(net, optimizer, i);
  }
  const OptimizerState state =
      optim::get_state(optimizer, optim::parameter_names(net->named_parameters()));
  Shard shard;
  shard.model = named_tensors(state_dict(*net));
  shard.optimizer = optim::to_json(state);
  shard.optimizer_tensors = optim::tensors_of(state);
  save(shard);

  Net resumed;
  Optimizer fresh(resumed->embedding->parameters(), torch::optim::AdamOptions(9));
  load_into_module(*resumed, path("c"));
  Reader reader(path("c"));
  std::map<std::string, at::Tensor> tensors;
  for (const auto& [name, entry] : reader.index().optimizer_tensors) {
    tensors[name] = reader.read_optimizer(name);
  }
  optim::set_state(fresh, optim::from_parts(reader.index().optimizer, tensors),
                   optim::parameter_names(resumed->named_parameters()));
  for (int64_t i = 3; i < 6; ++i) {
    train(net, optimizer, i);
    train(resumed, fresh, i);
  }
  expect_equal(*resumed, *net);
}

TEST_F(ApplyTest, TiedTensorIsFoundUnderAnyOfItsNames) {
  Net net;
  Shard shard;
  shard.model = named_tensors(state_dict(*net));
  for (const char* name : {"output", "embedding.weight"}) {
    shard.model[0].name = name;
    shard.model[0].aliases.clear();
    save(shard);
    Net copy;
    load_into_module(*copy, path("c"));
    expect_equal(*copy, *net);
  }
}

TEST_F(ApplyTest, UntiedModelLoadsATiedCheckpoint) {
  Net net;
  save(*net);
  Net untied(/*tied=*/false);
  load_into_module(*untied, path("c"));
  expect_equal(*untied, *net);
}

TEST_F(ApplyTest, TiedModelRefusesTwoDifferentTensors) {
  Net untied(/*tied=*/false);
  save(*untied);
  Net net;
  EXPECT_THAT(load_error(net), HasSubstr("\n  output: tied to \"embedding.weight\" in the model, "
                                         "but the checkpoint stores different contents"));
}

TEST_F(ApplyTest, EveryMismatchIsInOneError) {
  Net net(/*tied=*/false);
  Shard shard;
  shard.model = {{"embedding.weight", torch::zeros({4, 3}, torch::kDouble), {}},
                 {"norm.bias", torch::zeros({5}), {}},
                 {"norm.extra", torch::zeros({}, torch::kLong), {"norm.other"}},
                 {"norm.num_batches_tracked", torch::zeros({}, torch::kLong), {}},
                 {"norm.running_mean", torch::zeros({3}), {}},
                 {"norm.running_var", torch::zeros({3}), {}},
                 {"output", torch::zeros({4, 3}), {}}};
  save(shard);
  EXPECT_EQ(load_error(net),
            "[smp] checkpoint \"" + path("c") +
                "\" does not fit the model:\n"
                "  embedding.bias: missing, expected F32 [4]\n"
                "  embedding.weight: expected F32 [4, 3], got F64 [4, 3]\n"
                "  norm.bias: expected F32 [3], got F32 [5]\n"
                "  norm.extra: not in the model, got I64 []\n"
                "  norm.weight: missing, expected F32 [3]\n"
                "Build the model as it was when the checkpoint was written, or load with "
                "convert = true to convert floating point types, or load with strict = false to "
                "skip missing and unexpected tensors.");
  const std::string lenient = load_error(net, /*strict=*/false);
  EXPECT_THAT(lenient, HasSubstr("norm.bias: expected F32 [3], got F32 [5]"));
  EXPECT_THAT(lenient, ::testing::Not(HasSubstr("norm.extra")));
  EXPECT_THAT(lenient, ::testing::Not(HasSubstr("embedding.bias")));
}

TEST_F(ApplyTest, WithoutStrictLoadsWhatIsThere) {
  Net net;
  const torch::Tensor bias = net->embedding->bias.detach().clone();
  Shard shard;
  shard.model = {{"norm.bias", torch::full({3}, 5.0), {}}, {"extra", torch::zeros({1}), {}}};
  save(shard);
  load_into_module(*net, path("c"), {/*strict=*/false, /*convert=*/false});
  EXPECT_TRUE(torch::equal(net->norm->bias, torch::full({3}, 5.0)));
  EXPECT_TRUE(torch::equal(net->embedding->bias, bias));
}

/// A checkpoint that has nothing for the model is another one's.
TEST_F(ApplyTest, WithoutStrictSomethingIsThere) {
  Net net(/*tied=*/false);
  Shard shard;
  shard.model = {{"norm.extra", torch::zeros({2}), {}}, {"bias", torch::zeros({3}), {}}};
  save(shard);
  const std::string lenient = load_error(net, /*strict=*/false);
  EXPECT_THAT(lenient, HasSubstr("\n  norm.bias: missing, expected F32 [3]\n"));
  EXPECT_THAT(lenient, HasSubstr("\n  norm.extra: not in the model, got F32 [2]\n"));
  EXPECT_THAT(lenient, HasSubstr("\nBuild the model as it was when the checkpoint was written."));
  EXPECT_EQ(lenient, load_error(net));
}

struct OneImpl : torch::nn::Module {
  OneImpl() {
    weight = register_parameter("weight", torch::zeros({2}));
    tied = register_parameter("tied", weight);
    bias = register_parameter("bias", torch::zeros({1}));
  }
  torch::Tensor weight, tied, bias;
};
TORCH_MODULE(One);

/// Two models under their names, which share a tensor, and a third one.
Shard models(bool with_bias = true) {
  Shard shard;
  shard.model = {{"a.weight", torch::full({2}, 1.0), {"a.tied", "b.b.tied"}},
                 {"b.b.bias", torch::full({1}, 3.0), {}},
                 {"c.other", torch::full({1}, 4.0), {}}};
  if (with_bias) shard.model.push_back({"a.bias", torch::full({1}, 2.0), {}});
  return shard;
}

TEST_F(ApplyTest, LoadsOneOfSeveralModels) {
  save(models());
  One one;
  load_into_module(*one, path("c"), {/*strict=*/true, /*convert=*/false, "a"});
  EXPECT_TRUE(torch::equal(one->weight, torch::full({2}, 1.0)));
  EXPECT_TRUE(torch::equal(one->bias, torch::full({1}, 2.0)));
  load_into_module(*one, path("c"), {/*strict=*/true, /*convert=*/false, "b.b"});
  EXPECT_TRUE(torch::equal(one->weight, torch::full({2}, 1.0)));
  EXPECT_TRUE(torch::equal(one->bias, torch::full({1}, 3.0)));
}

/// The average of the model, not of another.
TEST_F(ApplyTest, LoadsTheAverageOfOneOfSeveralModels) {
  Shard shard = models();
  shard.optimizer = {{"state", nlohmann::json::object()},
                     {"param_groups", nlohmann::json::array()},
                     {kAverages, {{"ema", 5}}}};
  for (const std::string name : {"a.weight", "a.bias", "b.b.bias"}) {
    shard.optimizer_tensors[name + "/" + average_field("ema")] =
        torch::full({name == "a.weight" ? 2 : 1}, name[0] == 'a' ? 7.0 : 8.0);
  }
  save(shard);
  One one;
  load_into_module(*one, path("c"), {/*strict=*/true, /*convert=*/false, "a"}, "ema");
  EXPECT_TRUE(torch::equal(one->weight, torch::full({2}, 7.0)));
  EXPECT_TRUE(torch::equal(one->bias, torch::full({1}, 7.0)));
}

TEST_F(ApplyTest, NamesTheModelsThatFit) {
  save(models());
  One one;
  const auto error = [&](const Tolerance& tolerance) {
    return checkpoint_error([&] { load_into_module(*one, path("c"), tolerance); });
  };
  EXPECT_THAT(error({}),
              HasSubstr("\nBuild the model as it was when the checkpoint was written. "
                        "The checkpoint has the model's tensors under the name of a "
                        "model before them:\n  a\n  b.b\n"
                        "Load one into a plain module with LoadOptions().model(\"a\"), "
                        "or wrap the module under its name: ModelOptions().name(\"a\")."));
  EXPECT_EQ(error({/*strict=*/false}), error({}));
  // All names of the model that is asked for count, and none of the others'.
  EXPECT_THAT(error({/*strict=*/true, /*convert=*/false, "c"}),
              HasSubstr("does not fit the model:\n  c.bias: missing, expected F32 [1]\n  c.other: "
                        "not in the model, got F32 [1]\n  c.weight: missing, expected F32 [2]\n"));
  save(models(/*with_bias=*/false));
  EXPECT_THAT(error({/*strict=*/true, /*convert=*/false, "a"}),
              HasSubstr("does not fit the model:\n  a.bias: missing, expected F32 [1]\nBuild"));
  load_into_module(*one, path("c"), {/*strict=*/false, /*convert=*/false, "a"});
  EXPECT_TRUE(torch::equal(one->weight, torch::full({2}, 1.0)));
}

TEST_F(ApplyTest, DamagedTensorIsFoundBeforeAnythingChanges) {
  Net net;
  save(*net);
  const std::string file = path("c/model-00001-of-00001.safetensors");
  std::string bytes = slurp(file);
  bytes.back() ^= 0x10;  // a byte of the last tensor that would be copied
  spill(file, bytes);
  Net other;
  EXPECT_THAT(load_error(other),
              HasSubstr("is damaged:\n  model-00001-of-00001.safetensors: tensor \""));
}

TEST_F(ApplyTest, ConvertsFloatingPointTypesWhenAsked) {
  Net net;
  convert(net, torch::kHalf);
  save(*net);
  Net wide;
  EXPECT_THAT(load_error(wide), HasSubstr("output: expected F32 [4, 3], got F16 [4, 3]"));
  EXPECT_THAT(load_error(wide),
              ::testing::EndsWith("\nBuild the model as it was when the checkpoint was written, or "
                                  "load with convert = true to convert floating point types."));
  load_into_module(*wide, path("c"), {/*strict=*/true, /*convert=*/true});
  EXPECT_EQ(wide->output.scalar_type(), torch::kFloat);
  EXPECT_TRUE(torch::equal(wide->output, net->output.to(torch::kFloat)));
  EXPECT_EQ(wide->norm->num_batches_tracked.scalar_type(), torch::kLong);

  save(*wide);
  Net narrow;
  convert(narrow, torch::kHalf);
  load_into_module(*narrow, path("c"), {/*strict=*/true, /*convert=*/true});
  expect_equal(*narrow, *net);
}

TEST_F(ApplyTest, ConvertsNothingButFloatingPoint) {
  Net net(/*tied=*/false);
  Shard shard;
  shard.model = named_tensors(state_dict(*net));
  shard.model[0].tensor = torch::zeros({4, 3}, torch::kLong);
  save(shard);
  EXPECT_THAT(load_error(net, /*strict=*/true, /*convert=*/true),
              HasSubstr("output: expected F32 [4, 3], got I64 [4, 3]"));
}

/// A run in half precision has the exact values in its optimizer.
TEST_F(ApplyTest, TakesMasterWeightsIntoAWiderModel) {
  Net net;
  convert(net, torch::kBFloat16);
  Shard shard;
  shard.model = named_tensors(state_dict(*net));
  const torch::Tensor master = torch::randn({4, 3}), other = torch::randn({4, 4});
  shard.optimizer_tensors["output/master"] = master;
  shard.optimizer_tensors["embedding.bias/master"] = other;  // another shape: not a master
  save(shard);
  Net wide;
  load_into_module(*wide, path("c"), {/*strict=*/true, /*convert=*/true});
  EXPECT_TRUE(torch::equal(wide->output, master));
  EXPECT_TRUE(torch::equal(wide->embedding->bias, net->embedding->bias.to(torch::kFloat)));
  Net narrow;
  convert(narrow, torch::kBFloat16);
  load_into_module(*narrow, path("c"), {/*strict=*/true, /*convert=*/true});
  expect_equal(*narrow, *net);
}

}  // namespace
}  // namespace smp::checkpoint
