// SPDX-License-Identifier: Apache-2.0
#include "runtime/step/coalescing.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "core/check.h"
#include "core/log.h"
#include "graph/live_results.h"
#include "nn/rewrite/batch_axis.h"
#include "partitioner/cost.h"
#include "partitioner/format.h"
#include "runtime/step/measuring.h"
#include "runtime/step/planning.h"

namespace smp::runtime {
namespace {

/// A prediction is not worth more: a coalesced step must be faster by this fraction.
constexpr double kWorthwhile = 0.02;

class Chooser {
 public:
  Chooser(Runtime& runtime, const CoalescingRequest& request)
      : runtime_(runtime),
        request_(request),
        ranks_(runtime.topology().pp_size()),
        microbatches_(request.microbatches * runtime.batches()) {}

  CoalescingChoice run() {
    CoalescingChoice chosen;
    core::Refusal refusal = why_one_by_one();
    if (!refusal) chosen = request_.measured ? fastest(refusal) : like_the_first(refusal);
    report(chosen.coalesced.get(), refusal);
    return chosen;
  }

 private:
  /// The reason that forbids it whatever the number.
  core::Refusal why_one_by_one() const {
    const Config& config = runtime_.config();
    if (request_.per_microbatch) return "its function runs for each microbatch";
    if (config.pipeline() == "file") return "a schedule file is for one number of microbatches";
    if (config.load_partition()) return "a partition is loaded, which is for one graph";
    return nn::rewrite::why_not_together(request_.graph);
  }

  /// Numbers of microbatches of a batch to run as one, ascending: so many that a microbatch is left
  /// for each rank, and each gradient shard has whole ones.
  std::vector<int> factors() const {
    const int64_t shards = runtime_.shards_of_replica();
    std::vector<int> result;
    for (int64_t factor = 2; factor <= request_.microbatches; ++factor) {
      const int64_t left = microbatches_ / factor;
      if (request_.microbatches % factor != 0 || left < ranks_ || left % shards != 0) continue;
      result.push_back(static_cast<int>(factor));
    }
    return result;
  }

  std::shared_ptr<graph::Coalesced> make(int factor, core::Refusal& refusal) const {
    std::shared_ptr<graph::Coalesced> made = try_to_make(factor, refusal);
    const auto ranks = request_.measured ? runtime_.world() : runtime_.group(CommGroup::kMp);
    const auto texts =
        comm::all_gather_bytes(*ranks, made ? std::to_string(made->graph.fingerprint()) : *refusal);
    for (const std::string& text : texts) {
      if (text == texts[0]) continue;
      refusal = "the ranks captured other graphs on more samples";
      return nullptr;
    }
    return made;
  }

  std::shared_ptr<graph::Coalesced> try_to_make(int factor, core::Refusal& refusal) const {
    try {
      const graph::TraceResult traced =
          request_.capture(request_.inputs(request_.microbatches / factor));
      if (traced.recorded) graph::give_data_to_constants(*traced.recorded, traced.kept);
      const graph::Graph& many = traced.recorded ? *traced.recorded : *traced.match;
      const auto axes = nn::rewrite::find_batch_axes(request_.graph, many, factor);
      refusal = axes.refusal;
      if (refusal) return nullptr;
      return std::make_shared<graph::Coalesced>(
          graph::coalesce(request_.graph, many, axes, factor));
    } catch (const c10::Error& error) {
      refusal = c10::str("the function fails on ", factor,
                         " times the samples: ", core::text_without_prefix(error));
    }
    return nullptr;
  }

  /// Divides what a candidate runs, where ranks do.
  CoalescingChoice candidate(std::shared_ptr<const graph::Coalesced> coalesced) const {
    const graph::Graph& graph = coalesced ? coalesced->graph : request_.graph;
    return {std::move(coalesced), preview_division(runtime_, graph, request_.step_name)};
  }

  /// The predicted time of a step.
  double step_us(const CoalescingChoice& choice, int factor) const {
    const graph::Graph* divided = choice.division ? choice.division->graph() : nullptr;
    const graph::Graph& captured = choice.coalesced ? choice.coalesced->graph : request_.graph;
    return predicted_step_us(runtime_, divided != nullptr ? *divided : captured,
                             static_cast<int>(microbatches_ / factor));
  }

  double predict(const CoalescingChoice& choice, int factor) {
    const int64_t left = microbatches_ / factor;
    const double us = step_us(choice, factor);
    predictions_ += c10::str(predictions_.empty() ? "" : ", ", left, " of ", factor, ": ",
                             partitioner::format_time(us));
    return us;
  }

  /// Measures each number that is possible.
  CoalescingChoice fastest(core::Refusal& refusal) {
    CoalescingChoice best = candidate(nullptr);
    double shortest = predict(best, 1);
    for (int factor : factors()) {
      const auto made = make(factor, refusal);
      if (!made) break;  // more samples will not do better
      measure_costs_once(runtime_, made->graph, request_.inputs(request_.microbatches / factor),
                         request_.key, {}, request_.step_name);
      CoalescingChoice tried = candidate(made);
      const double us = predict(tried, factor);
      if (us >= shortest * (1 - kWorthwhile)) continue;
      shortest = us;
      best = std::move(tried);
    }
    if (best.coalesced) {
      runtime_.first_step.coalescing = best.coalesced->map.factor;
    } else if (!refusal) {
      refusal = "nothing else is predicted to be faster";
      runtime_.first_step.coalescing = 1;
    }
    return best;
  }

  /// Coalesces as many as the first graph does, or, where none was measured, as leaves two for each
  /// rank.
  CoalescingChoice like_the_first(core::Refusal& refusal) {
    const int64_t most = runtime_.first_step.coalescing > 0
                             ? runtime_.first_step.coalescing
                             : std::max<int64_t>(microbatches_ / (2 * ranks_), 1);
    int chosen = 1;
    for (int factor : factors()) {
      if (factor <= most) chosen = factor;
    }
    refusal = "the first graph does";
    if (chosen == 1) return {};
    const auto made = make(chosen, refusal);
    if (!made) return {};
    partitioner::estimate_costs(made->graph, runtime_.first_step.measured.get(),
                                runtime_.first_step.costs.compute);
    CoalescingChoice choice = candidate(made);
    if (step_us(choice, chosen) < std::numeric_limits<double>::infinity()) return choice;
    refusal = "there is no plan for more samples at once";
    return {};
  }

  void report(const graph::Coalesced* chosen, const core::Refusal& refusal) const {
    if (runtime_.rank() != 0) return;
    std::string text = c10::str("step function \"", request_.step_name, "\": ", microbatches_,
                                " microbatches run ");
    if (chosen != nullptr) {
      text += c10::str("as ", microbatches_ / chosen->map.factor, " of ", chosen->map.factor,
                       " (\"numerics\": \"fast\"); ", chosen->run_once(), " of ",
                       chosen->map.operators.size(), " operators run once for all ",
                       chosen->map.factor);
    } else {
      text += c10::str("one by one, though \"numerics\" is \"fast\": ", *refusal);
    }
    if (!predictions_.empty()) text += c10::str(". Predicted steps: ", predictions_);
    core::log_info(text + ".");
  }

  Runtime& runtime_;
  const CoalescingRequest& request_;
  const int ranks_;
  const int64_t microbatches_;  // in all batches that the ranks run
  std::string predictions_;
};

}  // namespace

CoalescingChoice choose_coalescing(Runtime& runtime, const CoalescingRequest& request) {
  if (runtime.config().numerics() != "fast" || request.microbatches == 1) return {};
  return Chooser(runtime, request).run();
}

}  // namespace smp::runtime
