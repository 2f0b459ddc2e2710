#include "pipeline/simulator.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "pipeline/verifier.h"
#include "pipeline/walk.h"
#include "smp/core/error.h"

namespace smp::pipeline {
namespace {

void check_costs(const char* name, const std::vector<double>& costs, size_t expected) {
  SMP_CHECK(costs.size() == expected, "simulate: expected ", expected, " numbers in costs.", name,
            ", got ", costs.size(), ".");
  for (const double cost : costs) {
    SMP_CHECK(std::isfinite(cost) && cost >= 0, "simulate: costs.", name,
              " must be finite and not negative, got ", cost, ".");
  }
}

class Simulator {
 public:
  Simulator(const Schedule& schedule, const std::vector<StageEdge>& edges, const StageCosts& costs)
      : schedule_(schedule),
        costs_(costs),
        latency_(stages() * stages(), 0.0),
        clocks_(static_cast<size_t>(schedule.ranks()), 0.0),
        in_flight_(stages(), 0) {
    for (size_t i = 0; i < costs.latency.size(); ++i) {
      latency_[pair(edges[i].from, edges[i].to)] = costs.latency[i];
      latency_[pair(edges[i].to, edges[i].from)] = costs.latency[i];
    }
    arrivals_.resize(stages() * stages());
    result_.busy.resize(clocks_.size(), 0.0);
    result_.peak_in_flight.resize(stages(), 0);
    result_.timeline.resize(clocks_.size());
  }

  Simulation run() && {
    walk(schedule_, schedule_.microbatches(),
         [this](int rank, size_t, const Action& action) { perform(rank, action); });
    result_.makespan = *std::max_element(clocks_.begin(), clocks_.end());
    for (const double busy : result_.busy) {
      result_.idle.push_back(result_.makespan - busy);
    }
    return std::move(result_);
  }

 private:
  size_t stages() const { return static_cast<size_t>(schedule_.stages()); }
  size_t pair(int from, int to) const {
    return static_cast<size_t>(from) * stages() + static_cast<size_t>(to);
  }

  void perform(int rank, const Action& action) {
    auto& clock = clocks_[static_cast<size_t>(rank)];
    const double start = clock;
    if (action.is_compute()) {
      clock += compute(rank, action);
    } else if (action.is_send()) {
      arrival(action.stage, action.peer, action.microbatch) =
          clock + latency_[pair(action.stage, action.peer)];
    } else if (action.is_recv()) {
      clock = std::max(clock, arrival(action.peer, action.stage, action.microbatch));
    }
    result_.timeline[static_cast<size_t>(rank)].push_back({action, start, clock});
  }

  double compute(int rank, const Action& action) {
    const auto stage = static_cast<size_t>(action.stage);
    const double cost = (action.is_backward() ? costs_.backward : costs_.forward)[stage];
    result_.busy[static_cast<size_t>(rank)] += cost;
    if (schedule_.has_backward()) {
      in_flight_[stage] += action.is_backward() ? -1 : 1;
      auto& peak = result_.peak_in_flight[stage];
      peak = std::max(peak, in_flight_[stage]);
    }
    return cost;
  }

  // Edges go to later stages and gradients to earlier ones, so a pair of stages is one channel.
  double& arrival(int from, int to, int microbatch) {
    auto& channel = arrivals_[pair(from, to)];
    channel.resize(static_cast<size_t>(schedule_.microbatches()), 0.0);
    return channel[static_cast<size_t>(microbatch)];
  }

  const Schedule& schedule_;
  const StageCosts& costs_;
  std::vector<double> latency_;                // by pair of stages
  std::vector<std::vector<double>> arrivals_;  // by pair of stages, then microbatch
  std::vector<double> clocks_;                 // by rank
  std::vector<int> in_flight_;                 // by stage
  Simulation result_;
};

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
      cells[cell] = cell > first ? "-" : show_stage ? name : name.substr(name.find_first_of("FB"));
    }
  }
  return cells;
}

}  // namespace

StageCosts StageCosts::unit(int stages) {
  StageCosts costs;
  costs.forward.assign(static_cast<size_t>(stages), 1.0);
  costs.backward.assign(static_cast<size_t>(stages), 1.0);
  return costs;
}

double Simulation::bubble() const {
  const double total = makespan * static_cast<double>(idle.size());
  return total > 0 ? std::accumulate(idle.begin(), idle.end(), 0.0) / total : 0.0;
}

Simulation simulate(const Schedule& schedule, const std::vector<StageEdge>& edges,
                    const StageCosts& costs) {
  const auto stages = static_cast<size_t>(schedule.stages());
  check_costs("forward", costs.forward, stages);
  check_costs("backward", costs.backward, stages);
  check_costs("latency", costs.latency, costs.latency.empty() ? 0 : edges.size());
  verify(schedule, edges, VerifyOptions().credit(schedule.microbatches()));
  return Simulator(schedule, edges, costs).run();
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
