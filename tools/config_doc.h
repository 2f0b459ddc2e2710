// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace smp::tools {

/// docs/configuration.md, made from the schema of the configuration.
std::string configuration_page();

}  // namespace smp::tools
