// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace smp::core {

/// A page of one file that needs nothing else: core/web/page.html with the style NAME.css, the
/// script NAME.js, which draws in the browser, and its `data`, a JSON text.
std::string web_page(const std::string& name, const std::string& title, const std::string& data);

}  // namespace smp::core
