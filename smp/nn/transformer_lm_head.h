// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include <ostream>
#include <tuple>

#include "smp/export.h"
#include "smp/nn/parallel_embedding.h"
#include "smp/nn/transformer_layer.h"
#include "smp/nn/transformer_options.h"

namespace smp::nn {

/// A language model: embeddings of words, positions and token types are added, go through a
/// `DistributedTransformer` and, with add_lm_head, through a linear layer without bias whose weight
/// is the word embedding's. The vocabulary is divided among the ranks of the tensor-parallel group,
/// the embeddings of positions and types are whole. The submodules are "word_embedding",
/// "position_embedding", "token_type_embedding", "transformer" and "layernorm".
///
/// Throws `UsageError` if the ranks do not divide vocab_size, and for a sequence longer than
/// num_positions.
class SMP_API DistributedTransformerLMHeadImpl
    : public torch::nn::Cloneable<DistributedTransformerLMHeadImpl> {
 public:
  /// (input_ids, attention_mask, token_type_ids, position_ids, labels).
  using Five = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
  /// (input_ids, attention_mask, token_type_ids, position_ids, cross_states, cross_mask, labels).
  using Seven = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor,
                           at::Tensor>;

  explicit DistributedTransformerLMHeadImpl(
      const DistributedTransformerLMHeadOptions& options = {});

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  /// input_ids [N, S]; the others may be undefined: attention_mask [N, S] (1 where a token is
  /// masked), token_type_ids [N, S], position_ids [N, S] or [S] (0, 1, ... without), labels [N, S]
  /// (-100 where there is none). Returns, the same on all ranks:
  /// - with labels, the mean cross entropy of the labels, each against the logits of its own
  ///   position (shift them to predict the next token); the logits are never gathered;
  /// - without, the logits [N, S, vocab_size], gathered;
  /// - without add_lm_head, the hidden states [N, S, H]; labels are an error then.
  at::Tensor forward(const Five& inputs);
  /// Also takes, with add_cross_attention, cross_states [N, S2, H] and cross_mask [N, S2] (1 where
  /// masked).
  at::Tensor forward(const Seven& inputs);

  DistributedTransformerLMHeadOptions options;
  VocabParallelEmbedding word_embedding{nullptr};
  torch::nn::Embedding position_embedding{nullptr}, token_type_embedding{nullptr};
  DistributedTransformer transformer{nullptr};
  torch::nn::LayerNorm layernorm{nullptr};

 private:
  torch::nn::Embedding make_embedding(int64_t count) const;
  at::Tensor embed(const at::Tensor& ids, const at::Tensor& types, const at::Tensor& positions);
  at::Tensor run(const at::Tensor& embedded, const at::Tensor& mask, const at::Tensor& cross,
                 const at::Tensor& cross_mask, const at::Tensor& labels);
};
TORCH_MODULE(DistributedTransformerLMHead);

}  // namespace smp::nn
