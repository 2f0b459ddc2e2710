#pragma once

#include <sched.h>

namespace smp::comm {

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

}  // namespace smp::comm
