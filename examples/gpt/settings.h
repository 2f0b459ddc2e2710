// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace gpt {

/// The command line of `gpt` and `gpt_plain`. The defaults are the quickstart's job: two to three
/// minutes on two cores.
struct Settings {
  std::vector<std::string> data;  ///< text files; none: the licence texts of this machine
  int64_t layers = 4;
  int64_t width = 128;
  int64_t heads = 4;
  int64_t sequence = 128;  ///< bytes of a sequence
  int64_t batch = 8;       ///< sequences of a step, all replicas together
  int64_t steps = 2000;
  double lr = 3e-3;    ///< peak learning rate
  double dropout = 0;  ///< costs a third of the speed, and five times through the text need none
  bool tied = false;
  std::string checkpoint_dir = "runs/gpt";
  int64_t save_every = 0;  ///< steps between checkpoints; 0: only one at the end
  int64_t stop_after = 0;  ///< step after which to stop, to go on with `resume`; 0: none
  bool resume = false;
  int64_t sample = 400;  ///< bytes of text to generate at the end
  uint64_t seed = 1;
  int threads = 1;             ///< intra-op threads of each process
  std::string device = "cpu";  ///< or "cuda"
  std::string config;  ///< JSON configuration of smp; empty: its environment, or one process
  std::string losses;  ///< file for the loss of every step, exact to the bit; empty: none

  /// The step before which to stop.
  int64_t last_step() const { return stop_after > 0 ? std::min(stop_after, steps) : steps; }

  /// The learning rate of `step`: linear warm-up, then half a cosine down to a tenth of `lr`. A
  /// function of the step alone, so that a resumed run goes on exactly.
  double learning_rate(int64_t step) const;
};

/// Reads the command line into `settings`. Returns the exit status if the program should stop here,
/// after `--help` or a usage error, which it has printed.
std::optional<int> parse_command_line(int argc, char** argv, Settings& settings);

}  // namespace gpt
