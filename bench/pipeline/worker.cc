// SPDX-License-Identifier: Apache-2.0
// One contender of bench/pipeline/compare.py: trains a GPT and takes a step whenever rank 0 reads a
// line, then prints how long it took, in seconds.

#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <string>

#include "bench/contender.h"
#include "examples/gpt/gpt_model.h"
#include "smp/smp.h"

namespace {

struct Options {
  std::string mode = "smp";
  int64_t layers = 8, width = 512, heads = 8, sequence = 128;
  int64_t batch = 16, microbatches = 8, warm = 3, steps = 30;
  int threads = 1;
};

class Trainer {
 public:
  explicit Trainer(const Options& options)
      : options_(options),
        net_(gpt::GPTOptions()
                 .layers(options.layers)
                 .width(options.width)
                 .heads(options.heads)
                 .sequence(options.sequence)
                 .dropout(0)),
        x_(torch::randint(gpt::kVocabulary, {options.batch, options.sequence})),
        y_(torch::randint(gpt::kVocabulary, {options.batch, options.sequence})) {}

  /// One process and plain libtorch.
  void run_plain() {
    torch::optim::SGD optimizer(net_->parameters(), kRate);
    const int64_t size = options_.batch / options_.microbatches;
    bench::take_steps(
        options_.warm, options_.steps, true, [] {},
        [&] {
          optimizer.zero_grad();
          for (int64_t m = 0; m < options_.microbatches; ++m) {
            const auto loss = gpt::next_byte_loss(net_(x_.narrow(0, m * size, size)),
                                                  y_.narrow(0, m * size, size));
            (loss / static_cast<double>(options_.microbatches)).backward();
          }
          optimizer.step();
        });
  }

  void run_smp() {
    smp::DistributedModel<gpt::GPT> model(net_);
    smp::DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), kRate);
    auto train = smp::step([&](torch::Tensor x, torch::Tensor y) {
      auto loss = gpt::next_byte_loss(model(x), y);
      model->backward(loss);
      return loss;
    });
    bench::take_steps(
        options_.warm, options_.steps, smp::rank() == 0, [] { smp::barrier(); },
        [&] {
          optimizer.zero_grad();
          train(x_, y_);
          optimizer.step();
        });
  }

 private:
  static constexpr double kRate = 0.01;
  const Options options_;
  gpt::GPT net_;
  torch::Tensor x_, y_;
};

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("A contender of bench/pipeline/compare.py");
  app.add_option("--mode", options.mode, "smp or plain")->check(CLI::IsMember({"smp", "plain"}));
  app.add_option("--layers", options.layers);
  app.add_option("--width", options.width);
  app.add_option("--heads", options.heads);
  app.add_option("--sequence", options.sequence);
  app.add_option("--batch", options.batch);
  app.add_option("--microbatches", options.microbatches);
  app.add_option("--warm", options.warm, "Steps that are not timed");
  app.add_option("--steps", options.steps, "Lines to wait for");
  app.add_option("--threads", options.threads, "Intra-op threads of a rank");
  CLI11_PARSE(app, argc, argv);
  torch::set_num_threads(options.threads);
  torch::manual_seed(1);
  if (options.mode == "plain") {
    Trainer(options).run_plain();
    return 0;
  }
  smp::init(smp::Config().microbatches(options.microbatches));
  Trainer(options).run_smp();
  smp::shutdown();
  return 0;
}
