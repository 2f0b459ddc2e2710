#pragma once

// All of smp::nn: layers whose parameters are divided among the ranks of the tensor-parallel group,
// and the operators that they are made of. See docs/tensor_parallelism.md.

#include "nn/attention_layer.h"      // IWYU pragma: export
#include "nn/cross_entropy.h"        // IWYU pragma: export
#include "nn/operators.h"            // IWYU pragma: export
#include "nn/parallel_embedding.h"   // IWYU pragma: export
#include "nn/parallel_linear.h"      // IWYU pragma: export
#include "nn/parameter_split.h"      // IWYU pragma: export
#include "nn/split_module.h"         // IWYU pragma: export
#include "nn/tensor_group.h"         // IWYU pragma: export
#include "nn/transformer_layer.h"    // IWYU pragma: export
#include "nn/transformer_lm_head.h"  // IWYU pragma: export
#include "nn/transformer_options.h"  // IWYU pragma: export
