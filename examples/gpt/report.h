// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <fstream>
#include <string>

namespace gpt {

/// A file with one line a step, "STEP LOSS", where the loss is a hexadecimal float: two runs
/// computed the same losses, to the last bit, if their files are equal.
class LossLog {
 public:
  /// Writes to `file` from step `first` on, after its lines about the steps before; an empty name
  /// makes a log that drops everything. Throws `std::runtime_error` if the file cannot be written.
  LossLog(const std::string& file, int64_t first);

  /// Adds the loss of `step`.
  void add(int64_t step, double loss);

 private:
  std::ofstream file_;
};

/// Compares bits per byte on the held-out text: "held-out text: 1.900 bits/byte; trigram model:
/// ...".
std::string held_out_line(double ours, double trigram);

/// `text` with every byte that a terminal might not print shown as `?`.
std::string printable(const std::string& text);

}  // namespace gpt
