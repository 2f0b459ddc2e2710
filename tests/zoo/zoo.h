// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "graph/graph.h"
#include "partitioner/plan.h"

/// A zoo of models that know nothing of smp (models_*.h), each with the program that trains it.
/// Every program runs twice: as plain libtorch in one process, microbatch by microbatch, and over
/// ranks. The two must leave the same numbers to the bit.
namespace smp::zoo {

class Run;
class Trace;

/// A model of the zoo and its training. `run` is an ordinary training program, written against
/// `Run` (harness.h) so that the same lines run in both ways; every rank calls it.
struct Program {
  std::string name;  ///< letters and digits
  void (*run)(Run&);
  bool by_hand = false;  ///< divided by the program's pins, with `auto_partition: false`
};

/// The programs by family.
std::vector<Program> convolutional();
std::vector<Program> generative();
std::vector<Program> sequences();
std::vector<Program> irregular();

/// How a program is run over ranks; each rank is a thread.
struct Layout {
  int stages = 1;
  std::string pipeline = "simple";
};

/// Microbatches in every step of the zoo: sums of three are rounded in each order differently, and
/// dividing by three rounds too.
constexpr int kMicrobatches = 3;

/// Runs the program as plain libtorch in one process.
std::shared_ptr<const Trace> run_plain(const Program& program);

/// Runs the program over ranks, with the initial values that `plain` had.
std::shared_ptr<const Trace> run_over_ranks(const Program& program, const Layout& layout,
                                            const Trace& plain);

/// The graph of the program's first step in such a run.
std::shared_ptr<const graph::Graph> first_graph(const Trace& trace);

/// The plan of that step in a run over ranks.
std::shared_ptr<const partitioner::Plan> first_plan(const Trace& trace);

/// The differences between two runs, in words, or ranks of one run; empty if they are equal to the
/// bit. Compared are all that the step functions returned, by microbatch; gradients, parameters and
/// buffers at each update; parameters and buffers at the end.
std::vector<std::string> differences(const Trace& got, const Trace& expected);

}  // namespace smp::zoo
