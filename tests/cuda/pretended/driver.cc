// SPDX-License-Identifier: Apache-2.0
// Functions in place of those of libcuda.so.1: libtorch asks for some by name, and its library for
// kernels that are compiled while a program runs is linked with others.
#include <cstring>

#include "tests/cuda/pretended/machine.h"

using namespace pretended;

PRETENDED_API int cuCtxGetCurrent(void** context) {
  static char only;
  *context = &only;
  return kSuccess;
}

PRETENDED_API int cuDevicePrimaryCtxGetState(int /*device*/, unsigned* flags, int* active) {
  if (flags) *flags = 0;
  if (active) *active = 1;
  return kSuccess;
}

PRETENDED_API int cuGetErrorString(int /*error*/, const char** text) {
  *text = "an error of the pretended CUDA driver";
  return kSuccess;
}

/// Loading takes memory of the device's.
PRETENDED_API int cuModuleLoadData(void** module, const void* /*image*/) {
  static char only;
  *module = &only;
  const auto lock = Machine::lock();
  return Machine::get().unsafe();
}

/// Finds a kernel of any name.
PRETENDED_API int cuModuleGetFunction(void** function, void* module, const char* /*name*/) {
  *function = module;
  return kSuccess;
}

PRETENDED_API int cuLaunchKernel(void* /*function*/, unsigned /*x*/, unsigned /*y*/, unsigned /*z*/,
                                 unsigned /*x*/, unsigned /*y*/, unsigned /*z*/,
                                 unsigned /*shared*/, void* stream, void** /*arguments*/,
                                 void** /*extra*/) {
  const auto lock = Machine::lock();
  return Machine::get().work(Machine::get().stream_of(stream), kLaunches);
}

#define IGNORED(name) \
  PRETENDED_API int name() { return kSuccess; }
IGNORED(cuCtxSetCurrent)
IGNORED(cuDeviceGet)
IGNORED(cuDeviceGetAttribute)
IGNORED(cuDevicePrimaryCtxRetain)
IGNORED(cuFuncGetAttribute)
IGNORED(cuFuncSetAttribute)
IGNORED(cuFuncSetCacheConfig)
IGNORED(cuLaunchCooperativeKernel)
IGNORED(cuLinkAddData_v2)
IGNORED(cuLinkComplete)
IGNORED(cuLinkCreate_v2)
IGNORED(cuModuleLoad)
IGNORED(cuModuleLoadDataEx)
IGNORED(cuModuleUnload)
IGNORED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
IGNORED(cuPointerGetAttribute)
IGNORED(cuTensorMapEncodeTiled)

/// Gives a function that does nothing for names that are not among these.
PRETENDED_API int cudaGetDriverEntryPointByVersion(const char* name, void** function,
                                                   unsigned /*version*/,
                                                   unsigned long long /*flags*/, int* status) {
  const auto is = [&](const char* other) { return !std::strcmp(name, other); };
  *function = is("cuCtxGetCurrent") ? reinterpret_cast<void*>(&cuCtxGetCurrent)
              : is("cuDevicePrimaryCtxGetState")
                  ? reinterpret_cast<void*>(&cuDevicePrimaryCtxGetState)
              : is("cuGetErrorString") ? reinterpret_cast<void*>(&cuGetErrorString)
                                       : reinterpret_cast<void*>(&cuCtxSetCurrent);
  if (status) *status = 0;
  return kSuccess;
}
