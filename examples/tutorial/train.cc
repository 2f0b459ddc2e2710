// SPDX-License-Identifier: Apache-2.0
// A whole training program on any number of ranks, explained in docs/tutorial.md:
//
//     train [FOLDER [EPOCHS]]
//
// trains into FOLDER (by default runs/tutorial) until it has done EPOCHS epochs (by default all),
// and goes on from the newest checkpoint there if it has one.
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <limits>
#include <numeric>
#include <optional>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "smp/smp.h"

namespace {

constexpr int64_t kEpochs = 12;
constexpr int64_t kSamples = 1024;       // samples of training; a quarter as many for validation
constexpr int64_t kBatch = 64;           // samples of all replicas together
constexpr int64_t kPassesPerUpdate = 2;  // gradient accumulation: an update sees 128 samples
constexpr int64_t kUpdatesPerEpoch = kSamples / kBatch / kPassesPerUpdate;
constexpr int64_t kWarmup = 10;  // updates
constexpr double kRate = 0.01;
constexpr double kMaxNorm = 1.0;

/// Points on three arms of a spiral, and the number of the arm. The same points on every rank.
class Spirals : public torch::data::datasets::Dataset<Spirals> {
 public:
  Spirals(int64_t count, uint64_t seed) {
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
    const auto radius = torch::linspace(0.1, 1, count);
    labels_ = torch::arange(count) % 3;
    const auto angle =
        labels_ * (2 * M_PI / 3) + 4 * radius + 0.1 * torch::randn({count}, generator);
    points_ = torch::stack({radius * torch::cos(angle), radius * torch::sin(angle)}, 1);
  }

  torch::data::Example<> get(size_t index) override {
    const auto i = static_cast<int64_t>(index);
    return {points_[i], labels_[i]};
  }
  std::optional<size_t> size() const override { return labels_.size(0); }

 private:
  torch::Tensor points_, labels_;
};

/// Batches in an order that depends on the epoch and on nothing else: every rank has the same, and
/// so has a run that is resumed.
auto batches_of(const Spirals& data, int64_t epoch) {
  torch::data::samplers::DistributedRandomSampler order(data.size().value());
  order.set_epoch(epoch);
  return torch::data::make_data_loader(
      Spirals(data).map(torch::data::transforms::Stack<>()), order,
      torch::data::DataLoaderOptions().batch_size(kBatch).drop_last(true));
}

struct ClassifierImpl : torch::nn::Module {
  ClassifierImpl() {
    input = register_module("input", torch::nn::Linear(2, 64));
    hidden = register_module("hidden", torch::nn::Linear(64, 64));
    output = register_module("output", torch::nn::Linear(64, 3));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = torch::tanh(input(x));
    x = x + torch::dropout(torch::tanh(hidden(x)), 0.1, is_training());
    return output(x);
  }

  torch::nn::Linear input{nullptr}, hidden{nullptr}, output{nullptr};
};
TORCH_MODULE(Classifier);

/// Raises the rate in the first updates (warm-up), then lowers it to zero by half a cosine.
class WarmupCosine : public torch::optim::LRScheduler {
 public:
  explicit WarmupCosine(torch::optim::Optimizer& optimizer)
      : LRScheduler(optimizer), highest_(get_current_lrs()) {}

 private:
  std::vector<double> get_lrs() override {
    const double update = step_count_, all = kEpochs * kUpdatesPerEpoch;
    const double factor = update < kWarmup
                              ? (update + 1) / kWarmup
                              : (1 + std::cos(M_PI * (update - kWarmup) / (all - kWarmup))) / 2;
    auto rates = highest_;
    for (double& rate : rates) rate *= factor;
    return rates;
  }

  std::vector<double> highest_;
};

/// Has checkpoints hold a list of numbers.
void keep_in_checkpoints(const std::string& name, std::vector<double>& numbers) {
  const auto save = [&numbers] {
    std::ostringstream text;
    text << std::setprecision(std::numeric_limits<double>::max_digits10);
    for (const double number : numbers) text << (text.tellp() > 0 ? "," : "[") << number;
    return numbers.empty() ? "[]" : text.str() + "]";
  };
  const auto load = [&numbers](const std::string& text) {
    numbers.clear();
    std::istringstream rest(text);
    double number = 0;
    for (char separator = 0; rest >> separator >> number;) numbers.push_back(number);
  };
  smp::register_checkpoint_state(name, save, load);
}

/// The losses of all updates and of the validation after each epoch.
struct History {
  History() {
    keep_in_checkpoints("losses", losses);
    keep_in_checkpoints("validation", validation);
  }

  int64_t epochs() const { return static_cast<int64_t>(validation.size()); }
  /// The mean over the updates of the last epoch.
  double last_epoch() const {
    return std::accumulate(losses.end() - kUpdatesPerEpoch, losses.end(), 0.0) / kUpdatesPerEpoch;
  }
  void write_csv(const std::string& path) const;
  void draw(const std::string& path) const;

