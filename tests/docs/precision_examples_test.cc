// SPDX-License-Identifier: Apache-2.0
// The code of docs/precision.md, compiled and run: precision_page_test checks that every block of
// the page is found here.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>

#include "smp/smp.h"

namespace {

struct NetImpl : torch::nn::Module {
  NetImpl() { fc = register_module("fc", torch::nn::Linear(4, 3)); }
  torch::Tensor forward(torch::Tensor x) { return torch::tanh(fc(x)); }
  torch::nn::Linear fc{nullptr};
};
TORCH_MODULE(Net);

class PrecisionPage : public ::testing::Test {
 protected:
  void SetUp() override {
    torch::manual_seed(1);
    torch::set_num_threads(1);
    x = torch::randn({4, 4});
    y = torch::randn({4, 3});
    before = net->fc->weight.detach().clone();
  }
  void TearDown() override {
    EXPECT_FALSE(torch::equal(net->fc->weight.to(torch::kFloat), before));
    EXPECT_TRUE(torch::isfinite(net->fc->weight).all().item<bool>());
    smp::shutdown();
  }

  Net net;
  torch::Tensor x, y, before;
};

TEST_F(PrecisionPage, Autocast) {
  smp::init();
  smp::DistributedModel<Net> model(net);
  smp::DistributedOptimizer<torch::optim::Adam> optimizer(model->parameters(), 1e-3);
  smp::amp::GradScaler scaler;
  auto train = smp::step([&](torch::Tensor x, torch::Tensor y) {
    torch::Tensor loss;
    {
      const smp::amp::Autocast autocast(torch::kHalf);  // (torch::kHalf, torch::kCUDA) on a GPU
      loss = torch::mse_loss(model(x), y);
    }
    model->backward(scaler.scale(loss));
    return loss;
  });
  for (int i = 0; i < 3; ++i) {
    optimizer.zero_grad();
    train(x, y);
    scaler.unscale_(optimizer);  // only to read or clip gradients
    scaler.step(optimizer);      // nothing is returned for a step that was skipped
    scaler.update();
  }
  EXPECT_EQ(net->fc->weight.scalar_type(), torch::kFloat);

  const auto path = (std::filesystem::path(testing::TempDir()) / "precision_page").string();
  smp::save(path, model, optimizer, scaler.state_dict());
  const auto run = smp::load(path, model, optimizer);
  scaler.load_state_dict(run.user_content);
  EXPECT_EQ(run.step, 3);
}

TEST_F(PrecisionPage, Parameters) {
  smp::init(smp::Config().fp16(true));
  smp::DistributedModel<Net> model(net);
  smp::DistributedOptimizer<torch::optim::AdamW> optimizer(model->parameters(), 1e-3);
  optimizer.scale_loss(smp::LossScaleOptions().dynamic_loss_scale(true).dynamic_loss_args(
      smp::DynamicLossArgs().init_scale(65536).scale_window(500)));
  torch::optim::StepLR scheduler(optimizer, 10, 0.5);
  auto train = smp::step([&](torch::Tensor x, torch::Tensor y) {
    auto loss = torch::mse_loss(model(x), y);
    model->backward(loss);  // times the loss scale
    return loss;
  });
  for (int i = 0; i < 3; ++i) {
    optimizer.zero_grad();
    train(x, y);
    optimizer.clip_master_grads(1.0);
    optimizer.step();
    if (!optimizer.overflow()) scheduler.step();
  }
  EXPECT_EQ(net->fc->weight.scalar_type(), torch::kHalf);
}

}  // namespace
