// SPDX-License-Identifier: Apache-2.0
#pragma once

/// All of smp::optim: optimizers that libtorch lacks, its own on fused kernels, and the traits of
/// an optimizer of your own. See docs/optimizers.md.

#include "smp/optim/adadelta.h"           // IWYU pragma: export
#include "smp/optim/fused.h"              // IWYU pragma: export
#include "smp/optim/lamb.h"               // IWYU pragma: export
#include "smp/optim/novograd.h"           // IWYU pragma: export
#include "smp/optim/own_options.h"        // IWYU pragma: export
#include "smp/optim/traits.h"             // IWYU pragma: export
#include "smp/optim/uses_grad_norm.h"     // IWYU pragma: export
#include "smp/optim/uses_tensor_norms.h"  // IWYU pragma: export
