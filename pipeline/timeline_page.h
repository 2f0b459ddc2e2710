// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "pipeline/timeline.h"

namespace smp::pipeline {

/// The steps shown and the prediction as JSON, for core/web/timeline.js: for each its headline, its
/// table, a lane for each rank with its actions and reductions, and the transfers as positions in
/// `lanes` and `actions`. Times are in the timeline's unit, memory in bytes.
std::string page_data(const Timeline& timeline);

/// A page of one file that needs nothing else, with a picture and a table for each step, one step
/// at a time, fitted to the window; the wheel zooms into the time, dragging moves it; a microbatch
/// under the pointer is shown without the others.
std::string to_html(const Timeline& timeline);

/// Where `write_timeline` writes.
struct TimelineFiles {
  std::string page;   ///< NAME.html
  std::string trace;  ///< NAME.json
};

/// `path` is NAME, NAME.html or NAME.json.
TimelineFiles timeline_files(const std::string& path);

/// Writes the page and the trace. Throws `smp::ConfigError` when a file cannot be written.
TimelineFiles write_timeline(const Timeline& timeline, const std::string& path);

}  // namespace smp::pipeline
