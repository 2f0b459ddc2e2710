// SPDX-License-Identifier: Apache-2.0
// The counterpart of SageMaker's PyTorch MNIST script: a convolutional network on pipeline stages
// times replicas, as the configuration says. `plain.cc` is the program it grew from.
//
//     tools/smprun --np 4 --config examples/mnist/2x2.json bazel-bin/examples/mnist/mnist --data
//     DIR
#include <torch/torch.h>

#include <iostream>
#include <tuple>

#include "examples/device.h"
#include "examples/mnist/conv_net.h"
#include "examples/mnist/idx_data.h"
#include "examples/mnist/loops.h"
#include "examples/mnist/settings.h"
#include "examples/program.h"
#include "smp/optim/adadelta.h"
#include "smp/smp.h"

namespace mnist {
namespace {

void run(const Settings& settings) {
  smp::init(settings.config.empty() ? smp::Config() : smp::Config::from_file(settings.config));
  if (settings.device != "cpu") {
    smp::set_device(device_of(settings.device, smp::local_rank()).index());
  }
  at::set_num_threads(settings.threads);
  torch::manual_seed(settings.seed);
  const DataSet data = load_mnist(settings.data);
  if (smp::rank() == 0) std::cout << "data: " << data.description << std::endl;

  ConvNet net;
  smp::optim::Adadelta adadelta(net->parameters(), smp::optim::AdadeltaOptions(settings.lr));
  smp::DistributedModel<ConvNet> model(net);
  auto optimizer = smp::distributed(adadelta);
  torch::optim::StepLR scheduler(adadelta, /*step_size=*/1, settings.gamma);

  auto train_step = smp::step([&](torch::Tensor images, torch::Tensor labels) {
    auto output = model(images);
    auto loss = torch::nll_loss(output, labels);
    model->backward(loss);
    return std::make_tuple(output, loss);
  });
  auto test_step = smp::step([&](torch::Tensor images, torch::Tensor labels) {
    const auto output = model(images);
    return std::make_tuple(torch::nll_loss(output, labels, {}, at::Reduction::Sum),
                           output.argmax(1).eq(labels).sum());
  });
  for (int64_t epoch = 1; epoch <= settings.epochs; ++epoch) {
    model->train();
    train(train_step, optimizer, data.training, epoch, settings);
    model->eval();
    test(test_step, data.test, settings);
    scheduler.step();
  }
  if (!settings.save_model.empty()) smp::save(settings.save_model, model, optimizer);
}

}  // namespace
}  // namespace mnist

int main(int argc, char** argv) {
  return run_program("mnist", argc, argv, mnist::parse_command_line, mnist::run);
}
