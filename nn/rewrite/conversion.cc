// SPDX-License-Identifier: Apache-2.0
#include "nn/rewrite/conversion.h"

#include "core/check.h"

namespace smp::nn::rewrite {

Conversion first_conversion(const Layout& from, const Layout& to) {
  SMP_INTERNAL_ASSERT(from != to && !to.is_partial(), from.to_string(), " to ", to.to_string());
  const bool in_one_block = to.is_divided() && to.blocks == 1;
  if (from.is_partial()) {
    if (in_one_block) return {Collective::kReduceScatter, from, to};
    return {Collective::kReduce, from, Layout::whole()};
  }
  if (from.is_divided()) {
    if (from.blocks == 1 && in_one_block) return {Collective::kAllToAll, from, to};
    if (from.blocks == 1 && to == Layout::shared()) return {Collective::kAllGather, from, to};
    return {Collective::kGather, from, Layout::whole()};
  }
  SMP_INTERNAL_ASSERT(from.is_whole(), from.to_string(), " to ", to.to_string());
  return {to.is_divided() ? Collective::kScatter : Collective::kCopy, from, to};
}

const CollectiveForm& form_of(Collective collective) {
  static constexpr CollectiveForm forms[] = {
      {"smp::tp_copy", false, 0, 2},       {"smp::tp_reduce", false, 2, 0},
      {"smp::tp_scatter", true, 0, 1},     {"smp::tp_gather", true, 1, 0},
      {"smp::tp_all_gather", false, 1, 1}, {"smp::tp_reduce_scatter", false, 1, 1},
      {"smp::tp_all_to_all", false, 1, 1}};
  return forms[static_cast<size_t>(collective)];
}

Traffic traffic_of(Collective collective, int64_t bytes, bool has_gradient, int ranks) {
  // Bytes of a gather, or of a sum to parts.
  const int64_t all = bytes / ranks * (ranks - 1);
  const int64_t once = collective == Collective::kAllToAll ? all / ranks : all;
  const CollectiveForm& form = form_of(collective);
  const int64_t forward = form.forward * once, backward = form.backward * once;
  Traffic traffic;
  traffic.forward_calls = forward > 0 ? 1 : 0;
  traffic.forward_bytes = forward;
  traffic.backward_calls = has_gradient && backward > 0 ? 1 : 0;
  traffic.backward_bytes = has_gradient ? backward : 0;
  return traffic;
}

Traffic traffic_inside(const Call& call, const Treatment& treatment) {
  Traffic moved;
  if (treatment.reduced_bytes > 0) {
    const bool to_parts = treatment.results[0].is_divided();
    moved +=
        traffic_of(to_parts ? Collective::kReduceScatter : Collective::kReduce,
                   treatment.reduced_bytes, to_parts && call.result_has_gradient(), call.ranks());
  }
  if (treatment.gathered >= 0) {
    const int64_t bytes = call.meta(treatment.gathered).nbytes();
    moved += traffic_of(Collective::kAllGather, bytes, call.has_gradient(treatment.gathered),
                        call.ranks());
    const Traffic again = traffic_of(Collective::kGather, bytes, false, call.ranks());
    moved.backward_calls += again.forward_calls;
    moved.backward_bytes += again.forward_bytes;
  }
  return moved;
}

std::pair<double, double> times_of(const Traffic& traffic, const DivideOptions& options) {
  const auto time = [&](int calls, int64_t bytes) {
    return calls * options.latency_us + static_cast<double>(bytes) / options.bytes_per_us;
  };
  return {time(traffic.forward_calls, traffic.forward_bytes),
          time(traffic.backward_calls, traffic.backward_bytes)};
}

Traffic& Traffic::operator+=(const Traffic& other) {
  forward_calls += other.forward_calls;
  backward_calls += other.backward_calls;
  forward_bytes += other.forward_bytes;
  backward_bytes += other.backward_bytes;
  return *this;
}

}  // namespace smp::nn::rewrite
