// SPDX-License-Identifier: Apache-2.0
#include "runtime/step/loss_watch.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/log.h"
#include "core/numbers.h"
#include "runtime/update/loss_scaler.h"

namespace smp::runtime {

using c10::impl::VirtualGuardImpl;

bool scales_loss(const Runtime& runtime) {
  return runtime.config().fp16() || !runtime.step_inputs.loss_scaler.expired() ||
         !runtime.step_inputs.values.all().empty();
}

namespace {

bool is_power_of_ten(int64_t number) {
  while (number % 10 == 0) number /= 10;
  return number == 1;
}

}  // namespace

bool LossWatch::begin(const Runtime& runtime, uint64_t call) {
  call_ = call;
  here_.clear();
  awaited_ = std::exchange(on_device_, {});
  if (!awaited_.empty()) {
    const at::Device device = awaited_.front().value.device();
    made_.emplace(device.type());
    made_->record(VirtualGuardImpl(device.type()).getStream(device));
  }
  return !scales_loss(runtime);
}

bool LossWatch::finish(const std::vector<pipeline::StepResults::Loss>& losses) {
  for (const auto& [microbatch, value] : losses) {
    (value.is_cpu() ? here_ : on_device_).push_back({call_, microbatch, value});
  }
  const Root* bad = nullptr;
  if (!awaited_.empty()) {
    const at::Device device = awaited_.front().value.device();
    if (!side_) side_ = VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
    made_->block(*side_);
    const c10::StreamGuard guard(*side_);
    bad = find_bad(awaited_);
  }
  if (bad == nullptr) bad = find_bad(here_);
  if (bad != nullptr) found_ = *bad;
  return bad != nullptr;
}

const LossWatch::Root* LossWatch::find_bad(const std::vector<Root>& roots) {
  std::vector<at::Tensor> values;
  for (const Root& root : roots) values.push_back(root.value);
  const auto numbers = core::read_numbers(values);
  const auto bad = std::find_if(numbers.begin(), numbers.end(),
                                [](double number) { return !std::isfinite(number); });
  return bad == numbers.end() ? nullptr : &roots[bad - numbers.begin()];
}

void LossWatch::report(const Runtime& runtime, const std::string& step_name,
                       const std::vector<bool>& bad) {
  if (!is_power_of_ten(++times_)) return;
  const auto count = std::count(bad.begin(), bad.end(), true);
  std::string where;
  if (bad.size() > 1) {
    where = count == 1 ? c10::str(" on this replica alone, of ", bad.size(), ": look at its batch")
                       : c10::str(" on ", count, " of ", bad.size(), " replicas");
  }
  core::log_warning(
      c10::str("step function \"", step_name, "\", call ", found_.call + 1,
               ": the value that model->backward starts from is ", found_.value.item<double>(),
               " in microbatch ", found_.microbatch, " on world rank ", runtime.rank(), where,
               ". Its gradients are added to those of all microbatches and replicas, and after "
               "optimizer.step() no weight may be a number any more. Leave out optimizer.step() on "
               "all ranks "
               "where loss.reduce_mean(smp::CommGroup::kDp) is not finite",
               times_ == 1 ? "" : c10::str(". So far ", times_, " times")));
}

}  // namespace smp::runtime
