// SPDX-License-Identifier: Apache-2.0
// PyTorch's DistributedDataParallel on MNIST, in C++: every rank trains a replica on its share of
// the digits, in an ordinary libtorch loop (loop.h).
//
//     tools/smprun --np 2 --config examples/mnist_ddp/ddp.json
//     bazel-bin/examples/mnist_ddp/mnist_ddp
//     --data DIR
//     mpirun -np 2 bazel-bin/examples/mnist_ddp/mnist_ddp --data DIR
//     torchrun --no-python --nproc-per-node 2 bazel-bin/examples/mnist_ddp/mnist_ddp --data DIR
#include <torch/torch.h>

#include <iostream>

#include "examples/device.h"
#include "examples/mnist_ddp/loop.h"
#include "examples/program.h"
#include "smp/ddp.h"

namespace mnist {
namespace {

void run(const Settings& settings) {
  smp::init(settings.config.empty() ? smp::Config().ddp(true)
                                    : smp::Config::from_file(settings.config));
  if (settings.device != "cpu") {
    smp::set_device(device_of(settings.device, smp::local_rank()).index());
  }
  const Place place{smp::rank(), smp::size(), smp::local_rank(),
                    device_of(settings.device, smp::local_rank())};
  at::set_num_threads(settings.threads);
  // Another one on each rank, so that dropout differs; the weights are rank 0's.
  torch::manual_seed(settings.seed + place.rank);
  const DataSet data = load_mnist(settings.data);
  if (place.rank == 0) std::cout << "data: " << data.description << std::endl;

  ConvNet net;
  net->to(place.device);
  smp::DistributedDataParallel<ConvNet> model(net);
  train_and_test(
      model, data, place, [] { smp::barrier(); }, settings);
}

}  // namespace
}  // namespace mnist

int main(int argc, char** argv) {
  return run_program("mnist_ddp", argc, argv, mnist::parse_command_line, mnist::run);
}
