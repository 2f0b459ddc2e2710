// PyTorch's DistributedDataParallel on MNIST, in C++: every rank trains a replica on its share of
// the digits, in an ordinary libtorch loop.
//
//     tools/smprun --np 2 --config examples/mnist_ddp/ddp.json
//     bazel-bin/examples/mnist_ddp/mnist_ddp
//     --data DIR
//     mpirun -np 2 bazel-bin/examples/mnist_ddp/mnist_ddp --data DIR
#include <torch/torch.h>

#include <iostream>

#include "examples/mnist/idx_data.h"
#include "examples/mnist/report.h"
#include "examples/mnist/settings.h"
#include "examples/mnist_ddp/net.h"
#include "optim/adadelta.h"
#include "smp/ddp.h"

namespace mnist {
namespace {

using Model = smp::dp::DistributedDataParallel<NormNet>;
using Sampler = torch::data::samplers::DistributedRandomSampler;

/// Digits as a libtorch data set.
class DigitSet : public torch::data::datasets::Dataset<DigitSet> {
 public:
  explicit DigitSet(Digits digits) : digits_(std::move(digits)) {}
  torch::data::Example<> get(size_t index) override {
    const auto i = static_cast<int64_t>(index);
    return {digits_.images[i], digits_.labels[i]};
  }
  std::optional<size_t> size() const override { return digits_.size(); }

 private:
  Digits digits_;
};

template <class Loader>
void train(Model& model, Loader& loader, torch::optim::Optimizer& optimizer, torch::Device device,
           int64_t epoch, int64_t all, const Settings& settings) {
  model->train();
  const int64_t steps = settings.max_steps > 0 ? std::min(settings.max_steps, all) : all;
  int64_t step = 0;
  for (auto& batch : loader) {
    if (step == steps) break;
    optimizer.zero_grad();
    const auto loss = torch::nll_loss(model(batch.data.to(device)), batch.target.to(device));
    loss.backward();
    optimizer.step();
    if (smp::rank() == 0 && step % settings.log_interval == 0) {
      print_step(epoch, step, steps, loss.template item<double>());
    }
    ++step;
  }
}

/// On this rank alone.
void test(Model& model, const Digits& digits, torch::Device device, const Settings& settings) {
  torch::NoGradGuard no_grad;
  model->eval();
  double loss = 0;
  int64_t correct = 0;
  for (int64_t first = 0; first < digits.size(); first += settings.test_batch_size) {
    const auto count = std::min(settings.test_batch_size, digits.size() - first);
    const auto labels = digits.labels.narrow(0, first, count).to(device);
    const auto output = model(digits.images.narrow(0, first, count).to(device));
    loss += torch::nll_loss(output, labels, {}, at::Reduction::Sum).item<double>();
    correct += output.argmax(1).eq(labels).sum().item<int64_t>();
  }
  print_test(loss, correct, digits.size());
}

/// One rank of each host writes the file, and all ranks of the host read it, each to its device.
void save_and_load(Model& model, const Digits& digits, torch::Device device,
                   const Settings& settings) {
  if (smp::local_rank() == 0) torch::save(model.module(), settings.save_model);
  smp::barrier();
  torch::load(model.module(), settings.save_model, device);
  std::cout << "rank " << smp::rank() << ", loaded: ";
  test(model, digits, device, settings);
}

void run(const Settings& settings) {
  smp::init(settings.config.empty() ? smp::Config().ddp(true)
                                    : smp::Config::from_file(settings.config));
  smp::set_device(smp::local_rank());
  const torch::Device device(torch::cuda::is_available() ? torch::kCUDA : torch::kCPU);
  at::set_num_threads(settings.threads);
  // Another one on each rank, so that dropout differs; the weights are rank 0's.
  torch::manual_seed(settings.seed + smp::rank());
  const DataSet data = load_mnist(settings.data);
  if (smp::rank() == 0) std::cout << "data: " << data.description << std::endl;

  NormNet net;
  net->to(device);
  Model model(net);
  smp::optim::Adadelta optimizer(model->parameters(), smp::optim::AdadeltaOptions(settings.lr));
  torch::optim::StepLR scheduler(optimizer, /*step_size=*/1, settings.gamma);

  // Every rank gets as many digits, so all take the same number of steps.
  Sampler sampler(data.training.size(), smp::size(), smp::rank(), /*allow_duplicates=*/false);
  const int64_t share = data.training.size() / smp::size();
  const int64_t steps = share / settings.batch_size;
  for (int64_t epoch = 1; epoch <= settings.epochs; ++epoch) {
    sampler.set_epoch(epoch);
    const auto loader = torch::data::make_data_loader(
        DigitSet(data.training).map(torch::data::transforms::Stack<>()), sampler,
        torch::data::DataLoaderOptions(settings.batch_size).drop_last(true));
    train(model, *loader, optimizer, device, epoch, steps, settings);
    if (smp::rank() == 0) test(model, data.test, device, settings);
    scheduler.step();
  }
  if (!settings.save_model.empty()) save_and_load(model, data.test, device, settings);
}

}  // namespace
}  // namespace mnist

int main(int argc, char** argv) {
  mnist::Settings settings;
  if (const auto status = mnist::parse_command_line(argc, argv, settings)) return *status;
  try {
    mnist::run(settings);
  } catch (const c10::Error& error) {
    std::cerr << "mnist_ddp: " << error.what_without_backtrace() << "\n";
    return 1;
  } catch (const std::exception& error) {
    std::cerr << "mnist_ddp: " << error.what() << "\n";
    return 1;
  }
  return 0;
}
