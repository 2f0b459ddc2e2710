// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <ostream>
#include <string>

namespace smp::tools::train {

/// The results of one step.
struct StepReport {
  int64_t step = 0;  ///< updates done
  double loss = 0;
  double lr = 0;
  std::optional<double> norm;  ///< norm of the gradients, before they were clipped
};

/// How a run is shown.
enum class Style {
  kJson,  ///< one object a line, for each step and evaluation
  kBar,   ///< one line, rewritten, for a terminal
  kLines  ///< a line in every so many steps
};

/// Shows a run on a stream. Used by one thread.
class Progress {
 public:
  /// A run that goes on after `done` steps of `steps`. `out` must outlive this object.
  Progress(int64_t done, int64_t steps, int64_t log_every, Style style, std::ostream& out);
  /// Ends the line of a terminal.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void show(const StepReport& report);
  void show_evaluation(int64_t step, double loss);
  /// A line that is no part of the run's numbers; left out of JSON.
  void say(const std::string& line);

 private:
  using Clock = std::chrono::steady_clock;

  void end_line();
  void draw_bar(const StepReport& report);

  const int64_t first_, steps_, log_every_;
  const Style style_;
  std::ostream& out_;
  const Clock::time_point start_ = Clock::now();
  bool line_is_open_ = false;
};

/// How standard output is shown: a terminal that can rewrite a line has a bar. Under mpirun each
/// rank has a terminal of its own, whatever its own output is: TERM=dumb says that it is none.
Style style_of_stdout(bool json);

}  // namespace smp::tools::train
