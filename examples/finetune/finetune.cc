// SPDX-License-Identifier: Apache-2.0
// Fine-tunes a Llama that counts up, so that it counts down: all its weights are frozen, and the
// last layers learn updates of low rank (LoRA). Stages of frozen layers only have no backward.
//
//     bazel-bin/examples/llama/llama --to up
//     tools/smprun --np 2 --config examples/finetune/2x1.json bazel-bin/examples/finetune/finetune
//         --from up --to down
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
  int64_t steps = 100, batch = 32, length = 16, rank = 8, layers = 1;
  double lr = 1e-2;
};

std::optional<int> parse_command_line(int argc, char** argv, Settings& s) {
  CLI::App app("Teaches a Llama that counts up to count down.");
  app.option_defaults()->always_capture_default();
  app.add_option("--from", s.from, "folder of LlamaForCausalLM")->required();
  app.add_option("--to", s.to, "folder for the model with what was learnt")->required();
  app.add_option("--names", s.names, "name map")->check(CLI::ExistingFile);
  app.add_option("--steps", s.steps, "steps of training")->check(CLI::PositiveNumber);
  app.add_option("--batch", s.batch, "sequences of a step, of all replicas");
  app.add_option("--length", s.length, "tokens of a sequence");
  app.add_option("--rank", s.rank, "rank of the updates")->check(CLI::PositiveNumber);
  app.add_option("--layers", s.layers, "how many of the last layers learn");
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

/// The blocks that learn.
std::vector<std::shared_ptr<BlockImpl>> adapted_blocks(Llama& net, const Settings& settings) {
  const auto count = static_cast<int64_t>(net->blocks->size());
  std::vector<std::shared_ptr<BlockImpl>> blocks;
  for (int64_t i = std::max<int64_t>(0, count - settings.layers); i < count; ++i) {
    blocks.push_back(net->blocks->ptr<BlockImpl>(i));
  }
  return blocks;
}

/// Their layers that do.
std::vector<Linear> adapted_layers(Llama& net, const Settings& settings) {
  std::vector<Linear> layers;
  for (const auto& block : adapted_blocks(net, settings)) {
    const auto& attention = block->attention;
    layers.insert(layers.end(),
                  {attention->query, attention->value, block->gate, block->up, block->down});
  }
  return layers;
}

/// A model of which only the updates of low rank are trained.
Llama adapted_model(const LlamaOptions& options, const Settings& settings) {
  Llama net(options);
  for (auto& parameter : net->parameters()) parameter.set_requires_grad(false);
  for (auto& layer : adapted_layers(net, settings)) layer->adapt(settings.rank);
  return net;
}

/// Writes the result of the training as a model of the library that the first one came from: in one
/// process, with the updates added to the weights.
void write_merged(const std::string& checkpoint, const LlamaOptions& options,
                  const Settings& settings, const smp::NameMap& names) {
  Llama net = adapted_model(options, settings);
  smp::load_into_module(checkpoint, *net);
  for (auto& layer : adapted_layers(net, settings)) layer->merge();
  smp::save_pretrained(settings.to, *net, names);
  write_config(settings.to, options);
}

void finetune(const Settings& settings) {
  smp::init(settings.config.empty() ? smp::Config() : smp::Config::from_file(settings.config));
  if (settings.device != "cpu") {
    smp::set_device(device_of(settings.device, smp::local_rank()).index());
  }
  torch::set_num_threads(1);
  torch::manual_seed(1);
  const auto options = read_config(settings.from);
  const auto names = smp::NameMap::from_file(settings.names);

  Llama net = adapted_model(options, settings);
  std::vector<torch::Tensor> learnt;
  for (const auto& parameter : net->parameters()) {
    if (parameter.requires_grad()) learnt.push_back(parameter);
  }
  smp::DistributedModel<Llama> model(net);
  smp::DistributedOptimizer<torch::optim::AdamW> optimizer(
      learnt, torch::optim::AdamWOptions(settings.lr).weight_decay(0));
  smp::load_pretrained(settings.from, model, smp::PretrainedOptions().names(names));
  // Trained layers go to the last partition, so that all others run forwards only.
  for (const auto& block : adapted_blocks(net, settings)) {
    smp::set_partition(block, smp::pp_size() - 1);
  }

  auto train_step = smp::step([&](torch::Tensor x, torch::Tensor y) {
    auto loss = next_token_loss(model(x), y);
    model->backward(loss);
    return loss;
  });
  for (int64_t step = 1; step <= settings.steps; ++step) {
    const Batch batch =
        counting(step, settings.batch, settings.length, options.vocabulary(), /*down=*/true);
    optimizer.zero_grad();
    const auto losses = train_step(smp::shard(batch.x), smp::shard(batch.y));
    optimizer.step();
    const auto loss = losses.reduce_mean(smp::CommGroup::kDp).item<double>();
    if (smp::rank() == 0 && (step == 1 || step % 20 == 0 || step == settings.steps)) {
      std::cout << "step " << step << ": loss " << loss << std::endl;
    }
  }
  const std::string checkpoint = settings.to + ".checkpoint";
  smp::save(checkpoint, model, optimizer);
  if (smp::rank() > 0) return;
  std::cout << model->partition_report() << "\n";
  write_merged(checkpoint, options, settings, names);
}

}  // namespace
}  // namespace llama

int main(int argc, char** argv) {
  return run_program("finetune", argc, argv, llama::parse_command_line, llama::finetune);
}
