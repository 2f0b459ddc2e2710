// SPDX-License-Identifier: Apache-2.0
#include "smp/nn/transformer_parts.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/softmax.h>

#include <mutex>
#include <set>

#include "core/check.h"
#include "core/log.h"
#include "nn/linear_biases.h"
#include "nn/tensor_group.h"
#include "smp/nn/operators.h"

namespace smp::nn {
namespace {

constexpr int64_t kSequence = 1;  // dimension of hidden states
constexpr int64_t kHeads = 1;     // dimension of [N, heads, S, channels]

/// Whether the program has not asked for `module` before; ranks may be threads.
bool is_first_of(const char* module) {
  static std::mutex mutex;
  static std::set<std::string> known;
  const std::lock_guard<std::mutex> lock(mutex);
  return known.insert(module).second;
}

}  // namespace

void check_block(const char* module, bool pre_layernorm, bool post_layernorm,
                 const std::optional<std::string>& optimize) {
  SMP_CHECK_WITH(UsageError, pre_layernorm || post_layernorm, module,
                 ": pre_layernorm and post_layernorm are both false. At least one of them must be "
                 "true");
  SMP_CHECK_WITH(UsageError, !optimize || *optimize == "speed" || *optimize == "memory", module,
                 ": optimize is \"", optimize.value_or(""), "\". Choose \"speed\" or \"memory\"");
}

bool slices(const char* module, const std::optional<std::string>& optimize, int64_t length) {
  const auto group = tensor_group();
  if (group->size() == 1 || optimize.value_or(default_optimize()) != "memory") return false;
  if (optimize || length % group->size() == 0) return true;
  if (group->rank() == 0 && is_first_of(module)) {
    core::log_warning(c10::str(
        module, ": a sequence of ", length, " tokens cannot be divided among the ", group->size(),
        " ranks of the tensor-parallel group, so such calls run as with optimize(\"speed\"), with "
        "activations that all ranks keep whole. Pad to a multiple of ",
        group->size(), " to save their memory. Said once for each kind of module"));
  }
  return false;
}

at::Tensor to_slice(const at::Tensor& x, bool sliced) {
  return sliced ? scatter_to_group(x, kSequence) : x;
}

at::Tensor from_slice(const at::Tensor& x, bool sliced) {
  return sliced ? gather_from_group(x, kSequence) : x;
}

at::Tensor normalised(const torch::nn::LayerNorm& norm, const at::Tensor& x, bool sliced) {
  at::Tensor weight = norm->weight, bias = norm->bias;
  const auto type = weight.scalar_type();
  if (sliced) {
    weight = copy_to_group(weight);
    bias = copy_to_group(bias);
  }
  if (x.scalar_type() == at::kFloat && type != at::kFloat) {
    weight = weight.to(at::kFloat);
    bias = bias.to(at::kFloat);
  }
  return at::layer_norm(x, norm->options.normalized_shape(), weight, bias, norm->options.eps())
      .to(type);
}

at::Tensor hidden_dropout(const at::Tensor& x, double p, bool train, bool sliced) {
  return sliced ? divided_dropout(x, p, train, kSequence) : at::dropout(x, p, train);
}

at::Tensor score_biases(const at::Tensor& query, int64_t keys, int64_t heads, int64_t bias_max) {
  const at::Tensor slopes = scatter_to_group(alibi_slopes(heads, bias_max, query), 0);
  return linear_biases(slopes, query.size(2), keys).to(query.scalar_type());
}

at::Tensor attention_in_steps(const at::Tensor& query, const at::Tensor& key,
                              const at::Tensor& value, const at::Tensor& bias,
                              const Scores& scores) {
  const auto divisor = static_cast<double>(scores.divisor);
  at::Tensor x = at::matmul(query * (scores.scale / divisor), key.transpose(-2, -1));
  if (scores.divisor > 1) x = widened(x) * divisor;
  if (bias.defined()) x = x + bias;
  x = at::softmax(x, -1);
  if (scores.divisor > 1) x = x.to(value.scalar_type());
  if (scores.dropout > 0) x = divided_dropout(x, scores.dropout, true, kHeads);
  return at::matmul(x, value);
}

at::Tensor widened(const at::Tensor& x) {
  const auto type = x.scalar_type();
  return type == at::kHalf || type == at::kBFloat16 ? x.to(at::kFloat) : x;
}

at::Tensor residual(const at::Tensor& x, const at::Tensor& y, bool fp32) {
  return fp32 ? widened(x) + widened(y) : x + y;
}

}  // namespace smp::nn
