// SPDX-License-Identifier: Apache-2.0
// A library in place of CUDA's for tools/count_calls.c: functions of the driver, and one of the
// runtime, which calls the driver as cudart does.
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef int (*Launch)(void* kernel, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                      unsigned shared, void* stream, void** arguments, void** extra);
typedef int (*Find)(const char* name, void** found, int version, uint64_t flags, int* status);

static int launches;

/// Fails unless the first and the last parameters are those of main.
int cuLaunchKernel(void* kernel, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned b,
                   unsigned c, unsigned shared, void* stream, void** arguments, void** extra) {
  ++launches;
  const int well = kernel == &launches && x == 1 && y == 2 && z == 3 && threads == 4 && b == 5 &&
                   c == 6 && shared == 7 && stream == &launches && arguments == NULL &&
                   extra == (void**)&launches;
  return well ? 0 : 1;
}

static int launch_of_threads(void) { return 2; }

int cuStreamSynchronize(void* stream) { return stream == &launches ? 0 : 1; }

/// Without the last parameter in its first version.
int cuGetProcAddress_v2(const char* name, void** found, int version, uint64_t flags, int* status) {
  *status = version == 13000 ? 0 : 1;
  if (!strcmp(name, "cuLaunchKernel")) {
    *found = flags == 2 ? (void*)launch_of_threads : (void*)cuLaunchKernel;
  } else if (!strcmp(name, "cuGetProcAddress")) {
    *found = (void*)cuGetProcAddress_v2;
  } else {
    *found = NULL;
    return 1;
  }
  return 0;
}

/// Launches as a program does that is linked with the runtime: by its own way to the driver.
int cudaLaunchKernel(const void* kernel) {
  int status = -1;
  void* launch = NULL;
  const Find find = (Find)dlsym(RTLD_DEFAULT, "cuGetProcAddress_v2");
  if (kernel != &launches || find("cuLaunchKernel", &launch, 13000, 1, &status) || status) return 1;
  return ((Launch)launch)(&launches, 1, 2, 3, 4, 5, 6, 7, &launches, NULL, (void**)&launches);
}

/// The kernels and streams here.
void* counted_cuda(void) { return &launches; }
int counted_cuda_launches(void) { return launches; }
