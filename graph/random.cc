// SPDX-License-Identifier: Apache-2.0
#include "graph/random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/equal.h>

#include <utility>

#include "graph/devices.h"
#include "graph/generator_scope.h"

namespace smp::graph {
namespace {

uint64_t mix(uint64_t state) {
  state += 0x9e3779b97f4a7c15ull;
  state = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9ull;
  state = (state ^ (state >> 27)) * 0x94d049bb133111ebull;
  return state ^ (state >> 31);
}

/// Seeds a device's default generator, and restores its state at the end.
class SeededGenerator {
 public:
  SeededGenerator(at::Generator generator, uint64_t seed)
      : generator_(std::move(generator)), saved_(generator_.clone()) {
    const std::lock_guard lock(generator_.mutex());
    generator_.set_current_seed(seed);
  }
  ~SeededGenerator() {
    const std::lock_guard lock(generator_.mutex());
    generator_.set_state(saved_.get_state());
  }

 private:
  at::Generator generator_;
  at::Generator saved_;
};

at::Tensor state_of(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

}  // namespace

SeedWatch::SeedWatch()
    : seed_(at::detail::getDefaultCPUGenerator().current_seed()),
      state_(state_of(at::detail::getDefaultCPUGenerator())) {}

bool SeedWatch::was_seeded() const {
  const at::Generator& generator = at::detail::getDefaultCPUGenerator();
  if (generator.current_seed() != seed_) return true;
  const at::Tensor state = state_of(generator);
  if (at::equal(state, state_)) return false;
  return at::equal(state, state_of(at::make_generator<at::CPUGeneratorImpl>(seed_)));
}

uint64_t stream_seed(const RandomKey& key, uint64_t ordinal) {
  uint64_t state = mix(key.seed);
  for (uint64_t field : {key.step_function, key.call, key.global_microbatch, ordinal}) {
    state = mix(state ^ field);
  }
  return state;
}

bool is_random(const c10::OperatorHandle& op) {
  return op.hasTag(at::Tag::nondeterministic_seeded);
}

std::unique_lock<std::mutex> lock_generators() {
  static std::mutex mutex;
  return std::unique_lock(mutex);
}

void call_seeded(const c10::OperatorHandle& op, torch::jit::Stack& stack, uint64_t seed) {
  const GeneratorScope cpu(seed);
  const auto device = accelerator_of(op, stack);
  if (!device) {
    op.callBoxed(stack);
    return;
  }
  const auto lock = lock_generators();
  const SeededGenerator other(at::globalContext().defaultGenerator(*device), seed);
  op.callBoxed(stack);
}

at::Tensor call_noting_state(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  at::Generator own = at::make_generator<at::CPUGeneratorImpl>();
  const std::lock_guard lock(generator.mutex());
  const at::Tensor state = generator.get_state();
  own.set_state(state);
  {
    const GeneratorScope scope(own);
    op.callBoxed(stack);
  }
  generator.set_state(own.get_state());
  return state;
}

void call_from_state(const c10::OperatorHandle& op, torch::jit::Stack& stack,
                     const at::Tensor& state) {
  at::Generator own = at::make_generator<at::CPUGeneratorImpl>();
  own.set_state(state);
  const GeneratorScope scope(std::move(own));
  op.callBoxed(stack);
}

}  // namespace smp::graph
