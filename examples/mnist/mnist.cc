// The twin of SageMaker's PyTorch MNIST script: a convolutional network on pipeline stages times
// replicas, as the configuration says. `plain.cc` is the program it grew from.
//
//     tools/smprun --np 4 --config examples/mnist/2x2.json bazel-bin/examples/mnist/mnist --data
//     DIR
#include <torch/torch.h>

#include <iostream>
#include <tuple>

#include "examples/mnist/conv_net.h"
#include "examples/mnist/idx_data.h"
#include "examples/mnist/settings.h"
#include "optim/adadelta.h"
#include "smp/smp.h"

namespace mnist {
namespace {

using Model = smp::DistributedModel<ConvNet>;

void train(Model& model, torch::optim::Optimizer& optimizer, const Digits& digits, int64_t epoch,
           const Settings& settings) {
  auto train_step = smp::step([&](torch::Tensor images, torch::Tensor labels) {
    auto output = model(images);
    auto loss = torch::nll_loss(output, labels);
    model->backward(loss);
    return std::make_tuple(output, loss);
  });

  model->train();
  const EpochSampler sampler(digits.size(), settings.batch_size, settings.seed, smp::dp_rank(),
                             smp::dp_size());
  const auto batches = sampler.batches(epoch);
  const auto all = static_cast<int64_t>(batches.size());
  const int64_t steps = settings.max_steps > 0 ? std::min(settings.max_steps, all) : all;
  for (int64_t step = 0; step < steps; ++step) {
    const Digits batch = digits.select(batches[step]);
    optimizer.zero_grad();
    const auto [output, losses] = train_step(batch.images, batch.labels);
    optimizer.step();
    if (smp::rank() == 0 && step % settings.log_interval == 0) {
      std::cout << "epoch " << epoch << ", step " << step << "/" << steps << ": loss "
                << losses.reduce_mean().template item<double>() << std::endl;
    }
  }
}

void test(Model& model, const Digits& digits, const Settings& settings) {
  auto test_step = smp::step([&](torch::Tensor images, torch::Tensor labels) {
    const auto output = model(images);
    return std::make_tuple(torch::nll_loss(output, labels, {}, at::Reduction::Sum),
                           output.argmax(1).eq(labels).sum());
  });

  model->eval();
  double loss = 0;
  int64_t correct = 0;
  for (int64_t first = 0; first < digits.size(); first += settings.test_batch_size) {
    const auto count = std::min(settings.test_batch_size, digits.size() - first);
    const auto [losses, corrects] =
        test_step(digits.images.narrow(0, first, count), digits.labels.narrow(0, first, count));
    loss += losses.reduce_sum().template item<double>();
    correct += corrects.reduce_sum().template item<int64_t>();
  }
  if (smp::rank() != 0) return;
  const auto count = static_cast<double>(digits.size());
  std::cout << "test: average loss " << loss / count << ", accuracy " << correct << "/"
            << digits.size() << " (" << 100 * static_cast<double>(correct) / count << "%)"
            << std::endl;
}

void run(const Settings& settings) {
  smp::init(settings.config.empty() ? smp::Config() : smp::Config::from_file(settings.config));
  smp::set_device(smp::local_rank());
  at::set_num_threads(settings.threads);
  torch::manual_seed(settings.seed);
  const DataSet data = load_mnist(settings.data);
  if (smp::rank() == 0) std::cout << "data: " << data.description << std::endl;

  ConvNet net;
  smp::optim::Adadelta adadelta(net->parameters(), smp::optim::AdadeltaOptions(settings.lr));
  Model model(net);
  auto optimizer = smp::distributed(adadelta);
  torch::optim::StepLR scheduler(optimizer, /*step_size=*/1, settings.gamma);
  for (int64_t epoch = 1; epoch <= settings.epochs; ++epoch) {
    train(model, optimizer, data.training, epoch, settings);
    test(model, data.test, settings);
    scheduler.step();
  }
  if (!settings.save_model.empty()) smp::save(settings.save_model, model, optimizer);
}

}  // namespace
}  // namespace mnist

int main(int argc, char** argv) {
  mnist::Settings settings;
  if (const auto status = mnist::parse_command_line(argc, argv, settings)) return *status;
  return smp::run([&] { mnist::run(settings); });
}
