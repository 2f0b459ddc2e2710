// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

#include "core/check.h"
#include "pipeline/generators.h"

namespace smp::pipeline {
namespace {

/// Writes the order of computes stage by stage; microbatches number themselves. A pattern may need
/// more microbatches than there are: those beyond the last are left out. That keeps an order right,
/// since microbatches depend on each other only through ascending order.
class Writer {
 public:
  explicit Writer(const ScheduleOptions& options)
      : order_(options.ranks(), options.microbatches(), options.rank_of_stage(), true),
        counts_(static_cast<size_t>(options.stages())) {}

  void forward(int stage) { append(Action::Kind::kForward, stage, counts(stage).forwards++); }

  /// Whole.
  void backward(int stage) {
    append(Action::Kind::kBackward, stage, counts(stage).inputs++);
    ++counts(stage).weights;
  }

  void input_half(int stage) {
    append(Action::Kind::kBackwardInput, stage, counts(stage).inputs++);
  }

  void weight_half(int stage) {
    append(Action::Kind::kBackwardWeight, stage, counts(stage).weights++);
  }

  void split_backward(int stage) {
    input_half(stage);
    weight_half(stage);
  }

  /// The weight halves that are still to do.
  void remaining_weight_halves(int stage) {
    while (pending_weights(stage) > 0) {
      weight_half(stage);
    }
  }

  int forwards(int stage) const { return counts_[static_cast<size_t>(stage)].forwards; }
  int pending_weights(int stage) const {
    const auto& done = counts_[static_cast<size_t>(stage)];
    return done.inputs - done.weights;
  }

  Schedule finish() && { return std::move(order_); }

 private:
  struct Counts {
    int forwards = 0;
    int inputs = 0;
    int weights = 0;
  };

  Counts& counts(int stage) { return counts_[static_cast<size_t>(stage)]; }

  void append(Action::Kind kind, int stage, int microbatch) {
    if (microbatch < order_.microbatches()) {
      order_.actions(order_.rank_of(stage)).push_back({kind, stage, microbatch, -1});
    }
  }

  Schedule order_;
  std::vector<Counts> counts_;
};

// --- one stage on each rank -----------------------------------------------------------------

/// How a rank of the 1F1B family runs.
struct Tempo {
  /// Forwards before the first backward.
  int warm_up;
  /// How many microbatches the weight halves lag behind; nothing for whole backwards.
  std::optional<int> weight_lag;
};

void write_one_forward_one_backward(int stage, int microbatches, const Tempo& tempo, Writer& out) {
  for (int i = 0; i < tempo.warm_up; ++i) {
    out.forward(stage);
  }
  for (int i = 0; i < microbatches; ++i) {
    if (!tempo.weight_lag) {
      out.backward(stage);
    } else {
      out.input_half(stage);
      if (out.pending_weights(stage) > *tempo.weight_lag) {
        out.weight_half(stage);
      }
    }
    out.forward(stage);
  }
  out.remaining_weight_halves(stage);
}

/// `tempo_of` gets the number of ranks before and of those after a rank of the pipeline.
template <class TempoOf>
Schedule one_stage_per_rank(const ScheduleOptions& options, const TempoOf& tempo_of) {
  Writer out(options);
  for (int stage = 0; stage < options.stages(); ++stage) {
    const auto tempo = tempo_of(stage, options.stages() - 1 - stage);
    write_one_forward_one_backward(stage, options.microbatches(), tempo, out);
  }
  return std::move(out).finish();
}

// --- several stages on each rank ------------------------------------------------------------

/// How many microbatches go through a rank's stages together: at least p, so that no rank waits, so
/// that there are m / p rounds. The larger ones come first: a rank is then never behind.
std::vector<int> rounds_of(int microbatches, int ranks) {
  const int count = std::max(1, microbatches / ranks);
  std::vector<int> rounds(static_cast<size_t>(count), microbatches / count);
  std::fill_n(rounds.begin(), microbatches % count, microbatches / count + 1);
  return rounds;
}

/// How often the pipeline goes through all ranks at each forward and backward: round by round, and
/// in each first all of a rank's first stage, then all of its second ...
std::vector<int> laps_of(const std::vector<int>& rounds, int laps) {
  std::vector<int> result;
  for (const int round : rounds) {
    for (int lap = 0; lap < laps; ++lap) {
      result.insert(result.end(), static_cast<size_t>(round), lap);
    }
  }
  return result;
}

// --- two stages on each rank, there and back --------------------------------------------------

/// The rank's stage on the way there, the one on the way back, and where the rank is.
struct Legs {
  Legs(const ScheduleOptions& options, int position)
      : there(position), back(options.stages() - 1 - position), before(position) {
    after = options.ranks() - 1 - position;
  }

