// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <fstream>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "graph/graph.h"

namespace smp::graph {

/// A log of hashes of the results of a run's ranks, as a folder with a text file for each. Two logs
/// can be compared whatever the layouts of their runs, since steps, microbatches and operators are
/// counted over all ranks, and operators as they were captured.
///
/// A file has a line for the log, then for each graph its rows, each time it is run first, and for
/// each step this rank's results. A *row* is an operator, or the gradient of a parameter: those
/// come after the operators, in the order of a backward pass.
///
///   smp hashes 1: rank 3 of 4
///   graph 77ab...: 812 rows
///   aten::linear, in module "layers.0.mlp": f32[8, 16]
///   ...
///   step 5 of graph 77ab...: train
///   microbatch 3
///   17 9f3a... -
///   end

/// Which step a part of a log is of.
struct HashedStep {
  std::string function;  ///< the step function's name
  uint64_t call = 0;     ///< how many calls of it came before
  uint64_t graph = 0;    ///< fingerprint of the graph as captured

  bool operator<(const HashedStep& other) const {
    return std::tie(function, call, graph) < std::tie(other.function, other.call, other.graph);
  }
};

/// The rows of a graph: the text of each, and the row of each parameter's gradient.
struct HashRows {
  explicit HashRows(const Graph& graph);

  std::vector<std::string> texts;
  std::map<std::string, int> of_parameter;
};

/// Writes the file of one rank. Internal to the rank's thread.
class HashLogWriter {
 public:
  /// Makes the folder; a file that is there is replaced. Throws `Error` if that cannot be written.
  HashLogWriter(const std::string& folder, int rank, int ranks);

  /// Whether a graph's rows are written already.
  bool knows(uint64_t graph) const { return known_.count(graph) > 0; }
  void add_graph(uint64_t fingerprint, const HashRows& rows);

  void begin_step(const HashedStep& step);
  void begin_microbatch(uint64_t microbatch);
  /// The hash of the `number`-th tensor of a row. Those of a row follow each other.
  void add(int row, size_t number, uint64_t hash);
  /// Ends the step: its hashes are on their way to the disk. Throws as the constructor.
  void end_step();

 private:
  void end_row();
  void flush();

  std::string path_;
  std::ofstream out_;
  std::set<uint64_t> known_;
  int row_ = -1;
  size_t next_ = 0;
};

/// The hashes of a row's tensors; 0 where one was not hashed.
using RowHashes = std::vector<uint64_t>;

/// Reads the files of all ranks. Holds one step at a time.
class HashLogReader {
 public:
  /// The hashes of ranks in a step, by microbatch and row: with the rank, since several may run a
  /// row.
  using OfRanks = std::set<std::pair<int, RowHashes>>;
  using Step = std::map<std::pair<uint64_t, int>, OfRanks>;

  /// Throws `Error` where there is no log in `folder`, files are missing or of several runs, or one
  /// has another form.
  explicit HashLogReader(std::string folder);

  const std::string& folder() const { return folder_; }
  /// Those that some rank has written to the end, in the order of the first that did.
  const std::vector<HashedStep>& steps() const { return steps_; }
  bool has(const HashedStep& step) const { return places_.count(step) > 0; }
  Step read(const HashedStep& step);
  const std::vector<std::string>& rows(uint64_t graph) const { return rows_.at(graph); }

 private:
  class File;

  void scan(int rank);

  std::string folder_;
  int ranks_ = 0;
  std::vector<HashedStep> steps_;
  std::map<uint64_t, std::vector<std::string>> rows_;
  struct Place {
    int rank;
    std::streamoff offset;
    int64_t line;
  };
  std::map<HashedStep, std::vector<Place>> places_;
};

}  // namespace smp::graph
