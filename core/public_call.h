// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace smp::core {

/// The call of the user's that a thread is in, as a value of fixed size: ranks put it into memory
/// that they share, and into messages, and compare it where they meet.
class PublicCall {
 public:
  /// The user's own code.
  PublicCall() = default;
  /// `text` as errors have it, cut off where it is longer than there is room. Ranks that meet are
  /// in calls of one `kind`; calls without a kind are collectives of the user's own, which are
  /// compared as such.
  PublicCall(std::string_view text, std::string_view kind);

  bool is_of_kind_of(const PublicCall& other) const { return kind_ == other.kind_; }
  uint64_t kind() const { return kind_; }

  /// "call 3 of step function \"train\""; empty in the user's own code.
  std::string text() const;

 private:
  uint64_t kind_ = 0;  // a hash, the same on all ranks
  std::array<char, 120> text_{};
};
static_assert(sizeof(PublicCall) == 128);

/// The kind of calls that are a collective of the user's own.
constexpr std::string_view kOwnCollective;

/// The kind of all calls of step functions: those of replicas that call different ones, or have no
/// batches left, meet. Which function it is, the ranks of a pipeline compare.
constexpr std::string_view kAnyStep = "step";

/// The call that this thread is in, or works for.
const PublicCall& this_public_call();

/// Until the end of the block this thread is in `call`; then in the one before.
class PublicCallScope {
 public:
  explicit PublicCallScope(const PublicCall& call);
  ~PublicCallScope();
  PublicCallScope(const PublicCallScope&) = delete;
  PublicCallScope& operator=(const PublicCallScope&) = delete;

 private:
  const PublicCall before_;
};

}  // namespace smp::core
