// SPDX-License-Identifier: Apache-2.0
// Counts the calls of functions of CUDA that launch, copy or wait, in a program that is started
// with this library in LD_PRELOAD, and prints a line "count_calls NAME NUMBER" for each at its end.
// Functions of the runtime are found by their names, since a preloaded library comes first. Those
// of the driver are asked for, by dlsym or cuGetProcAddress, also by the runtimes that cuBLAS and
// cuDNN contain, and are given in a form that counts. A call within a counted one is not counted.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

// clang-format off
#define RUNTIME(X) \
  X(__cudaLaunchKernel) X(cudaLaunchKernel) X(cudaLaunchKernelExC) X(cudaGraphLaunch) \
  X(cudaStreamSynchronize) X(cudaEventSynchronize) X(cudaDeviceSynchronize) \
  X(cudaMemcpy) X(cudaMemcpyAsync) X(cudaMemset) X(cudaMemsetAsync) \
  X(cudaStreamWaitEvent) X(cudaEventRecord) X(cudaEventRecordWithFlags) \
  X(cudaEventQuery) X(cudaStreamQuery) \
  X(cudaMalloc) X(cudaFree) X(cudaHostAlloc) X(cudaHostRegister) X(cudaStreamCreateWithPriority)
#define DRIVER(X) \
  X(cuLaunchKernel) X(cuLaunchKernelEx) X(cuGraphLaunch) \
  X(cuStreamSynchronize) X(cuEventSynchronize) X(cuCtxSynchronize) \
  X(cuMemcpyAsync) X(cuMemcpyHtoDAsync) X(cuMemcpyDtoHAsync) X(cuMemcpyDtoDAsync)
// clang-format on

enum {
#define NUMBER(name) k_##name,
  RUNTIME(NUMBER) DRIVER(NUMBER) kFunctions
};

static const char* const names[] = {
#define TEXT(name) #name,
    RUNTIME(TEXT) DRIVER(TEXT)};

static atomic_ulong counts[kFunctions];
static _Thread_local int depth;  // calls that are counted and have not returned

// Twelve words hold all parameters of each: none is a floating-point number, and a dim3 takes two.
// The headers of CUDA, which declare them, are not needed.
typedef void* Word;
typedef int (*Function)(Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word);
#define PARAMETERS \
  Word a, Word b, Word c, Word d, Word e, Word f, Word g, Word h, Word i, Word j, Word k, Word l

#define CALL(name, real)                                                                 \
  if (depth == 0) atomic_fetch_add_explicit(&counts[k_##name], 1, memory_order_relaxed); \
  ++depth;                                                                               \
  const int result = ((Function)real)(a, b, c, d, e, f, g, h, i, j, k, l);               \
  --depth;                                                                               \
  return result;

typedef Word (*FindSymbol)(Word, const char*);

/// glibc's own dlsym.
static FindSymbol real_dlsym(void) {
  static _Atomic(Word) found;
  if (!found) found = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
  if (!found) found = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
  return (FindSymbol)found;
}

#define OF_RUNTIME(name)                              \
  int name(PARAMETERS) {                              \
    static _Atomic(Word) real;                        \
    if (!real) real = real_dlsym()(RTLD_NEXT, #name); \
    CALL(name, real)                                  \
  }
RUNTIME(OF_RUNTIME)

#define OF_DRIVER(name)             \
  static _Atomic(Word) real_##name; \
  static int counted_##name(PARAMETERS) { CALL(name, real_##name) }
DRIVER(OF_DRIVER)

/// Gives a function of the driver in the form that counts. There is one form of each name: another
/// version of a function that was given before stays as it is.
static Word counted(const char* name, Word found) {
  if (!found || strncmp(name, "cu", 2)) return found;
  Word none;
#define COUNTED(function)                                                                \
  if (!strcmp(name, #function) || !strcmp(name, #function "_v2")) {                      \
    none = NULL;                                                                         \
    const int is_first = atomic_compare_exchange_strong(&real_##function, &none, found); \
    return is_first || none == found ? (Word)counted_##function : found;                 \
  }
  DRIVER(COUNTED)
  return found;
}

/// cuGetProcAddress, which has two versions: the later one has a fifth parameter.
#define OF_FINDER(number)                                                                   \
  static _Atomic(Word) real_finder_##number;                                                \
  static int finder_##number(PARAMETERS) {                                                  \
    const int error = ((Function)real_finder_##number)(a, b, c, d, e, f, g, h, i, j, k, l); \
    return error ? error : give_counted((const char*)a, (Word*)b, (uintptr_t)d);            \
  }
static int give_counted(const char* name, Word* found, uintptr_t flags);
OF_FINDER(0)
OF_FINDER(1)

/// The same for functions that find others.
static Word replaced(const char* name, Word found) {
  if (!found || (strcmp(name, "cuGetProcAddress") && strcmp(name, "cuGetProcAddress_v2"))) {
    return counted(name, found);
  }
  Word none = NULL;
  if (atomic_compare_exchange_strong(&real_finder_0, &none, found) || none == found) {
    return (Word)finder_0;
  }
  none = NULL;
  if (atomic_compare_exchange_strong(&real_finder_1, &none, found) || none == found) {
    return (Word)finder_1;
  }
  return found;
}

static int give_counted(const char* name, Word* found, uintptr_t flags) {
  enum { kPerThreadStreams = 2 };  // asks for another form of all functions
  if (found && !(flags & kPerThreadStreams)) *found = replaced(name, *found);
  return 0;
}

/// A jump, in an optimized build, so that glibc sees by whom RTLD_NEXT is asked for.
Word dlsym(Word library, const char* name) {
  if (strncmp(name, "cu", 2)) return real_dlsym()(library, name);
  return replaced(name, real_dlsym()(library, name));
}

__attribute__((destructor)) static void print(void) {
  for (int i = 0; i < kFunctions; ++i) {
    if (counts[i]) fprintf(stderr, "count_calls %s %lu\n", names[i], (unsigned long)counts[i]);
  }
}
