// SPDX-License-Identifier: Apache-2.0
// `mnist.cc` partitioned by hand, as SageMaker documents it: the network's two halves are made
// under partition scopes, and the configuration turns the automatic partition off.
//
//     tools/smprun --np 2 --config examples/mnist/manual.json
//     bazel-bin/examples/mnist/mnist_manual --data DIR
#include <torch/torch.h>

#include <iostream>
#include <tuple>

#include "examples/device.h"
#include "examples/mnist/grouped_net.h"
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

  GroupedNet net;
  smp::optim::Adadelta adadelta(net->parameters(), smp::optim::AdadeltaOptions(settings.lr));
  smp::DistributedModel<GroupedNet> model(net);
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
  model->register_post_partition_hook([&] {
    if (smp::rank() > 0) return;
    for (const auto& parameter : net->named_parameters()) {
      const smp::Placement placement = smp::get_partition(parameter.value());
      std::cout << parameter.key() << ": partition " << placement.partition << ", "
                << placement.reason << "\n";
    }
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
  return run_program("mnist_manual", argc, argv, mnist::parse_command_line, mnist::run);
}
