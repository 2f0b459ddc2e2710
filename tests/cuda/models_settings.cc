// SPDX-License-Identifier: Apache-2.0
#include <ATen/Context.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "tests/device/models_suite.h"

namespace smp::testing {

/// Large enough for the kernels that users get: heads of 64 channels, tiles of tensor cores.
ModelSizes sizes() {
  return {/*layers=*/3,    /*width=*/256, /*heads=*/4,    /*length=*/256,
          /*channels=*/32, /*side=*/32,   /*casts=*/true, /*convolves=*/true};
}

namespace {

/// Settings that are read when a process first uses cuBLAS and cuDNN. The workspace is the one that
/// libtorch takes by default on compute capability 9.0, so that it makes no difference where
/// deterministic algorithms are off.
class Settings : public ::testing::Environment {
 public:
  void SetUp() override {
    ASSERT_EQ(setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*replace=*/1), 0);
    at::globalContext().setBenchmarkCuDNN(false);
  }
};

const auto* const environment = ::testing::AddGlobalTestEnvironment(new Settings);

}  // namespace
}  // namespace smp::testing
