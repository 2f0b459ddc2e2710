// SPDX-License-Identifier: Apache-2.0
#include "examples/gpt/sampler.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/softmax.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "examples/gpt/text_data.h"

namespace gpt {

std::string sample_text(const Logits& logits, const std::string& prompt, int64_t length,
                        int64_t sequence, uint64_t seed) {
  TORCH_CHECK_VALUE(!prompt.empty(), "sample: expected a prompt of at least one byte, got none.");
  constexpr double kTemperature = 0.8;
  auto generator = at::detail::createCPUGenerator(seed);
  std::string text = prompt;
  for (int64_t i = 0; i < length; ++i) {
    std::string window = text.substr(text.size() - std::min<size_t>(text.size(), sequence));
    const auto last = static_cast<int64_t>(window.size()) - 1;
    window.resize(sequence, '\0');
    const auto next = logits(to_tensor(window).unsqueeze(0))[0][last];
    const auto drawn = at::multinomial(at::softmax(next.cpu() / kTemperature, -1), 1,
                                       /*replacement=*/false, generator);
    text.push_back(static_cast<char>(drawn.item<int64_t>()));
  }
  return text.substr(prompt.size());
}

}  // namespace gpt
