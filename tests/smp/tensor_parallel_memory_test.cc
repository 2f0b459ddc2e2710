// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "graph/allocations.h"
#include "runtime/runtime.h"
#include "smp/nn.h"
#include "tests/nn/harness.h"
#include "tests/smp/tensor_parallel_run.h"
#include "tests/smp/tensor_parallel_transformer.h"

// The memory and the messages of a rank where layers are divided, against the formulas of
// docs/tensor_parallelism.md.
namespace smp {
namespace {

using namespace testing;
using nn::testing::CountingGroup;

Config config_for(const TensorLayout& layout, int microbatches) {
  return config_of(layout).microbatches(microbatches);
}

torch::Tensor token_ids(const DecoderSizes& sizes, int microbatches) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
  return torch::randint(sizes.vocabulary, {microbatches * sizes.samples, sizes.length}, generator,
                        torch::kLong);
}

void mark_all(Decoder& net) { set_tensor_parallelism(net); }

void mark_blocks(Decoder& net) {
  for (const auto& block : net.blocks) set_tensor_parallelism(*block);
}

/// The decoder made of the modules of smp::nn, which divide states along the sequence.
struct ModuleDecoder : torch::nn::Module {
  explicit ModuleDecoder(const DecoderSizes& sizes)
      : gpt(nn::DistributedTransformerLMHeadOptions()
                .num_layers(sizes.layers)
                .num_attention_heads(sizes.heads)
                .attention_head_size(sizes.width / sizes.heads)
                .hidden_size(sizes.width)
                .intermediate_size(4 * sizes.width)
                .vocab_size(sizes.vocabulary)
                .num_positions(sizes.length)
                .causal_mask_size(sizes.length)
                .attention_dropout_prob(0)
                .hidden_dropout_prob(0)
                .pre_layernorm(true)
                .post_layernorm(false)) {
    register_module("gpt", gpt);
  }

  torch::Tensor loss(torch::Tensor ids, torch::Tensor targets) {
    return gpt->forward(nn::DistributedTransformerLMHeadImpl::Five{ids, {}, {}, {}, targets});
  }

