// SPDX-License-Identifier: Apache-2.0
// Costs of checkpoints: bandwidth of saving and loading against `cp` of the same bytes, the pause
// that a save makes between steps, in the background and not, and memory above the model's own. The
// things compared run in turn; every figure is a median.
//
//     bazel run //bench:checkpoint -- [FOLDER [WIDTH]]
//
// FOLDER is on the disk that is to be measured. Files are read from memory if they still are there:
// so are those that `cp` reads.

#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "bench/measure.h"
#include "smp/smp.h"

namespace {

namespace fs = std::filesystem;
using bench::median;
using bench::seconds;

constexpr int kRounds = 7;

/// Resident memory of the process, in MiB.
double resident() {
  std::ifstream in("/proc/self/statm");
  double total = 0, pages = 0;
  in >> total >> pages;
  return pages * 4096 / (1 << 20);
}

/// How much resident memory grew at most while `body` ran, in MiB.
double peak_above(const std::function<void()>& body) {
  std::atomic<bool> done{false};
  double most = 0;
  const double before = resident();
  std::thread watcher([&] {
    while (!done) {
      most = std::max(most, resident() - before);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  body();
  done = true;
  watcher.join();
  return most;
}

double mebibytes_in(const std::string& folder) {
  double bytes = 0;
  for (const auto& entry : fs::directory_iterator(folder)) bytes += entry.file_size();
  return bytes / (1 << 20);
}

/// Copies as reliably as a save: the copy is on the disk when it returns.
void copy(const std::string& from, const std::string& to) {
  fs::remove_all(to);
  const std::string command = "cp -r " + from + " " + to + " && sync " + to + "/*";
  TORCH_CHECK(std::system(command.c_str()) == 0, command);
}

torch::nn::Sequential make_net(int64_t width) {
  torch::nn::Sequential net;
  for (int i = 0; i < 8; ++i) net->push_back(torch::nn::Linear(width, width));
  return net;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string folder =
      argc > 1 ? argv[1] : (fs::temp_directory_path() / "smp_bench_checkpoint").string();
  const int64_t width = argc > 2 ? std::atol(argv[2]) : 1024;
  fs::create_directories(folder);
  const std::string path = folder + "/checkpoint", other = folder + "/copy";
  smp::init(smp::Config().microbatches(2));
  torch::set_num_threads(1);
  torch::nn::Sequential net = make_net(width);
  smp::DistributedModel<torch::nn::Sequential> model(net);
  smp::DistributedOptimizer<torch::optim::Adam> optimizer(model->parameters(), 1e-3);
  auto train = smp::step([&](torch::Tensor x) {
    auto loss = model(x).square().mean();
    model->backward(loss);
    return loss;
  });
  const auto x = torch::randn({64, width});
  const auto one_step = [&] {
    optimizer.zero_grad();
    train(x);
    optimizer.step();
  };
  for (int i = 0; i < 3; ++i) one_step();
  smp::save(path, model, optimizer);
  const double size = mebibytes_in(path);

  std::vector<double> copies, saves, loads, snapshots, beside, steps;
  double save_memory = 0, load_memory = 0, background_memory = 0;
  for (int round = 0; round < kRounds; ++round) {
    copies.push_back(seconds([&] { copy(path, other); }));
    save_memory = std::max(save_memory, peak_above([&] {
                             saves.push_back(seconds([&] { smp::save(path, model, optimizer); }));
                           }));
    load_memory = std::max(load_memory, peak_above([&] {
                             loads.push_back(seconds([&] { smp::load(path, model, optimizer); }));
                           }));
    steps.push_back(seconds(one_step));
    background_memory =
        std::max(background_memory, peak_above([&] {
                   const double pause =
                       seconds([&] { static_cast<void>(smp::save_async(path, model, optimizer)); });
                   snapshots.push_back(pause);
                   beside.push_back(seconds(one_step));
                   smp::save_async(path, model).wait();  // waits for the one before
                 }));
  }
  const double cp = median(copies), save = median(saves), load = median(loads);
  std::printf("checkpoint of %.0f MiB in %s, medians of %d rounds\n", size, folder.c_str(),
              kRounds);
  std::printf("cp and sync:       %7.0f MiB/s\n", size / cp);
  std::printf("save:              %7.0f MiB/s, %.2f of cp's time; %.0f MiB above the model's\n",
              size / save, save / cp, save_memory);
  std::printf("load:              %7.0f MiB/s, %.2f of cp's time; %.0f MiB above the model's\n",
              size / load, load / cp, load_memory);
  std::printf(
      "in the background: the call pauses for %.1f ms (%.3f of a save, %.2f steps), a step "
      "beside it takes %.2f of one without; %.0f MiB above the model's\n",
      1e3 * median(snapshots), median(snapshots) / save, median(snapshots) / median(steps),
      median(beside) / median(steps), background_memory);
  smp::shutdown();
  fs::remove_all(path);
  fs::remove_all(other);
  return 0;
}
