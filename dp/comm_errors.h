// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/check.h"
#include "core/failure.h"

namespace smp::dp {

/// Calls something that communicates. Errors of the communication end with the text of `where()`:
/// its purpose.
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
