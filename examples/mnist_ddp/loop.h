// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <iostream>

#include "examples/mnist/conv_net.h"
#include "examples/mnist/idx_data.h"
#include "examples/mnist/report.h"
#include "examples/mnist/settings.h"
#include "smp/optim/adadelta.h"

namespace mnist {

/// The launch, as far as the two programs of this folder need to know it.
struct Place {
  int rank;
  int size;
  int local_rank;  ///< among the ranks of the host
  torch::Device device;
};

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

template <class Model, class Loader>
void train(Model& model, Loader& loader, torch::optim::Optimizer& optimizer, const Place& place,
           int64_t epoch, int64_t all, const Settings& settings) {
  model.module()->train();
  const int64_t steps = settings.max_steps > 0 ? std::min(settings.max_steps, all) : all;
  int64_t step = 0;
  for (auto& batch : loader) {
    if (step == steps) break;
    optimizer.zero_grad();
    const auto loss =
        torch::nll_loss(model(batch.data.to(place.device)), batch.target.to(place.device));
    loss.backward();
    optimizer.step();
    if (place.rank == 0 && step % settings.log_interval == 0) {
      print_step(epoch, step, steps, loss.template item<double>());
    }
    ++step;
  }
}

/// On this rank alone.
template <class Model>
void test(Model& model, const Digits& digits, torch::Device device, const Settings& settings) {
  torch::NoGradGuard no_grad;
  model.module()->eval();
  double loss = 0;
  int64_t correct = 0;
  for (int64_t first = 0; first < digits.size(); first += settings.test_batch_size) {
    const auto count = std::min(settings.test_batch_size, digits.size() - first);
    const auto labels = digits.labels.narrow(0, first, count).to(device);
    const torch::Tensor output = model(digits.images.narrow(0, first, count).to(device));
    loss += torch::nll_loss(output, labels, {}, at::Reduction::Sum).item<double>();
    correct += output.argmax(1).eq(labels).sum().item<int64_t>();
  }
  print_test(loss, correct, digits.size());
}

/// Loads without giving parameters other memory, as `module.load(archive)` would: c10d's reducer
/// would know nothing of their gradients any more.
inline void load_in_place(torch::nn::Module& module, torch::serialize::InputArchive& archive) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : module.named_parameters(/*recurse=*/false)) {
    torch::Tensor saved;
    archive.read(parameter.key(), saved);
    parameter.value().copy_(saved);
  }
  for (const auto& child : module.named_children()) {
    torch::serialize::InputArchive part;
    if (archive.try_read(child.key(), part)) load_in_place(*child.value(), part);
  }
}

/// One rank of each host writes the file, and all ranks of the host read it, each to its device.
template <class Model, class Barrier>
void save_and_load(Model& model, torch::optim::Optimizer& optimizer, const Place& place,
                   Barrier barrier, const std::string& file) {
  if (place.local_rank == 0) {
    torch::serialize::OutputArchive all, net, updates;
    model.module()->save(net);
    optimizer.save(updates);
    all.write("model", net);
    all.write("optimizer", updates);
    all.save_to(file);
  }
  barrier();
  torch::serialize::InputArchive all, net, updates;
  all.load_from(file, place.device);
  all.read("model", net);
  all.read("optimizer", updates);
  load_in_place(*model.module(), net);
  optimizer.load(updates);
}

/// Trains a replica, `model`, on this rank's share of the digits: an ordinary libtorch loop.
/// Each epoch ends with a checkpoint, from which all ranks go on. `barrier` returns when all ranks
/// have called it.
template <class Model, class Barrier>
void train_and_test(Model& model, const DataSet& data, const Place& place, Barrier barrier,
                    const Settings& settings) {
  smp::optim::Adadelta optimizer(model.module()->parameters(),
                                 smp::optim::AdadeltaOptions(settings.lr));
  torch::optim::StepLR scheduler(optimizer, /*step_size=*/1, settings.gamma);
  // Every rank gets as many digits, so all take the same number of steps.
  torch::data::samplers::DistributedRandomSampler sampler(data.training.size(), place.size,
                                                          place.rank, /*allow_duplicates=*/false);
  const int64_t steps = data.training.size() / place.size / settings.batch_size;
  for (int64_t epoch = 1; epoch <= settings.epochs; ++epoch) {
    sampler.set_epoch(epoch);
    const auto loader = torch::data::make_data_loader(
        DigitSet(data.training).map(torch::data::transforms::Stack<>()), sampler,
        torch::data::DataLoaderOptions(settings.batch_size).drop_last(true));
    train(model, *loader, optimizer, place, epoch, steps, settings);
    if (place.rank == 0) test(model, data.test, place.device, settings);
    scheduler.step();
    if (!settings.save_model.empty()) {
      save_and_load(model, optimizer, place, barrier, settings.save_model);
      std::cout << "rank " << place.rank << ", loaded: ";
      test(model, data.test, place.device, settings);
    }
  }
}

}  // namespace mnist
