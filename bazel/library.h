// SPDX-License-Identifier: Apache-2.0
#pragma once

// Precompiled for the library and its tools (precompiled.bzl); no source includes it.

#include <ATen/ATen.h>
#include <torch/library.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "bazel/use_types.h"
