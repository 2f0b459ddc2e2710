// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/check.h"
#include "core/failure.h"

namespace smp::dp {

/// Calls something that communicates. What then goes wrong in the communication ends with the text
/// that `where()` gives: what it was for.
template <class Where, class Call>
void with_where_in_errors(const Where& where, const Call& call) {
  try {
    call();
  } catch (const core::FailedWait& error) {
    error.throw_with(where());
  } catch (const TimeoutError& error) {
    throw TimeoutError(error.what() + where());
  } catch (const CommError& error) {
    throw CommError(error.what() + where());
  }
}

}  // namespace smp::dp
