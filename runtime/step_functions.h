// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

namespace smp::runtime {

/// The number that stands for a step function in the keys of its random streams: XXH64 of its name.
uint64_t stream_of(std::string_view step_function);

/// The step functions of a program, which are known by their names: the name selects a function's
/// random streams and continues its count of calls after a restart. A function without a name gets
/// one from its place among those without: "step 0", "step 1" ... Internal.
class StepFunctions {
 public:
  /// How often each step function was called, by name.
  using Calls = std::map<std::string, uint64_t>;

  /// Notes a new step function and returns its name: `name`, or the next number if that is empty.
  /// A name can be used again when its function is gone; the calls are counted on. Throws
  /// `UsageError` if another one has the name.
  std::string add(const std::string& name);
  /// Notes that the function is gone.
  void remove(const std::string& name);

  /// How often the function was called, in the run that was resumed, too.
  uint64_t calls(const std::string& name) const;
  /// Counts a call and returns how many came before.
  uint64_t count_call(const std::string& name) { return calls_.at(name)++; }

  /// Those of the program, and of the checkpoint that was loaded.
  const Calls& all() const { return calls_; }

  /// Throws `CheckpointError` if a function without a name is not in the checkpoint `path`, which
  /// has `saved`: functions without names then have other numbers than in the run that saved.
  void check_resumable(const Calls& saved, const std::string& path) const;
  /// Counts on from `saved`.
  void load(const Calls& saved);
  /// The same, for a run that continues the one that saved, which `check_resumed` holds it to.
  void resume(const Calls& saved, const std::string& path);
  /// Throws `CheckpointError` if a function that is about to be called is not in the checkpoint
  /// that was resumed, and one of the checkpoint's is not in the program: it may have been renamed.
  void check_resumed(const std::string& name) const;

 private:
  int unnamed_ = 0;
  Calls calls_;
  std::map<std::string, bool> alive_;  // whether the program gave the name
  Calls resumed_;
  std::string resumed_path_;  // empty: the run was not resumed
};

}  // namespace smp::runtime
