// SPDX-License-Identifier: Apache-2.0
// Ends a program before its first test where there is no GPU.

#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

namespace smp::testing {
namespace {

class NeedsGpu : public ::testing::Environment {
 public:
  void SetUp() override {
    ASSERT_GT(c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).deviceCount(), 0)
        << "these tests need a GPU; see docs/development.md";
  }
};

const auto* const environment = ::testing::AddGlobalTestEnvironment(new NeedsGpu);

}  // namespace
}  // namespace smp::testing
