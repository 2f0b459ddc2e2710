// SPDX-License-Identifier: Apache-2.0
#include "graph/random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "graph/keyed_random.h"

namespace smp::graph {
namespace {

constexpr uint64_t kStep0 = 0x7a88ec1817808a60;  // XXH64 of "step 0"
constexpr uint64_t kTrain = 0xd18f9b6611eb8e16;

/// From a program of its own, SplitMix64 after Vigna.
TEST(StreamSeed, HasTheDocumentedValues) {
  EXPECT_EQ(stream_seed({}, 0), 0x78ae5a9a6b5fd45eu);
  EXPECT_EQ(stream_seed({1, kStep0, 0, 0}, 0), 0x11274aa4e06e9e80u);
  EXPECT_EQ(stream_seed({7, kTrain, 3, 5}, 2), 0xc80e116214f212b3u);
  const uint64_t largest = std::numeric_limits<uint64_t>::max();
  EXPECT_EQ(stream_seed({largest, kTrain, 200, 15}, 40), 0x8b4c4e2c9270609du);
}

at::Tensor default_state() { return at::detail::getDefaultCPUGenerator().get_state(); }

/// Normal numbers are drawn in pairs, and the generator keeps the second.
TEST(KeyedRandomScope, LeavesTheGeneratorAsItWas) {
  for (const at::ScalarType type : {at::kFloat, at::kDouble}) {
    const auto draw = [type](int count) {
      std::vector<at::Tensor> numbers;
      for (int i = 0; i < count; ++i) numbers.push_back(at::randn({1}, type));
      numbers.push_back(at::rand({3}, type));
      return at::cat(numbers);
    };
    torch::manual_seed(5);
    draw(1);
    const at::Tensor expected = draw(2);
    torch::manual_seed(5);
    draw(1);
    {
      const KeyedRandomScope scope({7, kTrain, 3, 5});
      draw(3);
    }
    EXPECT_TRUE(at::equal(draw(2), expected)) << type;
  }
}

using Draw = std::function<at::Tensor()>;

/// The random operators of the CPU, each of which `Draw` calls once: with an argument for a
/// generator, without one, made of others.
std::map<std::string, Draw> draws() {
  const at::Tensor half = at::full({4, 6}, 0.5), ones = at::ones({4, 6});
  const at::Tensor sequence = at::linspace(0, 1, 24).reshape({1, 2, 4, 3});
  const auto in_place = [](const auto& draw) { return [draw] { return draw(at::ones({40})); }; };
  torch::nn::LSTM lstm(torch::nn::LSTMOptions(3, 4).num_layers(2).dropout(0.5));
  torch::nn::GRU gru(torch::nn::GRUOptions(3, 4).num_layers(2).dropout(0.5));
  return {
      {"rand", [] { return at::rand({40}); }},
      {"randn", [] { return at::randn({40}); }},
      {"randn of one", [] { return at::randn({1}, at::kDouble); }},
      {"randint", [] { return at::randint(9, {40}); }},
      {"randint of a range", [] { return at::randint(3, 9, {40}); }},
      {"randperm", [] { return at::randperm(40); }},
      {"rand_like", [=] { return at::rand_like(half); }},
      {"randn_like", [=] { return at::randn_like(half); }},
      {"randint_like", [=] { return at::randint_like(half, 9); }},
      {"rand out",
       [] {
         at::Tensor out = at::empty({40});
         return at::rand_out(out, {40});
       }},
      {"bernoulli", [=] { return at::bernoulli(half); }},
      {"bernoulli of p", [=] { return at::bernoulli(half, 0.3); }},
      {"bernoulli_", in_place([](at::Tensor x) { return x.bernoulli_(0.3); })},
      {"bernoulli_ of a tensor",
       in_place([](at::Tensor x) { return x.bernoulli_(at::full({40}, 0.3)); })},
      {"normal", [=] { return at::normal(half, ones); }},
      {"normal of a number", [=] { return at::normal(half, 2.0); }},
      {"normal_", in_place([](at::Tensor x) { return x.normal_(); })},
      {"uniform_", in_place([](at::Tensor x) { return x.uniform_(2, 3); })},
      {"random_", in_place([](at::Tensor x) { return x.random_(); })},
      {"random_ to", in_place([](at::Tensor x) { return x.random_(9); })},
      {"cauchy_", in_place([](at::Tensor x) { return x.cauchy_(); })},
      {"log_normal_", in_place([](at::Tensor x) { return x.log_normal_(); })},
      {"exponential_", in_place([](at::Tensor x) { return x.exponential_(); })},
      {"geometric_", in_place([](at::Tensor x) { return x.geometric_(0.3); })},
      {"multinomial", [=] { return at::multinomial(half, 3); }},
      {"multinomial with replacement", [=] { return at::multinomial(half, 9, true); }},
      {"poisson", [=] { return at::poisson(ones); }},
      {"binomial", [=] { return at::binomial(ones * 9, half); }},
      {"_standard_gamma", [=] { return at::_standard_gamma(half); }},
      {"_sample_dirichlet", [=] { return at::_sample_dirichlet(half); }},
      {"rrelu", [=] { return at::rrelu(-half, 0.1, 0.9, true); }},
      {"dropout", [=] { return at::dropout(half, 0.3, true); }},
      {"dropout_", in_place([](at::Tensor x) { return at::dropout_(x, 0.3, true); })},
      {"native_dropout", [=] { return std::get<0>(at::native_dropout(half, 0.3, true)); }},
      {"alpha_dropout", [=] { return at::alpha_dropout(half, 0.3, true); }},
      {"feature_dropout", [=] { return at::feature_dropout(half, 0.3, true); }},
      {"feature_alpha_dropout", [=] { return at::feature_alpha_dropout(half, 0.3, true); }},
      {"attention",
       [=] { return at::scaled_dot_product_attention(sequence, sequence, sequence, {}, 0.5); }},
      {"lstm", [=]() mutable { return std::get<0>(lstm(sequence[0])).detach(); }},
      {"gru", [=]() mutable { return std::get<0>(gru(sequence[0])).detach(); }},
  };
}

/// Operators draw the numbers that the default generator would give with the key's seed, and
/// without it.
TEST(KeyedRandomScope, OperatorsDrawFromAGeneratorOfTheirOwn) {
  const RandomKey key{7, kTrain, 3, 5};
  for (auto& [name, draw] : draws()) {
    at::manual_seed(stream_seed(key, 0));
    const at::Tensor expected = draw();
    at::manual_seed(5);
    at::Tensor drawn, before = default_state();
    {
      const KeyedRandomScope scope(key);
      drawn = draw();
      EXPECT_TRUE(at::equal(default_state(), before)) << name;
    }
    EXPECT_TRUE(at::equal(drawn, expected)) << name;
    at::manual_seed(stream_seed(key, 0));
    EXPECT_FALSE(at::equal(default_state(), before)) << "a state without content";
  }
}

TEST(KeyedRandomScope, AGeneratorThatIsGivenIsDrawnFrom) {
  const RandomKey key{7, kTrain, 3, 5};
  const auto generator = [] { return at::make_generator<at::CPUGeneratorImpl>(9); };
  const at::Tensor own = at::rand({8}, generator());
  at::manual_seed(stream_seed(key, 1));
  const at::Tensor second = at::rand({8});
  const KeyedRandomScope scope(key);
  EXPECT_TRUE(at::equal(at::rand({8}, generator()), own));
  EXPECT_TRUE(at::equal(at::rand({8}, at::detail::getDefaultCPUGenerator()), second));
}

TEST(KeyedRandomScope, AnErrorLeavesNothing) {
  at::manual_seed(5);
  const at::Tensor expected = at::rand({8});
  at::manual_seed(5);
  {
    const KeyedRandomScope scope({7, kTrain, 3, 5});
    EXPECT_THROW(at::dropout(at::ones({4}), 2, true), c10::Error);
  }
  EXPECT_TRUE(at::equal(at::rand({8}), expected));
}

/// The operator is drawn again from where the generator was, which goes on behind it.
TEST(NotedState, DrawsTheSameAgain) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::normal_", "");
  const auto draw = [&](const auto& call) {
    torch::jit::Stack stack = {at::zeros({17}), 0.0, 1.0, c10::IValue()};
    call(stack);
    return stack[0].toTensor();
  };
  at::manual_seed(5);
  const at::Tensor first = at::randn({17}), second = at::randn({3});
  at::manual_seed(5);
  at::Tensor state;
  const auto noted = draw([&](auto& stack) { state = call_noting_state(op, stack); });
  EXPECT_TRUE(at::equal(noted, first));
  EXPECT_TRUE(at::equal(at::randn({3}), second));
  const at::Tensor before = default_state();
  EXPECT_TRUE(at::equal(draw([&](auto& stack) { call_from_state(op, stack, state); }), first));
  EXPECT_TRUE(at::equal(default_state(), before));
}

TEST(SeedWatch, TellsSeedsFromDraws) {
  at::manual_seed(7);
  at::rand({1});
  {
    const SeedWatch watch;
    EXPECT_FALSE(watch.was_seeded());
    at::rand({2000});  // more than a state has
    EXPECT_FALSE(watch.was_seeded()) << "drawn";
    at::manual_seed(8);
    EXPECT_TRUE(watch.was_seeded()) << "another seed";
  }
  at::manual_seed(7);
  at::rand({1});
  const SeedWatch watch;
  at::manual_seed(7);
  EXPECT_TRUE(watch.was_seeded()) << "the same seed";
}

/// The numbers that the operator after `before` others draws.
std::vector<float> drawn(const RandomKey& key, int before) {
  const KeyedRandomScope scope(key);
  for (int i = 0; i < before; ++i) at::rand({1});
  const at::Tensor numbers = at::rand({8});
  return {numbers.const_data_ptr<float>(), numbers.const_data_ptr<float>() + 8};
}

TEST(StreamSeed, EachFieldOfTheKeyGivesOtherNumbers) {
  const RandomKey key{7, kTrain, 3, 5};
  std::set<std::vector<float>> seen{drawn(key, 2)};
  EXPECT_EQ(seen.count(drawn(key, 2)), 1u);
  EXPECT_TRUE(seen.insert(drawn({8, key.step_function, 3, 5}, 2)).second) << "seed";
  EXPECT_TRUE(seen.insert(drawn({7, kStep0, 3, 5}, 2)).second) << "step function";
  EXPECT_TRUE(seen.insert(drawn({7, key.step_function, 4, 5}, 2)).second) << "call";
  EXPECT_TRUE(seen.insert(drawn({7, key.step_function, 3, 6}, 2)).second) << "microbatch";
  EXPECT_TRUE(seen.insert(drawn(key, 3)).second) << "ordinal";
  // Fields do not make up for each other.
  EXPECT_TRUE(seen.insert(drawn({7, key.step_function, 5, 3}, 2)).second) << "call, microbatch";
}

}  // namespace
}  // namespace smp::graph
