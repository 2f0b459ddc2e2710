// SPDX-License-Identifier: Apache-2.0
// One contender of bench/ddp/compare.py: trains replicas and takes a step whenever rank 0 reads a
// line, then prints how long it took, in seconds.

#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <functional>
#include <string>

#include "bench/contender.h"
#include "bench/ddp/norm_net.h"
#include "examples/gpt/gpt_model.h"
#include "smp/ddp.h"

namespace {

struct Options {
  std::string mode = "ddp", model = "convnet", hook = "none";
  int64_t batch = 64, warm = 3, steps = 30;
  int threads = 1;
  double bucket_cap_mb = 25;
};

constexpr double kRate = 0.01;

void serve(const Options& options, const std::function<void()>& step) {
  bench::take_steps(
      options.warm, options.steps, smp::rank() == 0, [] { smp::barrier(); }, step);
}

/// `loss(model)` of a batch of its own on each rank.
template <class Net, class Loss>
void run(const Options& options, Net net, const Loss& loss) {
  torch::optim::SGD optimizer(net->parameters(), kRate);
  if (options.mode == "barrier") {
    // The step without communication, but ranks wait for each other where they must.
    serve(options, [&] {
      optimizer.zero_grad();
      loss(net).backward();
      smp::barrier();
      optimizer.step();
    });
    return;
  }
  smp::DistributedDataParallel<Net> model(net,
                                          smp::DDPOptions().bucket_cap_mb(options.bucket_cap_mb));
  if (options.hook == "bf16") model.register_comm_hook(smp::bf16_compress_hook);
  serve(options, [&] {
    optimizer.zero_grad();
    loss(model).backward();
    optimizer.step();
  });
}

void run_convnet(const Options& options) {
  const auto x = torch::randn({options.batch, 1, 28, 28});
  const auto y = torch::randint(10, {options.batch});
  run(options, mnist::NormNet(), [&](auto& model) { return torch::nll_loss(model(x), y); });
}

/// The *bench* GPT of bench/pipeline.
void run_gpt(const Options& options) {
  const auto shape = gpt::GPTOptions().layers(8).width(512).heads(8).sequence(128).dropout(0);
  const auto x = torch::randint(gpt::kVocabulary, {options.batch, shape.sequence()});
  const auto y = torch::randint(gpt::kVocabulary, {options.batch, shape.sequence()});
  run(options, gpt::GPT(shape), [&](auto& model) { return gpt::next_byte_loss(model(x), y); });
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("A contender of bench/ddp/compare.py");
  app.add_option("--mode", options.mode, "ddp, or barrier: no communication but a barrier")
      ->check(CLI::IsMember({"ddp", "barrier"}));
  app.add_option("--model", options.model)->check(CLI::IsMember({"convnet", "gpt"}));
  app.add_option("--hook", options.hook)->check(CLI::IsMember({"none", "bf16"}));
  app.add_option("--batch", options.batch, "Samples of each rank");
  app.add_option("--bucket-cap-mb", options.bucket_cap_mb);
  app.add_option("--warm", options.warm, "Steps that are not timed");
  app.add_option("--steps", options.steps, "Lines to wait for");
  app.add_option("--threads", options.threads, "Intra-op threads of a rank");
  CLI11_PARSE(app, argc, argv);
  torch::set_num_threads(options.threads);
  smp::init(smp::Config().ddp(true));
  torch::manual_seed(1 + smp::rank());
  options.model == "gpt" ? run_gpt(options) : run_convnet(options);
  smp::shutdown();
  return 0;
}
