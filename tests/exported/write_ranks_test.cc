// SPDX-License-Identifier: Apache-2.0
// Programs of models that ranks have divided. check_written.py runs them in Python.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "smp/export_program.h"
#include "smp/exported.h"
#include "smp/smp.h"
#include "tests/exported/written.h"
#include "tests/zoo/models_sequence.h"

namespace smp::testing {
namespace {

using stranger::Gpt;
using torch::Tensor;

constexpr int kRanks = 4;

Gpt untrained() {
  torch::manual_seed(3);
  return Gpt(/*tied=*/false);
}

Tensor sentences(int64_t batch) {
  return torch::randint(stranger::GptImpl::kVocabulary, {batch, stranger::GptImpl::kLength},
                        torch::kLong);
}

/// Trains for three steps on four ranks, of which the first then writes the model. Returns its
/// parameters.
std::map<std::string, Tensor> train_and_write(const std::string& path, const Config& config,
                                              const Tensor& x) {
  std::vector<Gpt> nets;  // ranks that are threads share the default generator
  for (int rank = 0; rank < kRanks; ++rank) nets.push_back(untrained());
  std::map<std::string, Tensor> trained;
  run_as_threads(kRanks, config, [&] {
    torch::set_num_threads(1);
    Gpt net = nets[rank()];
    if (tp_size() > 1) set_tensor_parallelism(net);
    DistributedModel<Gpt> model(net);
    DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), 0.1);
    auto train = step([&](Tensor x) {
      const auto loss = torch::cross_entropy_loss(model(x).flatten(0, 1), x.flatten());
      model->backward(loss);
      return loss;
    });
    for (int i = 0; i < 3; ++i) {
      optimizer.zero_grad();
      train(x);
      optimizer.step();
    }
    EXPECT_EQ(model->distributed_modules().is_empty(), tp_size() == 1);
    model->cpu();
    if (rank() != 0) return;
    export_program(path, net, std::make_tuple(x),
                   ExportProgramOptions().dynamic_shapes({{{0, ExportDim("batch")}}}));
    for (const auto& item : net->named_parameters()) {
      trained[item.key()] = item.value().detach().clone();
    }
  });
  return trained;
}

/// The program computes the numbers of an undivided model with the trained weights, on batches of
/// three sizes.
void expect_whole(const std::string& name, const Config& config) {
  const WrittenFolder folder;
  const std::string path = folder.file(name + ".pt2");
  torch::manual_seed(4);
  const Tensor x = sentences(8);
  const auto trained = train_and_write(path, config, x);
  Gpt whole = untrained();
  for (auto& item : whole->named_parameters()) {
    torch::NoGradGuard no_grad;
    EXPECT_FALSE(torch::equal(item.value(), trained.at(item.key()))) << item.key();
    item.value().copy_(trained.at(item.key()));
  }
  ExportedModule program = load_exported(path);
  int number = 0;
  for (const Tensor& batch : {x, x.narrow(0, 0, 3), sentences(11)}) {
    const RunTensors expected = run_of(*whole, [&] { return c10::IValue(whole(batch)); });
    expect_same_run(run_of(*program, [&] { return program(batch); }), expected,
                    name + ", batch " + std::to_string(batch.size(0)));
    keep_run(folder, name, number++, {batch}, expected);
  }
}

TEST(ExportProgramOfRanks, StagesAndReplicasAreWrittenWhole) {
  expect_whole("StagesAndReplicas", Config().partitions(2).microbatches(2).ddp(true).seed(7));
}

TEST(ExportProgramOfRanks, DividedLayersAreWrittenWhole) {
  expect_whole("DividedLayers",
               Config().partitions(2).microbatches(2).tensor_parallel_degree(2).ddp(true).seed(7));
}

}  // namespace
}  // namespace smp::testing
