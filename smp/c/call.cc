// SPDX-License-Identifier: Apache-2.0
#include "smp/c/call.h"

#include <c10/util/Exception.h>

#include <new>
#include <utility>

#include "core/failure.h"
#include "smp/error.h"

namespace smp::c {
namespace {

std::string& error_text() {
  thread_local std::string text;
  return text;
}

template <class E>
bool is(const std::exception& error) {
  return dynamic_cast<const E*>(&error) != nullptr;
}

smp_code code_of(const std::exception& error) {
  if (is<ConfigError>(error)) return SMP_ERROR_CONFIG;
  if (is<UsageError>(error)) return SMP_ERROR_USAGE;
  if (is<CaptureError>(error)) return SMP_ERROR_CAPTURE;
  if (is<PartitionError>(error)) return SMP_ERROR_PARTITION;
  if (is<TimeoutError>(error)) return SMP_ERROR_TIMEOUT;
  if (is<CommError>(error)) return SMP_ERROR_COMM;
  if (is<CheckpointError>(error)) return SMP_ERROR_CHECKPOINT;
  if (is<CorruptionError>(error)) return SMP_ERROR_CORRUPTION;
  if (is<std::bad_alloc>(error) || is<c10::OutOfMemoryError>(error)) return SMP_ERROR_MEMORY;
  return SMP_ERROR_OTHER;
}

}  // namespace

smp_code set_error(smp_code code, std::string text) noexcept {
  error_text() = std::move(text);
  return code;
}

const char* last_error() noexcept { return error_text().c_str(); }

smp_code code_of_exception() noexcept {
  try {
    try {
      throw;
    } catch (const std::exception& error) {
      return set_error(code_of(error), core::message_of(error));
    } catch (...) {
      return set_error(SMP_ERROR_OTHER, "an exception that is no std::exception");
    }
  } catch (...) {  // there is no memory for the text
    error_text().clear();
    return SMP_ERROR_MEMORY;
  }
}

}  // namespace smp::c
