// SPDX-License-Identifier: Apache-2.0
// smp_train: trains a model that Python exported, on any number of ranks. docs/smp_train.md

#include <ATen/Parallel.h>
#include <torch/utils.h>

#include <filesystem>
#include <functional>
#include <iostream>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "core/check.h"
#include "smp/smp.h"
#include "smp/token_loss.h"
#include "tools/program.h"
#include "tools/train/batches.h"
#include "tools/train/loss.h"
#include "tools/train/network.h"
#include "tools/train/optimizer.h"
#include "tools/train/options.h"
#include "tools/train/progress.h"
#include "tools/train/schedule.h"

namespace smp::tools::train {
namespace {

void begin(const Options& options) {
  init(options.config.empty() ? Config() : Config::from_file(options.config));
  at::set_num_threads(options.threads);
  torch::manual_seed(options.seed);
  if (options.device == "cuda") set_device(local_rank());
}

/// Where a run is kept. It is made at once: a run must not end for want of it.
class Folder {
 public:
  explicit Folder(const Options& options) : options_(options) {
    std::error_code error;
    std::filesystem::create_directories(checkpoints(), error);
    SMP_CHECK_WITH(UsageError, !error, "smp_train: cannot make the folder ", checkpoints(), ": ",
                   error.message(), ". Give a --folder that can be written");
  }

  /// The steps done in an earlier start: the newest copy that `smprun` kept or checkpoint of the
  /// folder.
  int64_t resume(const ModelCore& model, const OptimizerCore& optimizer) const {
    auto resumed = resume_after_restart(model, optimizer);
    if (!resumed) {
      resumed = resume_from_checkpoint(checkpoints(), std::nullopt, model, optimizer,
                                       LoadOptions().begin_anew(true));
    }
    SMP_CHECK_WITH(UsageError, resumed->step <= options_.steps, "smp_train: the run in ",
                   options_.folder, " has made ", resumed->step, " steps, more than --steps ",
                   options_.steps, ". Give more --steps, or another --folder");
    return resumed->step;
  }

  void save(int64_t step, const ModelCore& model, const OptimizerCore& optimizer) const {
    save_checkpoint(checkpoints(), "step_" + std::to_string(step), model, optimizer,
                    SaveCheckpointOptions().num_kept_partial_checkpoints(options_.keep));
  }

  /// Writes the trained model: one file of safetensors, and the programs with its weights.
  void write_trained(const ModelCore& model) const {
    const std::string folder = options_.folder + "/trained";
    save_checkpoint(folder, "model", model, SaveCheckpointOptions().partial(false));
    const auto state = model.state_dict(/*gather_to_rank0=*/true);
    if (rank() != 0) return;
    save_exported(options_.model, state, folder + "/model.pt2");
    if (options_.eval_model.empty()) return;
    save_exported(options_.eval_model, state, folder + "/model_eval.pt2");
  }

 private:
  std::string checkpoints() const { return options_.folder + "/checkpoints"; }

  const Options& options_;
};

using Inputs = std::vector<at::Tensor>;
/// Takes the inputs, the target and how many numbers count.
using LossFunction = std::function<at::Tensor(const Inputs&, const at::Tensor&, const at::Tensor&)>;
using LossStep = Step<LossFunction>;

/// The model, its optimizer, and the steps that it takes.
class Training {
 public:
  explicit Training(const Options& options)
      : options_(options),
        model_(Network(options)),
        optimizer_(make_optimizer(options.optimizer, model_)),
        folder_(options),
        samples_(options, options.data, options.labels),
        train_(step(LossFunction([this](auto&&... batch) {
                      at::Tensor loss = loss_of(batch...);
                      model_->backward(loss);
                      return loss;
                    }),
                    StepOptions().name("train"))),
        evaluate_(step(LossFunction([this](auto&&... batch) { return loss_of(batch...); }),
                       StepOptions().name("evaluate"))) {
    if (options.eval_data.empty()) return;
    held_out_.emplace(options, options.eval_data, options.eval_labels);
  }

