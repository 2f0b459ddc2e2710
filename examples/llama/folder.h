// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "examples/llama/llama.h"

/// A folder that LlamaForCausalLM.from_pretrained reads: beside model.safetensors a config.json.
namespace llama {

inline void write_config(const std::string& folder, const LlamaOptions& options) {
  const nlohmann::json config = {
      {"architectures", {"LlamaForCausalLM"}},  {"model_type", "llama"},
      {"vocab_size", options.vocabulary()},     {"hidden_size", options.width()},
      {"intermediate_size", options.inner()},   {"num_hidden_layers", options.layers()},
      {"num_attention_heads", options.heads()}, {"num_key_value_heads", options.key_value_heads()},
      {"rms_norm_eps", options.epsilon()},      {"rope_theta", options.theta()},
      {"tie_word_embeddings", options.tied()},
  };
  std::ofstream(folder + "/config.json") << config.dump(2) << "\n";
}

/// The options in a config.json. Since its version 5 transformers has the base of the rotary angles
/// under "rope_parameters".
inline LlamaOptions options_of(const nlohmann::json& config) {
  const bool nested = config.contains("rope_parameters");
  const nlohmann::json& rope = nested ? config.at("rope_parameters") : config;
  const bool scaled = nested ? rope.value("rope_type", "default") != "default"
                             : !config.value("rope_scaling", nlohmann::json()).is_null();
  TORCH_CHECK_VALUE(!scaled, "this Llama does not scale its rotary angles, got ", rope.dump());
  return LlamaOptions()
      .vocabulary(config.at("vocab_size"))
      .width(config.at("hidden_size"))
      .inner(config.at("intermediate_size"))
      .layers(config.at("num_hidden_layers"))
      .heads(config.at("num_attention_heads"))
      .key_value_heads(config.at("num_key_value_heads"))
      .epsilon(config.at("rms_norm_eps"))
      .theta(rope.value("rope_theta", 10000.0))
      .tied(config.value("tie_word_embeddings", false));
}

inline LlamaOptions read_config(const std::string& folder) {
  std::ifstream file(folder + "/config.json");
  TORCH_CHECK_VALUE(file, "expected a config.json in \"", folder, "\", got none. Check the path.");
  return options_of(nlohmann::json::parse(file));
}

}  // namespace llama
