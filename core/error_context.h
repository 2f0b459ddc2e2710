#pragma once

#include <string>

#include "core/error.h"

namespace smp {

/// What the prefix of this thread's errors says, for `set_error_context` of a thread that goes on
/// with its work: "smp rank 3 pp 1/2".
inline std::string error_context() {
  const std::string prefix = error_prefix();
  return prefix.substr(1, prefix.size() - 3);  // without "[" and "] "
}

/// What an error of this thread says after its prefix, to stand in another text.
inline std::string text_without_prefix(const Error& error) {
  return error.what() + error_prefix().size();
}

}  // namespace smp
