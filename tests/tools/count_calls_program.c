// SPDX-License-Identifier: Apache-2.0
// Launches three kernels: through the runtime, by dlsym and by cuGetProcAddress. Run by
// gpu_run_test under tools/count_calls.c.
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>

int cudaLaunchKernel(const void* kernel);
void* counted_cuda(void);
int counted_cuda_launches(void);

typedef int (*Launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                      void*, void**, void**);
typedef int (*Find)(const char* name, void** found, int version, uint64_t flags, int* status);
typedef int (*Wait)(void* stream);

static int launch(void* function, void* it) {
  return ((Launch)function)(it, 1, 2, 3, 4, 5, 6, 7, it, NULL, it);
}

int main(void) {
  void* const it = counted_cuda();
  int failures = cudaLaunchKernel(it);
  failures += launch(dlsym(RTLD_DEFAULT, "cuLaunchKernel"), it);
  int status = -1;
  void *again = NULL, *found = NULL, *of_threads = NULL;
  const Find find = (Find)dlsym(RTLD_DEFAULT, "cuGetProcAddress_v2");
  failures += find("cuGetProcAddress", &again, 13000, 0, &status) || status;
  failures += ((Find)again)("cuLaunchKernel", &found, 13000, 0, &status) || launch(found, it);
  // For streams of threads there is another function, which is not to be mixed up with this one.
  failures += find("cuLaunchKernel", &of_threads, 13000, 2, &status);
  failures += launch(of_threads, it) != 2;
  failures += ((Wait)dlsym(RTLD_DEFAULT, "cuStreamSynchronize"))(it);
  failures += dlsym(RTLD_DEFAULT, "cuNothing") != NULL;
  printf("%d launches, %d failures\n", counted_cuda_launches(), failures);
  return failures;
}
