// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <memory>
#include <mutex>

namespace smp::graph {

/// Names the stream of one call of a step function on one microbatch. A random operator draws
/// from a generator seeded by the key and its ordinal in program order, and from nothing else:
/// the same masks on one rank and on eight, in any schedule, after a restart and when recomputed.
struct RandomKey {
  uint64_t seed = 0;
  uint64_t step_function = 0;      ///< XXH64 of the step function's name
  uint64_t call = 0;               ///< how many calls of it came before
  uint64_t global_microbatch = 0;  ///< dp_rank * microbatches + microbatch
};

/// The seed of random operator `ordinal` under `key` (SplitMix64 over the fields).
uint64_t stream_seed(const RandomKey& key, uint64_t ordinal);

/// True if the operator draws random numbers.
bool is_random(const c10::OperatorHandle& op);

/// While it is held, no other rank of this process seeds the default generator of a device other
/// than the CPU: for those who do so.
std::unique_lock<std::mutex> lock_generators();

/// Calls the operator, which draws on the CPU from a generator of its own that is seeded with
/// `seed` (`GeneratorScope`): threads of the program may draw from the default one meanwhile.
///
/// Kernels of other devices may take their device's default generator without being given one, so
/// that one is seeded and its state put back afterwards, in one critical section of the ranks that
/// are threads of this process. Other threads that draw from it meanwhile disturb both.
void call_seeded(const c10::OperatorHandle& op, torch::jit::Stack& stack, uint64_t seed);

/// Calls the operator, which draws from the CPU's default generator, and returns the state that the
/// generator had before: `call_from_state` draws the same numbers again from it. Other threads that
/// draw from it wait.
at::Tensor call_noting_state(const c10::OperatorHandle& op, torch::jit::Stack& stack);

/// Tells whether the CPU's default generator was seeded while this lived; to draw does not count.
/// It cannot tell a seed that the generator was given before and has not drawn with since.
class SeedWatch {
 public:
  SeedWatch();
  bool was_seeded() const;

 private:
  uint64_t seed_;
  at::Tensor state_;
};

/// Calls the operator, which draws on the CPU from a generator of its own in `state`.
void call_from_state(const c10::OperatorHandle& op, torch::jit::Stack& stack,
                     const at::Tensor& state);

}  // namespace smp::graph
