// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

namespace smp::testing {

/// A reader of untrusted text.
struct Reader {
  const char* name;
  /// Reads the text. Throws smp::Error where it does not take it.
  void (*read)(const std::string& text);
};

/// Those that have no fuzz target of their own, whose inputs begin with a byte that chooses one.
const std::vector<Reader>& small_readers();
/// All.
std::vector<Reader> all_readers();

/// A header of a safetensors file, as the file.
std::string safetensors_file(const std::string& header);

}  // namespace smp::testing
