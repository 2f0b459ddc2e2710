// SPDX-License-Identifier: Apache-2.0
// PyTorch's MNIST script in libtorch, one process. `mnist.cc` is the same program on many ranks.
#include <torch/torch.h>

#include <iostream>

#include "examples/device.h"
#include "examples/mnist/conv_net.h"
#include "examples/mnist/idx_data.h"
#include "examples/mnist/report.h"
#include "examples/mnist/settings.h"
#include "examples/program.h"
#include "smp/optim/adadelta.h"

namespace mnist {
namespace {

void train(ConvNet& net, torch::optim::Optimizer& optimizer, const Digits& digits, int64_t epoch,
           at::Device device, const Settings& settings) {
  net->train();
  const auto batches =
      EpochSampler(digits.size(), settings.batch_size, settings.seed).batches(epoch);
  const auto all = static_cast<int64_t>(batches.size());
  const int64_t steps = settings.max_steps > 0 ? std::min(settings.max_steps, all) : all;
  for (int64_t step = 0; step < steps; ++step) {
    const Digits batch = digits.select(batches[step]);
    optimizer.zero_grad();
    const auto loss = torch::nll_loss(net(batch.images.to(device)), batch.labels.to(device));
    loss.backward();
    optimizer.step();
    if (step % settings.log_interval == 0) print_step(epoch, step, steps, loss.item<double>());
  }
}

void test(ConvNet& net, const Digits& digits, at::Device device, const Settings& settings) {
  torch::NoGradGuard no_grad;
  net->eval();
  double loss = 0;
  int64_t correct = 0;
  for (int64_t first = 0; first < digits.size(); first += settings.test_batch_size) {
    const auto count = std::min(settings.test_batch_size, digits.size() - first);
    const auto labels = digits.labels.narrow(0, first, count).to(device);
    const auto output = net(digits.images.narrow(0, first, count).to(device));
    loss += torch::nll_loss(output, labels, {}, at::Reduction::Sum).item<double>();
    correct += output.argmax(1).eq(labels).sum().item<int64_t>();
  }
  print_test(loss, correct, digits.size());
}

void run(const Settings& settings) {
  at::set_num_threads(settings.threads);
  torch::manual_seed(settings.seed);
  const DataSet data = load_mnist(settings.data);
  std::cout << "data: " << data.description << std::endl;

  const auto device = device_of(settings.device);
  ConvNet net;
  net->to(device);
  smp::optim::Adadelta optimizer(net->parameters(), smp::optim::AdadeltaOptions(settings.lr));
  torch::optim::StepLR scheduler(optimizer, /*step_size=*/1, settings.gamma);
  for (int64_t epoch = 1; epoch <= settings.epochs; ++epoch) {
    train(net, optimizer, data.training, epoch, device, settings);
    test(net, data.test, device, settings);
    scheduler.step();
  }
  if (!settings.save_model.empty()) torch::save(net, settings.save_model);
}

}  // namespace
}  // namespace mnist

int main(int argc, char** argv) {
  return run_program("mnist_plain", argc, argv, mnist::parse_command_line, mnist::run);
}
