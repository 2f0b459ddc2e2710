// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <iostream>

#include "bazel/use_types.h"

// Templates of libtorch's modules, for the reason that use_types.h gives.

namespace smp::precompiled {

/// Not defined, since no code calls it.
template <typename T>
T& object();

template <typename Module>
void use_module(const Module& module) {
  using Cloneable [[maybe_unused]] = torch::nn::Cloneable<Module>;
  (void)module.Cloneable::clone();
  // The private `clone_` does so.
  (void)std::dynamic_pointer_cast<Module>(std::shared_ptr<torch::nn::Module>());
  object<Module>() = module;
}

template <size_t kDimensions, typename Module>
void use_convolution(Module& module) {
  using Convolution [[maybe_unused]] = torch::nn::ConvNdImpl<kDimensions, Module>;
  module.Convolution::reset();
  module.Convolution::pretty_print(std::cout);
  use_module(module);
}

template <size_t kDimensions, typename Module>
void use_transposed(const Module& module) {
  using Convolution [[maybe_unused]] = torch::nn::ConvTransposeNdImpl<kDimensions, Module>;
  module.Convolution::pretty_print(std::cout);
}

template <typename... Modules>
void use_modules() {
  (use_module(object<Modules>()), ...);
}

template <size_t kDimensions, typename... Modules>
void use_convolutions() {
  (use_convolution<kDimensions>(object<Modules>()), ...);
}

inline void use_dataset(torch::data::datasets::TensorDataset& dataset) {
  using torch::data::datasets::TensorDataset;
  using Batched = torch::data::datasets::Dataset<TensorDataset, torch::data::TensorExample>;
  (void)dataset.Batched::get_batch({});
}

template <typename... Options>
void use_options() {
  ((void)std::make_unique<Options>(object<Options>()), ...);  // the private `clone` does so
}

inline void use_options() {
  using namespace torch::optim;  // NOLINT: nothing else is here
  use_options<AdagradOptions, AdamOptions, AdamWOptions, LBFGSOptions, RMSpropOptions,
              SGDOptions>();
}

inline void use_modules() {
  using namespace torch::nn;  // NOLINT: nothing else is here
  use_convolutions<1, Conv1dImpl, ConvTranspose1dImpl>();
  use_convolutions<2, Conv2dImpl, ConvTranspose2dImpl>();
  use_convolutions<3, Conv3dImpl, ConvTranspose3dImpl>();
  use_transposed<1>(object<ConvTranspose1dImpl>());
  use_transposed<2>(object<ConvTranspose2dImpl>());
  use_transposed<3>(object<ConvTranspose3dImpl>());
  use_modules<AdaptiveLogSoftmaxWithLossImpl, BilinearImpl, CrossMapLRN2dImpl, EmbeddingBagImpl,
              EmbeddingImpl, FoldImpl, FractionalMaxPool2dImpl, FractionalMaxPool3dImpl,
              GRUCellImpl, GRUImpl, GroupNormImpl, LSTMCellImpl, LSTMImpl, LayerNormImpl,
              LinearImpl, LocalResponseNormImpl, LogSoftmaxImpl, ModuleDictImpl,
              MultiheadAttentionImpl, ParameterDictImpl, RNNCellImpl, RNNImpl, SequentialImpl,
              SoftmaxImpl, SoftminImpl, ThresholdImpl, TransformerDecoderImpl,
              TransformerDecoderLayerImpl, TransformerEncoderImpl, TransformerEncoderLayerImpl,
              UnflattenImpl, UnfoldImpl>();
}

}  // namespace smp::precompiled
