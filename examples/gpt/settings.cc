// SPDX-License-Identifier: Apache-2.0
#include "examples/gpt/settings.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>

namespace gpt {
namespace {

void add_model_flags(CLI::App& app, Settings& s) {
  app.add_option("--layers", s.layers, "transformer blocks")->check(CLI::PositiveNumber);
  app.add_option("--width", s.width, "channels of the residual stream")->check(CLI::PositiveNumber);
  app.add_option("--heads", s.heads, "attention heads")->check(CLI::PositiveNumber);
  app.add_option("--sequence", s.sequence, "bytes of a sequence")->check(CLI::PositiveNumber);
  app.add_option("--dropout", s.dropout, "dropout probability")->check(CLI::Range(0.0, 1.0));
  app.add_flag("--tied", s.tied, "the head shares the weight of the token embedding");
}

void add_training_flags(CLI::App& app, Settings& s) {
  app.add_option("--data", s.data, "text files (default: the licence texts of this machine)")
      ->type_name("FILE ...");
  app.add_option("--batch", s.batch, "sequences of a step, all replicas together")
      ->check(CLI::PositiveNumber);
  app.add_option("--steps", s.steps, "optimizer steps")->check(CLI::PositiveNumber);
  app.add_option("--lr", s.lr, "peak learning rate")->check(CLI::PositiveNumber);
  app.add_option("--seed", s.seed, "seed of weights, batches, dropout and the sample");
  app.add_option("--threads", s.threads, "intra-op threads of each process")
      ->check(CLI::PositiveNumber);
  app.add_option("--device", s.device, "where ranks compute")
      ->check(CLI::IsMember({"cpu", "cuda"}));
}

void add_output_flags(CLI::App& app, Settings& s) {
  app.add_option("--checkpoint-dir", s.checkpoint_dir, "folder of checkpoints");
  app.add_option("--save-every", s.save_every, "steps between checkpoints; 0: only at the end")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--stop-after", s.stop_after, "step after which to stop, to go on with --resume")
      ->check(CLI::NonNegativeNumber);
  app.add_flag("--resume", s.resume, "go on from the newest checkpoint");
  app.add_option("--sample", s.sample, "bytes of text to generate at the end")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--config", s.config, "JSON configuration of smp")->check(CLI::ExistingFile);
  app.add_option("--losses", s.losses, "file for the loss of every step, as hexadecimal floats");
}

}  // namespace

double Settings::learning_rate(int64_t step) const {
  const double warmup = std::min(100.0, 0.1 * static_cast<double>(steps));
  const auto now = static_cast<double>(step);
  if (now < warmup) return lr * (now + 1) / (warmup + 1);
  const double done = (now - warmup) / std::max(1.0, static_cast<double>(steps) - warmup);
  return lr * (0.1 + 0.9 * 0.5 * (1 + std::cos(std::acos(-1.0) * done)));
}

std::optional<int> parse_command_line(int argc, char** argv, Settings& settings) {
  CLI::App app("Trains a byte-level GPT and compares it with a trigram model.");
  app.option_defaults()->always_capture_default();
  add_model_flags(app, settings);
  add_training_flags(app, settings);
  add_output_flags(app, settings);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  }
  return std::nullopt;
}

}  // namespace gpt
