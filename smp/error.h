// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/Exception.h>

#include <string>
#include <utility>

#include "smp/export.h"

namespace smp {

/// Base of every exception this library throws. It derives from `c10::Error`, so code that
/// catches libtorch's exceptions catches ours. `what()` is the message alone, no backtrace.
class SMP_API Error : public c10::Error {
 public:
  explicit Error(std::string message) : c10::Error(std::move(message), c10::Backtrace{}) {}
};

/// A parameter, file or environment variable of the configuration is wrong.
class SMP_API ConfigError : public Error {
  using Error::Error;
};

/// A call that the API does not allow at this point; the message names the right call.
class SMP_API UsageError : public Error {
  using Error::Error;
};

/// The step function does something that cannot be captured as a graph of operators.
class SMP_API CaptureError : public Error {
  using Error::Error;
};

/// No valid partition exists for the graph and the constraints given.
class SMP_API PartitionError : public Error {
  using Error::Error;
};

/// Communication between ranks failed; the message names the peer.
class SMP_API CommError : public Error {
  using Error::Error;
};

/// A blocking wait ran out of time; the message names whom it waited for.
class SMP_API TimeoutError : public CommError {
  using CommError::CommError;
};

/// A checkpoint is missing, damaged or does not fit the model.
class SMP_API CheckpointError : public Error {
  using Error::Error;
};

/// Two ranks computed other bits from the same numbers, or replicas hold other weights: see the
/// configuration's `replay_check`. No gradient of the step has reached a parameter.
class SMP_API CorruptionError : public Error {
  using Error::Error;
};

}  // namespace smp