  nn::DistributedTransformerLMHead gpt;
};

void mark_nothing(ModuleDecoder&) {}

/// Trains a decoder of float32 on each rank of a layout. `with` gets the model and a function that
/// runs one step.
template <class Net>
void train_decoder(const TensorLayout& layout, const DecoderSizes& sizes, int microbatches,
                   const std::string& pipeline, const std::string& optimize,
                   const std::function<void(Net&)>& mark,
                   const std::function<void(ModelOf<Net>&, const std::function<void()>&)>& with) {
  torch::set_num_threads(1);
  const auto ids = token_ids(sizes, microbatches);
  const auto config = config_for(layout, microbatches).pipeline(pipeline).optimize(optimize);
  run_as_threads(layout.ranks(), config, [&] {
    const auto net = make_model<Net>(5, sizes);
    net->to(torch::kFloat);
    mark(*net);
    ModelOf<Net> model(net);
    auto train = step([&](torch::Tensor x, torch::Tensor y) {
      auto loss = net->loss(x, y);
      model->backward(loss);
      return loss;
    });
    with(model, [&] { train(ids, ids); });
  });
}

/// Rows of queries, keys, values, hidden channels and vocabulary, and columns of the layers after
/// them. (Positions are divided if the embeddings that they are added to are divided by columns.)
bool must_be_divided(const std::string& name) {
  static const std::set<std::string> ends = {"qkv.weight",  "qkv.bias",     "projection.weight",
                                             "up.weight",   "up.bias",      "down.weight",
                                             "head.weight", "tokens.weight"};
  for (const auto& end : ends) {
    if (name.size() >= end.size() && name.substr(name.size() - end.size()) == end) return true;
  }
  return false;
}

size_t storage_bytes(const Tensors& tensors) {
  std::set<const void*> seen;
  size_t bytes = 0;
  for (const auto& tensor : tensors) {
    const auto storage = tensor.storage();
    if (seen.insert(storage.unsafeGetStorageImpl()).second) bytes += storage.nbytes();
  }
  return bytes;
}

class TensorParallelMemory : public ::testing::TestWithParam<TensorLayout> {};

/// divided / T + whole, to the byte, of parameters, gradients and both moments of Adam.
TEST_P(TensorParallelMemory, OfParametersIsThatOfTheFormula) {
  const auto layout = GetParam();
  const DecoderSizes sizes;
  const auto plain = state_of(*make_model<Decoder>(5, sizes));
  std::mutex mutex;
  std::vector<std::set<std::string>> names(layout.ranks());
  const auto with = [&](ModelOf<Decoder>& model, const auto& run) {
    DistributedOptimizer<torch::optim::Adam> optimizer(model->parameters());
    for (int i = 0; i < 2; ++i) {
      optimizer.zero_grad();
      run();
      optimizer.step();
    }
    const std::lock_guard lock(mutex);
    size_t expected = 0, parameters = 0, gradients = 0;
    Tensors held;
    for (const auto& item : model->local_named_parameters()) {
      const bool divided = model->is_distributed_parameter(item.value());
      if (item.key() != "positions") {
        EXPECT_EQ(divided, layout.degree > 1 && must_be_divided(item.key())) << item.key();
      }
      const int parts = divided ? layout.degree : 1;
      expected += plain.at(item.key()).numel() / parts * sizeof(float);
      parameters += item.value().nbytes();
      gradients += item.value().grad().nbytes();
      held.push_back(item.value());
      names[rank()].insert(item.key());
    }
    EXPECT_EQ(parameters, expected);
    EXPECT_EQ(storage_bytes(held), expected);  // nothing of the whole is left behind
    EXPECT_EQ(gradients, expected);
    size_t moments = 0;
    for (const auto& [name, state] : optimizer.local_state_dict().params) {
      EXPECT_EQ(state.tensors.size(), 2u) << name;
      for (const auto& [field, tensor] : state.tensors) moments += tensor.nbytes();
    }
    EXPECT_EQ(moments, 2 * expected);
  };
  for (const char* optimize : {"speed", "memory"}) {
    train_decoder<Decoder>(layout, sizes, 2, "interleaved", optimize, mark_all, with);
  }
  std::set<std::string> all;
  for (const auto& of_rank : names) all.insert(of_rank.begin(), of_rank.end());
  EXPECT_EQ(all.size(), plain.size());
}

INSTANTIATE_TEST_SUITE_P(Layouts, TensorParallelMemory,
                         ::testing::Values(TensorLayout{1, 1, 1, true}, TensorLayout{2, 1, 1, true},
                                           TensorLayout{4, 1, 1, true}, TensorLayout{2, 2, 1, true},
                                           TensorLayout{2, 1, 2, true}));

/// The most that a rank allocates in a step in which all forwards come before all backwards.
template <class Net>
double peak_of_a_step(int degree, const DecoderSizes& sizes, int microbatches,
                      const std::string& optimize, const std::function<void(Net&)>& mark) {
  double peak = 0;
  std::mutex mutex;
  train_decoder<Net>({degree, 1, 1, true}, sizes, microbatches, "simple", optimize, mark,
                     [&](ModelOf<Net>& model, const auto& run) {
                       run();  // captures
                       run();  // gradients stay in place from here on
                       const graph::Allocations allocations;
                       run();
                       const std::lock_guard lock(mutex);
                       if (tp_rank() == 0) peak = static_cast<double>(allocations.peak());
                       (void)model;
                     });
  return peak;
}

/// The bytes that a layer keeps of a microbatch from its forward to its backward, measured as the
/// increase of the peak by one more microbatch, and of that increase by one more layer.
template <class Net>
double kept_by_a_layer(int degree, const DecoderSizes& sizes, const std::string& optimize,
                       const std::function<void(Net&)>& mark) {
  DecoderSizes small = sizes, large = sizes;
  small.layers = 1;
  large.layers = 3;
  const auto of_microbatch = [&](const DecoderSizes& of) {
    return (peak_of_a_step<Net>(degree, of, 6, optimize, mark) -
            peak_of_a_step<Net>(degree, of, 2, optimize, mark)) /
           4;
  };
  return (of_microbatch(large) - of_microbatch(small)) / 2;
}

void expect_within_a_tenth(int degree, double measured, double expected) {
  std::cout << degree << " ranks: a layer keeps " << measured << " B of a microbatch, by formula "
            << expected << std::endl;
  EXPECT_NEAR(measured / expected, 1, 0.1);
}

/// Queries, keys and values, the result of attention, and hidden channels before and after their
/// activation are divided; both layer norms' inputs and outputs are whole, or divided, too.
double kept_by_formula(int degree, const DecoderSizes& sizes, bool in_parts) {
  const auto tokens = static_cast<double>(sizes.samples * sizes.length);
  const auto width = static_cast<double>(sizes.width), heads = static_cast<double>(sizes.heads);
  const double statistics = 4;  // bytes of norms
  const double between = (4 * width + statistics) / (in_parts ? degree : 1);
  // And a sum for each head.
  return sizeof(float) * tokens * (between + ((3 + 1 + 4 + 4) * width + heads) / degree);
}

constexpr DecoderSizes kMeasured{/*layers=*/1, /*samples=*/4, /*length=*/32, /*width=*/64};

TEST(TensorParallelActivations, AreThoseOfTheFormulaWithinATenth) {
  for (const std::string optimize : {"speed", "memory"}) {
    for (const int degree : {1, 2, 4}) {
      SCOPED_TRACE(optimize);
      expect_within_a_tenth(degree, kept_by_a_layer<Decoder>(degree, kMeasured, optimize, mark_all),
                            kept_by_formula(degree, kMeasured, optimize == "memory"));
    }
  }
}

/// Everything is divided, along the sequence, the heads or the hidden channels.
TEST(TensorParallelActivations, OfSlicedStatesAreThoseOfTheFormulaWithinATenth) {
  for (const int degree : {1, 2, 4}) {
    expect_within_a_tenth(degree,
                          kept_by_a_layer<ModuleDecoder>(degree, kMeasured, "memory", mark_nothing),
                          kept_by_formula(degree, kMeasured, /*in_parts=*/true));
  }
}

/// The elements that a rank gives to its group in one step, the second one.
struct Sent {
  int64_t elements = 0;
  std::map<std::string, int64_t> calls;
};

template <class Net>
Sent sent_in_a_step(int degree, const DecoderSizes& sizes, int microbatches,
                    const std::string& optimize, const std::function<void(Net&)>& mark) {
  std::vector<Sent> by_rank(degree);
  train_decoder<Net>({degree, 1, 1, true}, sizes, microbatches, "interleaved", optimize, mark,
                     [&](ModelOf<Net>& model, const auto& run) {
                       run();
                       const auto group = std::make_shared<CountingGroup>(nn::tensor_group());
                       const nn::TensorGroupScope scope(group);
                       run();
                       auto& sent = by_rank[tp_rank()];
                       sent.elements = group->elements();
                       for (const auto& call : group->calls()) ++sent.calls[call];
                       (void)model;
                     });
  for (const auto& sent : by_rank) {
    EXPECT_EQ(sent.elements, by_rank[0].elements);
    EXPECT_EQ(sent.calls, by_rank[0].calls);
  }
  return by_rank[0];
}

/// Two all-reduces of [samples, length, width] forward and two backward in every layer, and nothing
/// else.
TEST(TensorParallelTraffic, IsFourSumsOfALayerAndMicrobatch) {
  DecoderSizes sizes;
  const int64_t states = sizes.samples * sizes.length * sizes.width;
  for (const int degree : {2, 4}) {
    for (const int microbatches : {1, 3}) {
      for (const int layers : {1, 3}) {
        SCOPED_TRACE(::testing::Message() << degree << " ranks, " << microbatches
                                          << " microbatches, " << layers << " layers");
        sizes.layers = layers;
        const int64_t sums = 4 * layers * microbatches;
        const auto sent =
            sent_in_a_step<Decoder>(degree, sizes, microbatches, "speed", mark_blocks);
        EXPECT_EQ(sent.calls, (std::map<std::string, int64_t>{{"all_reduce", sums}}));
        EXPECT_EQ(sent.elements, sums * states);
      }
    }
  }
}

/// Sliced states cause these messages in every layer and microbatch: forward, two gathers and two
/// reductions of [samples, length, width]; backward their reverse and the two gathers again; and
/// the sums of the gradients of two norms and of two biases. Besides these: the sum of embeddings
/// and the gather of its gradient; the last norm; the head's gather, forward and backward, and its
/// reduction; and three numbers of each token for the loss.
TEST(TensorParallelTraffic, OfSlicedStatesIsThatOfTheFormula) {
  DecoderSizes sizes;
  const int64_t tokens = sizes.samples * sizes.length, states = tokens * sizes.width;
  for (const int degree : {2, 4}) {
    for (const int microbatches : {1, 3}) {
      for (const int layers : {1, 3}) {
        SCOPED_TRACE(::testing::Message() << degree << " ranks, " << microbatches
                                          << " microbatches, " << layers << " layers");
        sizes.layers = layers;
        const auto sent =
            sent_in_a_step<ModuleDecoder>(degree, sizes, microbatches, "memory", mark_nothing);
        const int64_t gathers = 6 * layers + 3, reductions = 4 * layers + 1;
        const int64_t sums = 6 * layers + 1 + 2 + 2;  // words, last norm, loss
        EXPECT_EQ(sent.calls,
                  (std::map<std::string, int64_t>{{"all_gather", microbatches * gathers},
                                                  {"reduce_scatter", microbatches * reductions},
                                                  {"all_reduce", microbatches * sums}}));
        EXPECT_EQ(sent.elements,
                  microbatches * (gathers * states / degree + reductions * states + states +
                                  (6 * layers + 2) * sizes.width + 3 * tokens));
      }
    }
  }
}

/// Messages are parts of [samples, length, width]: forward two sums to parts and two gathers in
/// every layer; backward the same, and both gathers again; and sums of the gradients of norms'
/// parameters and of biases that are added to parts. The difference is that of a further layer: at
/// the ends of the stream there is more.
TEST(TensorParallelTraffic, IsOfPartsBetweenDividedLayers) {
  DecoderSizes one{/*layers=*/1, /*samples=*/4};
  DecoderSizes three = one;
  three.layers = 3;
  const int64_t states = one.samples * one.length * one.width;
  for (const int degree : {2, 4}) {
    for (const int microbatches : {1, 3}) {
      SCOPED_TRACE(::testing::Message() << degree << " ranks, " << microbatches << " microbatches");
      const auto less = sent_in_a_step<Decoder>(degree, one, microbatches, "memory", mark_blocks);
      const auto more = sent_in_a_step<Decoder>(degree, three, microbatches, "memory", mark_blocks);
      const int64_t layers = 2 * microbatches;
      std::map<std::string, int64_t> calls;
      for (const auto& [name, count] : more.calls) {
        const auto before = less.calls.find(name);
        const int64_t further = count - (before == less.calls.end() ? 0 : before->second);
        if (further != 0) calls[name] = further;
      }
      EXPECT_EQ(calls, (std::map<std::string, int64_t>{{"reduce_scatter", 4 * layers},
                                                       {"all_gather", 6 * layers},
                                                       {"all_reduce", 6 * layers}}));
      // A rank gives all of it to a sum to parts, and its part to a gather.
      const int64_t of_layer = 4 * states + 6 * states / degree + 6 * one.width;
      EXPECT_EQ(more.elements - less.elements, layers * of_layer);
    }
  }
}

torch::Tensor gate(const torch::Tensor& x, const torch::Tensor& y) { return x * torch::sigmoid(y); }

/// Layers around an operator that the rewrite knows by its rule, or not.
struct OwnOperator : torch::nn::Module {
  explicit OwnOperator(const char* name)
      : gate_of(c10::Dispatcher::singleton()
                    .findSchemaOrThrow(name, "")
                    .typed<torch::Tensor(const torch::Tensor&, const torch::Tensor&)>()) {
    left = register_module("left", torch::nn::Linear(8, 32));
    right = register_module("right", torch::nn::Linear(8, 32));
    down = register_module("down", torch::nn::Linear(32, 8));
  }

