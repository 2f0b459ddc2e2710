// SPDX-License-Identifier: Apache-2.0
// Trains a byte-level GPT on any number of ranks: pipeline stages times replicas, as the
// configuration says. Compare it with `plain.cc`, the same program in one process.
//
//     tools/smprun --np 4 --config examples/gpt/2x2.json bazel-bin/examples/gpt/gpt
#include <torch/torch.h>

#include <iostream>

#include "examples/device.h"
#include "examples/gpt/gpt_model.h"
#include "examples/gpt/progress.h"
#include "examples/gpt/report.h"
#include "examples/gpt/sampler.h"
#include "examples/gpt/settings.h"
#include "examples/gpt/text_data.h"
#include "examples/gpt/trigram.h"
#include "examples/program.h"
#include "smp/smp.h"

namespace gpt {
namespace {

/// Over the microbatches of all replicas.
double mean(const smp::StepOutput& losses) {
  return losses.reduce_mean(smp::CommGroup::kDp).item<double>();
}

/// Returns the program's exit status.
int train(const Settings& settings) {
  smp::init(settings.config.empty() ? smp::Config() : smp::Config::from_file(settings.config));
  if (settings.device != "cpu") {
    smp::set_device(device_of(settings.device, smp::local_rank()).index());
  }
  at::set_num_threads(settings.threads);
  torch::manual_seed(settings.seed);
  const bool leader = smp::rank() == 0;
  const TextData text =
      settings.data.empty() ? TextData::from_folder() : TextData::from_files(settings.data);

  GPT net(GPTOptions()
              .layers(settings.layers)
              .width(settings.width)
              .heads(settings.heads)
              .sequence(settings.sequence)
              .dropout(settings.dropout)
              .tied(settings.tied));
  smp::DistributedModel<GPT> model(net);
  smp::DistributedOptimizer<torch::optim::AdamW> optimizer(
      model->parameters(),
      torch::optim::AdamWOptions(settings.lr).betas({0.9, 0.95}).weight_decay(0.1));

  auto train_step = smp::step([&](torch::Tensor x, torch::Tensor y) {
    auto loss = next_byte_loss(model(x), y);
    model->backward(loss);
    return loss;
  });
  auto evaluate =
      smp::step([&](torch::Tensor x, torch::Tensor y) { return next_byte_loss(model(x), y); });
  auto logits =
      smp::step([&](torch::Tensor x) { return model(x); }, smp::StepOptions().microbatches(1));

  const std::string& folder = settings.checkpoint_dir;
  // After a restart by `smprun`, the copy or checkpoint of this job; --resume is about an earlier
  // job.
  auto resumed = smp::resume_after_restart(model, optimizer);
  if (!resumed && settings.resume) resumed = smp::load(folder, model, optimizer);
  const int64_t first = resumed ? resumed->step : 0;
  LossLog losses(leader ? settings.losses : "", first);
  Progress progress(first, settings.steps, settings.batch * settings.sequence, std::cout,
                    stdout_is_terminal());
  for (int64_t step = first; step < settings.last_step(); ++step) {
    // Every rank of a pipeline is given the same rows, every replica others.
    const Batch batch = text.batch(settings.seed, step, settings.batch, settings.sequence);
    optimizer.zero_grad();
    const double loss = mean(train_step(smp::shard(batch.x), smp::shard(batch.y)));
    for (auto& group : optimizer.param_groups()) {
      group.options().set_lr(settings.learning_rate(step));
    }
    optimizer.step();

    if (leader) progress.update(step + 1, loss);
    losses.add(step, loss);
    const bool is_due = settings.save_every > 0 && (step + 1) % settings.save_every == 0;
    const bool stops = smp::stop_requested();  // for "preempt_seconds": --resume goes on
    if (is_due || stops || step + 1 == settings.last_step()) smp::save(folder, model, optimizer);
    if (stops) return smp::kPreemptedStatus;
    smp::keep_copy(model, optimizer);  // for "recovery": finished work is not repeated
  }

  model->eval();
  double sum = 0;
  const auto batches = text.held_out_batches(settings.batch, settings.sequence);
  for (const Batch& batch : batches) {
    sum += mean(evaluate(smp::shard(batch.x), smp::shard(batch.y)));
  }
  const auto next_byte = [&](const at::Tensor& x) { return logits(x).outputs().front(); };
  const auto sample =
      sample_text(next_byte, "\n", settings.sample, settings.sequence, settings.seed);
  if (!leader) return 0;
  const double ours = bits_per_byte(sum / static_cast<double>(batches.size()));
  const double trigram = TrigramModel(text.training_text()).bits_per_byte(text.held_out_text());
  std::cout << held_out_line(ours, trigram) << "\n\nsample:\n"
            << printable(sample) << "\n\n"
            << model->partition_report() << "\ncheckpoint: " << folder << "\n";
  if (!settings.losses.empty()) std::cout << "losses: " << settings.losses << "\n";
  return 0;
}

}  // namespace
}  // namespace gpt

int main(int argc, char** argv) {
  return run_program("gpt", argc, argv, gpt::parse_command_line, gpt::train);
}