  /// Trains, on all ranks, and writes the trained model. Returns the exit status: 0, or
  /// `kPreemptedStatus` when it was asked to stop and has saved a checkpoint.
  int run() {
    const bool leads = rank() == 0;
    const int64_t first = folder_.resume(model_, *optimizer_.core);
    Progress progress(first, options_.steps, options_.log_every, style_of_stdout(options_.json),
                      std::cout);
    if (leads && first > 0) progress.say("resumed after step " + std::to_string(first));
    for (int64_t done = first; done < options_.steps;) {
      const StepReport report = update(done++);
      if (leads) progress.show(report);
      if (held_out_ && is_due(done, options_.eval_every)) {
        const double loss = evaluate();
        if (leads) progress.show_evaluation(done, loss);
      }
      const bool stops = stop_requested() && done < options_.steps;
      if (stops || is_due(done, options_.save_every)) folder_.save(done, model_, *optimizer_.core);
      if (stops) return kPreemptedStatus;
      keep_copy(model_, *optimizer_.core);
    }
    folder_.write_trained(model_);
    return 0;
  }

 private:
  /// The loss of a microbatch, such that the mean over all microbatches is that of the step.
  at::Tensor loss_of(const Inputs& inputs, const at::Tensor& target,
                     const at::Tensor& tokens) const {
    const at::Tensor output = model_(inputs);
    if (options_.loss.kind == LossKind::kOutput) return output;
    return mean_over_tokens(sum_of_losses(options_.loss, output, target), tokens);
  }

  double call(LossStep& step, const Batch& batch) const {
    const int64_t samples = batch.inputs.front().size(0), microbatches = step.microbatches();
    SMP_CHECK_WITH(UsageError, samples % microbatches == 0, "smp_train: a batch of ",
                   options_.batch_size, " samples gives each replica ", samples,
                   ", which are not divided by ", microbatches,
                   " microbatches. Choose a --batch-size that is a multiple of microbatches times "
                   "replicas");
    return step(batch.inputs, batch.target, whole(batch.tokens))
        .reduce_mean(CommGroup::kDp)
        .item<double>();
  }

  /// Makes the update that comes after `done` of them.
  StepReport update(int64_t done) {
    StepReport report;
    report.step = done + 1;
    report.lr = options_.optimizer.lr * rate_of(options_.schedule, done);
    optimizer_.core->zero_grad();
    report.loss = call(train_, samples_.of_step(done));
    if (options_.optimizer.clip > 0) report.norm = clip_grad_norm_(model_, options_.optimizer.clip);
    optimizer_.set_lr(report.lr);
    optimizer_.own->step();
    return report;
  }

  /// The mean over all numbers that count in the batches of the evaluation; with a loss of the
  /// model's own, over the batches.
  double evaluate() {
    model_->eval();
    const bool compares = options_.loss.kind != LossKind::kOutput;
    double sum = 0;
    int64_t own = 0;  // numbers of this replica that count: a batch without any has 1 for `tokens`
    for (int64_t i = 0; i < held_out_->count(); ++i) {
      const Batch batch = held_out_->in_order(i);
      sum += call(evaluate_, batch) * (compares ? batch.tokens.item<double>() : 1);
      if (compares) own += counted(options_.loss, batch.target).sum().item<int64_t>();
    }
    model_->train();
    if (!compares) return sum / static_cast<double>(held_out_->count());
    return sum / count_tokens(at::tensor(own)).item<double>();
  }

  /// Whether something that is done in every so many steps is to be done, as it is after the last.
  bool is_due(int64_t done, int64_t every) const {
    return done == options_.steps || (every > 0 && done % every == 0);
  }

  const Options& options_;
  const DistributedModel<Network> model_;
  const AnyOptimizer optimizer_;
  const Folder folder_;
  Batches samples_;
  std::optional<Batches> held_out_;
  LossStep train_, evaluate_;
};

}  // namespace
}  // namespace smp::tools::train

int main(int argc, char** argv) {
  using namespace smp::tools::train;  // NOLINT(google-build-using-namespace)
  Options options;
  if (const auto status = parse_command_line(argc, argv, options)) return *status;
  return smp::tools::status_of([&] {
    begin(options);
    return Training(options).run();
  });
}
