// SPDX-License-Identifier: Apache-2.0
// The program that a libtorch user would start from: one process trains a byte-level GPT.
// `train.cc` is the same program on many ranks; compare the two to see the demands of `smp`.
#include <torch/torch.h>

#include <filesystem>
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

namespace gpt {
namespace {

void save(const std::string& path, GPT& net, torch::optim::AdamW& optimizer, int64_t step) {
  torch::serialize::OutputArchive archive, model, state;
  net->save(model);
  optimizer.save(state);
  archive.write("model", model);
  archive.write("optimizer", state);
  archive.write("step", step);
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  archive.save_to(path);
}

int64_t load(const std::string& path, GPT& net, torch::optim::AdamW& optimizer) {
  torch::serialize::InputArchive archive, model, state;
  archive.load_from(path);
  archive.read("model", model);
  archive.read("optimizer", state);
  net->load(model);
  optimizer.load(state);
  c10::IValue step;
  archive.read("step", step);
  return step.toInt();
}

double evaluate(GPT& net, const TextData& text, at::Device device, const Settings& settings) {
  torch::NoGradGuard no_grad;
  net->eval();
  double sum = 0;
  const auto batches = text.held_out_batches(settings.batch, settings.sequence);
  for (const Batch& batch : batches) {
    sum += next_byte_loss(net(batch.x.to(device)), batch.y.to(device)).item<double>();
  }
  return bits_per_byte(sum / static_cast<double>(batches.size()));
}

void train(const Settings& settings) {
  at::set_num_threads(settings.threads);
  torch::manual_seed(settings.seed);
  const TextData text =
      settings.data.empty() ? TextData::from_folder() : TextData::from_files(settings.data);

  GPT net(GPTOptions()
              .layers(settings.layers)
              .width(settings.width)
              .heads(settings.heads)
              .sequence(settings.sequence)
              .dropout(settings.dropout)
              .tied(settings.tied));
  const auto device = device_of(settings.device);
  net->to(device);
  torch::optim::AdamW optimizer(
      net->parameters(),
      torch::optim::AdamWOptions(settings.lr).betas({0.9, 0.95}).weight_decay(0.1));

  const std::string checkpoint = settings.checkpoint_dir + "/plain.pt";
  const int64_t first = settings.resume ? load(checkpoint, net, optimizer) : 0;
  LossLog losses(settings.losses, first);
  Progress progress(first, settings.steps, settings.batch * settings.sequence, std::cout,
                    stdout_is_terminal());
  for (int64_t step = first; step < settings.last_step(); ++step) {
    // A resumed run must draw the dropout masks that it would have drawn.
    torch::manual_seed(settings.seed + static_cast<uint64_t>(step));
    const Batch batch = text.batch(settings.seed, step, settings.batch, settings.sequence);
    optimizer.zero_grad();
    const auto loss = next_byte_loss(net(batch.x.to(device)), batch.y.to(device));
    loss.backward();
    for (auto& group : optimizer.param_groups()) {
      group.options().set_lr(settings.learning_rate(step));
    }
    optimizer.step();

    progress.update(step + 1, loss.item<double>());
    losses.add(step, loss.item<double>());
    if (settings.save_every > 0 && (step + 1) % settings.save_every == 0) {
      save(checkpoint, net, optimizer, step + 1);
    }
  }
  save(checkpoint, net, optimizer, settings.last_step());

  const double trigram = TrigramModel(text.training_text()).bits_per_byte(text.held_out_text());
  const double ours = evaluate(net, text, device, settings);
  std::cout << held_out_line(ours, trigram) << "\n";
  const auto logits = [&](const at::Tensor& x) {
    torch::NoGradGuard no_grad;
    return net(x.to(device));
  };
  if (settings.sample > 0) {
    const auto sample =
        sample_text(logits, "\n", settings.sample, settings.sequence, settings.seed);
    std::cout << "sample:\n" << printable(sample) << "\n";
  }
  std::cout << "checkpoint: " << checkpoint << "\n";
  if (!settings.losses.empty()) std::cout << "losses: " << settings.losses << "\n";
}

}  // namespace
}  // namespace gpt

int main(int argc, char** argv) {
  return run_program("gpt_plain", argc, argv, gpt::parse_command_line, gpt::train);
}
