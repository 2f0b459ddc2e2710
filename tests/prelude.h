// SPDX-License-Identifier: Apache-2.0
#pragma once

// Precompiled for the tests (precompiled.bzl); no source includes it.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "bazel/use_modules.h"
