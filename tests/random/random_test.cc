// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <iostream>
#include <map>
#include <ostream>
#include <string>
#include <vector>

#include "pipeline/generators.h"
#include "tests/random/check.h"
#include "tests/random/generator.h"
#include "tests/random/runs.h"

namespace smp::random_programs {
namespace {

/// A number from the environment, to run more programs than the test does by itself.
uint64_t setting(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

/// The error, whatever the numbers: empty if there was none.
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

/// The facts that a person needs to find the reason: the smallest program that fails in this way,
/// and its failure.
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

bool has(const Program& program, const std::string& operation) {
  return std::any_of(program.instructions.begin(), program.instructions.end(),
                     [&](const Instruction& one) { return one.operation->name == operation; });
}

/// The features of a program that was run, and of its run.
std::vector<std::string> features_of(const Program& program, const Verdict& verdict) {
  const Trial trial = Trial::of(program.seed);
  std::vector<std::string> features = {"in " + verdict.schedule};
  if (!program.roots.empty()) features.push_back("trained");
  if (program.backward_after >= 0 && !program.roots.empty()) features.push_back("went on");
  if (program.outer.no_grad) features.push_back("under no_grad");
  if (program.outer.autocast) features.push_back("under autocast");
  if (has(program, "filled")) features.push_back("filled by the host");
  if (has(program, "slope")) features.push_back("differentiated inside");
  if (trial.numbers_change) features.push_back("numbers changed");
  if (trial.leaves) features.push_back("left a known graph");
  return features;
}

/// The least counts for a thousand programs.
std::map<std::string, uint64_t> least() {
  std::map<std::string, uint64_t> floors = {
      {"trained", 600},           {"went on", 200},
      {"under no_grad", 40},      {"under autocast", 50},
      {"numbers changed", 200},   {"left a known graph", 120},
      {"filled by the host", 80}, {"differentiated inside", 100}};
  for (const auto& kind : pipeline::schedule_kinds()) floors["in " + kind.name] = 5;
  return floors;
}

TEST(RandomPrograms, PipelinesGiveTheBitsOfEagerExecution) {
  const uint64_t first = setting("SMP_RANDOM_FIRST", 0);
  const uint64_t count = setting("SMP_RANDOM_PROGRAMS", 500);
  const uint64_t most = setting("SMP_RANDOM_FAILURES", 5);
  std::map<std::string, uint64_t> seen;
  uint64_t failures = 0;
  for (uint64_t seed = first; seed < first + count && failures < most; ++seed) {
    const Program program = generate(seed);
    const Verdict verdict = check(program);
    ++seen["programs"];
    seen["skipped"] += !verdict.skipped.empty();
    seen["cut"] += verdict.stages > 1;
    if (verdict.skipped.empty()) {
      for (const std::string& feature : features_of(program, verdict)) ++seen[feature];
    }
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
  EXPECT_GT(seen["cut"] * 100, seen["programs"] * 40);
  for (const auto& [what, floor] : least()) {
    EXPECT_GE(seen[what] * 1000, seen["programs"] * floor) << what;
  }
}

/// A fault, and how often it must be noticed, at the least, in so many programs from a seed on. The
/// seed is one before a program that notices it, where few do. SMP_RANDOM_PLANTED multiplies the
/// programs.
struct Planted {
  Fault fault;
  uint64_t first;
  uint64_t programs;
  int found;     ///< number of programs found by the bits of a run, or an error in it
  int rejected;  ///< number of programs rejected by the verifier
};

std::ostream& operator<<(std::ostream& out, const Planted& planted) {
  return out << to_string(planted.fault);
}

class PlantedFaults : public ::testing::TestWithParam<Planted> {};

/// Whether the fault changes anything of the program.
bool concerns(Fault fault, const Program& program) {
  if (fault == Fault::kGradientsApart) return !program.roots.empty();
  const bool late = fault == Fault::kLateRoots || fault == Fault::kLateWrites;
  return !late || (program.backward_after >= 0 && !program.roots.empty());
}

/// The fault that the verifier does not see: a plan that forgets to send a gradient.
bool is_gradient_flow(Fault fault, const std::string& failure) {
  const bool missing =
      failure.rfind("gradient of", 0) == 0 && failure.find(" is missing") != std::string::npos;
  return fault == Fault::kGradientsApart || missing;
}

/// The check or the verifier notices the fault; and where the verifier accepts the plan, it is
/// right for stages that know the graph as it is: except for a wrong gradient flow.
TEST_P(PlantedFaults, AreFound) {
  const auto& [fault, begin, sample, least_found, least_rejected] = GetParam();
  const uint64_t programs = sample * setting("SMP_RANDOM_PLANTED", 1);
  int found = 0, rejected = 0;
  uint64_t tried = 0, first = 0;
  for (uint64_t seed = begin; tried < programs; ++seed) {
    const Program program = generate(seed);
    if (!concerns(fault, program)) continue;
    ++tried;
    const Verdict verdict = check(program, fault);
    if (!verdict.skipped.empty()) continue;
    rejected += !verdict.rejection.empty();
    if (verdict.failure.empty()) continue;
    if (found++ == 0) first = seed;
    if (is_gradient_flow(fault, verdict.accepted_failure)) continue;
    EXPECT_EQ(verdict.accepted_failure, "") << "seed " << seed;
  }
  std::cout << to_string(fault) << ": found by " << found << " of " << programs
            << " programs, first by " << first << ", rejected " << rejected << "\n";
  EXPECT_GE(found, least_found);
  EXPECT_GE(rejected, least_rejected);
}

INSTANTIATE_TEST_SUITE_P(Each, PlantedFaults,
                         ::testing::Values(Planted{Fault::kEveryCut, 0, 200, 12, 37},
                                           Planted{Fault::kNoWrites, 0, 200, 37, 37},
                                           Planted{Fault::kOneWriteLost, 0, 200, 7, 8},
                                           Planted{Fault::kStoragesApart, 0, 200, 17, 30},
                                           Planted{Fault::kLeafViewsApart, 0, 200, 15, 27},
                                           Planted{Fault::kStaleHops, 200, 200, 0, 5},
                                           Planted{Fault::kEarlyEnds, 300, 250, 1, 1},
                                           Planted{Fault::kGradientsApart, 450, 250, 1, 0},
                                           Planted{Fault::kLateRoots, 0, 200, 20, 4},
                                           Planted{Fault::kLateWrites, 450, 200, 1, 0}));

}  // namespace
}  // namespace smp::random_programs
