// SPDX-License-Identifier: Apache-2.0
#include "pipeline/simulator.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/check.h"
#include "pipeline/verifier.h"
#include "pipeline/walk.h"

namespace smp::pipeline {
namespace {

class Simulator {
 public:
  /// `costs` are filled.
  Simulator(const Schedule& schedule, const std::vector<StageEdge>& edges, const StageCosts& costs)
      : schedule_(schedule),
        costs_(costs),
        latency_(stages() * stages(), 0.0),
        send_(latency_.size(), 0.0),
        arrivals_(latency_.size()),
        clocks_(static_cast<size_t>(schedule.ranks()), 0.0),
        kept_(clocks_.size(), KeptMemory(costs)) {
    for (size_t i = 0; i < edges.size(); ++i) {
      const auto there = pair(edges[i].from, edges[i].to);
      const auto back = pair(edges[i].to, edges[i].from);
      latency_[there] = costs.latency[i];
      latency_[back] = costs.backward_latency[i];
      send_[there] = send_[back] = costs.send[i];
    }
    result_.busy.resize(clocks_.size(), 0.0);
    result_.timeline.resize(clocks_.size());
    for (int rank = 0; rank < schedule.ranks(); ++rank) {
      result_.timeline[static_cast<size_t>(rank)].reserve(schedule.actions(rank).size());
    }
  }

  Simulation run() && {
    walk(schedule_, schedule_.microbatches(),
         [this](int rank, size_t, const Action& action) { perform(rank, action); });
    result_.makespan = *std::max_element(clocks_.begin(), clocks_.end());
    for (const double busy : result_.busy) {
      result_.idle.push_back(result_.makespan - busy);
    }
    for (const KeptMemory& kept : kept_) {
      result_.peak_memory.push_back(kept.peak());
    }
    return std::move(result_);
  }

 private:
  size_t stages() const { return static_cast<size_t>(schedule_.stages()); }
  size_t pair(int from, int to) const {
    return static_cast<size_t>(from) * stages() + static_cast<size_t>(to);
  }

  void perform(int rank, const Action& action) {
    const auto index = static_cast<size_t>(rank);
    auto& clock = clocks_[index];
    const double start = clock;
    if (action.is_recv()) {
      clock = std::max(clock, arrival(action.peer, action.stage, action.microbatch));
    } else {
      clock += duration(action);
      result_.busy[index] += duration(action);
    }
    if (action.is_send()) {
      arrival(action.stage, action.peer, action.microbatch) =
          clock + latency_[pair(action.stage, action.peer)];
    } else if (action.is_compute() && schedule_.has_backward(action.stage)) {
      kept_[index].add(action);
    }
    result_.timeline[index].push_back({action, start, clock, kept_[index].now()});
  }

  double duration(const Action& action) const {
    if (action.is_compute()) return costs_.of(action);
    return action.is_send() ? send_[pair(action.stage, action.peer)] : 0;
  }

  // Edges go to later stages and gradients to earlier ones, so a pair of stages is one channel.
  double& arrival(int from, int to, int microbatch) {
    auto& channel = arrivals_[pair(from, to)];
    channel.resize(static_cast<size_t>(schedule_.microbatches()), 0.0);
    return channel[static_cast<size_t>(microbatch)];
  }

  const Schedule& schedule_;
  const StageCosts& costs_;
  std::vector<double> latency_;                // latency by pair of stages
  std::vector<double> send_;                   // likewise
  std::vector<std::vector<double>> arrivals_;  // arrivals by pair of stages, then microbatch
  std::vector<double> clocks_;                 // time of each rank
  std::vector<KeptMemory> kept_;               // memory of each rank
  Simulation result_;
};

bool splits_backward(const Schedule& schedule) {
  const auto& lists = schedule.lists();
  return std::any_of(lists.begin(), lists.end(), [](const std::vector<Action>& actions) {
    return std::any_of(actions.begin(), actions.end(), [](const Action& action) {
      return action.kind == Action::Kind::kBackwardInput;
    });
  });
}

bool has_several_stages(const std::vector<TimedAction>& timeline) {
  return std::any_of(timeline.begin(), timeline.end(), [&](const TimedAction& timed) {
    return timed.action.stage != timeline.front().action.stage;
  });
}

using Cells = std::vector<std::string>;

Cells draw_rank(const std::vector<TimedAction>& timeline, size_t slots, double slot,
                bool show_stage) {
  Cells cells(slots, ".");
  for (const auto& timed : timeline) {
    if (!timed.action.is_compute()) {
      continue;
    }
    // The cells whose middle lies in [start, end).
    const auto first = static_cast<size_t>(std::max(0.0, std::ceil(timed.start / slot - 0.5)));
    const auto last = static_cast<size_t>(std::max(0.0, std::ceil(timed.end / slot - 0.5)));
    for (size_t cell = first; cell < std::min(last, slots); ++cell) {
      const auto name = to_string(timed.action);
      cells[cell] = cell > first ? "-"
                    : show_stage ? name
                                 : name.substr(name.find_first_of("FBIW"));
    }
  }
  return cells;
}

}  // namespace

double Simulation::bubble() const {
  const double total = makespan * static_cast<double>(idle.size());
  return total > 0 ? std::accumulate(idle.begin(), idle.end(), 0.0) / total : 0.0;
}

Simulation simulate(const Schedule& schedule, const std::vector<StageEdge>& edges,
                    const StageCosts& costs, const std::vector<double>& memory_limit) {
  verify(schedule, edges,
         VerifyOptions().credit(schedule.microbatches()).memory_limit(memory_limit).costs(costs));
  SMP_CHECK_WITH(ConfigError, costs.can_split() || !splits_backward(schedule),
                 "schedule costs: the schedule splits backwards, but costs.backward_input and "
                 "costs.backward_weight are empty. Give the times of both halves.");
  const auto filled = costs.filled(static_cast<size_t>(schedule.stages()), edges.size());
  return Simulator(schedule, edges, filled).run();
}

std::string draw(const Simulation& simulation, double slot) {
  SMP_CHECK(slot > 0, "draw: a slot must be longer than 0, got ", slot, ".");
  const auto slots = static_cast<size_t>(std::ceil(simulation.makespan / slot - 1e-9));
  const bool show_stage =
      std::any_of(simulation.timeline.begin(), simulation.timeline.end(), has_several_stages);
  std::vector<Cells> rows;
  size_t width = 1;
  for (const auto& timeline : simulation.timeline) {
    rows.push_back(draw_rank(timeline, slots, slot, show_stage));
    for (const auto& cell : rows.back()) {
      width = std::max(width, cell.size());
    }
  }
  const auto label_width = std::to_string(rows.size() - 1).size();
  std::string text;
  for (size_t rank = 0; rank < rows.size(); ++rank) {
    auto line = "rank " + std::to_string(rank);
    line.resize(5 + label_width, ' ');
    for (const auto& cell : rows[rank]) {
      line += ' ' + cell + std::string(width - cell.size(), ' ');
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + '\n';
  }
  return text;
}

}  // namespace smp::pipeline
