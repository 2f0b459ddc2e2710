// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <string>

/// A small GPT over bytes, written with nothing but `torch::nn`. It knows nothing of `smp`: the
/// same class is trained by `plain.cc` in one process and by `train.cc` on many ranks.
namespace gpt {

/// A text is a sequence of bytes, so there is no tokenizer.
constexpr int64_t kVocabulary = 256;

/// Shape of a `GPT`.
struct GPTOptions {
  /// Number of transformer blocks.
  TORCH_ARG(int64_t, layers) = 4;
  /// Channels of the residual stream; a multiple of `heads`.
  TORCH_ARG(int64_t, width) = 128;
  /// Attention heads of each block.
  TORCH_ARG(int64_t, heads) = 4;
  /// The longest sequence, in bytes: the number of position embeddings.
  TORCH_ARG(int64_t, sequence) = 128;
  /// Probability of dropping an attention weight or a channel on the residual stream.
  TORCH_ARG(double, dropout) = 0.1;
  /// Whether the vocabulary head reuses the token embedding as its weight.
  TORCH_ARG(bool, tied) = false;
};

/// The layer with its bias added inside the product, as Python's `nn.Linear` does it; that of C++
/// adds it in a pass of its own where the input has three dimensions.
inline torch::Tensor project(torch::nn::Linear& layer, const torch::Tensor& x) {
  return torch::linear(x, layer->weight, layer->bias);
}

/// Causal self-attention over `[batch, sequence, width]`.
class AttentionImpl : public torch::nn::Module {
 public:
  explicit AttentionImpl(const GPTOptions& options)
      : options_(options),
        qkv_(register_module("qkv", torch::nn::Linear(options.width(), 3 * options.width()))),
        out_(register_module("out", torch::nn::Linear(options.width(), options.width()))) {
    TORCH_CHECK_VALUE(options.width() % options.heads() == 0, "GPT: expected a width that is a ",
                      "multiple of heads (", options.heads(), "), got ", options.width(),
                      ". Change --width or --heads.");
  }

  torch::Tensor forward(const torch::Tensor& x) {
    const auto batch = x.size(0), length = x.size(1);
    const auto heads = options_.heads(), channels = options_.width() / heads;
    const auto qkv = project(qkv_, x)
                         .view({batch, length, 3, heads, channels})
                         .permute({2, 0, 3, 1, 4})
                         .unbind();
    const auto mixed = torch::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], /*attn_mask=*/{},
                                                           is_training() ? options_.dropout() : 0.0,
                                                           /*is_causal=*/true);
    return project(out_, mixed.transpose(1, 2).reshape({batch, length, options_.width()}));
  }

 private:
  GPTOptions options_;
  torch::nn::Linear qkv_, out_;
};
TORCH_MODULE(Attention);

/// A pre-norm transformer block: attention and a GELU MLP, each added to the residual stream.
class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(const GPTOptions& options)
      : norm1_(register_module("norm1", make_norm(options))),
        attention_(register_module("attention", Attention(options))),
        norm2_(register_module("norm2", make_norm(options))),
        expand_(register_module("expand", torch::nn::Linear(options.width(), 4 * options.width()))),
        contract_(
            register_module("contract", torch::nn::Linear(4 * options.width(), options.width()))),
        dropout_(register_module("dropout", torch::nn::Dropout(options.dropout()))) {}

  torch::Tensor forward(torch::Tensor x) {
    x = x + dropout_(attention_(norm1_(x)));
    return x + dropout_(project(contract_, torch::gelu(project(expand_, norm2_(x)))));
  }

 private:
  static torch::nn::LayerNorm make_norm(const GPTOptions& options) {
    return torch::nn::LayerNorm(torch::nn::LayerNormOptions({options.width()}));
  }

  torch::nn::LayerNorm norm1_;
  Attention attention_;
  torch::nn::LayerNorm norm2_;
  torch::nn::Linear expand_, contract_;
  torch::nn::Dropout dropout_;
};
TORCH_MODULE(Block);

/// Bytes `[batch, sequence]` (int64) in, logits of the next byte `[batch, sequence, 256]` out.
class GPTImpl : public torch::nn::Module {
 public:
  explicit GPTImpl(const GPTOptions& options)
      : options_(options),
        token_(register_module("token", torch::nn::Embedding(kVocabulary, options.width()))),
        position_(
            register_module("position", torch::nn::Embedding(options.sequence(), options.width()))),
        dropout_(register_module("dropout", torch::nn::Dropout(options.dropout()))),
        blocks_(register_module("blocks", torch::nn::ModuleList())),
        norm_(register_module(
            "norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({options.width()})))) {
    for (int64_t i = 0; i < options.layers(); ++i) blocks_->push_back(Block(options));
    if (!options.tied()) {
      head_ = register_module(
          "head",
          torch::nn::Linear(torch::nn::LinearOptions(options.width(), kVocabulary).bias(false)));
    }
    initialize();
  }

  torch::Tensor forward(const torch::Tensor& bytes) {
    const auto positions = torch::arange(bytes.size(1), bytes.options());
    auto x = dropout_(token_(bytes) + position_(positions));
    for (const auto& block : *blocks_) x = block->as<Block>()->forward(x);
    x = norm_(x);
    return options_.tied() ? torch::linear(x, token_->weight) : head_(x);
  }

 private:
  /// Normal weights with the variance of one over their row length, which keeps the variance of
  /// activations through every layer; embeddings too, so that a tied one is a good head. Weights
  /// that write to the residual stream are smaller by the square root of their number, so that it
  /// does not grow with depth. (GPT-2's 0.02 is for wider models: this one needs twice the steps
  /// with it.)
  void initialize() {
    torch::NoGradGuard no_grad;
    const double writers = 2.0 * static_cast<double>(options_.layers());
    for (auto& item : named_parameters()) {
      auto& value = item.value();
      const auto ends_with = [name = item.key()](const std::string& end) {
        return name.size() >= end.size() &&
               name.compare(name.size() - end.size(), end.size(), end) == 0;
      };
      if (value.dim() > 1) {
        const double scale = 1 / std::sqrt(static_cast<double>(value.size(1)));
        const bool writes = ends_with("out.weight") || ends_with("contract.weight");
        value.normal_(0.0, writes ? scale / std::sqrt(writers) : scale);
      } else if (ends_with("bias")) {
        value.zero_();
      }
    }
  }

  GPTOptions options_;
  torch::nn::Embedding token_, position_;
  torch::nn::Dropout dropout_;
  torch::nn::ModuleList blocks_;
  torch::nn::LayerNorm norm_;
  torch::nn::Linear head_{nullptr};
};
TORCH_MODULE(GPT);

/// Mean cross entropy, in nats a byte, of `logits` `[batch, sequence, 256]` against the bytes that
/// really came next, `[batch, sequence]`.
inline torch::Tensor next_byte_loss(const torch::Tensor& logits, const torch::Tensor& next) {
  return torch::nn::functional::cross_entropy(logits.view({-1, kVocabulary}), next.reshape({-1}));
}

}  // namespace gpt
