// SPDX-License-Identifier: Apache-2.0
// Program of tests/huggingface/check.py: reads a folder of Hugging Face's library into one of our
// models, changes its weights by a step of training, and writes it to another folder, with the
// logits that it computes for FROM/sample.safetensors.
//
//     convert MAPS FROM TO
#include <exception>
#include <filesystem>
#include <iostream>

#include "checkpoint/safetensors.h"
#include "smp/smp.h"
#include "tests/huggingface/imported.h"

namespace {

void convert(const std::string& maps, const std::string& from, const std::string& to) {
  smp::init(smp::Config());
  torch::set_num_threads(1);
  torch::manual_seed(1);
  const auto config = huggingface::config_of(from);
  const auto names =
      smp::NameMap::from_file(maps + "/" + config.at("model_type").get<std::string>() + ".json");
  const auto inputs =
      smp::checkpoint::SafetensorsReader(from + "/sample.safetensors").read("inputs");
  huggingface::with_model(config, [&](auto net) {
    smp::DistributedModel<decltype(net)> model(net);
    smp::DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), 0.1);
    smp::load_pretrained(from, model, smp::PretrainedOptions().names(names));
    auto train = smp::step([&](torch::Tensor x) {
      auto loss = huggingface::logits_of(net, x).square().mean();
      model->backward(loss);
      return loss;
    });
    auto evaluate = smp::step([&](torch::Tensor x) { return huggingface::logits_of(net, x); });
    train(inputs);
    optimizer.step();
    model->eval();
    const auto logits = evaluate(inputs).concat();
    smp::save_pretrained(to, model, names);
    if (smp::rank() > 0) return;
    smp::checkpoint::write_safetensors(to + "/logits.safetensors", {{"logits", logits}});
    std::filesystem::copy_file(from + "/config.json", to + "/config.json");
  });
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: convert MAPS FROM TO\n";
    return 2;
  }
  try {
    convert(argv[1], argv[2], argv[3]);
  } catch (const std::exception& error) {
    std::cerr << "convert: " << error.what() << "\n";
    return 1;
  }
  return 0;
}
