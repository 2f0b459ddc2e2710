// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "graph/graph.h"

namespace smp::graph {

/// The graph as JSON: everything that planning and printing need. The contents of constants and
/// literals are left out (their shapes, and so their bytes, are kept), so a graph that was read
/// back can be planned but not replayed.
///
/// One value or operator a line. Costs may be changed by hand; everything else is protected by the
/// graph's fingerprint. Throws `CaptureError` for a constant argument of a type that has no JSON
/// form (a custom class, a dictionary).
std::string graph_to_json(const Graph& graph);

/// Reads that form; errors call the text `source_name`. Operators are looked up by name; for one
/// that this process does not have (of a TORCH_LIBRARY extension that is not loaded) its schema is
/// registered from the file, without kernels and for the rest of the process.
///
/// Throws `ConfigError` with the JSON path for text that is malformed, of another version, not
/// consistent, or changed.
Graph graph_from_json(const std::string& text, const std::string& source_name);

/// Writes `graph_to_json` to a file. Throws `ConfigError` if it cannot be written.
void save_graph(const Graph& graph, const std::string& path);

/// Reads a file that `save_graph` wrote. Throws as `graph_from_json`, and if it cannot be read.
Graph load_graph(const std::string& path);

}  // namespace smp::graph
