// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "graph/graph.h"
#include "tools/forecast.h"

namespace smp::tools {

/// A plan as JSON, for core/web/plan.js: the stages with their predicted time and memory, boxes of
/// operators, the values that go between boxes, tied parameters, and each rank's computes.
std::string page_data(const graph::Graph& graph, const Forecast& forecast,
                      const std::string& title);

/// A page of one file that needs nothing else, with the picture of the plan fitted to the window;
/// the wheel zooms, dragging moves it.
std::string to_html(const graph::Graph& graph, const Forecast& forecast, const std::string& title);

}  // namespace smp::tools
