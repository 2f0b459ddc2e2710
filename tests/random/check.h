// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "graph/graph.h"
#include "partitioner/plan.h"
#include "tests/random/program.h"

/// Whether a random program gives the same bits over thread ranks as in one process, also with
/// faults planted in the knowledge of its aliases.
namespace smp::random_programs {

/// The fault made on purpose, to see that the check notices.
enum class Fault {
  kNone,
  kEveryCut,        ///< programs are cut anywhere
  kNoWrites,        ///< no operator is known to write
  kOneWriteLost,    ///< one operator's writes are unknown
  kStoragesApart,   ///< views are not known to share storage
  kLeafViewsApart,  ///< nor are views of inputs, parameters, buffers and constants
  kStaleHops,       ///< a value travels from its producer, not from the stage that wrote it last
  kEarlyEnds,       ///< outputs and roots are taken where they are made, not where last written
  kGradientsApart,  ///< gradients are not followed through views
  kLateRoots,       ///< roots of backward are taken as they are at the end
  kLateWrites,      ///< writes after backward are in place
};

const char* to_string(Fault fault);

/// How the check of one program ended.
struct Verdict {
  /// Why eager libtorch cannot run the program; empty if it can.
  std::string skipped;
  /// The difference, with the plan; empty if there is none.
  std::string failure;
  /// The error of `verify_plan` for the plan, given the graph without faults; empty: it is right.
  std::string rejection;
  /// The difference with a fault when stages that know the graph without it run a plan that
  /// `verify_plan` accepts. A copy that a stage forgets is no matter of plans.
  std::string accepted_failure;
  int stages = 1;
  int operators = 0;
  int transfers = 0;
  std::string schedule;
};

/// Runs the program in eager libtorch, then captured, cut at random and over thread ranks.
/// `cut_seed` chooses among the cuts. A plan without a planted fault must pass `verify_plan`.
Verdict check(const Program& program, Fault fault = Fault::kNone, uint64_t cut_seed = 0);

/// A part of the program that still fails: no instruction, output or root can be dropped.
Program shrink(Program program, const std::function<bool(const Program&)>& fails);

}  // namespace smp::random_programs