  int there;
  int back;
  int before;  ///< ranks before it on the way there
  int after;   ///< ranks after it
};

void write_zero_bubble_v(const Legs& at, int microbatches, Writer& out) {
  for (int i = 0; i < 2 * at.after + 1; ++i) {
    out.forward(at.there);
  }
  for (int i = 0; i < at.before; ++i) {
    out.forward(at.back);
    out.forward(at.there);
  }
  for (int i = 0; i <= at.after; ++i) {
    out.forward(at.back);
    out.split_backward(at.back);
  }
  while (out.forwards(at.back) < microbatches) {
    if (out.forwards(at.there) < microbatches) {
      out.forward(at.there);
    }
    out.split_backward(at.there);
    out.forward(at.back);
    out.split_backward(at.back);
  }
  // No forward is left to fill the time in which gradients travel: weight halves do.
  for (int i = 0; i < at.before; ++i) {
    out.input_half(at.there);
    out.input_half(at.back);
  }
  for (int i = 0; i <= at.after; ++i) {
    out.input_half(at.there);
    out.weight_half(at.there);
  }
  out.remaining_weight_halves(at.back);
  out.remaining_weight_halves(at.there);
}

void write_dualpipe_v(const Legs& at, int microbatches, Writer& out) {
  for (int i = 0; i < 2 * at.after; ++i) {
    out.forward(at.there);
  }
  for (int i = 0; i <= at.before; ++i) {
    out.forward(at.there);
    out.forward(at.back);
  }
  for (int i = 0; i < at.after; ++i) {
    out.split_backward(at.back);
    out.forward(at.back);
  }
  while (out.forwards(at.there) < microbatches) {
    out.forward(at.there);
    out.backward(at.back);
    out.forward(at.back);
    out.backward(at.there);
  }
  for (int i = 0; i < at.after; ++i) {
    out.backward(at.back);
    out.forward(at.back);
    out.backward(at.there);
  }
  // The second half of the remaining backwards is split, for the same reason as above.
  std::deque<int> pending;
  for (int i = 0; i < 2 * (at.before + 1); ++i) {
    const int stage = i % 2 == 0 ? at.back : at.there;
    if (i <= at.before) {
      out.backward(stage);
    } else {
      out.input_half(stage);
      pending.push_back(stage);
    }
  }
  for (int i = 0; i < at.after; ++i) {
    out.weight_half(pending.front());
    pending.pop_front();
    out.input_half(at.there);
    pending.push_back(at.there);
  }
  for (const int stage : pending) {
    out.weight_half(stage);
  }
}

/// The pattern takes at least so many microbatches to fill the pipeline.
Schedule there_and_back(const ScheduleOptions& options, int least,
                        void (*write)(const Legs&, int, Writer&)) {
  const int microbatches = std::max(options.microbatches(), least);
  Writer out(options);
  for (int rank = 0; rank < options.ranks(); ++rank) {
    write(Legs(options, rank), microbatches, out);
  }
  return std::move(out).finish();
}

}  // namespace

Schedule one_forward_one_backward(const ScheduleOptions& options) {
  return one_stage_per_rank(options, [](int, int after) { return Tempo{after + 1, std::nullopt}; });
}

Schedule eager_one_forward_one_backward(const ScheduleOptions& options) {
  return one_stage_per_rank(options, [](int, int after) {
    return Tempo{2 * after + 1, std::nullopt};
  });
}

Schedule zero_bubble_h1(const ScheduleOptions& options) {
  return one_stage_per_rank(options, [](int before, int after) {
    return Tempo{after + 1, before};
  });
}

Schedule zero_bubble_h2(const ScheduleOptions& options) {
  return one_stage_per_rank(options, [](int before, int after) {
    return Tempo{2 * after + 1, 2 * before};
  });
}

Schedule interleaved_one_forward_one_backward(const ScheduleOptions& options) {
  const int ranks = options.ranks();
  const int last_lap = options.stages() / ranks - 1;
  const auto rounds = rounds_of(options.microbatches(), ranks);
  const auto laps = laps_of(rounds, last_lap + 1);
  Writer out(options);
  for (int rank = 0; rank < ranks; ++rank) {
    auto forward = laps.begin();
    const auto run_forward = [&] {
      if (forward != laps.end()) {
        out.forward(rank + *forward++ * ranks);
      }
    };
    for (int i = 0; i < last_lap * rounds[0] + 2 * (ranks - 1 - rank) + 1; ++i) {
      run_forward();
    }
    for (const int lap : laps) {
      out.backward(rank + (last_lap - lap) * ranks);
      run_forward();
    }
  }
  return std::move(out).finish();
}

Schedule breadth_first(const ScheduleOptions& options) {
  Writer out(options);
  for (int stage = 0; stage < options.stages(); ++stage) {
    for (int m = 0; m < options.microbatches(); ++m) {
      out.forward(stage);
    }
  }
  for (int stage = options.stages() - 1; stage >= 0; --stage) {
    for (int m = 0; m < options.microbatches(); ++m) {
      out.backward(stage);
    }
  }
  return std::move(out).finish();
}

Schedule zero_bubble_v(const ScheduleOptions& options) {
  return there_and_back(options, 2 * options.ranks() - 1, write_zero_bubble_v);
}

Schedule dualpipe_v(const ScheduleOptions& options) {
  return there_and_back(options, 2 * options.ranks(), write_dualpipe_v);
}

}  // namespace smp::pipeline
