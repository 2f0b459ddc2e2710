// SPDX-License-Identifier: Apache-2.0
// The language model, against plain functions of libtorch.

#include "graph/keyed_random.h"
#include "smp/nn.h"
#include "tests/nn/transformer_cases.h"

namespace smp::nn::testing {
namespace {

constexpr int64_t kWords = 20, kLayers = 2, kTypes = 3;

DistributedTransformerLMHeadOptions head_options(const Case& test, const std::string& optimize) {
  return DistributedTransformerLMHeadOptions()
      .num_layers(kLayers)
      .num_attention_heads(kHeads)
      .attention_head_size(kChannels)
      .hidden_size(kHidden)
      .intermediate_size(kInner)
      .vocab_size(kWords)
      .num_positions(kLength + 1)
      .num_token_types(kTypes)
      .attention_dropout_prob(test.attention_dropout)
      .hidden_dropout_prob(test.dropout)
      .causal_mask_size(test.causal ? std::optional(kLength) : std::nullopt)
      .add_cross_attention(test.cross)
      .pre_layernorm(test.pre)
      .post_layernorm(test.post)
      .initializer_range(0.5)
      .optimize(optimize);
}

struct Tokens {
  Tensor ids, mask, types, positions, labels, cross, cross_mask;
};

Tokens tokens_of(const Case& test) {
  torch::manual_seed(2);
  Tokens tokens;
  tokens.ids = torch::randint(kWords, {kBatch, kLength});
  tokens.labels = torch::randint(kWords, {kBatch, kLength});
  tokens.labels[0][3] = -100;
  if (test.mask) {
    tokens.mask = torch::zeros({kBatch, kLength}, torch::kLong);
    tokens.mask.slice(1, 6).fill_(1);
    tokens.types = torch::randint(kTypes, {kBatch, kLength});
    tokens.positions = torch::randint(kLength + 1, {kBatch, kLength});
  }
  if (test.cross) {
    tokens.cross = torch::randn({kBatch, kCross, kHidden}, torch::kDouble);
    tokens.cross_mask = torch::zeros({kBatch, kCross}, torch::kLong);
    tokens.cross_mask.slice(1, 4).fill_(1);
  }
  return tokens;
}

Tensor additive(const Tensor& mask) {
  return mask.defined() ? mask.to(torch::kDouble).mul(-10000).view({kBatch, 1, 1, -1}) : mask;
}

/// The logits of a plain language model.
Tensor plain_logits(const Case& test, Named& parameters, const Tokens& tokens) {
  const Plain plain = plain_of(test, parameters);
  const auto row = [&](const char* name, const Tensor& ids) {
    return plain.at(std::string(name) + ".weight")
        .index_select(0, ids.flatten())
        .view({ids.size(0), ids.size(1), kHidden});
  };
  const auto positions = tokens.positions.defined()
                             ? tokens.positions
                             : torch::arange(kLength).expand({kBatch, kLength});
  Tensor x = row("word_embedding", tokens.ids) + row("position_embedding", positions);
  if (tokens.types.defined()) x = x + row("token_type_embedding", tokens.types);
  for (int64_t i = 0; i < kLayers; ++i) {
    x = plain.layer(x, tokens.cross, additive(tokens.mask), additive(tokens.cross_mask),
                    "transformer.seq_layers." + std::to_string(i) + ".");
  }
  if (!test.post) x = plain.norm(x, "layernorm");
  return torch::matmul(x, plain.at("word_embedding.weight").t());
}

Tensor call_head(DistributedTransformerLMHead& model, const Case& test, const Tokens& tokens,
                 const Tensor& labels) {
  using Model = DistributedTransformerLMHeadImpl;
  if (test.cross) {
    return model->forward(Model::Seven{tokens.ids, tokens.mask, tokens.types, tokens.positions,
                                       tokens.cross, tokens.cross_mask, labels});
  }
  return model->forward(
      Model::Five{tokens.ids, tokens.mask, tokens.types, tokens.positions, labels});
}

TEST(LMHead, IsThatOfPlainLibtorch) {
  for (const Case& test : layer_cases()) {
    if (test.alibi || test.activation == "relu") continue;
    const Tokens tokens = tokens_of(test);
    for (const int ranks : {1, 2, 4}) {
      for (const auto* optimize : {"speed", "memory"}) {
        const Outcome outcome = run_module<DistributedTransformerLMHead>(
            ranks, [&] { return DistributedTransformerLMHead(head_options(test, optimize)); },
            [&](DistributedTransformerLMHead& model) -> Tensors {
              model->train(test.train);
              const Tensor loss = call_head(model, test, tokens, tokens.labels);
              loss.backward();
              return {loss.detach()};
            });
        Named parameters = leaves(outcome.parameters);
        Tensor loss;
        {
          const graph::KeyedRandomScope random({3, 0, 1, 2});
          loss = torch::nn::functional::cross_entropy(
              plain_logits(test, parameters, tokens).flatten(0, 1), tokens.labels.flatten());
          loss.backward();
        }
        expect_close(outcome, {loss.detach()}, gradients_of(parameters),
                     c10::str(test.name, " on ", ranks, " ranks, ", optimize));
      }
    }
  }
}

TEST(LMHead, GivesLogitsWithoutLabelsAndStatesWithoutAHead) {
  Case test;
  test.mask = true;
  const Tokens tokens = tokens_of(test);
  for (const int ranks : {1, 4}) {
    for (const auto* optimize : {"speed", "memory"}) {
      const Outcome outcome = run_module<DistributedTransformerLMHead>(
          ranks, [&] { return DistributedTransformerLMHead(head_options(test, optimize)); },
          [&](DistributedTransformerLMHead& model) -> Tensors {
            const Tensor logits = call_head(model, test, tokens, {});
            logits.pow(2).sum().backward();
            return {logits.detach()};
          });
      Named parameters = leaves(outcome.parameters);
      const Tensor logits = plain_logits(test, parameters, tokens);
      logits.pow(2).sum().backward();
      expect_close(outcome, {logits.detach()}, gradients_of(parameters), "logits");

      const Outcome states = run_module<DistributedTransformerLMHead>(
          ranks,
          [&] {
            return DistributedTransformerLMHead(head_options(test, optimize).add_lm_head(false));
          },
          [&](DistributedTransformerLMHead& model) -> Tensors {
            return {call_head(model, test, tokens, {}).detach()};
          });
      Named same = leaves(states.parameters);
      const Tensor of_states =
          torch::matmul(states.outputs[0], same.at("word_embedding.weight").t());
      expect_close(of_states, plain_logits(test, same, tokens), "states");
    }
  }
}

TEST(LMHead, BeginsWithTheSameValuesForAllDegrees) {
  const std::function<DistributedTransformerLMHead()> make = [] {
    return DistributedTransformerLMHead(head_options(Case(), "speed"));
  };
  const auto none = [](DistributedTransformerLMHead&) { return Tensors(); };
  const Outcome one = run_module<DistributedTransformerLMHead>(1, make, none);
  const Outcome four = run_module<DistributedTransformerLMHead>(4, make, none);
  ASSERT_EQ(four.parameters.size(), one.parameters.size());
  for (const auto& [name, value] : one.parameters) {
    expect_equal(four.parameters.at(name), value, name);
  }
  EXPECT_NEAR(one.parameters.at("word_embedding.weight").std().item<double>(), 0.5, 0.1);
  EXPECT_NEAR(one.parameters.at("position_embedding.weight").std().item<double>(), 0.5, 0.1);
}

TEST(LMHead, CanBeCopied) {
  on_ranks(1, [](int) {
    Case test;
    test.cross = true;
    DistributedTransformerLMHead model(head_options(test, "speed"));
    const auto copy = model->clone();
    ASSERT_EQ(copy->parameters().size(), model->parameters().size());
    for (const auto& item : model->named_parameters()) {
      expect_equal(copy->named_parameters()[item.key()].detach(), item.value().detach(),
                   item.key());
    }
  });
}

TEST(LMHead, DefaultsAreTheDocumentedOnes) {
  const DistributedTransformerLMHeadOptions options;
  EXPECT_EQ(options.num_layers(), 12);
  EXPECT_EQ(options.num_attention_heads(), 32);
  EXPECT_EQ(options.attention_head_size(), 32);
  EXPECT_EQ(options.hidden_size(), 1024);
  EXPECT_EQ(options.intermediate_size(), 4096);
  EXPECT_EQ(options.vocab_size(), 30522);
  EXPECT_EQ(options.num_positions(), 1024);
  EXPECT_EQ(options.attention_dropout_prob(), 0.1);
  EXPECT_EQ(options.hidden_dropout_prob(), 0.1);
  EXPECT_EQ(options.activation(), "gelu");
  EXPECT_EQ(options.layernorm_epsilon(), 1e-5);
  EXPECT_EQ(options.num_token_types(), 0);
  EXPECT_FALSE(options.causal_mask_size().has_value());
  EXPECT_FALSE(options.add_cross_attention());
  EXPECT_TRUE(options.add_lm_head());
  EXPECT_EQ(options.initializer_range(), 0.02);
  EXPECT_FALSE(options.use_normal_initialization());
  EXPECT_FALSE(options.pre_layernorm());
  EXPECT_TRUE(options.post_layernorm());
  EXPECT_FALSE(options.use_alibi());
  EXPECT_EQ(options.alibi_bias_max(), 8);
  EXPECT_FALSE(options.optimize().has_value());  // the configuration says
}

TEST(LMHead, SaysWhatIsWrongWithItsOptions) {
  on_ranks(4, [](int) {
    const Case test;
    expect_has(error_of<UsageError>([&] {
                 DistributedTransformerLMHead(head_options(test, "speed").vocab_size(50257));
               }),
               {"DistributedTransformerLMHead: vocab_size 50257 cannot be divided"});
  });
}

TEST(LMHead, SaysWhatIsWrongWithItsInputs) {
  on_ranks(2, [](int) {
    using Head = DistributedTransformerLMHeadImpl;
    const auto x = torch::randn({kBatch, kLength, kHidden});
    Case cross;
    cross.cross = true;
    const auto ids = torch::zeros({1, 4}, torch::kLong);
    DistributedTransformerLMHead head(head_options(Case(), "speed").num_token_types(0));
    expect_has(error_of<UsageError>([&] {
                 head->forward(Head::Five{torch::zeros({1, 10}, torch::kLong), {}, {}, {}, {}});
               }),
               {"a sequence of 10 tokens is longer than num_positions 9"});
    expect_has(error_of<UsageError>([&] {
                 head->forward(Head::Five{ids, {}, ids, {}, {}});
               }),
               {"token_type_ids were given, but num_token_types is 0"});
    expect_has(error_of<UsageError>([&] {
                 head->forward(Head::Seven{ids, {}, {}, {}, x, {}, {}});
               }),
               {"without add_cross_attention its input is (input_ids", "got seven tensors"});
    DistributedTransformerLMHead with(head_options(cross, "speed").add_lm_head(false));
    expect_has(error_of<UsageError>([&] {
                 with->forward(Head::Five{ids, {}, {}, {}, {}});
               }),
               {"with add_cross_attention its input is (input_ids", "got five tensors"});
    expect_has(error_of<UsageError>([&] {
                 with->forward(Head::Seven{ids, {}, {}, {}, x.narrow(0, 0, 1), {}, ids});
               }),
               {"labels were given, but add_lm_head is false", "use add_lm_head(true)"});
  });
}

}  // namespace
}  // namespace smp::nn::testing
