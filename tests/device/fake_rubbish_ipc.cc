// SPDX-License-Identifier: Apache-2.0
#include "tests/device/fake_device.h"

namespace smp::testing {
namespace {

const RubbishFakeIpc rubbish;

}  // namespace
}  // namespace smp::testing
