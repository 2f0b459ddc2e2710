// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/Exception.h>

#include <string>

#include "smp/error.h"

namespace smp::core {

/// Sets the place in the errors of this thread, for example "smp rank 3 pp 1/2". Empty (the
/// default) means plain "smp".
void set_error_context(std::string context);

/// The prefix of an error message: "[smp rank 3 pp 1/2] ".
std::string error_prefix();

/// The text in the prefix of this thread's errors, for `set_error_context` of a thread that goes on
/// with its work: "smp rank 3 pp 1/2".
std::string error_context();

/// The text of an error, without the prefix of this thread if it has that, to stand in another
/// text.
std::string text_without_prefix(const c10::Error& error);

/// The text of an error: the prefix of this thread, then `message`, printable (core/text.h), and of
/// a very long one the beginning and the end.
std::string error_text(const std::string& message);

/// Throws `E` with the prefix of this thread and the concatenated parts.
template <class E, class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw E(error_text(c10::str(parts...)));
}

[[noreturn]] void fail_internal(const char* file, int line, const char* condition,
                                const std::string& message);

}  // namespace smp::core

/// Throws `E` unless `condition` holds. The message parts are only evaluated on failure; tell the
/// failure, the place, the expected and actual values, and the remedy.
#define SMP_CHECK_WITH(E, condition, ...) \
  do {                                    \
    if (C10_UNLIKELY(!(condition))) {     \
      ::smp::core::fail<E>(__VA_ARGS__);  \
    }                                     \
  } while (false)

/// The same as `SMP_CHECK_WITH` with the library's base error.
#define SMP_CHECK(condition, ...) SMP_CHECK_WITH(::smp::Error, condition, __VA_ARGS__)

/// For conditions that can only fail through a bug in this library.
#define SMP_INTERNAL_ASSERT(condition, ...)                                              \
  do {                                                                                   \
    if (C10_UNLIKELY(!(condition))) {                                                    \
      ::smp::core::fail_internal(__FILE__, __LINE__, #condition, c10::str(__VA_ARGS__)); \
    }                                                                                    \
  } while (false)
