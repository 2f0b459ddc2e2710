// SPDX-License-Identifier: Apache-2.0
#include "tools/train/options.h"

#include <CLI/CLI.hpp>
#include <map>

#include "tools/program.h"

namespace smp::tools::train {
namespace {

const std::map<std::string, Format> kFormats{
    {"safetensors", Format::kSafetensors}, {"tokens", Format::kTokens}, {"idx", Format::kIdx}};
const std::map<std::string, LossKind> kLosses{{"output", LossKind::kOutput},
                                              {"cross_entropy", LossKind::kCrossEntropy},
                                              {"mse", LossKind::kMse},
                                              {"bce_with_logits", LossKind::kBceWithLogits},
                                              {"l1", LossKind::kL1}};

/// Words in place of the numbers that CLI11 would show.
template <class T>
CLI::Option* add_choice(CLI::App& app, const std::string& name, T& value,
                        const std::map<std::string, T>& choices, const std::string& help) {
  std::vector<std::string> words;
  for (const auto& choice : choices) words.push_back(choice.first);
  return app
      .add_option_function<std::string>(
          name, [&value, &choices](const std::string& word) { value = choices.at(word); }, help)
      ->check(CLI::IsMember(words));
}

void add_data(CLI::App& app, Options& options) {
  DataOptions& reading = options.reading;
  app.add_option("--data", options.data, "The samples to train on")->required();
  add_choice(app, "--format", reading.format, kFormats,
             "Of the data: safetensors (default), tokens (raw numbers) or idx (MNIST)");
  app.add_option("--labels", options.labels, "The labels, for --format idx");
  app.add_option("--token-type", reading.token_type, "The numbers, for --format tokens")
      ->check(CLI::IsMember({"uint8", "uint16", "int32", "int64"}));
  app.add_option("--sequence", reading.sequence, "Tokens of a sample, for --format tokens")
      ->check(CLI::PositiveNumber)
      ->default_str("");
  app.add_flag("--shift", reading.shift,
               "The target of a token is the next one, not itself, for --format tokens");
  app.add_option("--inputs", options.inputs,
                 "Tensors of the data that the model is given, in its order: a,b; or by the names "
                 "of its arguments: input_ids=a,mask=b")
      ->delimiter(',')
      ->allow_extra_args(false);
  app.add_option("--target", options.target, "The tensor of the data that the loss compares with");
  app.add_option("--eval-data", options.eval_data, "Samples to evaluate on");
  app.add_option("--eval-labels", options.eval_labels, "Their labels, for --format idx");
}

void add_loss(CLI::App& app, Options& options) {
  LossOptions& loss = options.loss;
  add_choice(app, "--loss", loss.kind, kLosses,
             "output (the model returns it), cross_entropy, mse, bce_with_logits or l1")
      ->required();
  app.add_option("--output", options.output,
                 "Which of the model's results: a number, or a key; without it the result is "
                 "one tensor");
  app.add_option("--ignore-index", loss.ignore_index, "Targets of cross_entropy that do not count");
  app.add_option("--class-axis", loss.class_axis, "The axis of the classes, for cross_entropy");
}

void add_optimizer(CLI::App& app, OptimizerOptions& optimizer) {
  app.add_option("--optimizer", optimizer.name, "adamw, adam or sgd")
      ->check(CLI::IsMember({"adamw", "adam", "sgd"}));
  app.add_option("--lr", optimizer.lr, "The highest learning rate")->check(CLI::NonNegativeNumber);
  app.add_option("--weight-decay", optimizer.weight_decay,
                 "Of parameters with two dimensions or more; default 0.01 for adamw, else 0")
      ->check(CLI::NonNegativeNumber);
  app.add_flag("--decay-all", optimizer.decay_all, "Weight decay of all parameters");
  app.add_option("--betas", optimizer.betas, "Of adamw and adam: 0.9,0.999")->delimiter(',');
  app.add_option("--eps", optimizer.eps, "Of adamw and adam");
  app.add_option("--momentum", optimizer.momentum, "Of sgd");
  app.add_option("--clip", optimizer.clip, "The largest norm of all gradients; 0: any")
      ->check(CLI::NonNegativeNumber);
}

void add_schedule(CLI::App& app, ScheduleOptions& schedule) {
  app.add_option("--schedule", schedule.shape, "Of the learning rate: constant, cosine or linear")
      ->check(CLI::IsMember({"constant", "cosine", "linear"}));
  app.add_option("--warmup", schedule.warmup, "Steps in which the rate rises")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--final-rate", schedule.final_rate,
                 "Where cosine and linear end, as a fraction of --lr")
      ->check(CLI::Range(0.0, 1.0));
  app.add_option("--schedule-steps", schedule.steps, "Where they end; default: --steps")
      ->check(CLI::PositiveNumber)
      ->default_str("");
}

void add_run(CLI::App& app, Options& options) {
  app.add_option("--steps", options.steps, "Updates in all")
      ->required()
      ->check(CLI::PositiveNumber)
      ->default_str("");
  app.add_option("--batch-size", options.batch_size, "Samples of a step, all replicas together")
      ->required()
      ->check(CLI::PositiveNumber)
      ->default_str("");
  app.add_option("--seed", options.seed, "Of the order of samples, and of random operators")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--folder", options.folder,
                 "Where checkpoints and the trained model go, and where a run is resumed")
      ->required();
  app.add_option("--eval-every", options.eval_every, "Steps; 0: evaluate at the end only")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--save-every", options.save_every, "Steps; 0: a checkpoint at the end only")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--keep", options.keep, "How many checkpoints are kept")
      ->check(CLI::PositiveNumber);
  app.add_flag("--json", options.json, "Print each step as a line of JSON");
  app.add_option("--log-every", options.log_every, "Steps between lines where no terminal is")
      ->check(CLI::PositiveNumber);
  app.add_option("--threads", options.threads, "Of each rank")->check(CLI::PositiveNumber);
  app.add_option("--device", options.device, "cpu or cuda")->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--config", options.config,
                 "JSON file with the parameters of smp; smprun --config wins");
}

