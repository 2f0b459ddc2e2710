// SPDX-License-Identifier: Apache-2.0
// Costs of a model that was loaded from an archive: a training step of plain libtorch of the GPT of
// examples/gpt, as it is written in C++ and as a program that was exported from it, in turn, as a
// ratio of medians; and the time to load the archive. The operators are the same.
//
//     bazel run //bench:exported
//
// Instructions are counted by Valgrind, of the steps after the first three, for one width:
//
//     bazel build //bench:exported
//     export VALGRIND_OPTS='--callgrind-out-file=calls --toggle-collect=*measured_step<*'
//     valgrind --tool=callgrind bazel-bin/bench/exported 3 64
//     callgrind_annotate --inclusive=yes calls | grep measured_step

#include <torch/torch.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <tuple>
#include <vector>

#include "bench/measure.h"
#include "examples/gpt/gpt_model.h"
#include "smp/smp.h"

namespace {

using bench::median;
using bench::seconds;

constexpr int kRounds = 30;
constexpr int64_t kSequence = 64;
constexpr int64_t kBatch = 4;

torch::Tensor logits_of(gpt::GPT& model, const torch::Tensor& x) { return model(x); }
torch::Tensor logits_of(smp::ExportedModule& model, const torch::Tensor& x) {
  return model(x).toTensor();
}

template <class Model>
torch::Tensor train_step(Model& model, torch::optim::SGD& optimizer, const torch::Tensor& x,
                         const torch::Tensor& y) {
  optimizer.zero_grad();
  const auto loss = gpt::next_byte_loss(logits_of(model, x), y);
  loss.backward();
  optimizer.step();
  return loss.detach();
}

/// Milliseconds. Is called, not inlined, so that Valgrind knows when a step begins and ends.
template <class Model>
[[gnu::noinline]] double measured_step(Model& model, torch::optim::SGD& optimizer,
                                       const torch::Tensor& x, const torch::Tensor& y) {
  return 1e3 * seconds([&] { train_step(model, optimizer, x, y); });
}

void measure(int rounds, int64_t width) {
  gpt::GPT written(
      gpt::GPTOptions().layers(4).width(width).heads(4).sequence(kSequence).dropout(0.0));
  const auto x = torch::randint(gpt::kVocabulary, {kBatch, kSequence});
  const auto y = torch::randint(gpt::kVocabulary, {kBatch, kSequence});
  const std::string path = (std::filesystem::temp_directory_path() /
                            ("smp_bench_exported_" + std::to_string(::getpid()) + ".pt2"))
                               .string();
  const auto parts = smp::export_program(
      path, written, std::make_tuple(x),
      smp::ExportProgramOptions().dynamic_shapes({{{0, smp::ExportDim("batch")}}}));
  auto loaded = smp::load_exported(path);
  std::vector<double> loads;
  for (int i = 0; i < rounds; ++i)
    loads.push_back(1e3 * seconds([&] { smp::load_exported(path); }));
  const auto bytes = std::filesystem::file_size(path);
  std::filesystem::remove(path);

  torch::optim::SGD written_optimizer(written->parameters(), 0.01);
  torch::optim::SGD loaded_optimizer(loaded->parameters(), 0.01);
  for (int i = 0; i < 3; ++i) {
    const auto expected = train_step(written, written_optimizer, x, y);
    TORCH_CHECK(torch::equal(train_step(loaded, loaded_optimizer, x, y), expected),
                "the losses differ");
  }
  std::vector<double> times, loaded_times, ratios;
  for (int i = 0; i < rounds; ++i) {
    times.push_back(measured_step(written, written_optimizer, x, y));
    loaded_times.push_back(measured_step(loaded, loaded_optimizer, x, y));
    ratios.push_back(loaded_times.back() / times.back());
  }
  std::printf("| %lld | %zu | %.2f | %.2f | %.3f (%.3f to %.3f) | %.1f of %.1f |\n",
              static_cast<long long>(width), parts.operators, median(times), median(loaded_times),
              median(ratios), bench::quantile(ratios, 0.25), bench::quantile(ratios, 0.75),
              median(loads), static_cast<double>(bytes) / 1e6);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  torch::set_num_threads(1);
  const int rounds = argc > 1 ? std::atoi(argv[1]) : kRounds;
  std::printf("GPT of 4 layers, %lld sequences of %lld bytes, one thread; medians of %d\n",
              static_cast<long long>(kBatch), static_cast<long long>(kSequence), rounds);
  std::printf(
      "| width | operators | written in C++, ms | loaded, ms | ratio (quartiles) | ms to load, of "
      "MB |\n|---|---|---|---|---|---|\n");
  if (argc > 2) {
    measure(rounds, std::atoll(argv[2]));
  } else {
    for (const int64_t width : {16, 64, 256}) measure(rounds, width);
  }
  return 0;
}
