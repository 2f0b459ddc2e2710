// SPDX-License-Identifier: Apache-2.0
#include "tools/places.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <chrono>
#include <iostream>
#include <utility>

#include "core/topology.h"

namespace smp::tools {
namespace {

constexpr std::chrono::seconds kBetweenLooks{5};

}  // namespace

Places::Places(const LaunchOptions& options, LaunchContext& context, CommandRunner& runner)
    : options_(options), context_(context), runner_(runner), at_first_(count()) {}

Restarts::Decision Places::decide(const JobRun& run, Restarts::Decision decision) {
  if (!decision.again) return decision;
  // Before all ranks have met none is known to be lost.
  const bool shrinks = run.config_is_noted && run.config.recovery() == "shrink";
  const int needed = std::min(run.ranks, at_first_);  // ranks may share places
  look_for_hosts(needed);
  if (!shrinks) wait_for_hosts(needed);
  if (signal_ != 0) return {};
  const bool is_short = count() < needed || is_on_this_host(options_, context_);
  core::Refusal why_not;
  if (!shrinks) why_not = too_few(needed);
  if (shrinks && is_short) why_not = shrink(run);
  for (const std::string& host : context_.lost_hosts) {
    decision.text += "smprun: host " + host + " does not answer, and is left out\n";
  }
  if (why_not) {
    return {false, decision.text + "smprun: not started again: " + *why_not + "\n", {}};
  }
  if (shrinks && is_short) {
    decision.text += "smprun: goes on with " + context_.layout->to_text() + "\n";
  }
  return decision;
}

int Places::count() const {
  return is_on_this_host(options_, context_) ? core::Topology::kMostRanks
                                             : total_ranks(hosts_of(options_, context_));
}

bool Places::answer(const std::vector<Host>& hosts) {
  const ProcessResult result = runner_.run(plan_probe(options_, context_, hosts));
  if (result.forwarded_signal != 0) signal_ = result.forwarded_signal;
  return result.exit_status == 0;
}

/// Those that were lost stay out while the others are enough: these have the copies.
void Places::look_for_hosts(int places) {
  if (is_on_this_host(options_, context_)) return;
  leave_out_those_that_do_not_answer();
  if (count() >= places || signal_ != 0) return;
  context_.lost_hosts.clear();
  leave_out_those_that_do_not_answer();
}

void Places::leave_out_those_that_do_not_answer() {
  const auto hosts = hosts_of(options_, context_);
  if (answer(hosts)) return;
  for (const auto& host : hosts) {
    if (signal_ != 0) return;
    if (!answer({host})) context_.lost_hosts.insert(host.name);
  }
}

/// Some may be starting.
void Places::wait_for_hosts(int places) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::seconds(options_.wait_for_hosts);
  if (count() < places && Clock::now() < end) {
    std::cerr << "smprun: waits for hosts that do not answer, up to " << options_.wait_for_hosts
              << " s\n";
  }
  while (count() < places && Clock::now() < end && signal_ == 0) {
    signal_ = runner_.wait(kBetweenLooks);
    if (signal_ == 0) look_for_hosts(places);
  }
}

/// Why the job cannot go on with as many ranks, or nothing.
core::Refusal Places::too_few(int places) const {
  if (count() >= places) return std::nullopt;
  return c10::str(places, " ranks need as many places, and the hosts that answer have ", count(),
                  ". Name more hosts with --hosts than --np needs.");
}

/// Takes a layout with fewer ranks; why there is none, or nothing.
core::Refusal Places::shrink(const JobRun& run) {
  Config config = run.config;
  const int most = run.ranks <= at_first_ ? count() : run.ranks * count() / at_first_;
  auto layout = tools::shrink(config, run.ranks);
  while (layout && layout->ranks > most) {
    config = Config::from_json(layout->put_into(config.to_json()), "smprun");
    layout = tools::shrink(config, layout->ranks);
  }
  context_.layout = layout;
  if (layout) return std::nullopt;
  return "no layout with fewer ranks computes the same.";
}

}  // namespace smp::tools
