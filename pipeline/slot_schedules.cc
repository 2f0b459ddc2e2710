// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <utility>

#include "pipeline/costs.h"
#include "pipeline/generators.h"
#include "pipeline/list_dispatcher.h"
#include "pipeline/order_timing.h"

namespace smp::pipeline {
namespace {

using Backwards = DispatchRule::Backwards;

/// Every action takes one slot. A rank chooses from those that are ready when a slot begins.
Schedule in_slots(ScheduleOptions options, int in_flight, Backwards backwards) {
  const auto stages = static_cast<size_t>(options.stages());
  options.costs(StageCosts::unit(options.stages()).filled(stages, options.edges().size()))
      .memory_limit({});
  DispatchRule rule{/*backward_first=*/true, /*extra_in_flight=*/0, /*look_ahead=*/0, /*round=*/1};
  rule.in_flight = in_flight;
  rule.backwards = backwards;
  Schedule result(options.ranks(), options.microbatches(), options.rank_of_stage(),
                  backwards != Backwards::kNone);
  result.lists() = dispatch(StageFlow(options), options, /*split=*/false, rule);
  return result;
}

}  // namespace

Schedule simple(const ScheduleOptions& options) {
  return in_slots(options, options.microbatches(), Backwards::kAfterForwards);
}
Schedule interleaved(const ScheduleOptions& options) {
  return in_slots(options, options.active_microbatches(), Backwards::kWhenReady);
}
Schedule forward_only(const ScheduleOptions& options) {
  return in_slots(options, options.microbatches(), Backwards::kNone);
}

}  // namespace smp::pipeline
