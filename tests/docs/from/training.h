// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <vector>

/// The model that the programs of docs/from train, and its training by a plain process.

struct NetImpl : torch::nn::Module {
  NetImpl() {
    fc1 = register_module("fc1", torch::nn::Linear(8, 64));
    fc2 = register_module("fc2", torch::nn::Linear(64, 64));
    fc3 = register_module("fc3", torch::nn::Linear(64, 3));
  }
  torch::Tensor forward(torch::Tensor x) { return fc3(torch::tanh(fc2(torch::tanh(fc1(x))))); }

  torch::nn::Linear fc1{nullptr}, fc2{nullptr}, fc3{nullptr};
};
TORCH_MODULE(Net);

struct Batch {
  torch::Tensor data, target;
};

constexpr int kMicrobatches = 4;

/// The same on every rank. Afterwards the generator is where a model begins.
inline std::vector<Batch> make_batches() {
  torch::manual_seed(7);
  std::vector<Batch> batches;
  for (int i = 0; i < 5; ++i) {
    batches.push_back({torch::randn({32, 8}), torch::randint(3, {32})});
  }
  torch::manual_seed(1);
  return batches;
}

/// The mean loss of each batch in a process that runs the microbatches one after the other.
inline std::vector<double> plain_losses(double max_norm = INFINITY) {
  const auto batches = make_batches();
  Net net;
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-3));
  std::vector<double> losses;
  for (const Batch& batch : batches) {
    optimizer.zero_grad();
    double sum = 0;
    for (int m = 0; m < kMicrobatches; ++m) {
      auto loss = torch::cross_entropy_loss(net(batch.data.chunk(kMicrobatches)[m]),
                                            batch.target.chunk(kMicrobatches)[m]);
      (loss / kMicrobatches).backward();
      sum += loss.item<double>();
    }
    torch::nn::utils::clip_grad_norm_(net->parameters(), max_norm);
    optimizer.step();
    losses.push_back(sum / kMicrobatches);
  }
  return losses;
}

/// The exit status of a program that has trained with these losses.
inline int check_losses(const std::vector<double>& losses, const std::vector<double>& expected) {
  bool equal = losses.size() == expected.size();
  for (size_t i = 0; equal && i < losses.size(); ++i) {
    equal = std::abs(losses[i] - expected[i]) < 1e-6;
  }
  std::cout << "expected " << c10::ArrayRef<double>(expected) << "\ngot      "
            << c10::ArrayRef<double>(losses) << std::endl;
  return equal ? 0 : 1;
}

/// Where a program may write; a folder that the test's end removes.
inline void enter_test_folder() { std::filesystem::current_path(std::getenv("TEST_TMPDIR")); }
