// SPDX-License-Identifier: Apache-2.0
#include "runtime/step_functions.h"

#include <algorithm>

#include "core/check.h"
#include "runtime/first_difference.h"

namespace smp::runtime {
namespace {

/// `"step 0" (200 calls), "evaluate" (0 calls)`.
std::string list(const StepFunctions::Calls& calls) {
  std::string text;
  for (const auto& [name, count] : calls) {
    text += c10::str(text.empty() ? "" : ", ", "\"", name, "\" (", count, " calls)");
  }
  return text.empty() ? "none" : text;
}

}  // namespace

uint64_t stream_of(std::string_view step_function) { return hash_of(step_function); }

std::string StepFunctions::add(const std::string& name) {
  const bool named = !name.empty();
  const std::string full = named ? name : "step " + std::to_string(unnamed_++);
  const bool is_new = alive_.emplace(full, named).second;
  SMP_CHECK_WITH(
      UsageError, is_new, "two step functions are called \"", full,
      "\", and a step function draws its random numbers by its name. Give each a name of "
      "its own: StepOptions().name(\"evaluate\")");
  calls_.try_emplace(full, 0);
  return full;
}

void StepFunctions::remove(const std::string& name) { alive_.erase(name); }

uint64_t StepFunctions::calls(const std::string& name) const { return calls_.at(name); }

void StepFunctions::check_resumable(const Calls& saved, const std::string& path) const {
  for (const auto& [name, named] : alive_) {
    SMP_CHECK_WITH(CheckpointError, named || saved.count(name) > 0, "checkpoint \"", path,
                   "\" does not fit the step functions of the program: \"", name,
                   "\" has no name of its own and is not in the checkpoint, which has ",
                   list(saved),
                   ". Step functions without a name are numbered in the order in which they are "
                   "made, and draw random numbers by that. Make those of the run that saved, in "
                   "its order, and give the others names: StepOptions().name(\"evaluate\")");
  }
}

void StepFunctions::load(const Calls& saved) {
  for (const auto& [name, count] : saved) calls_[name] = count;
}

void StepFunctions::resume(const Calls& saved, const std::string& path) {
  load(saved);
  resumed_ = saved;
  resumed_path_ = path;
}

void StepFunctions::check_resumed(const std::string& name) const {
  if (resumed_path_.empty() || resumed_.count(name) > 0) return;
  const auto missing = std::find_if(resumed_.begin(), resumed_.end(), [&](const auto& saved) {
    return saved.second > 0 && alive_.count(saved.first) == 0;
  });
  SMP_CHECK_WITH(CheckpointError, missing == resumed_.end(), "step function \"", name,
                 "\" is not in checkpoint \"", resumed_path_,
                 "\", from which this run goes on, "
                 "and \"",
                 missing->first, "\" of the checkpoint (", missing->second,
                 " calls) is not in the program. Give step functions the names that they had when "
                 "the checkpoint was written, or make that one before the first step");
}

}  // namespace smp::runtime
