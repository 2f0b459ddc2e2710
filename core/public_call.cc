// SPDX-License-Identifier: Apache-2.0
#include "core/public_call.h"

#include <algorithm>
#include <cstring>

namespace smp::core {
namespace {

// FNV-1a, but never 0, which is that of no text.
uint64_t hash_of(std::string_view text) {
  if (text.empty()) return 0;
  uint64_t hash = 0xcbf29ce484222325U;
  for (const char letter : text) {
    hash = (hash ^ static_cast<unsigned char>(letter)) * 0x100000001b3U;
  }
  return hash | 1;
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
