// SPDX-License-Identifier: Apache-2.0
#include "tests/zoo/harness.h"
#include "tests/zoo/models_generative.h"

namespace smp::zoo {
namespace {

using torch::Tensor;

/// Trains, reconstructs, and draws new samples from the decoder.
void train_vae(Run& run) {
  auto model = run.model(stranger::Vae());
  auto optimizer = run.optimizer<torch::optim::Adam>(model, torch::optim::AdamOptions(1e-2));
  auto train = run.step([&](Tensor x) {
    auto [reconstruction, mean, log_variance] = model(x);
    const auto likelihood = torch::binary_cross_entropy(reconstruction, x, {}, at::Reduction::Sum);
    const auto divergence = -0.5 * torch::sum(1 + log_variance - mean.pow(2) - log_variance.exp());
    auto loss = (likelihood + divergence) / x.size(0);
    model.backward(loss);
    return std::make_tuple(loss, divergence, std::make_pair(mean, reconstruction));
  });
  auto evaluate = run.step([&](Tensor x) { return std::get<0>(model(x)); });
  auto sample = run.step([&] {
    torch::NoGradGuard no_grad;
    return model.net()->decode(torch::randn({2, stranger::VaeImpl::kLatent}));
  });
  const auto batch = [&] { return std::make_tuple(run.rand({6, 20})); };
  train_and_evaluate(model, optimizer, train, evaluate, batch);
  sample();
  train_and_evaluate(model, optimizer, train, evaluate, batch);
  sample();
}

/// Two models, two optimizers and two step functions; the first detaches the generator's output.
void train_gan(Run& run) {
  auto generator = run.model(stranger::Generator(), "generator");
  auto discriminator = run.model(stranger::Discriminator(), "discriminator");
  const auto options = torch::optim::AdamOptions(2e-3).betas({0.5, 0.999});
  auto generator_optimizer = run.optimizer<torch::optim::Adam>(generator, options);
  auto discriminator_optimizer = run.optimizer<torch::optim::Adam>(discriminator, options);
  const auto loss_of = [](Tensor score, double label) {
    return torch::binary_cross_entropy_with_logits(score, torch::full_like(score, label));
  };
  const auto noise = [](Tensor real) {
    return torch::randn({real.size(0), stranger::GeneratorImpl::kNoise, 1, 1});
  };
  auto train_discriminator = run.step([&](Tensor real) {
    const auto fake = generator(noise(real)).detach();
    auto loss = loss_of(discriminator(real), 0.9) + loss_of(discriminator(fake), 0.0);
    discriminator.backward(loss);
    return std::make_pair(loss, fake);
  });
  auto train_generator = run.step([&](Tensor real) {
    auto loss = loss_of(discriminator(generator(noise(real))), 1.0);
    generator.backward(loss);
    return loss;
  });
  auto sample = run.step([&](Tensor z) { return generator(z); });
  for (int i = 0; i < 3; ++i) {
    const auto real = run.randn({6, 1, 16, 16});
    discriminator_optimizer.zero_grad();
    train_discriminator(real);
    discriminator_optimizer.step();
    generator_optimizer.zero_grad();
    train_generator(real);
    generator_optimizer.step();
    generator.eval();
    sample(run.randn({3, stranger::GeneratorImpl::kNoise, 1, 1}));
    generator.train();
  }
}

void train_vq_vae(Run& run) {
  auto model = run.model(stranger::VqVae());
  auto optimizer = run.optimizer<torch::optim::Adam>(model, torch::optim::AdamOptions(1e-2));
  auto train = run.step([&](Tensor x) {
    auto [reconstruction, codes, commitment] = model(x);
    auto loss = torch::mse_loss(reconstruction, x) + 0.25 * commitment;
    model.backward(loss);
    return std::make_tuple(loss, codes);
  });
  auto evaluate = run.step([&](Tensor x) {
    const auto [reconstruction, codes, commitment] = model(x);
    return std::make_tuple(reconstruction, codes, commitment);
  });
  train_and_evaluate(model, optimizer, train, evaluate, [&] {
    return std::make_tuple(run.randn({6, 12}));
  });
}

/// Evaluation runs the network four times, so that all ranks read all parameters.
void train_diffusion(Run& run) {
  auto model = run.model(stranger::Diffusion());
  auto optimizer = run.optimizer<torch::optim::AdamW>(model, torch::optim::AdamWOptions(1e-2));
  auto train = run.step([&](Tensor x) {
    auto loss = model.net()->loss(x);
    model.backward(loss);
    return loss;
  });
  auto sample = run.step([&](Tensor x) { return model.net()->denoise(torch::randn_like(x)); });
  train_and_evaluate(model, optimizer, train, sample, [&] {
    return std::make_tuple(run.randn({6, 1, 8}));
  });
}

void train_flow(Run& run) {
  auto model = run.model(stranger::Flow());
  auto optimizer = run.optimizer<torch::optim::Adam>(model, torch::optim::AdamOptions(1e-2));
  const auto likelihood = [](Tensor z, Tensor log_det) { return -0.5 * z.pow(2).sum(1) + log_det; };
  auto train = run.step([&](Tensor x) {
    auto [z, log_det] = model(x);
    auto loss = -likelihood(z, log_det).mean();
    model.backward(loss);
    return std::make_pair(loss, z);
  });
  auto evaluate = run.step([&](Tensor x) {
    auto [z, log_det] = model(x);
    return likelihood(z, log_det);
  });
  train_and_evaluate(model, optimizer, train, evaluate, [&] {
    return std::make_tuple(run.randn({6, 6}));
  });
}

}  // namespace

std::vector<Program> generative() {
  return {{"Vae", train_vae},
          {"Gan", train_gan},
          {"VqVae", train_vq_vae},
          {"Diffusion", train_diffusion},
          {"Flow", train_flow}};
}

}  // namespace smp::zoo
