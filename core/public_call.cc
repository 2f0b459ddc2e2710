// SPDX-License-Identifier: Apache-2.0
#include "core/public_call.h"

#include <xxhash.h>

#include <algorithm>
#include <cstring>

namespace smp::core {
namespace {

// Never 0, which is that of no text.
uint64_t hash_of(std::string_view text) {
  return text.empty() ? 0 : XXH64(text.data(), text.size(), /*seed=*/0) | 1;
}

// Needs no destructor, since handlers that run when a program ends are in calls, too.
PublicCall& current() {
  thread_local PublicCall call;
  return call;
}

}  // namespace

PublicCall::PublicCall(std::string_view text, std::string_view kind) : kind_(hash_of(kind)) {
  std::memcpy(text_.data(), text.data(), std::min(text.size(), text_.size()));
}

std::string PublicCall::text() const { return {text_.data(), strnlen(text_.data(), text_.size())}; }

const PublicCall& this_public_call() { return current(); }

PublicCallScope::PublicCallScope(const PublicCall& call) : before_(current()) { current() = call; }

PublicCallScope::~PublicCallScope() { current() = before_; }

}  // namespace smp::core
