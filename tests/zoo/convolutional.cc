// SPDX-License-Identifier: Apache-2.0
#include "tests/zoo/harness.h"
#include "tests/zoo/models_convolutional.h"

namespace smp::zoo {
namespace {

using torch::Tensor;

/// Trains a classifier of small images.
template <class Base, class Net, class Options>
void train_classifier(Run& run, Net net, const Options& options) {
  auto model = run.model(std::move(net));
  auto optimizer = run.optimizer<Base>(model, options);
  auto train = run.step([&](Tensor x, Tensor y) {
    const auto logits = model(x);
    auto loss = torch::cross_entropy_loss(logits, y);
    model.backward(loss);
    return std::make_tuple(loss, logits);
  });
  auto evaluate = run.step([&](Tensor x, Tensor y) {
    torch::NoGradGuard no_grad;
    const auto logits = model(x);
    return std::make_pair(logits.argmax(1).eq(y).sum(), torch::cross_entropy_loss(logits, y));
  });
  train_and_evaluate(model, optimizer, train, evaluate, [&] {
    return std::make_tuple(run.randn({6, 3, 8, 8}), run.randint(0, 4, {6}));
  });
}

const auto kMomentum = torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(1e-3);

/// Pins by hand: all that no pin names otherwise is made under the scope of partition 1.
void train_resnet(Run& run) {
  stranger::ResNet net{nullptr};
  {
    const auto scope = run.pin_scope(1);
    net = stranger::ResNet(4);
  }
  run.pin(net->stem, 0);
  run.pin(net->layer2, 2);
  run.pin(net->fc, 3);
  train_classifier<torch::optim::SGD>(run, net, kMomentum);
}

void train_densenet(Run& run) {
  train_classifier<torch::optim::SGD>(run, stranger::DenseNet(4), kMomentum);
}

void train_vision_transformer(Run& run) {
  train_classifier<torch::optim::AdamW>(run, stranger::VisionTransformer(4),
                                        torch::optim::AdamWOptions(1e-2));
}

void train_mlp_mixer(Run& run) {
  train_classifier<torch::optim::Adam>(run, stranger::MlpMixer(4), torch::optim::AdamOptions(1e-2));
}

/// The auxiliary loss is there in training only.
void train_inception(Run& run) {
  auto model = run.model(stranger::Inception(4));
  auto optimizer = run.optimizer<torch::optim::RMSprop>(model, torch::optim::RMSpropOptions(1e-3));
  auto train = run.step([&](Tensor x, Tensor y) {
    const auto [logits, extra] = model(x);
    auto loss = torch::cross_entropy_loss(logits, y);
    if (extra) loss = loss + 0.3 * torch::cross_entropy_loss(*extra, y);
    model.backward(loss);
    return std::make_tuple(loss, logits, extra);
  });
  auto evaluate = run.step([&](Tensor x, Tensor y) {
    const auto [logits, extra] = model(x);
    return std::make_tuple(torch::cross_entropy_loss(logits, y), logits, extra);
  });
  train_and_evaluate(model, optimizer, train, evaluate, [&] {
    return std::make_tuple(run.randn({6, 3, 8, 8}), run.randint(0, 4, {6}));
  });
}

/// Cross entropy and Dice; 9 x 7 images, which do not halve evenly. By hand: each level of the way
/// down and up is on one rank, so that the skips stay there, and the loss on the last.
void train_unet(Run& run) {
  stranger::UNet net;
  for (const auto& [part, level] :
       std::vector<std::pair<torch::nn::Sequential, int>>{{net->down1, 0},
                                                          {net->down2, 1},
                                                          {net->bottom, 2},
                                                          {net->merge2, 1},
                                                          {net->merge1, 0}}) {
    run.pin(part, level);
  }
  run.pin(net->up2, 3);
  run.pin(net->head, 0);
  auto model = run.model(net);
  auto optimizer = run.optimizer<torch::optim::Adam>(model, torch::optim::AdamOptions(1e-2));
  auto train = run.step([&](Tensor x, Tensor mask) {
    const auto logits = model(x);
    const auto scope = run.pin_scope(3);
    const auto p = torch::sigmoid(logits);
    const auto dice = 1 - (2 * (p * mask).sum() + 1) / (p.sum() + mask.sum() + 1);
    auto loss = torch::binary_cross_entropy_with_logits(logits, mask) + dice;
    model.backward(loss);
    return std::make_tuple(loss, dice, logits);
  });
  auto evaluate = run.step([&](Tensor x, Tensor mask) {
    const auto found = model(x).gt(0);
    return std::make_pair(found, found.logical_and(mask.gt(0)).sum());
  });
  train_and_evaluate(model, optimizer, train, evaluate, [&] {
    return std::make_tuple(run.randn({6, 2, 9, 7}),
                           run.randint(0, 2, {6, 1, 9, 7}).to(torch::kFloat));
  });
}

/// Complex weights, and complex tensors between the stages.
void train_fourier_operator(Run& run) {
  auto model = run.model(stranger::FourierOperator());
  auto optimizer = run.optimizer<torch::optim::SGD>(model, torch::optim::SGDOptions(0.05));
  auto train = run.step([&](Tensor x, Tensor y) {
    const auto out = model(x);
    auto loss = torch::mse_loss(out, y);
    model.backward(loss);
    return std::make_tuple(loss, out);
  });
  auto evaluate = run.step([&](Tensor x, Tensor y) {
    torch::NoGradGuard no_grad;
    const auto out = model(x);
    return std::make_pair(torch::l1_loss(out, y), torch::fft::rfft(out.squeeze(-1)));
  });
  train_and_evaluate(model, optimizer, train, evaluate, [&] {
    return std::make_tuple(run.randn({6, 12, 1}), run.randn({6, 12, 1}));
  });
}

}  // namespace

std::vector<Program> convolutional() {
  return {{"ResNet", train_resnet},
          {"DenseNet", train_densenet},
          {"UNet", train_unet},
          {"ResNetByHand", train_resnet, true},
          {"UNetByHand", train_unet, true},
          {"Inception", train_inception},
          {"VisionTransformer", train_vision_transformer},
          {"MlpMixer", train_mlp_mixer},
          {"FourierOperator", train_fourier_operator}};
}

}  // namespace smp::zoo