  std::vector<double> losses, validation;
};

void History::write_csv(const std::string& path) const {
  std::ofstream file(path);
  file << std::setprecision(std::numeric_limits<double>::max_digits10)
       << "update,loss,validation loss\n";
  for (size_t i = 0; i < losses.size(); ++i) {
    file << i + 1 << "," << losses[i] << ",";
    if ((i + 1) % kUpdatesPerEpoch == 0) file << validation[i / kUpdatesPerEpoch];
    file << "\n";
  }
}

void History::draw(const std::string& path) const {
  const double top = *std::max_element(losses.begin(), losses.end());
  std::ofstream file(path);
  const auto text = [&](double x, double y, const std::string& words, const char* colour) {
    file << "<text x='" << x << "' y='" << y << "' fill='" << colour << "'>" << words
         << "</text>\n";
  };
  const auto curve = [&](const std::vector<double>& values, const char* colour) {
    file << "<polyline fill='none' stroke-width='2' stroke='" << colour << "' points='";
    for (size_t i = 0; i < values.size(); ++i) {
      file << 50 + 540.0 * static_cast<double>(i + 1) / static_cast<double>(values.size()) << ","
           << 270 - 240 * values[i] / top << " ";
    }
    file << "'/>\n";
  };
  file << "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 600 300' font-size='13' "
          "font-family='sans-serif'>\n<rect width='600' height='300' fill='white'/>\n"
          "<path d='M50 30V270H590' fill='none' stroke='black'/>\n";
  text(10, 35, std::to_string(top).substr(0, 4), "black");
  text(35, 275, "0", "black");
  text(500, 290, std::to_string(losses.size()) + " updates", "black");
  text(300, 50, "loss", "steelblue");
  text(300, 70, "loss on the validation set", "darkorange");
  curve(losses, "steelblue");
  curve(validation, "darkorange");
  file << "</svg>\n";
}

/// Over the microbatches of all replicas, with the same bits on any number of ranks.
double mean(const smp::StepOutput& output) {
  return output.reduce_mean(smp::CommGroup::kDp).item<double>();
}

}  // namespace

int main(int argc, char** argv) {
  const std::string folder = argc > 1 ? argv[1] : "runs/tutorial";
  const int64_t last_epoch = argc > 2 ? std::stoll(argv[2]) : kEpochs;

  smp::init(smp::Config().microbatches(8).gradient_shards(2));
  torch::set_num_threads(1);
  torch::manual_seed(1);

  const Spirals training(kSamples, /*seed=*/2), held_out(kSamples / 4, /*seed=*/3);
  Classifier net;
  smp::DistributedModel<Classifier> model(
      net, smp::ModelOptions().backward_passes_per_step(kPassesPerUpdate));
  smp::DistributedOptimizer<torch::optim::AdamW> optimizer(model->parameters(),
                                                           torch::optim::AdamWOptions(kRate));
  WarmupCosine scheduler(optimizer);
  smp::register_scheduler("rate", scheduler);
  History history;

  auto train = smp::step(
      [&](torch::Tensor x, torch::Tensor y) {
        const auto loss = torch::cross_entropy_loss(model(x), y);
        model->backward(loss / kPassesPerUpdate);  // the gradients of the passes add up
        return loss;
      },
      smp::StepOptions().name("train"));

  auto validate = smp::step(
      [&](torch::Tensor x, torch::Tensor y) {
        const auto logits = model(x);
        const auto hits = logits.argmax(1).eq(y).to(torch::kFloat);
        return std::make_tuple(torch::cross_entropy_loss(logits, y), hits.mean());
      },
      smp::StepOptions().name("validate"));

  auto resumed = smp::resume_after_restart(model, optimizer);  // set by smprun, after a failure
  if (!resumed) {
    resumed = smp::resume_from_checkpoint(folder, std::nullopt, model, optimizer,
                                          smp::LoadOptions().begin_anew(true));
  }
  int64_t done = resumed->step;  // batches
  const auto save = [&] {
    smp::save_checkpoint(folder, "batch_" + std::to_string(done), model, optimizer,
                         smp::SaveCheckpointOptions().num_kept_partial_checkpoints(2));
  };

  for (int64_t epoch = history.epochs(); epoch < last_epoch; ++epoch) {
    model->train();
    int64_t batch = epoch * kUpdatesPerEpoch * kPassesPerUpdate;
    double loss = 0;
    const auto batches = batches_of(training, epoch);
    for (const auto& example : *batches) {
      if (batch++ < done) continue;  // before the checkpoint
      if (done % kPassesPerUpdate == 0) optimizer.zero_grad();
      loss += mean(train(smp::shard(example.data), smp::shard(example.target)));
      if (++done % kPassesPerUpdate != 0) continue;

      smp::clip_grad_norm_(model, kMaxNorm);
      scheduler.step();
      optimizer.step();
      history.losses.push_back(std::exchange(loss, 0) / kPassesPerUpdate);
      if (smp::stop_requested()) {
        save();
        return smp::kPreemptedStatus;
      }
    }

    model->eval();
    double validation = 0, accuracy = 0;
    const int64_t count = held_out.size().value() / kBatch;
    const auto held_out_batches = batches_of(held_out, 0);
    for (const auto& example : *held_out_batches) {
      const auto [losses, hits] = validate(smp::shard(example.data), smp::shard(example.target));
      validation += mean(losses) / count;
      accuracy += mean(hits) / count;
    }
    history.validation.push_back(validation);
    if (smp::rank() == 0) {
      std::cout << std::fixed << std::setprecision(6) << "epoch " << epoch + 1 << "  loss "
                << history.last_epoch() << "  validation loss " << validation << "  accuracy "
                << accuracy << std::endl;
    }
    save();
  }

  if (smp::rank() == 0 && !history.losses.empty()) {
    history.write_csv(folder + "/loss.csv");
    history.draw(folder + "/loss.svg");
  }
}