  torch::Tensor loss(torch::Tensor x, torch::Tensor y) {
    return 4 * torch::mse_loss(x + down(gate_of.call(left(x), right(x))), y);
  }

  static Tensors step_batch(int number) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(100 + number);
    const auto draw = [&] {
      return torch::randn({kMicrobatches * kSamples, 8}, generator, torch::kDouble);
    };
    const auto x = draw();
    return {x, draw()};
  }

  c10::TypedOperatorHandle<torch::Tensor(const torch::Tensor&, const torch::Tensor&)> gate_of;
  torch::nn::Linear left{nullptr}, right{nullptr}, down{nullptr};
};

struct WithRule : OwnOperator {
  WithRule() : OwnOperator("tensor_parallel_test::gate") {}
};

struct WithoutRule : OwnOperator {
  WithoutRule() : OwnOperator("tensor_parallel_test::unknown_gate") {}
};

/// Trains as one process does; returns the group's calls in one step.
template <class Net>
std::set<std::string> check_own_operator() {
  const TensorLayout layout{2, 1, 1, true};
  const auto mark = [](Net& net) { set_tensor_parallelism(net); };
  const auto got = run_on_ranks<Net>(layout, mark);
  expect_close(got, run_plain<Net>());
  expect_close(run_on_ranks<Net>({4, 2}, mark), run_plain<Net>());
  for (const char* name : {"left.weight", "right.weight", "down.weight"}) {
    EXPECT_EQ(got.divided.count(name), 1u) << name;
  }
  std::set<std::string> calls;
  run_as_threads(2, config_of(layout).optimize("speed"), [&] {
    const auto net = make_model<Net>(5);
    mark(*net);
    ModelOf<Net> model(net);
    auto train = step([&](torch::Tensor x, torch::Tensor y) {
      auto loss = net->loss(x, y);
      model->backward(loss);
      return loss;
    });
    const auto batch = Net::step_batch(0);
    train(batch[0], batch[1]);
    const auto group = std::make_shared<CountingGroup>(nn::tensor_group());
    const nn::TensorGroupScope scope(group);
    train(batch[0], batch[1]);
    if (tp_rank() == 0) calls.insert(group->calls().begin(), group->calls().end());
  });
  return calls;
}

