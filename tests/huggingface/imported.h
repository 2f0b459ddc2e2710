// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <nlohmann/json.hpp>
#include <string>
#include <tuple>

#include "core/json.h"
#include "examples/huggingface/decoders.h"
#include "examples/huggingface/models.h"
#include "examples/llama/folder.h"
#include "smp/nn.h"

/// The models of the name maps in examples/huggingface, made as a config.json says.
namespace huggingface {

using nlohmann::json;

inline Shape shape_of(const json& config, const char* width, const char* layers,
                      const char* heads) {
  return Shape()
      .vocabulary(config.value("vocab_size", 0))
      .width(config.at(width))
      .layers(config.at(layers))
      .heads(config.at(heads));
}

/// BERT, RoBERTa, ViT, GPT-NeoX.
inline Shape shape_of_encoder(const json& config) {
  return shape_of(config, "hidden_size", "num_hidden_layers", "num_attention_heads")
      .inner(config.at("intermediate_size"))
      .activation(config.at("hidden_act"))
      .epsilon(config.at("layer_norm_eps"))
      .dropout(0);
}

/// GPT-2, GPT-J.
inline Shape shape_of_decoder(const json& config) {
  const int64_t inner = config.at("n_inner").is_null() ? 4 * config.at("n_embd").get<int64_t>()
                                                       : config.at("n_inner").get<int64_t>();
  return shape_of(config, "n_embd", "n_layer", "n_head")
      .inner(inner)
      .positions(config.at("n_positions"))
      .activation(config.at("activation_function"))
      .epsilon(config.at("layer_norm_epsilon"));
}

inline smp::nn::DistributedTransformerLMHead make_gpt2(const json& config) {
  const Shape shape = shape_of_decoder(config);
  return smp::nn::DistributedTransformerLMHead(
      smp::nn::DistributedTransformerLMHeadOptions()
          .vocab_size(shape.vocabulary())
          .num_layers(shape.layers())
          .hidden_size(shape.width())
          .num_attention_heads(shape.heads())
          .attention_head_size(shape.width() / shape.heads())
          .intermediate_size(shape.inner())
          .num_positions(shape.positions())
          .causal_mask_size(shape.positions())
          .activation(shape.activation())
          .layernorm_epsilon(shape.epsilon())
          .hidden_dropout_prob(0)
          .attention_dropout_prob(0)
          .pre_layernorm(true)
          .post_layernorm(false));
}

inline llama::Llama make_llama(const json& config) {
  return llama::Llama(llama::options_of(config));
}

inline MaskedLM make_masked_lm(const json& config) {
  return MaskedLM(shape_of_encoder(config)
                      .positions(config.at("max_position_embeddings"))
                      .token_types(config.at("type_vocab_size"))
                      .first_position(config.at("model_type") == "roberta" ? 2 : 0));
}

inline ViT make_vit(const json& config) {
  return ViT(shape_of_encoder(config)
                 .channels(config.at("num_channels"))
                 .image(config.at("image_size"))
                 .patch(config.at("patch_size"))
                 .classes(static_cast<int64_t>(config.at("id2label").size())));
}

inline GPTNeoX make_gpt_neox(const json& config) {
  const Shape shape = shape_of_encoder(config);
  const double part = config.at("rope_parameters").at("partial_rotary_factor");
  return GPTNeoX(Shape(shape).rotary(
      static_cast<int64_t>(static_cast<double>(shape.width() / shape.heads()) * part)));
}

inline GPTJ make_gptj(const json& config) {
  return GPTJ(shape_of_decoder(config).rotary(config.at("rotary_dim")));
}

/// Logits of token ids, or of images.
template <class Net>
torch::Tensor logits_of(Net net, const torch::Tensor& inputs) {
  return net->forward(inputs);
}
inline torch::Tensor logits_of(smp::nn::DistributedTransformerLMHead net,
                               const torch::Tensor& ids) {
  return net->forward(
      std::tuple(ids, torch::Tensor(), torch::Tensor(), torch::Tensor(), torch::Tensor()));
}
inline torch::Tensor logits_of(MaskedLM net, const torch::Tensor& ids) {
  return net->forward(ids, torch::zeros_like(ids));
}

/// The config.json of a folder.
inline json config_of(const std::string& folder) {
  const std::string path = folder + "/config.json";
  return smp::core::parse_json(smp::core::read_file(path, "the model's configuration"), path);
}

/// Calls `use` with the holder of a new model of this configuration. After `smp::init`.
template <class Use>
void with_model(const json& config, const Use& use) {
  const std::string type = config.at("model_type");
  if (type == "gpt2") return use(make_gpt2(config));
  if (type == "gpt_neox") return use(make_gpt_neox(config));
  if (type == "gptj") return use(make_gptj(config));
  if (type == "llama") return use(make_llama(config));
  if (type == "vit") return use(make_vit(config));
  return use(make_masked_lm(config));
}

}  // namespace huggingface
