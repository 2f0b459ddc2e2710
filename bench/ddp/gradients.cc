// SPDX-License-Identifier: Apache-2.0
// The half of bench/ddp/against_pytorch.py that is ours: trains on the script's files and writes
// gradients, parameters and buffers for it to compare.

#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "bench/ddp/norm_net.h"
#include "smp/ddp.h"

namespace {

using Model = smp::DistributedDataParallel<mnist::NormNet>;
using Tensors = c10::Dict<std::string, torch::Tensor>;

Tensors read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  Tensors tensors;
  for (const auto& item : torch::jit::pickle_load(bytes).toGenericDict()) {
    tensors.insert(item.key().toStringRef(), item.value().toTensor());
  }
  return tensors;
}

void write(const std::string& path, const Tensors& tensors) {
  const auto bytes = torch::jit::pickle_save(tensors);
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<int64_t>(bytes.size()));
}

void take(mnist::NormNet& net, const Tensors& from) {
  const torch::NoGradGuard no_grad;
  for (auto& item : net->named_parameters()) item.value().copy_(from.at(item.key()));
  for (auto& item : net->named_buffers()) item.value().copy_(from.at(item.key()));
  for (const auto& module : net->modules()) {
    if (auto* dropout = module->as<torch::nn::Dropout>()) dropout->options.p(0);
  }
}

Tensors result_of(Model& model) {
  Tensors result;
  for (const auto& item : model->named_parameters()) {
    result.insert("gradient of " + item.key(), item.value().grad().clone());
    result.insert(item.key(), item.value().detach());
  }
  for (const auto& item : model->named_buffers()) result.insert(item.key(), item.value());
  return result;
}

/// The same as `train` of against_pytorch.py.
void train(Model& model, const Tensors& input, const std::string& mode) {
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  const auto x = input.at("x")[smp::rank()], y = input.at("y")[smp::rank()];
  const int64_t batches = mode == "join" ? x.size(0) - smp::rank() : x.size(0);
  const auto backward = [&](int64_t i) { torch::nll_loss(model(x[i]), y[i]).backward(); };
  const auto guard = model.join(smp::JoinOptions().enable(mode == "join"));
  for (int64_t i = 0; i < batches; ++i) {
    if (mode == "no_sync" && i % 2 == 0) {
      const auto adds_up = model.no_sync();
      backward(i);
      continue;
    }
    backward(i);
    optimizer.step();
    if (i + 1 < batches) optimizer.zero_grad();
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::string folder, mode = "plain";
  CLI::App app("Used by bench/ddp/against_pytorch.py");
  app.add_option("--folder", folder)->required();
  app.add_option("--mode", mode)
      ->check(CLI::IsMember({"plain", "no_sync", "join", "bf16", "fp16"}));
  CLI11_PARSE(app, argc, argv);
  torch::set_num_threads(1);
  smp::init(smp::Config().ddp(true));
  const Tensors input = read(folder + "/input.pt");
  mnist::NormNet net;
  take(net, input);
  Model model(net);
  if (mode == "bf16") model.register_comm_hook(smp::bf16_compress_hook);
  if (mode == "fp16") model.register_comm_hook(smp::fp16_compress_hook);
  train(model, input, mode);
  write(folder + "/ours-" + std::to_string(smp::rank()) + ".pt", result_of(model));
  smp::shutdown();
  return 0;
}
