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
#include "examples/mnist/report.h"
#include "examples/mnist/settings.h"
#include "optim/adadelta.h"
#include "smp/smp.h"

namespace mnist {
namespace {

/// One epoch of `step(images, labels)`, which returns the output and the loss, on this replica's
/// share of `digits`.
template <class TrainStep, class Optimizer>
void train(TrainStep& step, Optimizer& optimizer, const Digits& digits, int64_t epoch,
           const Settings& settings) {
  const EpochSampler sampler(digits.size(), settings.batch_size, settings.seed, smp::dp_rank(),
                             smp::dp_size());
  const auto batches = sampler.batches(epoch);
  const auto all = static_cast<int64_t>(batches.size());
  const int64_t steps = settings.max_steps > 0 ? std::min(settings.max_steps, all) : all;
  for (int64_t i = 0; i < steps; ++i) {
    const Digits batch = digits.select(batches[i]);
    optimizer.zero_grad();
    const smp::StepOutput losses = std::get<1>(step(batch.images, batch.labels));
    optimizer.step();
    if (smp::rank() == 0 && i % settings.log_interval == 0) {
      print_step(epoch, i, steps, losses.reduce_mean().item<double>());
    }
  }
}

/// Judges the model by `step(images, labels)`, which returns the summed loss and how many digits
/// were recognised. Every replica judges the same digits.
template <class TestStep>
void test(TestStep& step, const Digits& digits, const Settings& settings) {
  double loss = 0;
  int64_t correct = 0, count = 0;
  // What does not fill a batch is dropped, as it might not divide into microbatches.
  for (; count + settings.test_batch_size <= digits.size(); count += settings.test_batch_size) {
    const std::tuple<smp::StepOutput, smp::StepOutput> sums =
        step(digits.images.narrow(0, count, settings.test_batch_size),
             digits.labels.narrow(0, count, settings.test_batch_size));
    loss += std::get<0>(sums).reduce_sum().item<double>();
    correct += std::get<1>(sums).reduce_sum().item<int64_t>();
  }
  if (smp::rank() == 0) print_test(loss, correct, count);
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
  mnist::Settings settings;
  if (const auto status = mnist::parse_command_line(argc, argv, settings)) return *status;
  try {
    mnist::run(settings);
  } catch (const c10::Error& error) {
    std::cerr << "mnist: " << error.what_without_backtrace() << "\n";
    return 1;
  } catch (const std::exception& error) {
    std::cerr << "mnist: " << error.what() << "\n";
    return 1;
  }
  return 0;
}
