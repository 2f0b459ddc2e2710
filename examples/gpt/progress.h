// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <ostream>
#include <string>

namespace gpt {

/// Converts a loss in nats a byte to bits a byte.
double bits_per_byte(double loss);

/// The content of one line of progress.
struct ProgressState {
  int64_t step = 0;              ///< steps done
  int64_t steps = 0;             ///< steps in all
  double loss = 0;               ///< nats a byte
  double tokens_per_second = 0;  ///< over the run so far
  double seconds_left = 0;
};

/// One line such as
/// `[#####---------------]  25%  step 100/400  loss 1.733  2.500 bits/byte  12345 tokens/s  1:30
/// left`.
std::string progress_line(const ProgressState& state);

/// Reports a training run on a stream: one line that is rewritten in place on a terminal, otherwise
/// a line every few seconds. Used by one thread.
class Progress {
 public:
  /// A run of steps [`first_step`, `steps`) that consume `tokens_per_step` each. The clock starts
  /// now. `out` must outlive this object; `in_place` says whether it is a terminal.
  Progress(int64_t first_step, int64_t steps, int64_t tokens_per_step, std::ostream& out,
           bool in_place);

  /// Tells that `step` steps are done and the last one had this loss, in nats a byte.
  void update(int64_t step, double loss);

 private:
  using Clock = std::chrono::steady_clock;

  const int64_t first_step_;
  const int64_t steps_;
  const int64_t tokens_per_step_;
  std::ostream& out_;
  const bool in_place_;
  const Clock::time_point start_ = Clock::now();
  Clock::time_point shown_{};
  double smooth_loss_ = 0;
};

/// Whether standard output is a terminal that can rewrite a line. mpirun gives each rank a terminal
/// of its own, whatever its own output is: the environment variable TERM=dumb says that it is none.
bool stdout_is_terminal();

}  // namespace gpt
