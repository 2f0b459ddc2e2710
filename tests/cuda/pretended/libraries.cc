// SPDX-License-Identifier: Apache-2.0
// Functions in place of those of cuBLAS, cuDNN and NCCL, as far as training programs of one rank
// call them. A call that would launch kernels counts as one launch.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <vector>

#include "tests/cuda/pretended/machine.h"

using namespace pretended;

namespace {

/// A parameter that is a pointer or a whole number.
using Word = void*;

/// A handle of cuBLAS or cuDNN.
struct Library {
  void* stream = nullptr;
};

constexpr int kExecutionFailed = 13;  // CUBLAS_STATUS_EXECUTION_FAILED

Error launch(void* stream) {
  const auto lock = Machine::lock();
  return Machine::get().work(Machine::get().stream_of(stream), kLaunches);
}

}  // namespace

// cuBLAS.

PRETENDED_API int cublasCreate_v2(Library** library) {
  *library = new Library;
  return 0;
}

PRETENDED_API int cublasDestroy_v2(Library* library) {
  delete library;
  return 0;
}

PRETENDED_API int cublasSetStream_v2(Library* library, void* stream) {
  library->stream = stream;
  return 0;
}

PRETENDED_API int cublasGetMathMode(Library* /*library*/, int* mode) {
  *mode = 0;
  return 0;
}

PRETENDED_API int cublasGetPointerMode_v2(Library* /*library*/, int* mode) {
  *mode = 0;
  return 0;
}

#define PRODUCT(name)                                      \
  PRETENDED_API int name(Library* library, ...) {          \
    return launch(library->stream) ? kExecutionFailed : 0; \
  }
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasDgemm_v2)
PRODUCT(cublasSgemmEx)
PRODUCT(cublasGemmEx)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasDgemmStridedBatched)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasSgemv_v2)
PRODUCT(cublasDgemv_v2)
PRODUCT(cublasSdot_v2)
PRODUCT(cublasDdot_v2)
PRODUCT(cublasDotEx)

PRETENDED_API int cublasLtMatmul(void* /*library*/, void* /*product*/, const void* /*alpha*/,
                                 const void* /*a*/, void* /*layout*/, const void* /*b*/,
                                 void* /*layout*/, const void* /*beta*/, const void* /*c*/,
                                 void* /*layout*/, void* /*d*/, void* /*layout*/,
                                 const void* /*algorithm*/, void* /*workspace*/, size_t /*bytes*/,
                                 void* stream) {
  return launch(stream) ? kExecutionFailed : 0;
}

/// Gives one way, of all zeros.
PRETENDED_API int cublasLtMatmulAlgoGetHeuristic(void* /*library*/, void* /*product*/, void* /*a*/,
                                                 void* /*b*/, void* /*c*/, void* /*d*/,
                                                 void* /*preference*/, int /*most*/, void* ways,
                                                 int* count) {
  std::memset(ways, 0, 96);  // cublasLtMatmulHeuristicResult_t
  *count = 1;
  return 0;
}

// Descriptions, of which nothing is read.
#define DESCRIPTION(name)                            \
  PRETENDED_API int name##Create(void** made, ...) { \
    *made = new char;                                \
    return 0;                                        \
  }                                                  \
  PRETENDED_API int name##Destroy(char* made) {      \
    delete made;                                     \
    return 0;                                        \
  }
DESCRIPTION(cublasLtMatmulDesc)
DESCRIPTION(cublasLtMatmulPreference)
DESCRIPTION(cublasLtMatrixLayout)

#define IGNORED(name) \
  PRETENDED_API int name() { return 0; }
IGNORED(cublasSetMathMode)
IGNORED(cublasSetPointerMode_v2)
IGNORED(cublasSetWorkspace_v2)
IGNORED(cublasLtMatmulDescSetAttribute)
IGNORED(cublasLtMatmulPreferenceSetAttribute)
IGNORED(cublasLtMatrixLayoutSetAttribute)

// cuDNN: descriptors have the attributes that were set. There is one engine, which needs no
// workspace and has neither knobs nor notes.

namespace {

/// Values of cudnnBackendAttributeType_t.
enum Type { kBoolean = 2, kNumericalNote = 11, kDescriptor = 15, kBehaviorNote = 19, kChar = 24 };

constexpr int kKnobs = 1302;  // a value of cudnnBackendAttributeName_t

struct Attribute {
  int64_t count;
  std::vector<char> elements;
};

using Descriptor = std::map<int, Attribute>;

/// Bytes of one element; enumerations have four bytes, handles, pointers and large numbers eight.
size_t size_of(int type) {
  if (type == kBoolean || type == kChar) return 1;
  const bool large = type == 0 || type == 3 || type == 5 || type == 6 || type == 15;
  return large ? 8 : 4;
}

}  // namespace

PRETENDED_API int cudnnCreate(Library** library) { return cublasCreate_v2(library); }

PRETENDED_API int cudnnDestroy(Library* library) { return cublasDestroy_v2(library); }

PRETENDED_API int cudnnSetStream(Library* library, void* stream) {
  return cublasSetStream_v2(library, stream);
}

PRETENDED_API int cudnnGetStream(const Library* library, void** stream) {
  *stream = library->stream;
  return 0;
}

PRETENDED_API int cudnnBackendCreateDescriptor(int /*type*/, Descriptor** made) {
  *made = new Descriptor;
  return 0;
}

PRETENDED_API int cudnnBackendDestroyDescriptor(Descriptor* descriptor) {
  delete descriptor;
  return 0;
}

