// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "graph/graph.h"
#include "tools/forecast.h"

namespace smp::tools {

/// A plan as an SVG picture. A column for each stage, in the colour of its partition, with its
/// modules as boxes in program order, and their numbers of operators and shares of the time; what
/// crosses between stages, with bytes; parameters that several stages read; below, the predicted
/// step as a chart of what each partition does when. `title` is the heading.
std::string to_svg(const graph::Graph& graph, const Forecast& forecast, const std::string& title);

}  // namespace smp::tools
