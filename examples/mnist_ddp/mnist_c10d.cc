// SPDX-License-Identifier: Apache-2.0
// The same as mnist_ddp with nothing but libtorch's own distributed parts, as a program has them
// that was written for torch.distributed: c10d's reducer, over the backend "smddp". train.py is the
// script in Python, over smddp, gloo or NCCL.
//
//     torchrun --no-python --nproc-per-node 2 bazel-bin/examples/mnist_ddp/mnist_c10d --data DIR
#include <torch/torch.h>

#include <cstdlib>
#include <iostream>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "examples/device.h"
#include "examples/mnist_ddp/loop.h"
#include "examples/program.h"
#include "smp/c10d.h"

namespace mnist {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

/// The counterpart of torch.nn.parallel.DistributedDataParallel in Python.
class Replica {
 public:
  Replica(ConvNet net, Group group)
      : net_(std::move(net)), group_(std::move(group)), parameters_(net_->parameters()) {
    broadcast(parameters_);
    broadcast(net_->buffers());
    const auto [buckets, limits] =
        c10d::compute_bucket_assignment_by_size(parameters_, {kFirstBucketBytes, kBucketBytes});
    reducer_ = std::make_unique<c10d::Reducer>(
        parameters_, std::vector<std::vector<size_t>>(buckets.rbegin(), buckets.rend()), group_,
        std::vector<bool>(parameters_.size(), false), kBucketBytes,
        /*find_unused_parameters=*/false, /*gradient_as_bucket_view=*/false,
        std::unordered_map<size_t, std::string>(), kFirstBucketBytes,
        /*skip_all_reduce_unused_params=*/false, /*use_python_reducer=*/false,
        std::vector<int64_t>());
  }

  torch::Tensor operator()(const torch::Tensor& images) {
    if (!torch::GradMode::is_enabled()) return net_->forward(images);
    broadcast(net_->buffers());
    reducer_->prepare_for_forward();
    const auto output = net_->forward(images);
    reducer_->prepare_for_backward({output});
    return output;
  }

  ConvNet& module() { return net_; }

 private:
  static constexpr int64_t kFirstBucketBytes = 1 << 20;
  static constexpr int64_t kBucketBytes = 25 << 20;

  /// Gives rank 0's tensors to all.
  void broadcast(const std::vector<torch::Tensor>& tensors) {
    for (const torch::Tensor& tensor : tensors) {
      std::vector<at::Tensor> one = {tensor.detach()};
      group_->broadcast(one)->wait();
    }
  }

  ConvNet net_;
  Group group_;
  std::vector<torch::Tensor> parameters_;
  std::unique_ptr<c10d::Reducer> reducer_;
};

void run(const Settings& settings) {
  const Group group = smp::smddp::make_process_group();
  const char* local_rank = std::getenv("LOCAL_RANK");
  const int on_host = local_rank == nullptr ? 0 : std::atoi(local_rank);
  const Place place{group->getRank(), group->getSize(), on_host,
                    device_of(settings.device, on_host)};
  at::set_num_threads(settings.threads);
  torch::manual_seed(settings.seed + place.rank);
  const DataSet data = load_mnist(settings.data);
  if (place.rank == 0) std::cout << "data: " << data.description << std::endl;

  ConvNet net;
  net->to(place.device);
  Replica model(net, group);
  const auto barrier = [&] { group->barrier()->wait(); };
  train_and_test(model, data, place, barrier, settings);
  barrier();  // rank 0 has the store
}

}  // namespace
}  // namespace mnist

int main(int argc, char** argv) {
  return run_program("mnist_c10d", argc, argv, mnist::parse_command_line, mnist::run);
}
