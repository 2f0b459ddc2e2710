// SPDX-License-Identifier: Apache-2.0
#include "examples/mnist/settings.h"

#include <CLI/CLI.hpp>

namespace mnist {

std::optional<int> parse_command_line(int argc, char** argv, Settings& s) {
  CLI::App app("Trains a small convolutional network on MNIST.");
  app.option_defaults()->always_capture_default();
  app.add_option("--data", s.data, "folder of the four idx files of MNIST")->required();
  app.add_option("--batch-size", s.batch_size, "digits of a training step, for each replica")
      ->check(CLI::PositiveNumber);
  app.add_option("--test-batch-size", s.test_batch_size, "digits of an evaluation step")
      ->check(CLI::PositiveNumber);
  app.add_option("--epochs", s.epochs, "times to go through the data")->check(CLI::PositiveNumber);
  app.add_option("--lr", s.lr, "learning rate")->check(CLI::PositiveNumber);
  app.add_option("--gamma", s.gamma, "factor on the learning rate after each epoch")
      ->check(CLI::PositiveNumber);
  app.add_option("--seed", s.seed, "seed of weights, order and dropout");
  app.add_option("--log-interval", s.log_interval, "steps between two lines of output")
      ->check(CLI::PositiveNumber);
  app.add_option("--max-steps", s.max_steps, "steps of an epoch at most; 0: all")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--threads", s.threads, "intra-op threads of each process")
      ->check(CLI::PositiveNumber);
  app.add_option("--device", s.device, "where ranks compute")
      ->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--save-model", s.save_model, "file for the trained weights");
  app.add_option("--config", s.config, "JSON configuration of smp")->check(CLI::ExistingFile);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  }
  return std::nullopt;
}

}  // namespace mnist
