// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <string>
#include <vector>

#include "smp/smp.h"
#include "tests/smp/oracle.h"

namespace smp::testing {

/// Trains a `Net`, which has `loss(x, y)` and `batch(size)`, on two stages, saves it halfway and
/// goes on with one: parameters and buffers are those of plain libtorch, which it returns.
template <class Net, class Optimizer, class Options>
Net expect_goes_on_from_a_checkpoint(const Options& options) {
  constexpr int kSteps = 4, kMicrobatches = 2;  // the numbers of `stages`
  torch::set_num_threads(1);
  torch::manual_seed(23);
  std::vector<Tensors> batches;
  for (int i = 0; i < kSteps; ++i) {
    batches.push_back(Net::ContainedType::batch(3 * kMicrobatches));
  }
  const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
  const std::string path =
      ::testing::TempDir() + "/" + info->test_suite_name() + "." + info->name();
  std::filesystem::remove_all(path);

  torch::manual_seed(5);
  Net plain;
  const Tensors parameters = unique_parameters(*plain);
  Optimizer optimizer(parameters, options);
  for (const Tensors& batch : batches) {
    optimizer.zero_grad();
    plain_backward(parameters, /*replicas=*/1, kMicrobatches, [&](int m) {
      return plain->loss(part(batch[0], kMicrobatches, m), part(batch[1], kMicrobatches, m));
    });
    optimizer.step();
  }

  const auto run = [&](int ranks, int first, int last) {
    torch::manual_seed(5 + first);  // a resumed run must not depend on its own weights
    std::vector<Net> nets;
    for (int i = 0; i < ranks; ++i) nets.push_back(Net());
    Named state;
    run_as_threads(ranks, stages(ranks), [&] {
      Net net = nets[rank()];
      DistributedModel<Net> model(net);
      DistributedOptimizer<Optimizer> own(model->parameters(), options);
      auto train = step([&](torch::Tensor x, torch::Tensor y) {
        auto loss = net->loss(x, y);
        model->backward(loss);
      });
      if (first > 0) smp::load(path, model, own);
      for (int i = first; i < last; ++i) {
        own.zero_grad();
        train(batches[i][0], batches[i][1]);
        own.step();
      }
      if (last < kSteps) smp::save(path, model, own);
      const Named whole = to_map(model->state_dict());
      if (rank() == 0) state = whole;
    });
    return state;
  };
  run(/*ranks=*/2, 0, kSteps / 2);
  expect_equal(run(/*ranks=*/1, kSteps / 2, kSteps), state_of(*plain), "value");
  std::filesystem::remove_all(path);
  return plain;
}

}  // namespace smp::testing
