// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

/// Models for sequences, written in plain libtorch without any knowledge of smp.
namespace stranger {

/// Written like minGPT's: the causal mask is a buffer, and so are only as many rows used as needed.
struct CausalAttentionImpl : torch::nn::Module {
  CausalAttentionImpl(int64_t width, int64_t heads, int64_t length) : heads(heads) {
    attend = register_module("attend", torch::nn::Linear(width, 3 * width));
    project = register_module("project", torch::nn::Linear(width, width));
    drop = register_module("drop", torch::nn::Dropout(0.1));
    mask = register_buffer("mask",
                           torch::tril(torch::ones({length, length})).view({1, 1, length, length}));
  }

  torch::Tensor forward(torch::Tensor x) {
    const auto batch = x.size(0), length = x.size(1), width = x.size(2);
    const auto parts = attend(x).split(width, 2);
    const auto by_head = [&](torch::Tensor y) {
      return y.view({batch, length, heads, width / heads}).transpose(1, 2);
    };
    const auto q = by_head(parts[0]), k = by_head(parts[1]), v = by_head(parts[2]);
    auto scores = q.matmul(k.transpose(-2, -1)) * (1.0 / std::sqrt(double(width) / heads));
    const auto visible = mask.slice(2, 0, length).slice(3, 0, length);
    scores = scores.masked_fill(visible == 0, -std::numeric_limits<float>::infinity());
    auto y = drop(torch::softmax(scores, -1)).matmul(v);
    return drop(project(y.transpose(1, 2).contiguous().view({batch, length, width})));
  }

  int64_t heads;
  torch::nn::Linear attend{nullptr}, project{nullptr};
  torch::nn::Dropout drop{nullptr};
  torch::Tensor mask;
};
TORCH_MODULE(CausalAttention);

struct GptBlockImpl : torch::nn::Module {
  GptBlockImpl(int64_t width, int64_t heads, int64_t length) {
    norm1 = register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    attention = register_module("attention", CausalAttention(width, heads, length));
    norm2 = register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    up = register_module("up", torch::nn::Linear(width, 4 * width));
    down = register_module("down", torch::nn::Linear(4 * width, width));
  }

