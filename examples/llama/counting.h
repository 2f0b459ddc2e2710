// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

/// The task of the examples: to count on.
namespace llama {

/// Tokens and those that come next, [rows, length] both.
struct Batch {
  torch::Tensor x, y;
};

/// Sequences that count modulo `vocabulary`, each from a start and in steps of its own: up in steps
/// of 1 to 7 or, with `down`, down. The same for the same `number`.
inline Batch counting(int64_t number, int64_t rows, int64_t length, int64_t vocabulary,
                      bool down = false) {
  const auto random = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(number));
  const auto start = torch::randint(0, vocabulary, {rows, 1}, random, torch::kLong);
  const auto step = torch::randint(1, 8, {rows, 1}, random, torch::kLong) * (down ? -1 : 1);
  const auto all = torch::remainder(start + step * torch::arange(length + 1), vocabulary);
  return {all.narrow(1, 0, length).contiguous(), all.narrow(1, 1, length).contiguous()};
}

/// Mean cross entropy of the next tokens.
inline torch::Tensor next_token_loss(const torch::Tensor& logits, const torch::Tensor& next) {
  return torch::nn::functional::cross_entropy(logits.flatten(0, 1), next.flatten());
}

}  // namespace llama
