// SPDX-License-Identifier: Apache-2.0
#include "graph/random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <optional>

#include "graph/devices.h"
#include "graph/intercept.h"

namespace smp::graph {
namespace {

uint64_t mix(uint64_t state) {
  state += 0x9e3779b97f4a7c15ull;
  state = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9ull;
  state = (state ^ (state >> 27)) * 0x94d049bb133111ebull;
  return state ^ (state >> 31);
}

/// Restores the state of the CPU's default generator at the end.
class RestoredCpuGenerator {
 public:
  RestoredCpuGenerator()
      : generator_(at::detail::getDefaultCPUGenerator()),
        impl_(*at::check_generator<at::CPUGeneratorImpl>(generator_)),
        saved_(state()) {}
  ~RestoredCpuGenerator() {
    const std::lock_guard lock(generator_.mutex());
    impl_.set_engine(saved_.engine);
    impl_.set_next_float_normal_sample(saved_.next_float);
    impl_.set_next_double_normal_sample(saved_.next_double);
  }

  void seed(uint64_t seed) {
    const std::lock_guard lock(generator_.mutex());
    impl_.set_current_seed(seed);
  }
  void set_state(const at::Tensor& state) {
    const std::lock_guard lock(generator_.mutex());
    generator_.set_state(state);
  }

 private:
  /// All that the generator consists of. As the tensor of `get_state` it costs several times that.
  struct State {
    at::mt19937 engine;
    std::optional<float> next_float;
    std::optional<double> next_double;
  };
  State state() {
    const std::lock_guard lock(generator_.mutex());
    return {impl_.engine(), impl_.next_float_normal_sample(), impl_.next_double_normal_sample()};
  }

  at::Generator generator_;
  at::CPUGeneratorImpl& impl_;
  State saved_;
};

/// Restores the state of another device's default generator at the end.
class RestoredGenerator {
 public:
  explicit RestoredGenerator(at::Generator generator)
      : generator_(std::move(generator)), saved_(generator_.clone()) {}
  ~RestoredGenerator() {
    const std::lock_guard lock(generator_.mutex());
    generator_.set_state(saved_.get_state());
  }

  void seed(uint64_t seed) {
    const std::lock_guard lock(generator_.mutex());
    generator_.set_current_seed(seed);
  }

 private:
  at::Generator generator_;
  at::Generator saved_;
};

}  // namespace

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
  const auto lock = lock_generators();
  RestoredCpuGenerator cpu;
  cpu.seed(seed);
  std::optional<RestoredGenerator> other;
  if (const auto device = accelerator_of(op, stack)) {
    other.emplace(at::globalContext().defaultGenerator(*device));
    other->seed(seed);
  }
  op.callBoxed(stack);
}

at::Tensor call_noting_state(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const auto lock = lock_generators();
  const at::Tensor state = at::detail::getDefaultCPUGenerator().get_state();
  op.callBoxed(stack);
  return state;
}

void call_from_state(const c10::OperatorHandle& op, torch::jit::Stack& stack,
                     const at::Tensor& state) {
  const auto lock = lock_generators();
  RestoredCpuGenerator generator;
  generator.set_state(state);
  op.callBoxed(stack);
}

class KeyedRandomScope::Impl : public OperatorInterceptor {
 public:
  explicit Impl(const RandomKey& key) : key_(key), scope_(*this) {}

  void call(const c10::OperatorHandle& op, torch::jit::Stack& stack) override {
    if (is_random(op)) {
      call_seeded(op, stack, stream_seed(key_, ordinal_++));
    } else {
      op.callBoxed(stack);
    }
  }

 private:
  RandomKey key_;
  uint64_t ordinal_ = 0;
  InterceptScope scope_;
};

KeyedRandomScope::KeyedRandomScope(const RandomKey& key) : impl_(std::make_unique<Impl>(key)) {}
KeyedRandomScope::~KeyedRandomScope() = default;

}  // namespace smp::graph
