// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "runtime/runtime.h"
#include "runtime/step/recorded_rows.h"

namespace smp::runtime {

/// Writes hashes of this rank's results in the steps of a program into the log of the
/// configuration's `record_hashes`. Internal.
class HashRecording {
 public:
  /// Throws `Error` if the log cannot be written.
  HashRecording(Runtime& runtime, std::shared_ptr<const RecordedRows> rows);

  /// A step has run. `global`: the number of a microbatch among those of all ranks.
  void write(const std::string& step_function, uint64_t call, const pipeline::StepRecords& records,
             const std::function<uint64_t(int microbatch)>& global);

 private:
  std::shared_ptr<graph::HashLogWriter> log_;
  std::shared_ptr<const RecordedRows> rows_;
};

}  // namespace smp::runtime
