#include "smp/keyed_random.h"

#include "graph/random.h"

namespace smp {

class KeyedRandom::Impl : public graph::KeyedRandomScope {
 public:
  using KeyedRandomScope::KeyedRandomScope;
};

KeyedRandom::KeyedRandom(uint64_t seed, uint64_t step_function, uint64_t call, uint64_t microbatch)
    : impl_(std::make_unique<Impl>(graph::RandomKey{seed, step_function, call, microbatch})) {}

KeyedRandom::~KeyedRandom() = default;

}  // namespace smp