/// Options that need each other, beyond the rules of CLI11.
void check_together(const Options& options, const CLI::App& app) {
  const auto require = [&](bool ok, const std::string& text) {
    if (!ok) throw CLI::ValidationError(text);
  };
  const bool is_idx = options.reading.format == Format::kIdx;
  const bool is_tokens = options.reading.format == Format::kTokens;
  require(is_idx == !options.labels.empty(), "--labels goes with --format idx, and it needs it");
  require(is_tokens == (options.reading.sequence > 0),
          "--sequence goes with --format tokens, and it needs it");
  require(is_tokens || !options.reading.shift, "--shift goes with --format tokens");
  require(!is_idx || options.eval_data.empty() == options.eval_labels.empty(),
          "--eval-data and --eval-labels go together for --format idx");
  require(options.eval_data.empty() == options.eval_model.empty(),
          "--eval-data and --eval-model go together: a program has one mode. Export the model "
          "after eval(), too; where nothing depends on the mode, it may be the same file");
  require(options.loss.kind != LossKind::kOutput || app.get_option("--target")->count() == 0,
          "--target goes with a loss that compares; what --loss output compares with is an input");
}

}  // namespace

std::optional<int> parse_command_line(int argc, char** argv, Options& options) {
  CLI::App app{
      "Trains a model that torch.export.save wrote: smp_train MODEL.pt2 --data FILE ...\n"
      "On several ranks: smprun --np 4 --config CONFIG.json smp_train MODEL.pt2 ...\n"
      "See docs/smp_train.md.",
      "smp_train"};
  add_version(app);
  app.option_defaults()->always_capture_default();  // shown by --help
  app.add_option("model", options.model, "The program exported after train()")->required();
  app.add_option("--eval-model", options.eval_model,
                 "The same model exported after eval(), for --eval-data");
  add_data(app, options);
  add_loss(app, options);
  add_optimizer(app, options.optimizer);
  add_schedule(app, options.schedule);
  add_run(app, options);
  try {
    app.parse(argc, argv);
    check_together(options, app);
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  }
  if (options.schedule.steps == 0) options.schedule.steps = options.steps;
  return std::nullopt;
}

}  // namespace smp::tools::train
