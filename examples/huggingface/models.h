// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include "smp/nn.h"

/// Models into which checkpoints of Hugging Face's library go by the name maps of this folder.
/// Those with layers that `smp::nn` has are made of them; the others are plain libtorch, which
/// tensor parallelism divides by rewriting. (GPT-2 is `smp::nn::DistributedTransformerLMHead` as it
/// is, Llama that of examples/llama.)
namespace huggingface {

/// Shape of a `MaskedLM`, a `ViT` or a decoder.
struct Shape {
  TORCH_ARG(int64_t, vocabulary) = 30522;
  TORCH_ARG(int64_t, layers) = 12;
  TORCH_ARG(int64_t, width) = 768;
  TORCH_ARG(int64_t, heads) = 12;
  TORCH_ARG(int64_t, inner) = 3072;
  TORCH_ARG(int64_t, positions) = 512;  ///< rows of the table of positions
  TORCH_ARG(int64_t, token_types) = 2;
  TORCH_ARG(int64_t, first_position) = 0;  ///< 2 for RoBERTa, whose table has two rows for padding
  TORCH_ARG(int64_t, rotary) = 64;         ///< channels of a head that are turned
  TORCH_ARG(int64_t, channels) = 3;        ///< channels of an image
  TORCH_ARG(int64_t, image) = 224;         ///< pixels on a side
  TORCH_ARG(int64_t, patch) = 16;
  TORCH_ARG(int64_t, classes) = 1000;
  TORCH_ARG(double, epsilon) = 1e-12;
  TORCH_ARG(double, dropout) = 0.1;
  TORCH_ARG(std::string, activation) = "gelu";
};

/// The layers of BERT (a norm behind each block) or of ViT (before it).
inline smp::nn::DistributedTransformer make_layers(const Shape& shape, bool pre_layernorm) {
  return smp::nn::DistributedTransformer(smp::nn::DistributedTransformerOptions()
                                             .num_layers(shape.layers())
                                             .hidden_size(shape.width())
                                             .num_attention_heads(shape.heads())
                                             .attention_head_size(shape.width() / shape.heads())
                                             .intermediate_size(shape.inner())
                                             .activation(shape.activation())
                                             .layernorm_epsilon(shape.epsilon())
                                             .hidden_dropout_prob(shape.dropout())
                                             .attention_dropout_prob(shape.dropout())
                                             .pre_layernorm(pre_layernorm)
                                             .post_layernorm(!pre_layernorm));
}

inline torch::nn::LayerNorm make_norm(const Shape& shape) {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({shape.width()}).eps(shape.epsilon()));
}

/// The result of a configuration's activation.
inline torch::Tensor activated(const torch::Tensor& x, const std::string& activation) {
  return activation == "relu" ? torch::relu(x)
                              : torch::gelu(x, activation == "gelu_new" ? "tanh" : "none");
}

/// BertForMaskedLM and RobertaForMaskedLM: token ids and types, [batch, length], to logits.
struct MaskedLMImpl : torch::nn::Module {
  explicit MaskedLMImpl(const Shape& shape_) : shape(shape_) {
    const auto table = [&](const char* name, int64_t rows) {
      return register_module(name, torch::nn::Embedding(rows, shape.width()));
    };
    word_embedding = table("word_embedding", shape.vocabulary());
    position_embedding = table("position_embedding", shape.positions());
    token_type_embedding = table("token_type_embedding", shape.token_types());
    embedding_norm = register_module("embedding_norm", make_norm(shape));
    transformer = register_module("transformer", make_layers(shape, /*pre_layernorm=*/false));
    head = register_module("head", torch::nn::Linear(shape.width(), shape.width()));
    head_norm = register_module("head_norm", make_norm(shape));
    head_bias = register_parameter("head_bias", torch::zeros({shape.vocabulary()}));
  }
  torch::Tensor forward(const torch::Tensor& ids, const torch::Tensor& types) {
    const auto positions = torch::arange(ids.size(1), ids.options()) + shape.first_position();
    auto x = word_embedding(ids) + token_type_embedding(types) + position_embedding(positions);
    x = torch::dropout(embedding_norm(x), shape.dropout(), is_training());
    x = std::get<0>(transformer->forward(std::tuple(x, torch::Tensor())));
    x = head_norm(activated(head(x), shape.activation()));
    return torch::linear(x, word_embedding->weight, head_bias);
  }
  Shape shape;
  torch::nn::Embedding word_embedding{nullptr}, position_embedding{nullptr},
      token_type_embedding{nullptr};
  torch::nn::LayerNorm embedding_norm{nullptr}, head_norm{nullptr};
  smp::nn::DistributedTransformer transformer{nullptr};
  torch::nn::Linear head{nullptr};
  torch::Tensor head_bias;
};
TORCH_MODULE(MaskedLM);

/// ViTForImageClassification: images [batch, channels, side, side] to logits of classes.
struct ViTImpl : torch::nn::Module {
  explicit ViTImpl(const Shape& shape) {
    const auto side = shape.image() / shape.patch();
    class_token = register_parameter("class_token", torch::randn({1, 1, shape.width()}) * 0.02);
    position_embedding = register_parameter(
        "position_embedding", torch::randn({1, side * side + 1, shape.width()}) * 0.02);
    patches = register_module(
        "patches",
        torch::nn::Conv2d(torch::nn::Conv2dOptions(shape.channels(), shape.width(), shape.patch())
                              .stride(shape.patch())));
    transformer = register_module("transformer", make_layers(shape, /*pre_layernorm=*/true));
    norm = register_module("norm", make_norm(shape));
    classifier = register_module("classifier", torch::nn::Linear(shape.width(), shape.classes()));
  }
  torch::Tensor forward(const torch::Tensor& images) {
    const auto x = patches(images).flatten(2).transpose(1, 2);
    const auto all = torch::cat({class_token.expand({x.size(0), -1, -1}), x}, 1);
    const auto hidden =
        std::get<0>(transformer->forward(std::tuple(all + position_embedding, torch::Tensor())));
    return classifier(norm(hidden).select(1, 0));
  }
  torch::Tensor class_token, position_embedding;
  torch::nn::Conv2d patches{nullptr};
  smp::nn::DistributedTransformer transformer{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear classifier{nullptr};
};
TORCH_MODULE(ViT);

}  // namespace huggingface
