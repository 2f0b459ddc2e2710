// SPDX-License-Identifier: Apache-2.0
// Functions of libtorch whose shapes, or checks, depend on data: packed sequences, least squares
// and reductions of segments.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <tuple>
#include <vector>

#include "tests/smp/oracle.h"
#include "tests/smp/parity.h"

namespace smp::testing {
namespace {

constexpr int64_t kFeatures = 6, kMostSteps = 5;

torch::nn::Linear features_to(int64_t out = kFeatures) { return torch::nn::Linear(kFeatures, out); }

const std::vector<parity::Layout> kPlainLayouts = {
    {1, 1, 2, "simple"}, {2, 1, 3, "interleaved"}, {3, 1, 4, "zb_h1"}, {2, 2, 2, "interleaved"}};

template <class Net>
void expect_plain_bits() {
  torch::set_num_threads(1);
  for (const parity::Layout& layout : kPlainLayouts) {
    SCOPED_TRACE(::testing::Message() << layout);
    parity::check<Net, torch::optim::SGD>(
        layout, [] { return Net(); }, torch::optim::SGDOptions(0.1));
  }
}

/// The text of the error of the first step.
template <class Net>
std::string text_of_refusal(Net net) {
  return error_of_run<CaptureError>(1, stages(1), [&] {
    DistributedModel<Net> model(net);
    const auto batch = Net::ContainedType::batch(4);
    step([&](torch::Tensor x, torch::Tensor y) { model->backward(net->loss(x, y)); })(batch[0],
                                                                                      batch[1]);
  });
}

/// Runs a recurrent layer over sequences of any order and length. A leaf runs on zeros, too, and
/// libtorch packs no sequence without an element.
template <class Recurrent, class Options>
struct PackedImpl : torch::nn::Module {
  PackedImpl() {
    layer = this->register_module(
        "layer",
        Recurrent(Options(kFeatures, kFeatures).num_layers(2).batch_first(true).dropout(0.3)));
  }
  torch::Tensor forward(torch::Tensor x, torch::Tensor lengths) {
    namespace rnn = torch::nn::utils::rnn;
    const auto packed = rnn::pack_padded_sequence(x, lengths.clamp_min(1), /*batch_first=*/true,
                                                  /*enforce_sorted=*/false);
    const auto out = std::get<0>(layer->forward_with_packed_input(packed));
    return std::get<0>(rnn::pad_packed_sequence(out, /*batch_first=*/true, 0.0, x.size(1)));
  }
  Recurrent layer{nullptr};
};

template <class Recurrent, class Options>
struct TaggerImpl : torch::nn::Module {
  using Packed = torch::nn::ModuleHolder<PackedImpl<Recurrent, Options>>;

