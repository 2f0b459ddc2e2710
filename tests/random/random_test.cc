// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <iostream>
#include <map>
#include <string>

#include "tests/random/check.h"
#include "tests/random/generator.h"

namespace smp::random_programs {
namespace {

/// A number from the environment, to run more programs than the test does by itself.
uint64_t setting(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

/// What went wrong, whatever the numbers: empty if nothing did.
std::string kind_of(const Verdict& verdict) {
  const bool threw =
      verdict.failure.rfind("threw", 0) == 0 || verdict.failure.rfind("the pipeline threw", 0) == 0;
  if (!threw && !verdict.failure.empty()) return "other bits";
  std::string text =
      threw ? verdict.failure.substr(0, verdict.failure.find('\n')) : verdict.rejection;
  text.erase(std::remove_if(text.begin(), text.end(), [](char c) { return std::isdigit(c); }),
             text.end());
  return text;
}

/// What a person needs to find the reason: the smallest program that fails in this way, and how it
/// does.
std::string explain(const Program& program, const std::string& kind) {
  constexpr uint64_t kCuts = 8;
  Verdict last;
  const auto fails = [&](const Program& candidate) {
    for (uint64_t cut_seed = 0; cut_seed < kCuts; ++cut_seed) {
      const Verdict verdict = check(candidate, Fault::kNone, cut_seed);
      if (!verdict.skipped.empty()) return false;
      if (kind_of(verdict) != kind) continue;
      last = verdict;
      return true;
    }
    return false;
  };
  if (!fails(program)) return "it does not fail again\n";
  const Program smallest = shrink(program, fails);
  fails(smallest);
  return smallest.to_string() + last.failure + last.rejection;
}

TEST(RandomPrograms, PipelinesGiveTheBitsOfEagerExecution) {
  const uint64_t first = setting("SMP_RANDOM_FIRST", 0);
  const uint64_t count = setting("SMP_RANDOM_PROGRAMS", 3000);
  const uint64_t most = setting("SMP_RANDOM_FAILURES", 5);
  std::map<std::string, uint64_t> seen;
  uint64_t failures = 0;
  for (uint64_t seed = first; seed < first + count && failures < most; ++seed) {
    const Program program = generate(seed);
    const Verdict verdict = check(program);
    ++seen["programs"];
    seen["skipped"] += !verdict.skipped.empty();
    seen["trained"] += verdict.skipped.empty() && !program.roots.empty();
    seen["cut"] += verdict.stages > 1;
    const bool goes_on = program.backward_after >= 0 && !program.roots.empty();
    seen["went on after backward"] += verdict.skipped.empty() && goes_on;
    seen["operators"] += verdict.operators;
    seen["transfers"] += verdict.transfers;
    const std::string kind = kind_of(verdict);
    if (kind.empty()) continue;
    ++failures;
    ADD_FAILURE() << "seed " << seed << ": "
                  << verdict.failure.substr(0, verdict.failure.find('\n')) << verdict.rejection
                  << "\nshrunk to\n"
                  << explain(program, kind);
  }
  for (const auto& [what, number] : seen) std::cout << what << ": " << number << "\n";
  EXPECT_LT(seen["skipped"] * 100, seen["programs"] * 30);
  EXPECT_GT(seen["trained"] * 100, seen["programs"] * 40);
  EXPECT_GT(seen["cut"] * 100, seen["programs"] * 40);
  EXPECT_GT(seen["went on after backward"] * 100, seen["programs"] * 10);
}

class PlantedFaults : public ::testing::TestWithParam<Fault> {};

/// What the verifier does not see: a plan that forgets to send a gradient.
bool is_gradient_flow(Fault fault, const std::string& failure) {
  const bool missing =
      failure.rfind("gradient of", 0) == 0 && failure.find(" is missing") != std::string::npos;
  return fault == Fault::kGradientsApart || missing;
}

/// The check or the verifier notices the fault; and where the verifier accepts the plan, it is
/// right for stages that know the graph as it is: except for a wrong gradient flow.
TEST_P(PlantedFaults, AreFound) {
  constexpr uint64_t kPrograms = 400;
  int found = 0, rejected = 0;
  uint64_t first = 0;
  for (uint64_t seed = 0; seed < kPrograms; ++seed) {
    const Verdict verdict = check(generate(seed), GetParam());
    if (!verdict.skipped.empty()) continue;
    rejected += !verdict.rejection.empty();
    if (verdict.failure.empty()) continue;
    if (found++ == 0) first = seed;
    if (is_gradient_flow(GetParam(), verdict.accepted_failure)) continue;
    EXPECT_EQ(verdict.accepted_failure, "") << "seed " << seed;
  }
  std::cout << to_string(GetParam()) << ": found by " << found << " of " << kPrograms
            << " programs, first by " << first << ", rejected " << rejected << "\n";
  EXPECT_GT(found + rejected, 0);
}

INSTANTIATE_TEST_SUITE_P(Each, PlantedFaults, ::testing::ValuesIn(kFaults));

}  // namespace
}  // namespace smp::random_programs