  torch::Tensor forward(torch::Tensor x) {
    x = x + attention(norm1(x));
    const auto y = up(norm2(x));
    const auto gelu =
        0.5 * y * (1.0 + torch::tanh(std::sqrt(2.0 / M_PI) * (y + 0.044715 * torch::pow(y, 3.0))));
    return x + down(gelu);
  }

  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  CausalAttention attention{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(GptBlock);

struct GptImpl : torch::nn::Module {
  explicit GptImpl(bool tied, int layers = 3) {
    tokens = register_module("tokens", torch::nn::Embedding(kVocabulary, kWidth));
    positions = register_parameter("positions", torch::zeros({1, kLength, kWidth}));
    drop = register_module("drop", torch::nn::Dropout(0.1));
    for (int i = 0; i < layers; ++i) blocks->push_back(GptBlock(kWidth, 2, kLength));
    register_module("blocks", blocks);
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    head = register_module(
        "head", torch::nn::Linear(torch::nn::LinearOptions(kWidth, kVocabulary).bias(false)));
    // Ties like Python code. In C++ the member is bound anew, but "head.weight" stays registered as
    // it was: a parameter that nothing reads.
    if (tied) head->weight = tokens->weight;
  }

  torch::Tensor forward(torch::Tensor ids) {
    auto x = drop(tokens(ids) + positions.slice(1, 0, ids.size(1)));
    for (auto& block : *blocks) x = block->as<GptBlock>()->forward(x);
    return head(norm(x));
  }

  /// Greedy: the network runs once for each token.
  torch::Tensor generate(torch::Tensor ids, int count) {
    torch::NoGradGuard no_grad;
    for (int i = 0; i < count; ++i) {
      const auto logits = forward(ids).select(1, ids.size(1) - 1);
      ids = torch::cat({ids, logits.argmax(-1, true)}, 1);
    }
    return ids;
  }

  static constexpr int64_t kVocabulary = 13, kWidth = 12, kLength = 7;
  torch::nn::Embedding tokens{nullptr};
  torch::Tensor positions;
  torch::nn::Dropout drop{nullptr};
  torch::nn::ModuleList blocks;
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Gpt);

/// Vaswani et al. 2017 with libtorch's own nn::Transformer: cross attention, a causal mask and
/// padding masks computed from the ids. Batch first outside, sequence first inside.
struct TranslatorImpl : torch::nn::Module {
  TranslatorImpl() {
    source = register_module("source", torch::nn::Embedding(kVocabulary, kWidth));
    target = register_module("target", torch::nn::Embedding(kVocabulary, kWidth));
    auto table = torch::zeros({kLength, 1, kWidth});
    const auto position = torch::arange(kLength, torch::kFloat).view({-1, 1, 1});
    const auto rate =
        torch::exp(torch::arange(0, kWidth, 2, torch::kFloat) * (-std::log(1000.0) / kWidth));
    table.slice(2, 0, kWidth, 2).copy_(torch::sin(position * rate));
    table.slice(2, 1, kWidth, 2).copy_(torch::cos(position * rate));
    places = register_buffer("places", table);
    transformer = register_module(
        "transformer",
        torch::nn::Transformer(
            torch::nn::TransformerOptions(kWidth, 2, 2, 2).dim_feedforward(16).dropout(0.1)));
    head = register_module("head", torch::nn::Linear(kWidth, kVocabulary));
  }

  torch::Tensor forward(torch::Tensor from, torch::Tensor to) {
    const auto memory_padding = from.eq(kPadding);
    const auto target_padding = to.eq(kPadding);
    const auto causal = torch::nn::TransformerImpl::generate_square_subsequent_mask(to.size(1));
    const torch::Tensor none;
    const auto out = transformer(embed(source, from), embed(target, to), none, causal, none,
                                 memory_padding, target_padding, memory_padding);
    return head(out).transpose(0, 1);
  }

  torch::Tensor embed(torch::nn::Embedding table, torch::Tensor ids) {
    auto x = table(ids.t()) * std::sqrt(double(kWidth));
    return x + places.slice(0, 0, x.size(0));
  }

  static constexpr int64_t kVocabulary = 11, kWidth = 8, kLength = 10, kPadding = 0;
  torch::nn::Embedding source{nullptr}, target{nullptr};
  torch::Tensor places;
  torch::nn::Transformer transformer{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Translator);

/// Zaremba et al. 2014: the hidden state goes in and comes out.
struct LstmModelImpl : torch::nn::Module {
  using State = std::tuple<torch::Tensor, torch::Tensor>;

  LstmModelImpl() {
    embed = register_module("embed", torch::nn::Embedding(kVocabulary, 8));
    lstm = register_module(
        "lstm",
        torch::nn::LSTM(
            torch::nn::LSTMOptions(8, kHidden).num_layers(2).dropout(0.2).batch_first(true)));
    drop = register_module("drop", torch::nn::Dropout(0.2));
    head = register_module("head", torch::nn::Linear(kHidden, kVocabulary));
  }

  std::tuple<torch::Tensor, State> forward(torch::Tensor ids, const State& state) {
    auto [x, next] = lstm(drop(embed(ids)), state);
    return {head(drop(x)), next};
  }

  static constexpr int64_t kVocabulary = 9, kHidden = 10;
  torch::nn::Embedding embed{nullptr};
  torch::nn::LSTM lstm{nullptr};
  torch::nn::Dropout drop{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(LstmModel);

/// A bidirectional GRU encoder and a decoder of one cell per position with attention: the cell's
/// weights are used at every position.
struct GruModelImpl : torch::nn::Module {
  GruModelImpl() {
    embed = register_module("embed", torch::nn::Embedding(kVocabulary, 6));
    encoder = register_module(
        "encoder",
        torch::nn::GRU(
            torch::nn::GRUOptions(6, kHidden / 2).bidirectional(true).batch_first(true)));
    cell = register_module("cell", torch::nn::GRUCell(6 + kHidden, kHidden));
    head = register_module("head", torch::nn::Linear(kHidden, kVocabulary));
  }

  /// Logits by position and the last hidden state.
  std::tuple<torch::Tensor, torch::Tensor> forward(torch::Tensor from, torch::Tensor to,
                                                   torch::Tensor hidden) {
    const auto memory = std::get<0>(encoder(embed(from)));
    const auto inputs = embed(to);
    std::vector<torch::Tensor> logits;
    for (int64_t i = 0; i < to.size(1); ++i) {
      const auto weights = torch::bmm(memory, hidden.unsqueeze(2)).softmax(1);
      const auto context = (memory * weights).sum(1);
      hidden = cell(torch::cat({inputs.select(1, i), context}, 1), hidden);
      logits.push_back(head(hidden));
    }
    return {torch::stack(logits, 1), hidden};
  }

  static constexpr int64_t kVocabulary = 9, kHidden = 8;
  torch::nn::Embedding embed{nullptr};
  torch::nn::GRU encoder{nullptr};
  torch::nn::GRUCell cell{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(GruModel);

/// van den Oord et al. 2016: dilated causal convolutions with gates; the sum of all layers' skips
/// makes the output.
struct WaveNetImpl : torch::nn::Module {
  WaveNetImpl() {
    const auto conv = [](int64_t in, int64_t out, int64_t kernel, int64_t dilation) {
      return torch::nn::Conv1d(torch::nn::Conv1dOptions(in, out, kernel).dilation(dilation));
    };
    in = register_module("in", conv(1, kWidth, 1, 1));
    for (int i = 0; i < 4; ++i) {
      const auto number = std::to_string(i);
      gates.push_back(register_module("gate" + number, conv(kWidth, 2 * kWidth, 2, 1 << i)));
      residuals.push_back(register_module("residual" + number, conv(kWidth, kWidth, 1, 1)));
      skips.push_back(register_module("skip" + number, conv(kWidth, 2 * kWidth, 1, 1)));
    }
    out = register_module("out", conv(2 * kWidth, 8, 1, 1));
  }

  torch::Tensor forward(torch::Tensor x) {
    x = in(x);
    torch::Tensor skip;
    for (size_t i = 0; i < gates.size(); ++i) {
      const auto padded = torch::constant_pad_nd(x, {1 << i, 0});
      const auto halves = gates[i](padded).chunk(2, 1);
      const auto y = torch::tanh(halves[0]) * torch::sigmoid(halves[1]);
      const auto part = skips[i](y);
      skip = skip.defined() ? skip + part : part;
      x = x + residuals[i](y);
    }
    return out(torch::relu(skip));
  }

  static constexpr int64_t kWidth = 5;
  torch::nn::Conv1d in{nullptr}, out{nullptr};
  std::vector<torch::nn::Conv1d> gates, residuals, skips;
};
TORCH_MODULE(WaveNet);

/// Su et al. 2021: attention with rotary positions. Their table and the causal mask are computed
/// in `forward` when a longer sequence than ever comes, and kept in plain members.
struct RotaryImpl : torch::nn::Module {
  RotaryImpl() {
    embed = register_module("embed", torch::nn::Embedding(kVocabulary, kWidth));
    qkv = register_module("qkv", torch::nn::Linear(kWidth, 3 * kWidth));
    out = register_module("out", torch::nn::Linear(kWidth, kWidth));
    head = register_module("head", torch::nn::Linear(kWidth, kVocabulary));
  }

  torch::Tensor forward(torch::Tensor ids) {
    const auto length = ids.size(1);
    grow_tables(length);
    const auto x = embed(ids);
    const auto parts = qkv(x).chunk(3, 2);
    const auto scores = torch::bmm(rotate(parts[0]), rotate(parts[1]).transpose(1, 2));
    const auto seen = future.slice(0, 0, length).slice(1, 0, length);
    const auto weights = scores.masked_fill(seen, -1e9).softmax(2);
    return head(x + out(torch::bmm(weights, parts[2])));
  }

  void grow_tables(int64_t length) {
    if (cosine.defined() && cosine.size(0) >= length) return;
    const auto frequency = torch::pow(100.0, -torch::arange(kWidth / 2) / (kWidth / 2.0));
    const auto angle = torch::outer(torch::arange(length).to(torch::kFloat), frequency);
    cosine = torch::cat({angle, angle}, 1).cos();
    sine = torch::cat({angle, angle}, 1).sin();
    future = torch::ones({length, length}, torch::kBool);
    future.triu_(1);
  }

  torch::Tensor rotate(torch::Tensor x) const {
    const auto halves = x.chunk(2, 2);
    const auto turned = torch::cat({-halves[1], halves[0]}, 2);
    return x * cosine.slice(0, 0, x.size(1)) + turned * sine.slice(0, 0, x.size(1));
  }

  static constexpr int64_t kVocabulary = 11, kWidth = 8;
  torch::nn::Embedding embed{nullptr};
  torch::nn::Linear qkv{nullptr}, out{nullptr}, head{nullptr};
  torch::Tensor cosine, sine, future;
};
TORCH_MODULE(Rotary);

/// Zhang et al. 2023, "Dive into Deep Learning": a number is written where a row is past its valid
/// length.
inline torch::Tensor sequence_mask(torch::Tensor x, torch::Tensor valid_lens, double value) {
  const auto valid = torch::arange(x.size(1)).unsqueeze(0) < valid_lens.unsqueeze(1);
  x.index_put_({torch::logical_not(valid)}, value);
  return x;
}

inline torch::Tensor masked_softmax(torch::Tensor x, torch::Tensor valid_lens) {
  const auto lens = torch::repeat_interleave(valid_lens, x.size(1));
  return sequence_mask(x.reshape({-1, x.size(-1)}), lens, -1e6).reshape(x.sizes()).softmax(-1);
}

/// Devlin et al. 2018, as the book has it: an encoder over two sentences with valid lengths, which
/// keeps its attention weights to be looked at, and a head for masked words.
struct BertImpl : torch::nn::Module {
  BertImpl() {
    words = register_module("words", torch::nn::Embedding(kVocabulary, kWidth));
    segments = register_module("segments", torch::nn::Embedding(2, kWidth));
    places = register_parameter("places", torch::randn({1, kLength, kWidth}));
    qkv = register_module("qkv", torch::nn::Linear(kWidth, 3 * kWidth));
    out = register_module("out", torch::nn::Linear(kWidth, kWidth));
    norm1 = register_module("norm1", norm());
    in = register_module("in", torch::nn::Linear(kWidth, 2 * kWidth));
    back = register_module("back", torch::nn::Linear(2 * kWidth, kWidth));
    norm2 = register_module("norm2", norm());
    drop = register_module("drop", torch::nn::Dropout(0.1));
    head = register_module("head", torch::nn::Linear(kWidth, kVocabulary));
  }

  torch::Tensor forward(torch::Tensor ids, torch::Tensor sentence, torch::Tensor valid_lens) {
    auto x = words(ids) + segments(sentence) + places;
    x = norm1(x + drop(out(attend(x, valid_lens))));
    x = norm2(x + drop(back(torch::relu(in(x)))));
    return head(x);
  }

  torch::Tensor attend(torch::Tensor x, torch::Tensor valid_lens) {
    const auto by_head = [&](const torch::Tensor& all) {
      const auto apart = all.reshape({all.size(0), all.size(1), kHeads, -1}).permute({0, 2, 1, 3});
      return apart.reshape({-1, all.size(1), kWidth / kHeads});
    };
    const auto parts = qkv(x).chunk(3, 2);
    const auto scores = torch::bmm(by_head(parts[0]), by_head(parts[1]).transpose(1, 2)) /
                        std::sqrt(double(kWidth) / kHeads);
    attention_weights = masked_softmax(scores, torch::repeat_interleave(valid_lens, kHeads));
    const auto read = torch::bmm(drop(attention_weights), by_head(parts[2]));
    return read.reshape({-1, kHeads, x.size(1), kWidth / kHeads})
        .permute({0, 2, 1, 3})
        .reshape({x.size(0), x.size(1), kWidth});
  }

  static torch::nn::LayerNorm norm() {
    return torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth}));
  }

  static constexpr int64_t kVocabulary = 11, kWidth = 8, kHeads = 2, kLength = 6;
  torch::nn::Embedding words{nullptr}, segments{nullptr};
  torch::Tensor places, attention_weights;
  torch::nn::Linear qkv{nullptr}, out{nullptr}, in{nullptr}, back{nullptr}, head{nullptr};
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  torch::nn::Dropout drop{nullptr};
};
TORCH_MODULE(Bert);

}  // namespace stranger