TEST(TensorParallelRegister, DividesTheUsersOperator) {
  tp_register("tensor_parallel_test::gate", TpRule::elementwise());
  EXPECT_EQ(check_own_operator<WithRule>(), std::set<std::string>{"all_reduce"});
  // It gets whole arguments, which are gathered for it.
  EXPECT_EQ(check_own_operator<WithoutRule>().count("all_gather"), 1u);
}

TEST(TensorParallelRegister, TakesARuleOfTheUser) {
  std::atomic<int> seen{0};
  tp_register("tensor_parallel_test::gate",
              TpRule([&](const TpCall& call) -> std::optional<TpTreatment> {
                EXPECT_EQ(call.name(), "tensor_parallel_test::gate");
                EXPECT_EQ(call.num_tensors(), 2);
                EXPECT_EQ(call.num_results(), 1);
                EXPECT_EQ(call.position("y"), 1);
                EXPECT_TRUE(call.constant("z").isNone());
                EXPECT_EQ(call.sizes(0), call.result_sizes());
                ++seen;
                if (!call.layout(0).is_divided() || call.layout(0) != call.layout(1)) {
                  return std::nullopt;
                }
                return TpTreatment{{call.layout(0), call.layout(1)}, {call.layout(0)}, {}};
              }));
  EXPECT_EQ(check_own_operator<WithRule>(), std::set<std::string>{"all_reduce"});
  EXPECT_GT(seen, 0);
}

TEST(TensorParallelRegister, RefusesRulesThatDoNotFitTheOperator) {
  const auto error_with = [](const TpTreatment& treatment) {
    tp_register("tensor_parallel_test::gate", TpRule([treatment](const TpCall&) {
                  return std::optional<TpTreatment>(treatment);
                }));
    return error_of<UsageError>([] { check_own_operator<WithRule>(); });
  };
  const nn::Layout whole;
  expect_has(
      error_with({{whole}, {whole}, {}}),
      {"the rule registered for operator tensor_parallel_test::gate says how 1 arguments and "
       "1 results lie. Expected 2 and 1: one layout for each tensor"});
  expect_has(
      error_with({{whole, whole}, {whole}, {{"size", 1}}}),
      {"the rule registered for operator tensor_parallel_test::gate names an argument \"size\", "
       "which the operator does not have. Name one of its schema"});
}

}  // namespace

TORCH_LIBRARY(tensor_parallel_test, library) {
  library.def("gate(Tensor x, Tensor y) -> Tensor", &gate);
  library.def("unknown_gate(Tensor x, Tensor y) -> Tensor", &gate);
}

}  // namespace smp
