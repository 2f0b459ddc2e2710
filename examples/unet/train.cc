// SPDX-License-Identifier: Apache-2.0
// Trains a diffusion model on pictures of discs, on any number of ranks, and draws some of its own.
//
//     tools/smprun --np 2 --config examples/unet/2x1.json bazel-bin/examples/unet/unet
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <iostream>

#include "examples/device.h"
#include "examples/program.h"
#include "examples/unet/unet.h"
#include "smp/smp.h"

namespace unet {
namespace {

constexpr int64_t kSide = 16;

struct Settings {
  std::string config, save, device = "cpu";
  int64_t steps = 300, batch = 32, width = 16, sampling_steps = 20;
  double lr = 2e-3;
};

std::optional<int> parse_command_line(int argc, char** argv, Settings& s) {
  CLI::App app("Trains a diffusion U-Net to draw discs.");
  app.option_defaults()->always_capture_default();
  app.add_option("--steps", s.steps, "steps of training")->check(CLI::PositiveNumber);
  app.add_option("--batch", s.batch, "pictures of a step, of all replicas");
  app.add_option("--width", s.width, "channels of the first size, a multiple of 4");
  app.add_option("--sampling-steps", s.sampling_steps, "steps from noise to a picture");
  app.add_option("--lr", s.lr, "learning rate")->check(CLI::PositiveNumber);
  app.add_option("--save", s.save, "folder for the checkpoint");
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

/// Discs of any place and size, 1 inside and -1 outside.
torch::Tensor discs(int64_t count) {
  const auto place = [&](double least, double most) {
    return torch::rand({count, 1, 1, 1}) * (most - least) + least;
  };
  const auto pixels = torch::arange(kSide).to(torch::kFloat);
  const auto across = pixels.view({1, 1, 1, kSide}) - place(5, kSide - 5);
  const auto down = pixels.view({1, 1, kSide, 1}) - place(5, kSide - 5);
  return torch::tanh(place(2, 5) - (across.square() + down.square()).sqrt());
}

/// How much of a picture is left at a time, as factor; the rest is noise.
torch::Tensor kept(const torch::Tensor& times) { return torch::cos(times * (M_PI / 2)); }
torch::Tensor noise_in(const torch::Tensor& times) { return torch::sin(times * (M_PI / 2)); }

torch::Tensor per_picture(const torch::Tensor& values) { return values.view({-1, 1, 1, 1}); }

/// From noise to pictures in equal steps of time (DDIM, Song et al., arXiv 2010.02502).
template <class Predict>
torch::Tensor sample(const Predict& predict, int64_t count, int64_t steps) {
  auto x = torch::randn({count, 1, kSide, kSide});
  for (int64_t i = steps; i > 0; --i) {
    // At time 1 itself nothing of a picture is left to be found.
    const auto now =
        torch::full({count}, 0.98 * static_cast<double>(i) / static_cast<double>(steps));
    const auto next =
        torch::full({count}, 0.98 * static_cast<double>(i - 1) / static_cast<double>(steps));
    const auto noise = predict(x, now);
    const auto picture = (x - per_picture(noise_in(now)) * noise) / per_picture(kept(now));
    x = per_picture(kept(next)) * picture.clamp(-1, 1) + per_picture(noise_in(next)) * noise;
  }
  return x;
}

void draw(const torch::Tensor& picture) {
  for (int64_t row = 0; row < kSide; ++row) {
    for (int64_t column = 0; column < kSide; ++column) {
      std::cout << (picture[row][column].item<float>() > 0 ? "##" : " .");
    }
    std::cout << "\n";
  }
}

void train(const Settings& settings) {
  smp::init(settings.config.empty() ? smp::Config() : smp::Config::from_file(settings.config));
  if (settings.device != "cpu") {
    smp::set_device(device_of(settings.device, smp::local_rank()).index());
  }
  torch::set_num_threads(1);
  torch::manual_seed(1);  // the same pictures and noise on all ranks
  UNet net(settings.width);
  smp::DistributedModel<UNet> model(net);
  smp::DistributedOptimizer<torch::optim::AdamW> optimizer(model->parameters(),
                                                           torch::optim::AdamWOptions(settings.lr));
  auto train_step = smp::step([&](torch::Tensor x, torch::Tensor t, torch::Tensor noise) {
    auto loss = torch::mse_loss(model(x, t), noise);
    model->backward(loss);
    return loss;
  });
  auto predict = smp::step([&](torch::Tensor x, torch::Tensor t) { return model(x, t); },
                           smp::StepOptions().microbatches(1));

  for (int64_t step = 1; step <= settings.steps; ++step) {
    const auto pictures = discs(settings.batch), noise = torch::randn_like(pictures);
    const auto times = torch::rand({settings.batch});
    const auto noisy = per_picture(kept(times)) * pictures + per_picture(noise_in(times)) * noise;
    optimizer.zero_grad();
    const auto losses = train_step(smp::shard(noisy), smp::shard(times), smp::shard(noise));
    optimizer.step();
    const auto loss = losses.reduce_mean(smp::CommGroup::kDp).item<double>();
    if (smp::rank() == 0 && (step % 50 == 0 || step == settings.steps)) {
      std::cout << "step " << step << ": loss " << loss << std::endl;
    }
  }
  if (!settings.save.empty()) smp::save(settings.save, model, optimizer);
  model->eval();
  const auto drawn =
      sample([&](const auto& x, const auto& t) { return predict(x, t).concat().cpu(); },
             /*count=*/1, settings.sampling_steps);
  if (smp::rank() == 0) draw(drawn[0][0]);
}

}  // namespace
}  // namespace unet

int main(int argc, char** argv) {
  return run_program("unet", argc, argv, unet::parse_command_line, unet::train);
}
