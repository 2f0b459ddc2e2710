#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "graph/graph.h"
#include "graph/random.h"
#include "runtime/runtime.h"
#include "runtime/step/planning.h"

namespace smp::runtime {

/// What the first step does before it captures: compares the models of all ranks, gives every
/// rank the parameters and buffers of world rank 0 (but for delayed parameters, which are made once
/// they have owners, and for parts of divided ones, which come from the first rank that has the
/// same), and settles the seed. Collective over the world. Throws `UsageError` without
/// a model, and when models differ between ranks.
void prepare_models(Runtime& runtime);

/// Measures the graph's costs on world rank 0, or estimates them if the configuration says so or
/// the graph needs a tensor-parallel group to run, and sends them to all ranks. Collective over the
/// world; all ranks have captured the same graph (checked). `checksums` are of the recorded run.
void measure_costs_once(Runtime& runtime, graph::Graph& graph,
                        const std::vector<at::Tensor>& inputs, const graph::RandomKey& key,
                        const std::vector<uint64_t>& checksums, const std::string& step_name);

/// Writes the first graph, with its costs, to the configuration's `graph_file`, if that is set; on
/// world rank 0. Throws `ConfigError` if it cannot be written.
void save_first_graph(const Runtime& runtime, const graph::Graph& graph);

/// Parameters by name, with how they are to be divided among the ranks of a tensor-parallel group.
using Splits = std::map<std::string, nn::ParameterSplit>;

/// Divides the models among the ranks by the first plan: settles owners, frees what other ranks
/// own, divides parameters, makes delayed ones that this rank owns, keeps the report, and runs the
/// post-partition hooks.
void apply_first_plan(Runtime& runtime, const PlannedGraph& planned, int microbatches,
                      const Splits& splits);

/// Copies of all buffers, put back when it goes: captures are invisible.
class BufferRestorer {
 public:
  explicit BufferRestorer(const Runtime& runtime);
  ~BufferRestorer();
  BufferRestorer(const BufferRestorer&) = delete;
  BufferRestorer& operator=(const BufferRestorer&) = delete;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> saved_;  // buffer and copy
};

}  // namespace smp::runtime
