// SPDX-License-Identifier: Apache-2.0
#include "graph/deferred.h"

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/check.h"
#include "graph/default_dtype.h"
#include "graph/recording.h"
#include "tests/error_of.h"

namespace smp::graph {
namespace {

namespace nn = torch::nn;
using smp::testing::error_of;
using smp::testing::expect_has;
using Module = std::shared_ptr<nn::Module>;
using Make = std::function<Module()>;
using Dict = torch::OrderedDict<std::string, torch::Tensor>;

constexpr uint64_t kSeed = 7;

/// Parameters, buffers and plain tensors of a test's module.
struct Custom : nn::Module {
  explicit Custom(const std::function<void(Custom&)>& construct) { construct(*this); }

  torch::Tensor add(const std::string& name, torch::Tensor tensor) {
    return register_parameter(name, std::move(tensor));
  }
};

Make custom(const std::function<void(Custom&)>& construct) {
  return [construct] { return std::make_shared<Custom>(construct); };
}

Dict tensors_of(const nn::Module& module) {
  Dict dict = module.named_parameters();
  for (const auto& item : module.named_buffers()) dict.insert(item.key(), item.value());
  return dict;
}

void expect_same(const Dict& got, const Dict& expected) {
  ASSERT_EQ(got.keys(), expected.keys());
  for (const auto& item : expected) {
    const torch::Tensor& tensor = got[item.key()];
    ASSERT_EQ(tensor.sizes(), item.value().sizes()) << item.key();
    EXPECT_EQ(tensor.strides(), item.value().strides()) << item.key();
    EXPECT_EQ(tensor.requires_grad(), item.value().requires_grad()) << item.key();
    EXPECT_EQ(tensor.is_leaf(), item.value().is_leaf()) << item.key();
    EXPECT_EQ(tensor.scalar_type(), item.value().scalar_type()) << item.key();
    // Bit for bit, so that NaNs of uninitialised memory would not hide a difference.
    EXPECT_TRUE(torch::equal(value_of(tensor).detach(), item.value().detach())) << item.key();
  }
}

/// A module made plainly, the generator's next numbers, and the same under a scope.
struct Pair {
  Module plain, deferred;
  torch::Tensor drawn_after_plain, drawn_after;
};

Pair make_both(const Make& make, const DeferredOptions& options) {
  at::set_num_threads(1);
  Pair pair;
  torch::manual_seed(kSeed);
  torch::randn({3});  // begins in the middle of the stream, with half a pair of normal numbers
  pair.plain = make();
  pair.drawn_after_plain = torch::randn({5});
  torch::manual_seed(kSeed);
  torch::randn({3});
  {
    const DeferredScope scope(options);
    pair.deferred = make();
  }
  pair.drawn_after = torch::randn({5});
  return pair;
}

struct Case {
  std::string name;
  Make make;
  /// 0: nothing is made at once.
  int64_t eager_bytes = 0;
};

std::ostream& operator<<(std::ostream& out, const Case& test) { return out << test.name; }

class Construction : public ::testing::TestWithParam<Case> {};

TEST_P(Construction, EqualsPlainBitForBit) {
  const Pair pair =
      make_both(GetParam().make, DeferredOptions().eager_bytes(GetParam().eager_bytes));
  EXPECT_TRUE(torch::equal(pair.drawn_after, pair.drawn_after_plain));
  const Dict tensors = tensors_of(*pair.deferred);
  size_t deferred = 0;
  for (const auto& item : tensors) {
    if (!is_deferred(item.value())) continue;
    ++deferred;
    EXPECT_EQ(item.value().storage().nbytes(), 0u) << item.key();
  }
  EXPECT_GT(deferred, 0u);
  // Computed for the occasion, nothing is kept.
  expect_same(tensors, tensors_of(*pair.plain));
  // The last first: no tensor depends on another one's memory.
  const auto values = tensors.values();
  for (size_t i = values.size(); i-- > 0;) {
    if (is_deferred(values[i])) recording_of(values[i]).first->materialize(values[i]);
    EXPECT_FALSE(is_deferred(values[i]));
  }
  expect_same(tensors, tensors_of(*pair.plain));
  // Making tensors left the generator where it was.
  const auto drawn = torch::randn({5});
  torch::manual_seed(kSeed);
  torch::randn({3});
  GetParam().make();
  torch::randn({5});
  EXPECT_TRUE(torch::equal(drawn, torch::randn({5})));
}

/// A table of sines and cosines, as transformers have.
torch::Tensor sinusoidal(int64_t length, int64_t width) {
  auto table = torch::zeros({length, width});
  const auto position = torch::arange(length, torch::kFloat).unsqueeze(1);
  const auto divisor =
      torch::exp(torch::arange(0, width, 2, torch::kFloat) * (-std::log(10000.0) / width));
  table.index_put_({torch::indexing::Slice(), torch::indexing::Slice(0, torch::indexing::None, 2)},
                   torch::sin(position * divisor));
  table.slice(1, 1, width, 2).copy_(torch::cos(position * divisor));
  return table;
}

std::vector<Case> cases() {
  std::vector<Case> all = {
      {"Linear", [] { return nn::Linear(5, 7).ptr(); }},
      {"Convolution", [] { return nn::Conv2d(nn::Conv2dOptions(3, 5, 3)).ptr(); }},
      {"Transposed", [] { return nn::ConvTranspose2d(nn::ConvTranspose2dOptions(3, 5, 3)).ptr(); }},
      {"BatchNorm", [] { return nn::BatchNorm2d(6).ptr(); }},
      {"LayerNorm", [] { return nn::LayerNorm(nn::LayerNormOptions({6})).ptr(); }},
      {"Embedding", [] { return nn::Embedding(nn::EmbeddingOptions(9, 4).padding_idx(2)).ptr(); }},
      {"Lstm",
       [] { return nn::LSTM(nn::LSTMOptions(4, 6).num_layers(2).bidirectional(true)).ptr(); }},
      {"Gru", [] { return nn::GRU(nn::GRUOptions(4, 6)).ptr(); }},
      {"Attention", [] { return nn::MultiheadAttention(8, 2).ptr(); }},
      // Clones its layer: reset() of each copy, then set_data().
      {"TransformerEncoder",
       [] {
         return nn::TransformerEncoder(
                    nn::TransformerEncoderOptions(nn::TransformerEncoderLayerOptions(8, 2), 3))
             .ptr();
       }},
      {"ClonedModule", [] { return nn::Sequential(nn::Linear(5, 7), nn::Linear(7, 2))->clone(); }},
      {"OtherType",
       [] {
         nn::Linear linear(5, 7);
         linear->to(torch::kBFloat16);
         return linear.ptr();
       }},
  };
  const auto add = [&](const std::string& name, const std::function<void(Custom&)>& construct,
                       int64_t eager_bytes = 0) {
    all.push_back({name, custom(construct), eager_bytes});
  };
  add("Initialisers", [](Custom& module) {
    namespace init = nn::init;
    init::orthogonal_(module.add("tall", torch::empty({9, 4})), 0.5);
    init::orthogonal_(module.add("wide", torch::empty({4, 9})));
    init::kaiming_normal_(module.add("kaiming", torch::empty({4, 9})));
    init::xavier_uniform_(module.add("xavier", torch::empty({4, 9})));
    init::sparse_(module.add("sparse", torch::empty({6, 5})), 0.5);
    init::eye_(module.add("eye", torch::empty({4, 5})));
    init::dirac_(module.add("dirac", torch::empty({4, 5, 3})));
    init::constant_(module.add("constant", torch::empty({4})), 3);
  });
  add("LoopsWithoutGradients", [](Custom& module) {
    const torch::NoGradGuard no_grad;
    for (int i = 0; i < 3; ++i) {
      auto weight = module.add("weight" + std::to_string(i), torch::empty({6, 6}));
      weight.normal_(0, 0.02).mul_(1.0 / (i + 1)).clamp_(-0.03, 0.03);
      weight[i].fill_(0.5);
      weight.diagonal().add_(torch::rand({6}));
      weight.t().narrow(0, 1, 2).zero_();
    }
  });
  add("Results", [](Custom& module) {
    module.add("product", torch::randn({4, 6}) * 0.1 + torch::eye(4, 6));
    module.add("permuted", torch::randn({4, 6}).index({torch::randperm(4)}).t());
    module.register_buffer("mask", torch::ones({8, 8}).tril().to(torch::kBool));
    module.register_buffer("table", sinusoidal(12, 6));
  });
  add("SharedStorage", [](Custom& module) {
    const auto whole = torch::randn({6, 4});
    const auto halves = whole.chunk(2);
    module.add("first", halves[0]);
    module.add("second", halves[1]);
    module.add("tied", halves[0]);
    module.add("alias", whole.data());
  });
  add("TransposedInPlace", [](Custom& module) {
    auto weight = torch::randn({4, 6});
    weight.t_();
    weight.mul_(torch::arange(6, torch::kFloat).unsqueeze(1));
    module.add("weight", weight.contiguous());
    module.add("strided", weight);
  });
  add("HostReads", [](Custom& module) {
    // Rates of stochastic depth, a norm, and a rejection loop.
    const auto rates = torch::linspace(0, 0.5, 4);
    for (int i = 0; i < 4; ++i) {
      module.add("scaled" + std::to_string(i), torch::rand({5, 5}) * rates[i].item<float>());
    }
    auto weight = torch::randn({5, 5});
    while (weight.abs().max().item<float>() > 1.8f) weight.normal_();
    module.add("rejected", weight / weight.norm().item<float>());
    module.add("chosen", weight.masked_select(weight > 0));
  });
  add(
      "HostWrites",
      [](Custom& module) {
        auto table = torch::zeros({4, 5});
        auto accessor = table.accessor<float, 2>();
        for (int i = 0; i < 4; ++i) accessor[i][i] = static_cast<float>(i);
        const auto list = torch::tensor({1.5, 2.5, 3.5});
        module.add("big", torch::randn({3, 5000}) * list.unsqueeze(1));
        module.add("expanded", table.expand({1000, 4, 5}).clone());
        module.add("small", torch::rand({7}));
        module.register_buffer("table", table);
        table.add_(1);  // after the use
      },
      1024);
  add("MeasuresAForwardPass", [](Custom& module) {
    nn::Conv2d conv(nn::Conv2dOptions(1, 3, 3));
    nn::BatchNorm2d norm(3);
    nn::Dropout drop(0.5);
    module.register_module("conv", conv);
    module.register_module("norm", norm);
    const auto features = drop(torch::relu(norm(conv(torch::ones({2, 1, 9, 9}))))).flatten(1);
    module.register_module("head", nn::Linear(features.size(1), 2));
  });
  add("OwnGenerator", [](Custom& module) {
    auto generator = at::detail::createCPUGenerator(3);
    for (int i = 0; i < 2; ++i) {
      module.add("weight" + std::to_string(i), torch::empty({20}).normal_(0, 1, generator));
    }
  });
  add("OwnGeneratorWithoutMetaKernel", [](Custom& module) {
    auto generator = at::detail::createCPUGenerator(3);
    for (int i = 0; i < 2; ++i) {
      module.register_buffer("order" + std::to_string(i), torch::randperm(20, generator));
    }
  });
  add(
      "NumbersThatBecameTensors",
      [](Custom& module) {
        // Autograd makes such tensors of numbers: they do not decide the type of the result.
        const auto number = at::scalar_tensor(2.5, torch::kDouble);
        number.unsafeGetTensorImpl()->set_wrapped_number(true);
        module.add("product", torch::arange(6).mul(number));
        module.add("sum", torch::rand({}).add(number));
      },
      8);
  add("Reseeds", [](Custom& module) {
    module.add("first", torch::randn({20}));
    torch::manual_seed(99);
    module.add("second", torch::randn({20}));
  });
  add("OddNumbersOfNormals", [](Custom& module) {
    for (int64_t size : {1, 3, 15, 16, 17, 33}) {
      module.add("weight" + std::to_string(size), torch::randn({size}));
      module.add("double" + std::to_string(size), torch::randn({size}, torch::kDouble));
    }
  });
  const auto outside = std::make_shared<torch::Tensor>(torch::arange(12.0).view({3, 4}));
  add("TensorsFromOutside", [outside](Custom& module) {
    module.add("copy", torch::empty({3, 4})).data().copy_(*outside);
    module.add("sum", outside->add(1));
  });
  return all;
}

INSTANTIATE_TEST_SUITE_P(Modules, Construction, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

// ---------------------------------------------------------------------------------------------

class Deferred : public ::testing::Test {
 protected:
  void SetUp() override { at::set_num_threads(1); }

  static torch::Tensor make(const std::function<torch::Tensor()>& function,
                            const DeferredOptions& options = DeferredOptions().eager_bytes(0)) {
    const DeferredScope scope(options);
    return function();
  }
};

TEST_F(Deferred, KeepsIdentityWhenItGetsData) {
  nn::Linear linear{nullptr};
  torch::Tensor before;
  {
    const DeferredScope scope(DeferredOptions().eager_bytes(0));
    linear = nn::Linear(5, 7);
    before = linear->weight;
  }
  const torch::Tensor view = linear->weight.data();
  recording_of(linear->weight).first->materialize(linear->weight);
  EXPECT_TRUE(linear->weight.is_same(before));
  EXPECT_TRUE(torch::equal(view, before.detach()));
  linear->weight.sum().backward();
  EXPECT_TRUE(torch::equal(before.grad(), torch::ones({7, 5})));
}

TEST_F(Deferred, KeepsTheDefaultTypeOfTheScope) {
  const auto construct = [] {
    torch::manual_seed(kSeed);
    const auto frequencies = 1.0 / torch::pow(100.0, torch::arange(0, 8, 2) / 8);
    return std::vector<torch::Tensor>{torch::randn({5}),
                                      torch::full({4}, 0.1),
                                      torch::arange(4) * 0.3,
                                      torch::linspace(0, 1, 7),
                                      torch::ones({3}, torch::kDouble),
                                      frequencies};
  };
  std::vector<torch::Tensor> expected, got;
  {
    const DefaultDtypeScope dtype(torch::kBFloat16);
    expected = construct();
    const DeferredScope scope(DeferredOptions().eager_bytes(0));
    got = construct();
  }
  ASSERT_EQ(torch::empty({1}).scalar_type(), torch::kFloat);
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_TRUE(is_deferred(got[i])) << i;
    ASSERT_EQ(got[i].scalar_type(), expected[i].scalar_type()) << i;
    EXPECT_TRUE(torch::equal(value_of(got[i]), expected[i])) << i;
  }
  EXPECT_EQ(expected.back().scalar_type(), torch::kBFloat16);
  EXPECT_EQ(torch::empty({1}).scalar_type(), torch::kFloat);
}

TEST_F(Deferred, ScopesInARowShareTensors) {
  torch::manual_seed(kSeed);
  const auto plain = torch::randn({30});
  const auto expected = plain + torch::randn({30});
  torch::manual_seed(kSeed);
  const auto first = make([] { return torch::randn({30}); });
  const auto second = make([&] { return first + torch::randn({30}); });
  EXPECT_TRUE(torch::equal(value_of(second), expected));
}

TEST_F(Deferred, OtherThreadsAreLeftAlone) {
  const DeferredScope scope(DeferredOptions().eager_bytes(0));
  torch::Tensor other;
  std::thread([&] { other = torch::ones({4}); }).join();
  EXPECT_FALSE(is_deferred(other));
  EXPECT_TRUE(is_deferred(torch::ones({4})));
}

TEST_F(Deferred, DataComesFromASourceInstead) {
  const auto tensor = make([] { return torch::randn({2, 3}); });
  const auto recording = recording_of(tensor).first;
  recording->set_source(tensor, [] { return torch::ones({2, 3}); });
  recording->set_source(tensor, [] { return torch::full({2, 3}, 4.0f); });
  recording->set_source(tensor_on(tensor.storage(), TensorMeta::of(torch::empty({3})), 3),
                        [] { return torch::zeros({3}); });
  recording->materialize(tensor);
  EXPECT_TRUE(torch::equal(tensor, torch::tensor({{4.f, 4.f, 4.f}, {0.f, 0.f, 0.f}})));
}

TEST_F(Deferred, FastModeKeysByName) {
  const auto options = DeferredOptions().eager_bytes(0).fast(true);
  const auto values = [&](bool with_extra, uint64_t seed) {
    torch::manual_seed(kSeed);
    torch::Tensor extra, a, b, copy;
    {
      const DeferredScope scope(options);
      if (with_extra) extra = torch::randn({50});
      a = torch::randn({50});
      b = torch::randn({50});
      copy = a.clone();
    }
    const auto drawn = torch::rand({3});
    torch::manual_seed(kSeed);
    EXPECT_TRUE(torch::equal(drawn, torch::rand({3}))) << "fast mode draws nothing";
    std::vector<std::pair<std::string, at::Tensor>> named = {{"a", a}, {"b", b}, {"copy", copy}};
    recording_of(a).first->assign_seeds(named, seed);
    return std::vector<torch::Tensor>{value_of(a), value_of(b), value_of(copy)};
  };
  const auto first = values(false, 1), more = values(true, 1), other = values(false, 2);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(torch::equal(first[i], more[i])) << i;
  EXPECT_FALSE(torch::equal(first[0], first[1]));
  EXPECT_TRUE(torch::equal(first[0], first[2])) << "a copy stays a copy";
  EXPECT_FALSE(torch::equal(first[0], other[0]));
}

TEST_F(Deferred, SaysWhatIsInTheWay) {
  const auto tensor = make([] { return torch::randn({2, 3}); });
  const std::string no_data = "made under delayed parameter initialization was read or written";
  expect_has(error_of<c10::Error>([&] { tensor.sum(); }), no_data);
  expect_has(error_of<c10::Error>([&] { tensor.clone().normal_(); }), no_data);
  expect_has(error_of<c10::Error>([&] { tensor.accessor<float, 2>(); }), no_data);
  expect_has(error_of<c10::Error>([] {
               make([] { return torch::tensor(std::vector<double>{1, 2}); });
             }),
             no_data);
  expect_has(error_of<UsageError>([] { make([] { return torch::randn({4}).resize_({8}); }); }),
             "operator aten::resize_ replaces the storage of a tensor, which delayed parameter "
             "initialization cannot record. Make a new tensor instead");
  expect_has(error_of<UsageError>([] { make([] { return torch::randn({4}).to(torch::kMeta); }); }),
             "operator aten::to moves a tensor without data to another device");
  torch::Tensor known = torch::empty({4});
  expect_has(error_of<UsageError>([&] {
               make([&] {
                 auto indices = torch::empty({4}, torch::kLong);
                 torch::sort_out(known, indices, torch::randn({4}));
                 return indices;
               });
             }),
             "operator aten::sort writes a tensor that has data and one that has not");
  expect_has(error_of<UsageError>(
                 [] { make([] { return torch::randn({4}, torch::kComplexFloat).conj(); }); }),
             "operator aten::_conj makes a tensor that is not dense, or a lazy conjugate");
  expect_has(error_of<UsageError>([] { make([] {
                                         return torch::randn({4, 4}).to_sparse();
                                       }); }),
             "operator aten::to_sparse makes a tensor that is not dense");
  const auto sparse = torch::eye(4).to_sparse();
  expect_has(
      error_of<UsageError>([&] { make([&] {
                                   return torch::mm(sparse, torch::randn({4, 4}));
                                 }); }),
      "operator aten::mm uses a tensor that is not dense, or a lazy conjugate, together with "
      "one without data");
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const std::string autocast = error_of<UsageError>([] { make([] { return torch::randn({4}); }); });
  at::autocast::set_autocast_enabled(at::kCPU, false);
  expect_has(autocast, "operator aten::randn was called with autocast on");
  const auto outside = torch::ones({100});
  const auto sum = make([&] { return outside + 1; });
  outside.mul_(2);
  expect_has(error_of<UsageError>([&] { value_of(sum); }),
             "a tensor of shape [100] was used to initialise a parameter");
  const auto fast =
      make([] { return torch::randn({4}); }, DeferredOptions().eager_bytes(0).fast(true));
  expect_has(error_of<UsageError>([&] { value_of(fast); }), "Leave out fast(true)");
}

}  // namespace
}  // namespace smp::graph
