// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/StringUtil.h>
#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
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

/// The number of a PID or network namespace; 0 where the kernel does not say.
inline uint64_t namespace_number(const char* path) {
  struct stat status {};
  return stat(path, &status) == 0 ? status.st_ino : 0;
}

/// The same for processes that can share memory and reach each other over the loopback, and for no
/// others. Ranks share memory by way of /proc or of a socket, so both namespaces must be the same.
inline std::string host_identity() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return c10::str(boot, " ", namespace_number("/proc/self/ns/pid"), " ",
                  namespace_number("/proc/self/ns/net"));
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
