// SPDX-License-Identifier: Apache-2.0
#include "core/check.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/text.h"

namespace smp::core {
namespace {

constexpr size_t kLongest = size_t{32} << 10, kEnd = size_t{2} << 10;

// Needs no destructor: handlers that run when the program ends, after thread-local objects have
// been destroyed, log and throw, too.
using Context = std::array<char, 256>;

Context& context() {
  thread_local Context text;
  return text;
}

}  // namespace

void set_error_context(std::string value) {
  value.resize(std::min(value.size(), context().size() - 1));
  std::strcpy(context().data(), value.c_str());
}

std::string error_prefix() {
  const std::string text = context().data();
  return text.empty() ? "[smp] " : "[" + text + "] ";
}

std::string error_context() {
  const std::string prefix = error_prefix();
  return prefix.substr(1, prefix.size() - 3);  // without "[" and "] "
}

std::string text_without_prefix(const c10::Error& error) {
  const std::string text = error.what_without_backtrace(), prefix = error_prefix();
  return text.compare(0, prefix.size(), prefix) == 0 ? text.substr(prefix.size()) : text;
}

std::string error_text(const std::string& message) {
  if (message.size() <= kLongest) return error_prefix() + printable_lines(message);
  const size_t left_out = message.size() - kLongest;
  const std::string begin = message.substr(0, kLongest - kEnd);
  return c10::str(error_prefix(), printable_lines(begin), " ... (", left_out,
                  " bytes left out) ... ", printable_lines(message.substr(message.size() - kEnd)));
}

void fail_internal(const char* file, int line, const char* condition, const std::string& message) {
  core::fail<Error>("internal error at ", file, ":", line, ": ", condition,
                    message.empty() ? "" : ": ", message,
                    ". This is a bug in smp; please report it with this message.");
}

}  // namespace smp::core
