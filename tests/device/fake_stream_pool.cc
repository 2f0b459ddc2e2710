// SPDX-License-Identifier: Apache-2.0
#include "tests/device/fake_device.h"

namespace smp::testing {
namespace {

const FakeStreamPool two_streams(2);

}  // namespace
}  // namespace smp::testing
