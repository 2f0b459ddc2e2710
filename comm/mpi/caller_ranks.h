// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace smp::comm {

/// The processes of a communicator that the program has made.
struct CallerRanks {
  int rank = 0;
  std::vector<std::string> texts;  ///< texts that each of them has given, by rank
};

/// The most of a text that the others see.
constexpr size_t kMostOfCallerText = 2000;

/// Gives each process of the communicator the texts of all. `communicator` is MPI's Fortran handle.
/// `text` is called with this process's rank, before the others are waited for, and throws nothing.
///
/// One collective, on a copy of the communicator which is freed again. The copy returns its errors;
/// those of copying go where the program's communicator sends them. It blocks until all processes
/// have come, for ever if one does not: MPI has no time-outs.
///
/// Throws `UsageError` unless MPI runs and lets this thread call it, and the handle is one of a
/// communicator of one group.
CallerRanks exchange_texts(int64_t communicator, const std::function<std::string(int rank)>& text);

}  // namespace smp::comm
