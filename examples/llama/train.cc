// SPDX-License-Identifier: Apache-2.0
// Trains a small Llama to count, on any number of ranks: stages, divided layers and replicas, as
// the configuration says. Hugging Face's library opens its output.
//
//     tools/smprun --np 4 --config examples/llama/2x2.json bazel-bin/examples/llama/llama --to
//     counting
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <iostream>

#include "examples/device.h"
#include "examples/llama/counting.h"
#include "examples/llama/folder.h"
#include "examples/llama/llama.h"
#include "examples/program.h"
#include "smp/smp.h"

namespace llama {
namespace {

struct Settings {
  std::string from, to, config, names = "examples/huggingface/llama.json", device = "cpu";
  int64_t steps = 100, batch = 32, length = 16;
  double lr = 3e-3;
};

std::optional<int> parse_command_line(int argc, char** argv, Settings& s) {
  CLI::App app("Trains a small Llama to count.");
  app.option_defaults()->always_capture_default();
  app.add_option("--from", s.from, "folder of LlamaForCausalLM to begin with");
  app.add_option("--to", s.to, "folder for what was learnt");
  app.add_option("--names", s.names, "name map")->check(CLI::ExistingFile);
  app.add_option("--steps", s.steps, "steps of training")->check(CLI::PositiveNumber);
  app.add_option("--batch", s.batch, "sequences of a step, of all replicas");
  app.add_option("--length", s.length, "tokens of a sequence");
  app.add_option("--lr", s.lr, "learning rate")->check(CLI::PositiveNumber);
  app.add_option("--device", s.device, "where ranks compute")
      ->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--config", s.config, "JSON configuration of smp")->check(CLI::ExistingFile);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  }
  return std::nullopt;
}

void train(const Settings& settings) {
  smp::init(settings.config.empty() ? smp::Config() : smp::Config::from_file(settings.config));
  if (settings.device != "cpu") {
    smp::set_device(device_of(settings.device, smp::local_rank()).index());
  }
  torch::set_num_threads(1);
  torch::manual_seed(1);
  const auto options = settings.from.empty() ? LlamaOptions() : read_config(settings.from);
  const auto names = smp::NameMap::from_file(settings.names);

  Llama net(options);
  smp::DistributedModel<Llama> model(net);
  smp::DistributedOptimizer<torch::optim::AdamW> optimizer(model->parameters(),
                                                           torch::optim::AdamWOptions(settings.lr));
  if (!settings.from.empty()) {
    smp::load_pretrained(settings.from, model, smp::PretrainedOptions().names(names));
  }
  auto train_step = smp::step([&](torch::Tensor x, torch::Tensor y) {
    auto loss = next_token_loss(model(x), y);
    model->backward(loss);
    return loss;
  });

  for (int64_t step = 1; step <= settings.steps; ++step) {
    const Batch batch = counting(step, settings.batch, settings.length, options.vocabulary());
    optimizer.zero_grad();
    const auto losses = train_step(smp::shard(batch.x), smp::shard(batch.y));
    smp::clip_grad_norm_(model, 1.0);
    optimizer.step();
    const auto loss = losses.reduce_mean(smp::CommGroup::kDp).item<double>();
    if (smp::rank() == 0 && (step % 20 == 0 || step == settings.steps)) {
      std::cout << "step " << step << ": loss " << loss << std::endl;
    }
  }
  if (smp::rank() == 0) std::cout << model->partition_report() << "\n";
  if (settings.to.empty()) return;
  smp::save_pretrained(settings.to, model, names);
  if (smp::rank() == 0) write_config(settings.to, options);
}

}  // namespace
}  // namespace llama

int main(int argc, char** argv) {
  return run_program("llama", argc, argv, llama::parse_command_line, llama::train);
}
