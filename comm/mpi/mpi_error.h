// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <mpi.h>

#include <string>

#include "core/check.h"

namespace smp::comm {

/// MPI's text for an error code.
inline std::string mpi_text(int code) {
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  if (MPI_Error_string(code, text, &length) != MPI_SUCCESS) {
    return "unknown MPI error " + std::to_string(code);
  }
  return std::string(text, length);
}

/// Throws a CommError that names the call unless `code` is MPI_SUCCESS.
inline void check_mpi(int code, const char* call) {
  SMP_CHECK_WITH(CommError, code == MPI_SUCCESS, call, " failed: ", mpi_text(code),
                 ". Run the job again; if it fails again, run a plain MPI program with the same "
                 "mpirun options to see whether MPI itself works.");
}

}  // namespace smp::comm
