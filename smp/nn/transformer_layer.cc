// SPDX-License-Identifier: Apache-2.0
#include "smp/nn/transformer_layer.h"

#include <ATen/ops/gelu.h>
#include <ATen/ops/relu.h>

#include "core/check.h"
#include "nn/initialization.h"
#include "nn/tensor_group.h"
#include "smp/nn/operators.h"
#include "smp/nn/transformer_parts.h"

namespace smp::nn {
namespace {

constexpr const char* kOutputLayer = "DistributedTransformerOutputLayer";
constexpr const char* kLayer = "DistributedTransformerLayer";
constexpr const char* kTransformer = "DistributedTransformer";

void check_arity(const char* module, bool add_cross_attention, bool expected) {
  SMP_CHECK_WITH(UsageError, add_cross_attention == expected, module,
                 ": its input is (hidden states, attention mask) and, with add_cross_attention, "
                 "(hidden states, cross states, attention mask, cross mask); got ",
                 expected ? "four tensors without it" : "two tensors with it");
}

constexpr const char* kGelu = "gelu";
constexpr const char* kGeluNew = "gelu_new";
constexpr const char* kRelu = "relu";

at::Tensor activated(const at::Tensor& x, const std::string& activation) {
  if (activation == kRelu) return at::relu(x);
  return activation == kGelu ? at::gelu(x) : at::gelu(x, "tanh");
}

/// The forward of a layer, or of several: into slices, through them, and back.
template <class Module>
DistributedTransformerLayerImpl::Pair forward_pair(
    const char* name, Module& module, const DistributedTransformerLayerImpl::Pair& inputs) {
  const auto& [hidden, mask] = inputs;
  const bool sliced = slices(name, module.options.optimize(), hidden.size(1));
  return {from_slice(module.run(to_slice(hidden, sliced), {}, mask, {}, sliced), sliced), mask};
}

template <class Module>
DistributedTransformerLayerImpl::Four forward_four(
    const char* name, Module& module, const DistributedTransformerLayerImpl::Four& inputs) {
  const auto& [hidden, cross, mask, cross_mask] = inputs;
  const bool sliced = slices(name, module.options.optimize(), hidden.size(1));
  const at::Tensor result = module.run(to_slice(hidden, sliced), cross, mask, cross_mask, sliced);
  return {from_slice(result, sliced), cross, mask, cross_mask};
}

}  // namespace

// ---------------------------------------------------------------------------------------------
// DistributedTransformerOutputLayer

DistributedTransformerOutputLayerImpl::DistributedTransformerOutputLayerImpl(
    const DistributedTransformerOutputLayerOptions& options_)
    : options(options_) {
  DistributedTransformerOutputLayerImpl::reset();
}

void DistributedTransformerOutputLayerImpl::reset() {
  check_block(kOutputLayer, options.pre_layernorm(), options.post_layernorm(), options.optimize());
  check_divides(kOutputLayer, "intermediate_size", options.intermediate_size(),
                tensor_group()->size());
  const std::string& activation = options.activation();
  SMP_CHECK_WITH(UsageError, activation == kGelu || activation == kGeluNew || activation == kRelu,
                 kOutputLayer, ": activation is \"", activation,
                 "\". Choose \"gelu\", \"gelu_new\" or \"relu\"");
  const Block<DistributedTransformerOutputLayerOptions> block{options};
  if (options.pre_layernorm()) {
    pre_layernorm = register_module("pre_layernorm", block.make_norm());
  }
  dense1 = register_module("dense1", block.make_entry(options.intermediate_size(), 1));
  dense2 = register_module("dense2", block.make_exit(options.intermediate_size()));
  if (options.post_layernorm()) layernorm = register_module("layernorm", block.make_norm());
}

void DistributedTransformerOutputLayerImpl::pretty_print(std::ostream& stream) const {
  stream << "smp::nn::" << kOutputLayer << "(hidden_size=" << options.hidden_size()
         << ", intermediate_size=" << options.intermediate_size()
         << ", activation=" << options.activation() << ")";
}

at::Tensor DistributedTransformerOutputLayerImpl::forward(const at::Tensor& hidden) {
  const bool sliced = slices(kOutputLayer, options.optimize(), hidden.size(1));
  return from_slice(run(to_slice(hidden, sliced), sliced), sliced);
}

at::Tensor DistributedTransformerOutputLayerImpl::run(const at::Tensor& hidden, bool sliced) {
  const at::Tensor x = pre_layernorm ? normalised(pre_layernorm, hidden, sliced)
                                     : hidden.to(dense2->weight.scalar_type());
  const at::Tensor inner = dense1->run(x, sliced);
  const at::Tensor active = activated(inner, options.activation());
  const at::Tensor y = hidden_dropout(dense2->run(active, sliced), options.hidden_dropout_prob(),
                                      is_training(), sliced);
  const at::Tensor sum = residual(hidden, y, options.fp32_residual_addition());
  return layernorm ? normalised(layernorm, sum, sliced) : sum;
}

// ---------------------------------------------------------------------------------------------
// DistributedTransformerLayer

DistributedTransformerLayerImpl::DistributedTransformerLayerImpl(
    const DistributedTransformerLayerOptions& options_)
    : options(options_) {
  DistributedTransformerLayerImpl::reset();
}

void DistributedTransformerLayerImpl::reset() {
  const auto of_attention =
      attention_options(options, block_options<DistributedAttentionLayerOptions>(options))
          .layer_idx(options.layer_idx());
  attention = register_module("attention", DistributedAttentionLayer(of_attention));
  if (options.add_cross_attention()) {
    auto of_cross = of_attention;
    cross_attention = register_module("cross_attention",
                                      DistributedAttentionLayer(of_cross.cross_attention(true)));
  }
  output = register_module(
      "output", DistributedTransformerOutputLayer(output_options(
                    options, block_options<DistributedTransformerOutputLayerOptions>(options))));
}

void DistributedTransformerLayerImpl::pretty_print(std::ostream& stream) const {
  stream << "smp::nn::" << kLayer;
}

DistributedTransformerLayerImpl::Pair DistributedTransformerLayerImpl::forward(const Pair& inputs) {
  check_arity(kLayer, options.add_cross_attention(), false);
  return forward_pair(kLayer, *this, inputs);
}

DistributedTransformerLayerImpl::Four DistributedTransformerLayerImpl::forward(const Four& inputs) {
  check_arity(kLayer, options.add_cross_attention(), true);
  return forward_four(kLayer, *this, inputs);
}

at::Tensor DistributedTransformerLayerImpl::run(const at::Tensor& hidden, const at::Tensor& cross,
                                                const at::Tensor& mask,
                                                const at::Tensor& cross_mask, bool sliced) {
  at::Tensor x = attention->run(hidden, {}, mask, sliced);
  if (cross_attention) x = cross_attention->run(x, cross, cross_mask, sliced);
  return output->run(x, sliced);
}

// ---------------------------------------------------------------------------------------------
// DistributedTransformer

DistributedTransformerImpl::DistributedTransformerImpl(
    const DistributedTransformerOptions& options_)
    : options(options_) {
  DistributedTransformerImpl::reset();
}

void DistributedTransformerImpl::reset() {
  SMP_CHECK_WITH(UsageError, options.num_layers() >= 1,
                 "DistributedTransformer: num_layers must be 1 or more, got ",
                 options.num_layers());
  auto of_layer = output_options(
      options,
      attention_options(options, block_options<DistributedTransformerLayerOptions>(options)));
  of_layer.add_cross_attention(options.add_cross_attention());
  seq_layers = register_module("seq_layers", torch::nn::ModuleList());
  for (int64_t i = 0; i < options.num_layers(); ++i) {
    seq_layers->push_back(DistributedTransformerLayer(of_layer.layer_idx(i)));
  }
}

void DistributedTransformerImpl::pretty_print(std::ostream& stream) const {
  stream << "smp::nn::" << kTransformer;
}

DistributedTransformerImpl::Pair DistributedTransformerImpl::forward(const Pair& inputs) {
  check_arity(kTransformer, options.add_cross_attention(), false);
  return forward_pair(kTransformer, *this, inputs);
}

DistributedTransformerImpl::Four DistributedTransformerImpl::forward(const Four& inputs) {
  check_arity(kTransformer, options.add_cross_attention(), true);
  return forward_four(kTransformer, *this, inputs);
}

at::Tensor DistributedTransformerImpl::run(at::Tensor hidden, const at::Tensor& cross,
                                           const at::Tensor& mask, const at::Tensor& cross_mask,
                                           bool sliced) {
  for (const auto& layer : *seq_layers) {
    hidden =
        layer->as<DistributedTransformerLayerImpl>()->run(hidden, cross, mask, cross_mask, sliced);
  }
  return hidden;
}

}  // namespace smp::nn
