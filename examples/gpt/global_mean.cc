#include "examples/gpt/global_mean.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "smp/init.h"

namespace gpt {

double global_mean(const smp::StepOutput& losses) {
  std::vector<at::Tensor> mine{losses.stack().to(at::kDouble)};
  std::vector<std::vector<at::Tensor>> all(1);
  for (int replica = 0; replica < smp::dp_size(); ++replica) {
    all.front().push_back(at::empty_like(mine.front()));
  }
  if (smp::dp_size() > 1) {
    smp::get_dp_process_group()->allgather(all, mine)->wait();
  } else {
    all = {mine};
  }
  const auto ordered = at::cat(all.front());
  double sum = 0;
  for (int64_t i = 0; i < ordered.numel(); ++i) sum += ordered[i].item<double>();
  return sum / static_cast<double>(ordered.numel());
}

}  // namespace gpt
