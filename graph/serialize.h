// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <string>

#include "graph/graph.h"

namespace smp::graph {

/// A graph, and what its run knew beside it.
struct SavedGraph {
  Graph graph;
  /// Bytes of optimizer state for each byte of a parameter, by the parameter's name, as far as they
  /// were known.
  std::map<std::string, double> optimizer_state;
};

/// The graph as JSON: everything that planning and printing need. The contents of constants and
/// literals are left out (their shapes, and so their bytes, are kept), so a graph that was read
/// back can be planned but not replayed; but for wrapped numbers, which decide types.
///
/// One value or operator a line. Costs and the optimizer's state may be changed by hand; everything
/// else is protected by the graph's fingerprint. Throws `CaptureError` for a constant argument of a
/// type that has no JSON form (a custom class, a dictionary).
std::string graph_to_json(const Graph& graph,
                          const std::map<std::string, double>& optimizer_state = {});

/// Reads that form; errors call the text `source_name`. Operators are looked up by name; for one
/// that this process does not have (of a TORCH_LIBRARY extension that is not loaded) its schema is
/// registered from the file, without kernels and for the rest of the process.
///
/// Throws `ConfigError` with the JSON path for text that is malformed, of another version, not
/// consistent, or changed.
SavedGraph saved_graph_from_json(const std::string& text, const std::string& source_name);

/// Writes `graph_to_json` to a file. Throws `ConfigError` if it cannot be written.
void save_graph(const Graph& graph, const std::string& path,
                const std::map<std::string, double>& optimizer_state = {});

/// Reads a file that `save_graph` wrote. Throws as `saved_graph_from_json`, and if it cannot be
/// read.
SavedGraph load_graph(const std::string& path);

}  // namespace smp::graph
