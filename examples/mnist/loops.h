// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <tuple>

#include "examples/mnist/idx_data.h"
#include "examples/mnist/report.h"
#include "examples/mnist/settings.h"
#include "smp/smp.h"

/// The loops over the digits that `mnist` and `mnist_manual` share.
namespace mnist {

/// One epoch of `step(images, labels)`, which returns the output and the loss, on this replica's
/// share of `digits`.
template <class TrainStep, class Optimizer>
void train(TrainStep& step, Optimizer& optimizer, const Digits& digits, int64_t epoch,
           const Settings& settings) {
  const auto batches =
      EpochSampler(digits.size(), settings.batch_size * smp::dp_size(), settings.seed)
          .batches(epoch);
  const auto all = static_cast<int64_t>(batches.size());
  const int64_t steps = settings.max_steps > 0 ? std::min(settings.max_steps, all) : all;
  for (int64_t i = 0; i < steps; ++i) {
    const Digits batch = digits.select(smp::shard(batches[i]));
    optimizer.zero_grad();
    const smp::StepOutput losses = std::get<1>(step(batch.images, batch.labels));
    optimizer.step();
    if (smp::rank() == 0 && i % settings.log_interval == 0) {
      print_step(epoch, i, steps, losses.reduce_mean().item<double>());
    }
  }
}

/// Judges the model by `step(images, labels)`, which returns the summed loss and how many digits
/// were recognised. Every replica judges the same digits.
template <class TestStep>
void test(TestStep& step, const Digits& digits, const Settings& settings) {
  double loss = 0;
  int64_t correct = 0, count = 0;
  while (count < digits.size()) {
    const auto size = std::min(settings.test_batch_size, digits.size() - count);
    const std::tuple<smp::StepOutput, smp::StepOutput> sums =
        step(digits.images.narrow(0, count, size), digits.labels.narrow(0, count, size));
    count += size;
    loss += std::get<0>(sums).reduce_sum().item<double>();
    correct += std::get<1>(sums).reduce_sum().item<int64_t>();
  }
  if (smp::rank() == 0) print_test(loss, correct, count);
}

}  // namespace mnist