PRETENDED_API int cudnnBackendFinalize(Descriptor* /*descriptor*/) { return 0; }

PRETENDED_API int cudnnBackendSetAttribute(Descriptor* descriptor, int name, int type,
                                           int64_t count, const void* elements) {
  const auto* first = static_cast<const char*>(elements);
  const size_t bytes = first ? size_of(type) * static_cast<size_t>(count) : 0;
  (*descriptor)[name] = {count, std::vector<char>(first, first + bytes)};
  return 0;
}

/// Gives the value that was set; otherwise a number 0, the descriptor that the caller made, or
/// nothing.
PRETENDED_API int cudnnBackendGetAttribute(const Descriptor* descriptor, int name, int type,
                                           int64_t room, int64_t* count, void* elements) {
  const auto found = descriptor->find(name);
  const bool none = name == kKnobs || type == kNumericalNote || type == kBehaviorNote;
  const int64_t there = found != descriptor->end() ? found->second.count : none ? 0 : 1;
  if (count) *count = there;
  if (!elements || room == 0) return 0;
  if (found != descriptor->end()) {
    const size_t bytes = size_of(type) * static_cast<size_t>(std::min(room, there));
    std::memcpy(elements, found->second.elements.data(), bytes);
  } else if (type != kDescriptor) {
    std::memset(elements, 0, size_of(type) * static_cast<size_t>(std::min(room, there)));
  }
  return 0;
}

PRETENDED_API int cudnnBackendExecute(const Library* library, Descriptor* /*plan*/,
                                      Descriptor* /*tensors*/) {
  return launch(library->stream) ? 5000 : 0;  // CUDNN_STATUS_EXECUTION_FAILED
}

// Batch normalization, which has functions of its own.
PRODUCT(cudnnBatchNormalizationForwardTrainingEx)
PRODUCT(cudnnBatchNormalizationForwardInference)
PRODUCT(cudnnBatchNormalizationBackwardEx)

#define NO_MEMORY(name, ...)                           \
  PRETENDED_API int name(__VA_ARGS__, size_t* bytes) { \
    *bytes = 0;                                        \
    return 0;                                          \
  }
NO_MEMORY(cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize, Word, Word, Word, Word, Word,
          Word, Word, Word)
NO_MEMORY(cudnnGetBatchNormalizationBackwardExWorkspaceSize, Word, Word, Word, Word, Word, Word,
          Word, Word, Word, Word)
NO_MEMORY(cudnnGetBatchNormalizationTrainingExReserveSpaceSize, Word, Word, Word, Word, Word)

// NCCL, in groups of one rank.

namespace {

struct UniqueId {
  char bytes[128];
};

struct Group {};

Error make_group(Group** group, int ranks) {
  if (ranks != 1) return static_cast<Error>(5);  // ncclInvalidUsage
  *group = new Group;
  return kSuccess;
}

}  // namespace

PRETENDED_API int ncclGetUniqueId(UniqueId* id) {
  *id = {};
  return 0;
}

PRETENDED_API int ncclCommInitRank(Group** group, int ranks, UniqueId /*id*/, int /*rank*/) {
  return make_group(group, ranks);
}

PRETENDED_API int ncclCommInitRankConfig(Group** group, int ranks, UniqueId /*id*/, int /*rank*/,
                                         void* /*config*/) {
  return make_group(group, ranks);
}

PRETENDED_API int ncclCommInitRankScalable(Group** group, int ranks, int /*rank*/, int /*ids*/,
                                           UniqueId* /*id*/, void* /*config*/) {
  return make_group(group, ranks);
}

PRETENDED_API int ncclCommDestroy(Group* group) {
  delete group;
  return 0;
}

PRETENDED_API int ncclCommAbort(Group* group) { return ncclCommDestroy(group); }

PRETENDED_API int ncclCommGetAsyncError(Group* /*group*/, int* error) {
  *error = 0;
  return 0;
}

PRETENDED_API int ncclCommCount(const Group* /*group*/, int* ranks) {
  *ranks = 1;
  return 0;
}

PRETENDED_API int ncclCommUserRank(const Group* /*group*/, int* rank) {
  *rank = 0;
  return 0;
}

PRETENDED_API int ncclRedOpCreatePreMulSum(int* op, ...) {
  *op = 5;  // ncclNumOps, the first that is free
  return 0;
}

IGNORED(ncclCommFinalize)
IGNORED(ncclCommRegister)
IGNORED(ncclCommDeregister)
IGNORED(ncclGroupStart)
IGNORED(ncclGroupEnd)
IGNORED(ncclRedOpDestroy)

// Parameters of these are pointers and whole numbers.
#define COLLECTIVE(name, ...) \
  PRETENDED_API int name(__VA_ARGS__, Word stream) { return launch(stream) ? 1 : 0; }
COLLECTIVE(ncclSend, Word, Word, Word, Word, Word)
COLLECTIVE(ncclRecv, Word, Word, Word, Word, Word)
COLLECTIVE(ncclBcast, Word, Word, Word, Word, Word)
COLLECTIVE(ncclAllGather, Word, Word, Word, Word, Word)
COLLECTIVE(ncclAlltoAll, Word, Word, Word, Word, Word)
COLLECTIVE(ncclAllReduce, Word, Word, Word, Word, Word, Word)
COLLECTIVE(ncclBroadcast, Word, Word, Word, Word, Word, Word)
COLLECTIVE(ncclReduceScatter, Word, Word, Word, Word, Word, Word)
COLLECTIVE(ncclReduce, Word, Word, Word, Word, Word, Word, Word)
