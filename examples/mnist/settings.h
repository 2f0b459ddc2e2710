// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace mnist {

/// The command line of `mnist` and `mnist_plain`; names and defaults are those of the PyTorch
/// script.
struct Settings {
  std::string data;               ///< folder of the idx files
  int64_t batch_size = 64;        ///< digits of a training step, for each replica
  int64_t test_batch_size = 500;  ///< digits of an evaluation step
  int64_t epochs = 14;
  double lr = 1.0;
  double gamma = 0.7;  ///< factor of the learning rate after each epoch
  uint64_t seed = 1;
  int64_t log_interval = 10;   ///< steps between two lines of output
  int64_t max_steps = 0;       ///< steps of an epoch at most; 0: all of them
  int threads = 1;             ///< intra-op threads of each process
  std::string device = "cpu";  ///< or "cuda"
  std::string save_model;      ///< file for the trained weights; empty: none
  std::string config;          ///< JSON configuration of smp
};

/// Reads the command line into `settings`. Returns the exit status if the program should stop here,
/// after `--help` or a usage error, which it has printed.
std::optional<int> parse_command_line(int argc, char** argv, Settings& settings);

}  // namespace mnist
