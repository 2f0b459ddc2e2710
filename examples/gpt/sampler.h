// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>

namespace gpt {

/// Maps bytes `[1, sequence]` (int64) to the logits of the next byte, `[1, sequence, 256]`.
using Logits = std::function<at::Tensor(const at::Tensor&)>;

/// Continues `prompt` by `length` bytes, drawn one by one at temperature 0.8, and returns the
/// continuation. Every call of `logits` has the same shape: a text shorter than `sequence` is
/// padded on the right, which a causal model cannot see. The same arguments give the same text on
/// every rank.
std::string sample_text(const Logits& logits, const std::string& prompt, int64_t length,
                        int64_t sequence, uint64_t seed);

}  // namespace gpt
