// SPDX-License-Identifier: Apache-2.0
#include "smp/ema.h"

#include <utility>

#include "core/status.h"
#include "runtime/update/average.h"
#include "smp/model_core.h"
#include "smp/optimizer_core.h"

namespace smp {
namespace {

/// An average and the model that it refers to.
struct OwnedAverage {
  ModelCore model;
  runtime::Average average;
};

std::shared_ptr<runtime::Average> make_average(const ModelCore& model,
                                               std::shared_ptr<runtime::Optimizer> optimizer,
                                               const EmaOptions& options) {
  const auto owned = std::shared_ptr<OwnedAverage>(new OwnedAverage{
      model, {model.impl(), std::move(optimizer), options.name(), options.decay()}});
  return {owned, &owned->average};
}

}  // namespace

Ema::Averaged::Averaged(std::shared_ptr<runtime::Average> average) : average_(std::move(average)) {
  const core::CallScope here("ema.averaged", "smp::Ema::averaged");
  average_->begin_use();
}

Ema::Averaged::~Averaged() { average_->end_use(); }

Ema::Ema(const ModelCore& model, const EmaOptions& options)
    : average_(make_average(model, nullptr, options)) {}

Ema::Ema(const ModelCore& model, const OptimizerCore& optimizer, const EmaOptions& options)
    : average_(make_average(model, optimizer.impl().shared_from_this(), options)) {}

void Ema::update() const { average_->update(); }

int64_t Ema::updates() const { return average_->updates(); }

Ema::Averaged Ema::averaged() const { return Averaged(average_); }

}  // namespace smp
