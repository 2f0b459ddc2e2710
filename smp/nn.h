// SPDX-License-Identifier: Apache-2.0
#pragma once

/// All of smp::nn: layers whose parameters are divided among the ranks of the tensor-parallel
/// group, and the operators that they are made of. See docs/tensor_parallelism.md.

#include "smp/nn/attention_layer.h"      // IWYU pragma: export
#include "smp/nn/cross_entropy.h"        // IWYU pragma: export
#include "smp/nn/flash_attention.h"      // IWYU pragma: export
#include "smp/nn/operators.h"            // IWYU pragma: export
#include "smp/nn/parallel_embedding.h"   // IWYU pragma: export
#include "smp/nn/parallel_linear.h"      // IWYU pragma: export
#include "smp/nn/parameter_split.h"      // IWYU pragma: export
#include "smp/nn/split_module.h"         // IWYU pragma: export
#include "smp/nn/transformer_layer.h"    // IWYU pragma: export
#include "smp/nn/transformer_lm_head.h"  // IWYU pragma: export
#include "smp/nn/transformer_options.h"  // IWYU pragma: export
