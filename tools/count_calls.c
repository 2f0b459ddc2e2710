// SPDX-License-Identifier: Apache-2.0
// Counts the calls of functions of CUDA's runtime that launch or wait, in a program that is started
// with this library in LD_PRELOAD, and prints a line "count_calls NAME NUMBER" for each at its end.
// Calls of libraries that contain a runtime of their own (cuBLAS, cuDNN) are not seen.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdio.h>

// clang-format off
#define FUNCTIONS(X) \
  X(__cudaLaunchKernel) X(cudaLaunchKernel) X(cudaLaunchKernelExC) X(cudaGraphLaunch) \
  X(cudaStreamSynchronize) X(cudaEventSynchronize) X(cudaDeviceSynchronize) \
  X(cudaMemcpy) X(cudaMemcpyAsync) X(cudaMemset) X(cudaMemsetAsync) \
  X(cudaStreamWaitEvent) X(cudaEventRecord) X(cudaEventRecordWithFlags) \
  X(cudaEventQuery) X(cudaStreamQuery) \
  X(cudaMalloc) X(cudaFree) X(cudaHostAlloc) X(cudaHostRegister) X(cudaStreamCreateWithPriority)
// clang-format on

enum {
#define NUMBER(name) k_##name,
  FUNCTIONS(NUMBER) kFunctions
};

static const char* const names[] = {
#define TEXT(name) #name,
    FUNCTIONS(TEXT)};

static atomic_ulong counts[kFunctions];

// Ten words hold all parameters of each: none is a floating-point number, and a dim3 takes two. The
// headers of CUDA, which declare them, are not needed.
typedef void* Word;
typedef int (*Function)(Word, Word, Word, Word, Word, Word, Word, Word, Word, Word);

#define COUNTED(name)                                                                        \
  int name(Word a, Word b, Word c, Word d, Word e, Word f, Word g, Word h, Word i, Word j) { \
    static _Atomic(Word) found;                                                              \
    Word real = found;                                                                       \
    if (!real) found = real = dlsym(RTLD_NEXT, #name);                                       \
    atomic_fetch_add_explicit(&counts[k_##name], 1, memory_order_relaxed);                   \
    return ((Function)real)(a, b, c, d, e, f, g, h, i, j);                                   \
  }
FUNCTIONS(COUNTED)

__attribute__((destructor)) static void print(void) {
  for (int i = 0; i < kFunctions; ++i) {
    if (counts[i]) fprintf(stderr, "count_calls %s %lu\n", names[i], (unsigned long)counts[i]);
  }
}
