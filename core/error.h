#pragma once

#include <c10/util/Exception.h>

#include <string>
#include <utility>

namespace smp {

/// Base of every exception this library throws. It derives from `c10::Error`, so code that
/// catches libtorch's exceptions catches ours. `what()` is the message alone, no backtrace.
class Error : public c10::Error {
 public:
  explicit Error(std::string message) : c10::Error(std::move(message), c10::Backtrace{}) {}
};

/// A parameter, file or environment variable of the configuration is wrong.
class ConfigError : public Error {
  using Error::Error;
};

/// A call that the API does not allow at this point; the message names the right call.
class UsageError : public Error {
  using Error::Error;
};

/// The step function does something that cannot be captured as a graph of operators.
class CaptureError : public Error {
  using Error::Error;
};

/// No valid partition exists for the graph and the constraints given.
class PartitionError : public Error {
  using Error::Error;
};

/// Communication between ranks failed; the message names the peer.
class CommError : public Error {
  using Error::Error;
};

/// A blocking wait ran out of time; the message names whom it waited for.
class TimeoutError : public CommError {
  using CommError::CommError;
};

/// A checkpoint is missing, damaged or does not fit the model.
class CheckpointError : public Error {
  using Error::Error;
};

/// Sets what errors of this thread say about where they happened, for example
/// "smp rank 3 pp 1/2". Empty (the default) means plain "smp".
void set_error_context(std::string context);

/// The prefix of an error message: "[smp rank 3 pp 1/2] ".
std::string error_prefix();

namespace detail {

/// Throws `E` with the prefix of this thread and the concatenated parts.
template <class E, class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw E(error_prefix() + c10::str(parts...));
}

[[noreturn]] void fail_internal(const char* file, int line, const char* condition,
                                const std::string& message);

}  // namespace detail
}  // namespace smp

/// Throws `E` unless `condition` holds. The message parts are only evaluated on failure; say
/// what failed, where, expected and got, and what to do.
#define SMP_CHECK_WITH(E, condition, ...)  \
  do {                                     \
    if (C10_UNLIKELY(!(condition))) {      \
      ::smp::detail::fail<E>(__VA_ARGS__); \
    }                                      \
  } while (false)

/// As `SMP_CHECK_WITH` with the library's base error.
#define SMP_CHECK(condition, ...) SMP_CHECK_WITH(::smp::Error, condition, __VA_ARGS__)

/// For what can only fail through a bug in this library.
#define SMP_INTERNAL_ASSERT(condition, ...)                                                \
  do {                                                                                     \
    if (C10_UNLIKELY(!(condition))) {                                                      \
      ::smp::detail::fail_internal(__FILE__, __LINE__, #condition, c10::str(__VA_ARGS__)); \
    }                                                                                      \
  } while (false)
