// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace smp::tools {

/// A page of one file that needs nothing else: `svg` fitted to the window; the wheel zooms,
/// dragging moves it. Also well-formed XML.
std::string to_html(const std::string& svg, const std::string& title);

}  // namespace smp::tools
