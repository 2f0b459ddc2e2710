// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <string>
#include <vector>

#include "partitioner/format.h"
#include "tests/zoo/facts.h"
#include "tests/zoo/zoo.h"

/// Prints docs/zoo.md: `bazel run //tests/zoo:table > docs/zoo.md`.
namespace smp::zoo {
namespace {

constexpr int kStages = 4;

constexpr const char* kIntroduction =
    R"(# The zoo: models that know nothing of smp

Each model of [tests/zoo](../tests/zoo) is written in plain libtorch and trained by an ordinary program, which runs twice: in one process, and over ranks. All that the step functions return, gradients, weights and buffers must be equal to the bit at every step, in training and in evaluation. The tests do this with 1 to 4 stages in both pipelines; the table is of 4 stages and 3 microbatches.

- **Operators**, **parameters**: of the graph of the program's first step, which trains. Evaluation and other shapes make further graphs.
- **Stages**: operators of each. Models whose names end in ByHand are divided by `smp::set_partition` and `smp::partition`, with `auto_partition: false`; the ranks of their stages follow.
- **Balance**: time of the slowest rank divided by the mean, 1 at best, with times estimated from shapes so that this page can be made again. Models this small have few places to cut, and sending costs them more than computing.
- **Boundary**: bytes between ranks for each microbatch, forward and backward.
- **Parity**: with one process, as said above.

Made by `bazel run //tests/zoo:table > docs/zoo.md`.

| Model | Operators | Parameters | Stages | Balance | Boundary | Parity |
|---|--:|--:|--:|--:|--:|---|
)";

void print_row(const Program& program) {
  const auto plain = run_plain(program);
  const auto trace = run_over_ranks(program, {kStages, "interleaved"}, *plain);
  const graph::Graph& graph = *first_graph(*trace);
  const Facts facts =
      program.by_hand ? facts_of(graph, *first_plan(*trace)) : facts_of(graph, kStages);
  const std::string stages =
      facts.stages + (program.by_hand ? " on " + facts.ranks : std::string());
  std::printf("| %s | %zu | %lld | %s | %.2f | %s + %s | %s |\n", program.name.c_str(),
              facts.operators, static_cast<long long>(facts.parameters), stages.c_str(),
              facts.balance, partitioner::format_bytes(facts.forward_bytes).c_str(),
              partitioner::format_bytes(facts.backward_bytes).c_str(),
              differences(*trace, *plain).empty() ? "equal" : "DIFFERS");
}

void print_table() {
  std::fputs(kIntroduction, stdout);
  for (const auto& family : {convolutional(), generative(), sequences(), irregular()}) {
    for (const Program& program : family) print_row(program);
  }
}

}  // namespace
}  // namespace smp::zoo

int main() { smp::zoo::print_table(); }
