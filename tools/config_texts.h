// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

/// The texts that follow from the schema of the configuration.
namespace smp::tools {

/// docs/configuration.md.
std::string configuration_page();

/// The text of smp/config.h with its generated list as the schema says: `header` is the file as it
/// is, of which everything outside the list is kept.
std::string config_header(const std::string& header);

}  // namespace smp::tools
