// SPDX-License-Identifier: Apache-2.0
#include "pipeline/gradient_sums.h"

#include <map>

#include "core/check.h"

namespace smp::pipeline {

GradientSums::GradientSums(std::vector<dp::StepGradients*> all, std::vector<Place> places,
                           int microbatches, bool fuses)
    : all_(std::move(all)),
      places_(std::move(places)),
      microbatches_(microbatches),
      fuses_(fuses) {}

const GradientSums::Place& GradientSums::at(graph::ValueId parameter) const {
  const Place& place = places_.at(parameter);
  SMP_INTERNAL_ASSERT(place.sums != nullptr, "value ", parameter, " has no sum of gradients");
  return place;
}

void GradientSums::arm(const std::vector<graph::ValueId>& parameters) {
  caller_ = core::this_public_call();
  for (graph::ValueId id : parameters) at(id).sums->await(at(id).index);
}

void GradientSums::complete(const std::vector<graph::ValueId>& parameters) {
  for (graph::ValueId id : parameters) at(id).sums->complete(at(id).index);
  start_reductions();
}

void GradientSums::add(graph::ValueId parameter, int microbatch, at::Tensor gradient) {
  const Place& place = at(parameter);
  place.sums->add(place.index, microbatch, std::move(gradient));
  if (!is_complete_with(microbatch)) return;
  place.sums->complete(place.index);
  start_reductions();
}

void GradientSums::add(int microbatch, const Gradients& gradients) {
  std::map<dp::StepGradients*, std::vector<dp::StepGradients::Given>> given;
  for (const auto& [parameter, gradient] : gradients) {
    given[at(parameter).sums].push_back({at(parameter).index, gradient});
  }
  for (const auto& [sums, list] : given) sums->add(microbatch, list);
  if (!is_complete_with(microbatch)) return;
  for (const auto& [parameter, gradient] : gradients) {
    at(parameter).sums->complete(at(parameter).index);
  }
  start_reductions();
}

at::Tensor GradientSums::buffer(graph::ValueId parameter, int microbatch) const {
  const Place& place = at(parameter);
  return place.whole->buffer(place.index, microbatch);
}

/// Whether a parameter gets no gradient after one of this microbatch.
bool GradientSums::is_complete_with(int microbatch) const {
  // Products that are fused with their sums may follow.
  return microbatch + 1 == microbatches_ && !fuses_;
}

/// One after the other, so that replicas reduce in one order.
void GradientSums::start_reductions() {
  const core::PublicCallScope here(caller_);
  for (dp::StepGradients* gradients : all_) {
    if (!gradients->start_complete()) return;
  }
}

}  // namespace smp::pipeline
