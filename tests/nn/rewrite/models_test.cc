// SPDX-License-Identifier: Apache-2.0
// Models that know nothing of smp, divided: results and gradients on every rank are those of one
// process, in float64, with dropout on.

#include "examples/gpt/gpt_model.h"
#include "graph/serialize.h"
#include "partitioner/partition.h"
#include "tests/nn/rewrite/harness.h"
#include "tests/zoo/models_convolutional.h"
#include "tests/zoo/models_irregular.h"
#include "tests/zoo/models_sequence.h"

namespace smp::nn::rewrite::testing {
namespace {

using torch::Tensor;
namespace F = torch::nn::functional;

struct Prepared {
  std::shared_ptr<torch::nn::Module> module;
  Tensors inputs;
  Function step;
};

/// The divided graph of a model for `ranks`, after its results were found to be those of one
/// process; so does the one in which activations between divided layers are divided, too.
DividedGraph divided_as_plain(const Prepared& model, int ranks) {
  const TensorTable table = table_of(*model.module);
  const Function step = training(model.step);
  const auto whole = capture(table, model.inputs, step);
  DividedGraph divided = divide(*whole, eager_options(table, ranks));
  expect_equals_plain(divided, *model.module, table, model.inputs, step, ranks);
  expect_metas_hold(divided, table, model.inputs, ranks);
  const DividedGraph in_parts = divide(*whole, memory_options(table, ranks));
  if (in_parts.graph.to_string() != divided.graph.to_string()) {
    expect_equals_plain(in_parts, *model.module, table, model.inputs, step, ranks);
    expect_metas_hold(in_parts, table, model.inputs, ranks);
  }
  return divided;
}

/// "dim" or "dim/blocks" of each divided parameter, by name; "" for whole ones.
std::map<std::string, std::string> splits(const DividedGraph& divided) {
  std::map<std::string, std::string> result;
  for (const auto& decision : divided.decisions) {
    std::string& text = result[decision.name];
    if (!decision.split) continue;
    text = std::to_string(decision.split->dim);
    if (decision.split->blocks > 1) text += "/" + std::to_string(decision.split->blocks);
  }
  return result;
}

Tensor tokens(int64_t count, std::vector<int64_t> sizes) { return torch::randint(count, sizes); }

Prepared make_gpt(bool tied, int64_t heads) {
  torch::manual_seed(1);
  const auto options =
      gpt::GPTOptions().layers(2).width(24).heads(heads).sequence(6).dropout(0.2).tied(tied);
  auto net = std::make_shared<gpt::GPTImpl>(options);
  net->to(torch::kDouble);
  return {net, {tokens(256, {2, 6}), tokens(256, {2, 6})}, [net](const Tensors& in) -> Tensors {
            return {F::cross_entropy(net->forward(in[0]).flatten(0, 1), in[1].flatten())};
          }};
}

TEST(ModelTest, Mlp) {
  torch::manual_seed(1);
  torch::nn::Sequential net(torch::nn::Linear(6, 16), torch::nn::ReLU(), torch::nn::Linear(16, 8),
                            torch::nn::Dropout(0.3), torch::nn::Tanh(), torch::nn::Linear(8, 2));
  net->to(torch::kDouble);
  const Prepared mlp = {net.ptr(),
                        {torch::randn({5, 6}, torch::kDouble)},
                        [net](const Tensors& in) mutable -> Tensors {
                          const auto out = net->forward(in[0]);
                          return {out.square().mean(), out};
                        }};
  for (int ranks : {2, 4}) {
    const auto found = splits(divided_as_plain(mlp, ranks));
    EXPECT_EQ(found.at("0.weight"), "0");
    EXPECT_EQ(found.at("0.bias"), "0");
    EXPECT_EQ(found.at("2.weight"), "1");
    EXPECT_EQ(found.at("2.bias"), "");
  }
}

TEST(ModelTest, GptWithFusedProjection) {
  for (int ranks : {2, 4}) {
    const DividedGraph divided = divided_as_plain(make_gpt(false, 4), ranks);
    const auto found = splits(divided);
    for (const char* block : {"blocks.0.", "blocks.1."}) {
      const auto of = [&](const char* name) { return found.at(std::string(block) + name); };
      EXPECT_EQ(of("attention.qkv.weight"), "0/3");
      EXPECT_EQ(of("attention.qkv.bias"), "0/3");
      EXPECT_EQ(of("attention.out.weight"), "1");
      EXPECT_EQ(of("attention.out.bias"), "");
      EXPECT_EQ(of("expand.weight"), "0");
      EXPECT_EQ(of("contract.weight"), "1");
      EXPECT_EQ(of("norm1.weight"), "");
    }
    EXPECT_EQ(found.at("head.weight"), "0");
    // Two sums in each block forward, and two backward; the embeddings are joined once.
    const std::string block = " copy dropout reduce copy reduce";
    EXPECT_EQ(collectives(divided.graph), "dropout gather" + block + block + " copy cross_entropy")
        << divided.graph.to_string();
  }
}

/// Stages are made of it and files written as of any graph; `partition` verifies its plans.
TEST(ModelTest, DividedGraphsArePartitioned) {
  for (bool tied : {false, true}) {
    const Prepared gpt = make_gpt(tied, 4);
    const TensorTable table = table_of(*gpt.module);
    const auto whole = capture(table, gpt.inputs, training(gpt.step));
    const DividedGraph divided = divide(*whole, eager_options(table, 2));
    const auto plan = partitioner::partition(divided.graph, partitioner::PartitionOptions(2));
    EXPECT_EQ(plan.stages(), 2);
    const auto read =
        graph::saved_graph_from_json(graph::graph_to_json(divided.graph), "a test").graph;
    EXPECT_EQ(read.to_string(), divided.graph.to_string());
    EXPECT_EQ(read.constants_fingerprint(), divided.graph.constants_fingerprint());
    EXPECT_EQ(plan.owner.size(), divided.decisions.size());
  }
}

/// On a slow network dividing does not pay: if it has to be, then as Megatron
/// does.
TEST(ModelTest, GptDividedByForce) {
  const Prepared gpt = make_gpt(false, 4);
  const TensorTable table = table_of(*gpt.module);
  const Function step = training(gpt.step);
  const auto whole = graph::testing::trace(table, gpt.inputs, step, false).recorded;
  DivideOptions options;
  options.ranks = 2;
  options.latency_us = 1000;
  options.allowed = eager_options(table, 2).allowed;
  EXPECT_TRUE(divide(*whole, options).parameters.empty());
  options.insist = true;
  const DividedGraph divided = divide(*whole, options);
  const std::string block = " copy dropout reduce copy reduce";
  EXPECT_EQ(collectives(divided.graph), "dropout gather" + block + block + " copy cross_entropy")
      << divided.graph.to_string();
  expect_equals_plain(divided, *gpt.module, table, gpt.inputs, step, 2);
}

TEST(ModelTest, GptWithTiedVocabulary) {
  const DividedGraph divided = divided_as_plain(make_gpt(true, 4), 2);
  EXPECT_EQ(splits(divided).at("token.weight"), "0");
  const std::string text = divided.graph.to_string();
  EXPECT_NE(text.find("smp::tp_embedding"), std::string::npos) << text;
  EXPECT_NE(text.find("smp::tp_cross_entropy"), std::string::npos) << text;
}

TEST(ModelTest, GptWhoseHeadsCannotBeDivided) {
  const DividedGraph divided = divided_as_plain(make_gpt(false, 3), 4);
  const auto& decision = decision_of(divided, "blocks.0.attention.qkv.weight");
  EXPECT_FALSE(decision.split.has_value());
  EXPECT_TRUE(decision.skipped);
  EXPECT_EQ(decision.why_whole, "3 heads cannot be divided among 4 ranks");
  EXPECT_EQ(splits(divided).at("blocks.0.expand.weight"), "0");
}

TEST(ModelTest, MinGpt) {
  torch::manual_seed(1);
  auto net = std::make_shared<stranger::GptImpl>(false);
  net->to(torch::kDouble);
  const Prepared gpt = {
      net, {tokens(13, {2, 7}), tokens(13, {2, 7})}, [net](const Tensors& in) -> Tensors {
        const auto logits = net->forward(in[0]);
        return {F::cross_entropy(logits.flatten(0, 1), in[1].flatten()), logits};
      }};
  const auto found = splits(divided_as_plain(gpt, 2));
  EXPECT_EQ(found.at("blocks.0.attention.attend.weight"), "0/3");
  EXPECT_EQ(found.at("blocks.0.attention.project.weight"), "1");
  EXPECT_EQ(found.at("blocks.0.up.weight"), "0");
  EXPECT_EQ(found.at("blocks.0.down.weight"), "1");
}

TEST(ModelTest, VisionTransformer) {
  torch::manual_seed(1);
  auto net = std::make_shared<stranger::VisionTransformerImpl>(4);
  net->to(torch::kDouble);
  const Prepared vit = {net,
                        {torch::randn({2, 3, 8, 8}, torch::kDouble), tokens(4, {2})},
                        [net](const Tensors& in) -> Tensors {
                          return {F::cross_entropy(net->forward(in[0]), in[1])};
                        }};
  const auto found = splits(divided_as_plain(vit, 3));
  EXPECT_EQ(found.at("blocks.0.qkv.weight"), "0/3");
  EXPECT_EQ(found.at("blocks.0.proj.weight"), "1");
  EXPECT_EQ(found.at("blocks.1.mlp.0.weight"), "0");
  EXPECT_EQ(found.at("blocks.1.mlp.2.weight"), "1");
}

TEST(ModelTest, TransformerEncoder) {
  torch::manual_seed(1);
  torch::nn::TransformerEncoder net(torch::nn::TransformerEncoderOptions(
      torch::nn::TransformerEncoderLayerOptions(16, 4).dim_feedforward(32).dropout(0.2), 2));
  net->to(torch::kDouble);
  const auto padding = torch::zeros({3, 5}, torch::kBool);
  padding[1].slice(0, 3).fill_(true);
  const Prepared encoder = {net.ptr(),
                            {torch::randn({5, 3, 16}, torch::kDouble), padding},
                            [net](const Tensors& in) mutable -> Tensors {
                              const auto out = net->forward(in[0], {}, in[1]);
                              return {out.square().sum(), out};
                            }};
  for (int ranks : {2, 4}) {
    const auto found = splits(divided_as_plain(encoder, ranks));
    EXPECT_EQ(found.at("layers.0.self_attn.in_proj_weight"), "0/3");
    EXPECT_EQ(found.at("layers.0.self_attn.in_proj_bias"), "0/3");
    EXPECT_EQ(found.at("layers.0.self_attn.out_proj.weight"), "1");
    EXPECT_EQ(found.at("layers.1.linear1.weight"), "0");
    EXPECT_EQ(found.at("layers.1.linear2.weight"), "1");
  }
}

/// Cross attention, whose projection is one parameter of which slices are used.
TEST(ModelTest, Translator) {
  torch::manual_seed(1);
  auto net = std::make_shared<stranger::TranslatorImpl>();
  net->to(torch::kDouble);
  const Prepared translator = {net,
                               {tokens(11, {2, 6}).clamp_min(1), tokens(11, {2, 5}).clamp_min(1)},
                               [net](const Tensors& in) -> Tensors {
                                 const auto logits = net->forward(in[0], in[1]);
                                 return {F::cross_entropy(logits.flatten(0, 1), in[1].flatten())};
                               }};
  const auto found = splits(divided_as_plain(translator, 2));
  EXPECT_EQ(found.at("transformer.decoder.layers.0.self_attn.in_proj_weight"), "0/3");
  EXPECT_EQ(found.at("transformer.decoder.layers.0.multihead_attn.in_proj_weight"), "0/3");
  EXPECT_EQ(found.at("transformer.decoder.layers.0.multihead_attn.in_proj_bias"), "0/3");
  EXPECT_EQ(found.at("transformer.decoder.layers.1.multihead_attn.out_proj.weight"), "1");
}

/// The projection has a head of one kind only, which cannot be cut.
TEST(ModelTest, RotaryAttentionWithOneHead) {
  torch::manual_seed(1);
  auto net = std::make_shared<stranger::RotaryImpl>();
  net->to(torch::kDouble);
  net->grow_tables(6);
  net->cosine = net->cosine.to(torch::kDouble);
  net->sine = net->sine.to(torch::kDouble);
  const Prepared rotary = {
      net, {tokens(11, {2, 6}), tokens(11, {2, 6})}, [net](const Tensors& in) -> Tensors {
        const auto logits = net->forward(in[0]);
        return {F::cross_entropy(logits.flatten(0, 1), in[1].flatten())};
      }};
  const DividedGraph divided = divided_as_plain(rotary, 2);
  // Its products are whole; the projection's input, the channels of the embedding, need not be.
  EXPECT_NE(splits(divided).at("qkv.weight").substr(0, 1), "0") << report(divided);
  for (const auto& op : divided.graph.operators) {
    if (op.name() != "aten::bmm") continue;
    EXPECT_EQ(divided.graph.values[op.arguments[0].values[0]].meta.sizes[1], 6);
    EXPECT_EQ(divided.graph.values[op.results[0]].meta.sizes[0], 2);
  }
}

/// Gates of dilated convolutions, and a sum of skips.
TEST(ModelTest, WaveNet) {
  torch::manual_seed(1);
  auto net = std::make_shared<stranger::WaveNetImpl>();
  net->to(torch::kDouble);
  const Prepared wavenet = {
      net, {torch::randn({2, 1, 20}, torch::kDouble)}, [net](const Tensors& in) -> Tensors {
        const auto out = net->forward(in[0]);
        return {out.square().mean(), out};
      }};
  for (int ranks : {2, 5}) divided_as_plain(wavenet, ranks);
}

/// Convolutions with batch norm, whose averages are written; dense skips; layers over patches.
TEST(ModelTest, Images) {
  torch::manual_seed(1);
  const auto check = [](auto net, int64_t size) {
    net->to(torch::kDouble);
    const Prepared model = {net.ptr(),
                            {torch::randn({2, 3, size, size}, torch::kDouble), tokens(4, {2})},
                            [net](const Tensors& in) mutable -> Tensors {
                              return {F::cross_entropy(net->forward(in[0]), in[1])};
                            }};
    EXPECT_FALSE(divided_as_plain(model, 2).parameters.empty());
  };
  check(stranger::ResNet(4), 8);
  check(stranger::DenseNet(4), 8);
  check(stranger::MlpMixer(4), 8);
}

/// Storages that are written through views stay whole.
TEST(ModelTest, WrittenInPlace) {
  // It makes tensors of the default type.
  const auto before = torch::get_default_dtype();
  torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
  torch::manual_seed(1);
  auto net = std::make_shared<stranger::InPlaceImpl>();
  const Prepared in_place = {
      net,
      {torch::randn({2, 4, 4}, torch::kDouble), torch::rand({2, 4}) > 0.5},
      [net](const Tensors& in) -> Tensors { return {net->forward(in[0], in[1]).square().sum()}; }};
  const DividedGraph divided = divided_as_plain(in_place, 2);
  torch::set_default_dtype(before);
  EXPECT_FALSE(divided.parameters.empty());
}

/// Two projections multiplied with each other, as in Llama, and a skip that crosses other layers.
struct GatedImpl : torch::nn::Module {
  GatedImpl() {
    const auto linear = [](int64_t in, int64_t out) {
      return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false));
    };
    gate = register_module("gate", linear(8, 16));
    up = register_module("up", linear(8, 16));
    inner = register_module("inner", linear(16, 16));
    join = register_module("join", linear(32, 8));
    last = register_module("last", linear(8, 8));
  }
  Tensor forward(Tensor x) {
    const auto early = torch::silu(gate(x)) * up(x);
    const auto late = torch::relu(inner(early));
    return last(join(torch::cat({early, late}, -1)) + x);
  }
  torch::nn::Linear gate{nullptr}, up{nullptr}, inner{nullptr}, join{nullptr}, last{nullptr};
};

TEST(ModelTest, GatesAndSkips) {
  torch::manual_seed(1);
  auto net = std::make_shared<GatedImpl>();
  net->to(torch::kDouble);
  const Prepared gated = {
      net, {torch::randn({3, 8}, torch::kDouble)}, [net](const Tensors& in) -> Tensors {
        const auto out = net->forward(in[0]);
        return {out.square().mean(), out};
      }};
  const auto found = splits(divided_as_plain(gated, 2));
  EXPECT_EQ(found.at("gate.weight"), "0");
  EXPECT_EQ(found.at("up.weight"), "0");
}

}  // namespace
}  // namespace smp::nn::rewrite::testing
