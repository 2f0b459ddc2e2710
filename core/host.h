// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sched.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <string>

#include "core/check.h"

namespace smp::core {

/// The name of this host.
inline std::string host_name() {
  std::array<char, 256> name{};
  // A name has at most HOST_NAME_MAX characters, 64.
  SMP_INTERNAL_ASSERT(gethostname(name.data(), name.size() - 1) == 0, std::strerror(errno));
  return name.data();
}

/// The cores that this process may run on; all when the kernel does not say.
inline cpu_set_t cores_of_this_process() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (sched_getaffinity(0, sizeof cores, &cores) != 0) {
    for (int core = 0; core < CPU_SETSIZE; ++core) {
      CPU_SET(core, &cores);
    }
  }
  return cores;
}

}  // namespace smp::core
