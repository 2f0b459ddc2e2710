// SPDX-License-Identifier: Apache-2.0
#pragma once

// Precompiled for programs that use libtorch as its users do (precompiled.bzl); no source includes
// it.

#include <torch/torch.h>

#include "bazel/use_modules.h"
