// SPDX-License-Identifier: Apache-2.0
// The code of docs/exported.md, compiled and run: //tests/docs:exported_page_test checks that every
// block of the page is found here.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <tuple>

#include "smp/export_program.h"
#include "smp/exported.h"
#include "smp/smp.h"
#include "tests/exported/archives.h"
#include "tests/temp_folder.h"

namespace {

/// A model of C++ that computes as the one in the archive "small" does.
struct NetImpl : torch::nn::Module {
  NetImpl() { layer = register_module("layer", torch::nn::Linear(3, 2)); }
  torch::Tensor forward(torch::Tensor x) { return layer(x).relu(); }
  torch::nn::Linear layer{nullptr};
};
TORCH_MODULE(Net);

/// Runs in a folder with the files that the page names.
class ExportedPage : public ::testing::Test {
 protected:
  void SetUp() override {
    torch::manual_seed(1);
    torch::set_num_threads(1);
    for (const char* name : {"model.pt2", "train.pt2", "eval.pt2"}) {
      std::filesystem::copy_file(smp::testing::archive("small"), folder.file(name));
    }
    std::filesystem::current_path(folder.path());
    x = torch::randn({4, 3});
    y = torch::tensor({0, 1, 1, 0});
  }
  void TearDown() override { std::filesystem::current_path(before); }

  /// The result of the program in a file.
  static torch::Tensor result_of(const char* file, const torch::Tensor& x) {
    return smp::load_exported(file)(x).toTensor().detach();
  }

  const std::filesystem::path before = std::filesystem::current_path();
  const smp::testing::TempFolder folder;
  torch::Tensor x, y;
};

TEST_F(ExportedPage, TrainsInPlainLibtorch) {
  auto model = smp::load_exported("model.pt2");
  torch::optim::AdamW optimizer(model->parameters(), 1e-3);
  auto loss = torch::cross_entropy_loss(model(x).toTensor(), y);
  loss.backward();
  optimizer.step();
  smp::save_exported(model, "trained.pt2");  // a plain module: the program of its mode
  EXPECT_TRUE(torch::equal(result_of("trained.pt2", x), model(x).toTensor()));
  EXPECT_FALSE(torch::equal(result_of("model.pt2", x), model(x).toTensor()));
}

TEST_F(ExportedPage, TrainsInSteps) {
  smp::init();
  {
    smp::DistributedModel<smp::ExportedModule> model(smp::load_exported("model.pt2"));
    auto train = smp::step([&](torch::Tensor x, torch::Tensor y) {
      auto loss = torch::cross_entropy_loss(model(x).toTensor(), y);
      model->backward(loss);
      return loss;
    });
    smp::DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), 0.1);
    train(x, y);
    optimizer.step();
    const auto state = model->state_dict(/*gather_to_rank0=*/true);  // on all ranks
    if (smp::rank() == 0) {
      smp::save_exported("train.pt2", state, "trained.pt2");
      smp::save_exported("eval.pt2", state, "trained_eval.pt2");
    }
  }
  smp::shutdown();
  EXPECT_FALSE(torch::equal(result_of("trained.pt2", x), result_of("train.pt2", x)));
  EXPECT_TRUE(torch::equal(result_of("trained.pt2", x), result_of("trained_eval.pt2", x)));
}

TEST_F(ExportedPage, TwoModes) {
  auto model = smp::load_exported(smp::ExportedPrograms().train("train.pt2").eval("eval.pt2"));
  model->eval();
  EXPECT_EQ(model->file(), "eval.pt2");
}

TEST_F(ExportedPage, ExportsAModelOfThisLanguage) {
  Net model;
  model->eval();
  const smp::ExportDim batch("batch");
  const smp::ExportedParts parts =
      smp::export_program("model.pt2", model, std::make_tuple(x),
                          smp::ExportProgramOptions().dynamic_shapes({{{0, batch}}}));
  EXPECT_GT(parts.operators, 1u);
  EXPECT_TRUE(torch::equal(result_of("model.pt2", x), model(x)));
}

TEST_F(ExportedPage, ExportsAModelOfRanks) {
  Net net;
  smp::init();
  {
    smp::DistributedModel<Net> model(net);
    smp::step([&](torch::Tensor x) { return model(x); })(x);
    model->cpu();  // collective
    if (smp::rank() == 0) smp::export_program("model.pt2", net, std::make_tuple(x));
  }
  smp::shutdown();
  EXPECT_TRUE(torch::equal(result_of("model.pt2", x), net(x)));
}

}  // namespace
