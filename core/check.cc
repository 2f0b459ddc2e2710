// SPDX-License-Identifier: Apache-2.0
#include "core/check.h"

namespace smp::core {
namespace {

std::string& context() {
  thread_local std::string value;
  return value;
}

}  // namespace

void set_error_context(std::string value) { context() = std::move(value); }

std::string error_prefix() { return context().empty() ? "[smp] " : "[" + context() + "] "; }

std::string error_context() {
  const std::string prefix = error_prefix();
  return prefix.substr(1, prefix.size() - 3);  // without "[" and "] "
}

std::string text_without_prefix(const Error& error) { return error.what() + error_prefix().size(); }

void fail_internal(const char* file, int line, const char* condition, const std::string& message) {
  throw Error(c10::str(error_prefix(), "internal error at ", file, ":", line, ": ", condition,
                       message.empty() ? "" : ": ", message,
                       ". This is a bug in smp; please report it with this message."));
}

}  // namespace smp::core
