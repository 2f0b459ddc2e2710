// SPDX-License-Identifier: Apache-2.0
#include "core/deterministic.h"

#include <ATen/Context.h>

#include <cstdlib>
#include <mutex>
#include <string>

#include "core/check.h"
#include "core/env.h"

namespace smp::core {
namespace {

constexpr const char* kWorkspaceVariable = "CUBLAS_WORKSPACE_CONFIG";
/// Eight buffers of 4 MiB, the larger one of the two with which cuBLAS repeats its sums.
constexpr const char* kWorkspace = ":4096:8";
constexpr const char* kSmallWorkspace = ":16:8";

void check_workspace() {
  const std::string given = env(kWorkspaceVariable).value_or("");
  const bool repeats = given == kWorkspace || given == kSmallWorkspace;
  SMP_CHECK_WITH(ConfigError, repeats, "config key \"deterministic\": the environment has ",
                 kWorkspaceVariable, "=", given,
                 ", with which sums of cuBLAS may differ from run to run. Unset it, or set it to ",
                 kWorkspace, " or ", kSmallWorkspace);
}

/// libtorch's choice of kernels.
struct KernelChoice {
  bool deterministic, only_warns;
  bool deterministic_cudnn, benchmarks_cudnn;
};
constexpr KernelChoice kDeterministic = {true, false, true, false};

KernelChoice choice_now() {
  const at::Context& context = at::globalContext();
  return {context.deterministicAlgorithms(), context.deterministicAlgorithmsWarnOnly(),
          context.deterministicCuDNN(), context.benchmarkCuDNN()};
}

void choose(const KernelChoice& choice) {
  at::Context& context = at::globalContext();
  context.setDeterministicAlgorithms(choice.deterministic, choice.only_warns);
  context.setDeterministicCuDNN(choice.deterministic_cudnn);
  context.setBenchmarkCuDNN(choice.benchmarks_cudnn);
}

/// The objects of `DeterministicKernels`, and the choice after the last.
struct Uses {
  std::mutex mutex;
  int count = 0;
  KernelChoice afterwards{};
};

Uses& uses_of_process() {
  static auto* const uses = new Uses;  // threads may still leave when static objects have ended
  return *uses;
}

}  // namespace

void set_deterministic_workspace() {
  if (!env(kWorkspaceVariable)) setenv(kWorkspaceVariable, kWorkspace, /*overwrite=*/1);
}

void use_deterministic_kernels() {
  check_workspace();
  Uses& uses = uses_of_process();
  const std::lock_guard<std::mutex> lock(uses.mutex);
  uses.afterwards = kDeterministic;
  choose(kDeterministic);
}

DeterministicKernels::DeterministicKernels() {
  check_workspace();
  Uses& uses = uses_of_process();
  const std::lock_guard<std::mutex> lock(uses.mutex);
  if (uses.count == 0) {
    uses.afterwards = choice_now();
    choose(kDeterministic);
  }
  ++uses.count;
}

DeterministicKernels::~DeterministicKernels() {
  Uses& uses = uses_of_process();
  const std::lock_guard<std::mutex> lock(uses.mutex);
  if (--uses.count == 0) choose(uses.afterwards);
}

bool uses_deterministic_kernels() {
  const at::Context& context = at::globalContext();
  return context.deterministicAlgorithms() && !context.deterministicAlgorithmsWarnOnly();
}

void explain_if_not_deterministic(c10::Error& error) {
  // libtorch has no type for it.
  const std::string text = error.what_without_backtrace();
  if (text.find("does not have a deterministic implementation") == std::string::npos) return;
  error.add_context(
      "deterministic algorithms are on (\"deterministic\": true, or at::globalContext()), so this "
      "operator is refused. Use another one in its place, or turn them off, and bits may differ "
      "from run to run: docs/cuda.md");
}

}  // namespace smp::core
