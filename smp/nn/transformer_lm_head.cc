// SPDX-License-Identifier: Apache-2.0
#include "smp/nn/transformer_lm_head.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Reduction.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/linear.h>
#include <torch/nn/init.h>

#include "core/check.h"
#include "nn/initialization.h"
#include "nn/tensor_group.h"
#include "smp/nn/operators.h"
#include "smp/nn/transformer_parts.h"

namespace smp::nn {
namespace {

constexpr const char* kHeadName = "DistributedTransformerLMHead";

/// A mask [N, S] of ones where tokens are masked, as the term added to scores. Not infinity, so
/// that a sample of masked tokens only has no NaN.
at::Tensor additive(const at::Tensor& mask, at::ScalarType type) {
  constexpr double kMasked = -10000;
  if (!mask.defined()) return mask;
  return (mask.to(type) * kMasked).unsqueeze(1).unsqueeze(1);
}

DistributedTransformerOptions transformer_options(const DistributedTransformerLMHeadOptions& from) {
  return output_options(from,
                        attention_options(from, block_options<DistributedTransformerOptions>(from)))
      .num_layers(from.num_layers())
      .add_cross_attention(from.add_cross_attention());
}

}  // namespace

DistributedTransformerLMHeadImpl::DistributedTransformerLMHeadImpl(
    const DistributedTransformerLMHeadOptions& options_)
    : options(options_) {
  DistributedTransformerLMHeadImpl::reset();
}

torch::nn::Embedding DistributedTransformerLMHeadImpl::make_embedding(int64_t count) const {
  torch::nn::Embedding embedding(count, options.hidden_size());
  torch::nn::init::normal_(embedding->weight, 0, options.initializer_range());
  return embedding;
}

void DistributedTransformerLMHeadImpl::reset() {
  check_divides(kHeadName, "vocab_size", options.vocab_size(), tensor_group()->size());
  word_embedding = register_module(
      "word_embedding", VocabParallelEmbedding(VocabParallelEmbeddingOptions(options.vocab_size(),
                                                                             options.hidden_size())
                                                   .init_std(options.initializer_range())));
  position_embedding =
      register_module("position_embedding", make_embedding(options.num_positions()));
  if (options.num_token_types() > 0) {
    token_type_embedding =
        register_module("token_type_embedding", make_embedding(options.num_token_types()));
  }
  transformer =
      register_module("transformer", DistributedTransformer(transformer_options(options)));
  if (options.final_layernorm().value_or(!options.post_layernorm())) {
    layernorm = register_module("layernorm",
                                Block<DistributedTransformerLMHeadOptions>{options}.make_norm());
  }
}

void DistributedTransformerLMHeadImpl::pretty_print(std::ostream& stream) const {
  stream << "smp::nn::" << kHeadName << "(vocab_size=" << options.vocab_size()
         << ", num_positions=" << options.num_positions()
         << ", hidden_size=" << options.hidden_size() << ")";
}

at::Tensor DistributedTransformerLMHeadImpl::forward(const Five& inputs) {
  SMP_CHECK_WITH(UsageError, !options.add_cross_attention(), kHeadName,
                 ": with add_cross_attention its input is (input_ids, attention_mask, "
                 "token_type_ids, position_ids, cross_states, cross_mask, labels); got five "
                 "tensors");
  const auto& [ids, mask, types, positions, labels] = inputs;
  return run(embed(ids, types, positions), mask, {}, {}, labels);
}

at::Tensor DistributedTransformerLMHeadImpl::forward(const Seven& inputs) {
  SMP_CHECK_WITH(UsageError, options.add_cross_attention(), kHeadName,
                 ": without add_cross_attention its input is (input_ids, attention_mask, "
                 "token_type_ids, position_ids, labels); got seven tensors");
  const auto& [ids, mask, types, positions, cross, cross_mask, labels] = inputs;
  return run(embed(ids, types, positions), mask, cross, cross_mask, labels);
}

at::Tensor DistributedTransformerLMHeadImpl::embed(const at::Tensor& ids, const at::Tensor& types,
                                                   const at::Tensor& positions) {
  SMP_CHECK_WITH(UsageError, ids.size(-1) <= options.num_positions(), kHeadName, ": a sequence of ",
                 ids.size(-1), " tokens is longer than num_positions ", options.num_positions());
  SMP_CHECK_WITH(UsageError, !types.defined() || token_type_embedding, kHeadName,
                 ": token_type_ids were given, but num_token_types is 0");
  at::Tensor x = word_embedding(ids);
  x = x + position_embedding(positions.defined()
                                 ? positions
                                 : at::arange(ids.size(-1), ids.options().dtype(at::kLong)));
  return types.defined() ? x + token_type_embedding(types) : x;
}

at::Tensor DistributedTransformerLMHeadImpl::run(const at::Tensor& embedded, const at::Tensor& mask,
                                                 const at::Tensor& cross,
                                                 const at::Tensor& cross_mask,
                                                 const at::Tensor& labels) {
  SMP_CHECK_WITH(UsageError, options.add_lm_head() || !labels.defined(), kHeadName,
                 ": labels were given, but add_lm_head is false. Leave them undefined, or use "
                 "add_lm_head(true)");
  const bool sliced = slices(kHeadName, options.optimize(), embedded.size(1));
  const auto type = word_embedding->weight.scalar_type();
  at::Tensor x = transformer->run(to_slice(embedded, sliced), cross, additive(mask, type),
                                  additive(cross_mask, type), sliced);
  x = layernorm ? normalised(layernorm, x, sliced) : x.to(type);
  if (!options.add_lm_head()) return from_slice(x, sliced);
  const at::Tensor& weight = word_embedding->weight;
  const at::Tensor logits =
      sliced ? gathered_linear(x, weight, std::nullopt, 1) : at::linear(copy_to_group(x), weight);
  if (!labels.defined()) return gather_from_group(logits, -1);
  return divided_cross_entropy(logits.flatten(0, 1), labels.flatten(), std::nullopt,
                               at::Reduction::Mean);
}

}  // namespace smp::nn
