// SPDX-License-Identifier: Apache-2.0
#include "core/libtorch.h"

#include <c10/util/StringUtil.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/version.h>

#include <string>

#include "core/check.h"

namespace smp::core {
namespace {

constexpr int kMinorBits = 48;  // above them: major and minor version, a byte each

std::string text_of(uint64_t version) {
  return c10::str(version >> 56, '.', version >> kMinorBits & 0xff, '.', version >> 40 & 0xff);
}

}  // namespace

void check_libtorch(uint64_t compiled, uint64_t loaded) {
  SMP_CHECK_WITH(
      ConfigError, compiled >> kMinorBits == loaded >> kMinorBits,
      "smp was compiled with libtorch ", text_of(compiled), ", and libtorch ", text_of(loaded),
      " is loaded. Build smp with that one, or let the program find the other first (ldd "
      "shows which libtorch_cpu.so it loads; LD_LIBRARY_PATH goes before what was "
      "linked).");
}

void check_libtorch() { check_libtorch(TORCH_ABI_VERSION, aoti_torch_abi_version()); }

}  // namespace smp::core
