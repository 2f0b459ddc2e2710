// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "pipeline/timeline.h"

namespace smp::pipeline {

/// A page of one file that needs nothing else: the picture (`to_svg`) and the table (`table_of`) of
/// each step, one step at a time, fitted to the window; the wheel zooms into the time, dragging
/// moves it; a microbatch under the pointer is shown without the others. Also well-formed XML.
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
