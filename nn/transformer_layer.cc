#include "nn/transformer_layer.h"

#include <ATen/ops/gelu.h>
#include <ATen/ops/relu.h>

#include "nn/initialization.h"
#include "nn/operators.h"
#include "nn/transformer_parts.h"

namespace smp::nn {
namespace {

void check_arity(const char* module, bool add_cross_attention, bool expected) {
  SMP_CHECK_WITH(UsageError, add_cross_attention == expected, module,
                 ": its input is (hidden states, attention mask) and, with add_cross_attention, "
                 "(hidden states, cross states, attention mask, cross mask); got ",
                 expected ? "four tensors without it" : "two tensors with it");
}

/// The forward of a layer, or of several: into slices, through them, and back.
template <class Module>
DistributedTransformerLayerImpl::Pair forward_pair(
    Module& module, const DistributedTransformerLayerImpl::Pair& inputs) {
  const bool sliced = slices(module.options.optimize());
  const auto& [hidden, mask] = inputs;
  return {from_slice(module.run(to_slice(hidden, sliced), {}, mask, {}), sliced), mask};
}

template <class Module>
DistributedTransformerLayerImpl::Four forward_four(
    Module& module, const DistributedTransformerLayerImpl::Four& inputs) {
  const bool sliced = slices(module.options.optimize());
  const auto& [hidden, cross, mask, cross_mask] = inputs;
  return {from_slice(module.run(to_slice(hidden, sliced), cross, mask, cross_mask), sliced), cross,
          mask, cross_mask};
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
  constexpr const char* kName = "DistributedTransformerOutputLayer";
  check_block(kName, options.pre_layernorm(), options.post_layernorm(), options.optimize());
  check_divides(kName, "intermediate_size", options.intermediate_size(), tensor_group()->size());
  SMP_CHECK_WITH(UsageError, options.activation() == "gelu" || options.activation() == "relu",
                 kName, ": activation is \"", options.activation(),
                 "\". Choose \"gelu\" or \"relu\"");
  const Block<DistributedTransformerOutputLayerOptions> block{options};
  if (options.pre_layernorm()) {
    pre_layernorm = register_module("pre_layernorm", block.make_norm());
  }
  dense1 = register_module("dense1", block.make_entry(options.intermediate_size(), 1));
  dense2 = register_module("dense2", block.make_exit(options.intermediate_size()));
  if (options.post_layernorm()) layernorm = register_module("layernorm", block.make_norm());
}

void DistributedTransformerOutputLayerImpl::pretty_print(std::ostream& stream) const {
  stream << "smp::nn::DistributedTransformerOutputLayer(hidden_size=" << options.hidden_size()
         << ", intermediate_size=" << options.intermediate_size()
         << ", activation=" << options.activation() << ")";
}

at::Tensor DistributedTransformerOutputLayerImpl::forward(const at::Tensor& hidden) {
  const bool sliced = slices(options.optimize());
  return from_slice(run(to_slice(hidden, sliced)), sliced);
}

at::Tensor DistributedTransformerOutputLayerImpl::run(const at::Tensor& hidden) {
  const bool sliced = slices(options.optimize());
  const at::Tensor x = pre_layernorm ? normalised(pre_layernorm, hidden, sliced)
                                     : hidden.to(dense2->weight.scalar_type());
  const at::Tensor inner = dense1(x);
  const at::Tensor active = options.activation() == "gelu" ? at::gelu(inner) : at::relu(inner);
  const at::Tensor y =
      hidden_dropout(dense2(active), options.hidden_dropout_prob(), is_training(), sliced);
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
      attention_options(options, block_options<DistributedAttentionLayerOptions>(options));
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
  stream << "smp::nn::DistributedTransformerLayer";
}

DistributedTransformerLayerImpl::Pair DistributedTransformerLayerImpl::forward(const Pair& inputs) {
  check_arity("DistributedTransformerLayer", options.add_cross_attention(), false);
  return forward_pair(*this, inputs);
}

DistributedTransformerLayerImpl::Four DistributedTransformerLayerImpl::forward(const Four& inputs) {
  check_arity("DistributedTransformerLayer", options.add_cross_attention(), true);
  return forward_four(*this, inputs);
}

at::Tensor DistributedTransformerLayerImpl::run(const at::Tensor& hidden, const at::Tensor& cross,
                                                const at::Tensor& mask,
                                                const at::Tensor& cross_mask) {
  at::Tensor x = attention->run(hidden, {}, mask);
  if (cross_attention) x = cross_attention->run(x, cross, cross_mask);
  return output->run(x);
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
    seq_layers->push_back(DistributedTransformerLayer(of_layer));
  }
}

void DistributedTransformerImpl::pretty_print(std::ostream& stream) const {
  stream << "smp::nn::DistributedTransformer";
}

DistributedTransformerImpl::Pair DistributedTransformerImpl::forward(const Pair& inputs) {
  check_arity("DistributedTransformer", options.add_cross_attention(), false);
  return forward_pair(*this, inputs);
}

DistributedTransformerImpl::Four DistributedTransformerImpl::forward(const Four& inputs) {
  check_arity("DistributedTransformer", options.add_cross_attention(), true);
  return forward_four(*this, inputs);
}

at::Tensor DistributedTransformerImpl::run(at::Tensor hidden, const at::Tensor& cross,
                                           const at::Tensor& mask, const at::Tensor& cross_mask) {
  for (const auto& layer : *seq_layers) {
    hidden = layer->as<DistributedTransformerLayerImpl>()->run(hidden, cross, mask, cross_mask);
  }
  return hidden;
}

}  // namespace smp::nn