  explicit TaggerImpl(bool is_leaf = true) : opaque(is_leaf) {
    in = register_module("in", features_to());
    packed = this->register_module("packed", Packed());
    out = register_module("out", features_to(1));
  }
  torch::Tensor loss(torch::Tensor x, torch::Tensor lengths) {
    x = torch::tanh(in(x));
    x = opaque ? leaf(packed)(x, lengths) : packed(x, lengths);
    const auto mask = torch::arange(kMostSteps) < lengths.unsqueeze(1);
    return (out(x).squeeze(2).square() * mask).sum() / mask.sum();
  }
  static Tensors batch(int64_t size) {
    return {torch::randn({size, kMostSteps, kFeatures}),
            torch::randint(1, kMostSteps + 1, {size}, torch::kLong)};
  }
  bool opaque;
  torch::nn::Linear in{nullptr}, out{nullptr};
  Packed packed{nullptr};
};

using LstmTagger = torch::nn::ModuleHolder<TaggerImpl<torch::nn::LSTM, torch::nn::LSTMOptions>>;
using GruTagger = torch::nn::ModuleHolder<TaggerImpl<torch::nn::GRU, torch::nn::GRUOptions>>;

TEST(PackedSequences, OfALeafHaveTheBitsOfOneProcess) {
  expect_plain_bits<LstmTagger>();
  expect_plain_bits<GruTagger>();
}

TEST(PackedSequences, AreRefusedElsewhere) {
  const auto expect_refused = [](const std::string& text) {
    expect_has(text, {"step function \"step 0\", in or after module \"in\": operator aten::item "
                      "reads the data of a tensor on the host",
                      "make the module that needs the value a leaf: smp::leaf"});
  };
  expect_refused(text_of_refusal(LstmTagger(/*is_leaf=*/false)));
  expect_refused(text_of_refusal(GruTagger(/*is_leaf=*/false)));
}

/// Neither cut nor declared whole: as an argument it does not compile.
TEST(PackedSequences, AreNoArguments) {
  static_assert(detail::content_of<torch::nn::utils::rnn::PackedSequence>().unknown);
}

/// The coefficients by which features fit targets best. libtorch's default driver gives other bits
/// from call to call.
struct FitImpl : torch::nn::Module {
  FitImpl() { scale = register_parameter("scale", torch::rand({kFeatures})); }
  torch::Tensor forward(torch::Tensor features, torch::Tensor targets) {
    return std::get<0>(torch::linalg_lstsq(features * scale, targets, std::nullopt, "gelsd"))
        .clone();
  }
  torch::Tensor scale;
};
TORCH_MODULE(Fit);

struct FittedImpl : torch::nn::Module {
  explicit FittedImpl(bool is_leaf = true) : opaque(is_leaf) {
    in = register_module("in", features_to());
    fit = register_module("fit", Fit());
    out = register_module("out", features_to(1));
  }
  torch::Tensor loss(torch::Tensor x, torch::Tensor y) {
    x = torch::tanh(in(x));
    const auto coefficients = opaque ? leaf(fit)(x, y) : fit(x, y);
    return (torch::matmul(x, coefficients) - y).square().mean() + (out(x) - y).square().mean();
  }
  static Tensors batch(int64_t size) {
    return {torch::randn({size, 2 * kFeatures, kFeatures}), torch::randn({size, 2 * kFeatures, 1})};
  }
  bool opaque;
  torch::nn::Linear in{nullptr}, out{nullptr};
  Fit fit{nullptr};
};
TORCH_MODULE(Fitted);

TEST(LeastSquares, OfALeafHaveTheBitsOfOneProcess) { expect_plain_bits<Fitted>(); }

TEST(LeastSquares, AreRefusedElsewhere) {
  expect_has(
      text_of_refusal(Fitted(/*is_leaf=*/false)),
      {"the result shape of operator aten::linalg_lstsq depends on data", "smp::leaf(module)(x)"});
}

/// Averages the elements of each row by segments, whose lengths are part of the batch.
struct SegmentsImpl : torch::nn::Module {
  SegmentsImpl() {
    in = register_module("in", features_to());
    out = register_module("out", features_to(1));
  }
  torch::Tensor loss(torch::Tensor x, torch::Tensor lengths) {
    const auto means = torch::segment_reduce(in(x), "mean", lengths, /*indices=*/{}, /*offsets=*/{},
                                             /*axis=*/1, /*unsafe=*/false, /*initial=*/0.0);
    return out(torch::tanh(means)).square().mean();
  }
  static Tensors batch(int64_t size) {
    const auto first = torch::randint(0, kMostSteps + 1, {size, 1}, torch::kLong);
    return {torch::randn({size, kMostSteps, kFeatures}),
            torch::cat({first, kMostSteps - first}, 1)};
  }
  torch::nn::Linear in{nullptr}, out{nullptr};
};
TORCH_MODULE(Segments);

TEST(SegmentReductions, HaveTheBitsOfOneProcess) { expect_plain_bits<Segments>(); }

}  // namespace
}  // namespace smp::testing
