// SPDX-License-Identifier: Apache-2.0
#include "partitioner/split.h"

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

namespace smp::partitioner {
namespace {

/// More than any sum, and small enough that sums with it do not overflow.
constexpr int64_t kInfinite = std::numeric_limits<int64_t>::max() / 4;

/// Positions that are allowed for one cut; none if first > last.
struct Range {
  int first = 0;
  int last = 0;
};

/// Value of the best stages from one on to the end, compared in this order.
struct Label {
  int64_t foreign = kInfinite;
  int64_t goal = kInfinite;  ///< the sum of times, or the maximum of memory

  bool operator<(const Label& other) const {
    return foreign < other.foreign || (foreign == other.foreign && goal < other.goal);
  }
  bool operator==(const Label& other) const {
    return foreign == other.foreign && goal == other.goal;
  }
};

/// The cost of a stage of pieces [start, end), whichever it is.
struct StageTotals {
  int64_t time = 0;
  int64_t kept = 0;
  int64_t fixed = 0;
  int64_t owned = 0;              ///< bytes of owned tensors that it uses
  std::vector<int64_t> by_owner;  ///< the same, per rank
};

struct Solution {
  std::vector<int> cuts;
  SplitScore score;
};

class Splitter {
 public:
  explicit Splitter(const SplitProblem& problem)
      : problem_(problem),
        pieces_(static_cast<int>(problem.cost.size())),
        stages_(problem.stages()),
        prefix_(problem.cost.size() + 1, 0),
        first_use_(problem.cost.size() + 1, 0),
        leaving_(problem.cost.size(), 0),
        sent_(problem.cost.size(), 0) {
    for (int p = 0; p < pieces_; ++p) prefix_[p + 1] = prefix_[p] + problem.cost[p];
    for (const PieceUse& use : problem.uses) {
      ++first_use_[use.piece + 1];
      if (use.previous >= 0) {
        leaving_[use.previous] += use.cost;
        sent_[use.previous] += use.sent;
      }
      has_owned_ |= use.owner >= 0;
    }
    for (int p = 0; p < pieces_; ++p) first_use_[p + 1] += first_use_[p];
    std::map<int, int> visits;
    for (int rank : problem.rank_of_stage) ++visits[rank];
    for (int rank : problem.rank_of_stage) visits_.push_back(visits[rank]);
    int ranks = visits.rbegin()->first + 1;
    for (const PieceUse& use : problem.uses) ranks = std::max(ranks, use.owner + 1);
    empty_.by_owner.assign(ranks, 0);
  }

  std::optional<std::vector<int>> best() {
    if (!limit(kInfinite)) return std::nullopt;
    if (has_owned_ && !find_fewest_foreign()) return std::nullopt;
    const std::optional<int64_t> lowest = find_first();
    if (!lowest) return std::nullopt;
    const int64_t sum_bound = prefix_[pieces_] + crossing_bound();
    explore(*lowest, (step(best_->score) - sum_bound) / weight(), sum_bound);
    return best_->cuts;
  }

  std::optional<int64_t> smallest_memory() {
    if (!limit(kInfinite)) return std::nullopt;
    memory_limit_ = kInfinite;
    solve<Goal::kMemory>();  // fewest foreign bytes come first, as in `best`
    const Label& all = label(0, 0);
    if (all.foreign >= kInfinite) return std::nullopt;
    return all.goal;
  }

  SplitScore score(const std::vector<int>& cuts) {
    SplitScore total;
    for (int stage = 0; stage < stages_; ++stage) {
      const int start = stage == 0 ? 0 : cuts[stage - 1];
      const int end = stage + 1 == stages_ ? pieces_ : cuts[stage];
      begin_stage();
      for (int piece = start; piece < end; ++piece) add_piece(start, piece);
      total.foreign += foreign(stage_totals_, stage);
      total.sum += stage_totals_.time + (end > start ? penalty(start) : 0);
      total.peak = std::max(total.peak, stage_totals_.time * visits_[stage]);
      total.memory = std::max(total.memory, memory(stage_totals_, stage));
    }
    return total;
  }

 private:
  int min_length() const { return problem_.allow_empty ? 0 : 1; }
  int64_t weight() const { return step({0, 0, 1, 0}); }
  int64_t step(const SplitScore& score) const { return score.step(problem_.microbatches); }
  int64_t penalty(int start) const { return start > 0 ? problem_.penalty[start] : 0; }

  int64_t foreign(const StageTotals& totals, int stage) const {
    return totals.owned - totals.by_owner[problem_.rank_of_stage[stage]];
  }

  int64_t memory(const StageTotals& totals, int stage) const {
    return totals.fixed + problem_.in_flight[stage] * totals.kept;
  }

  // ---- Stages ----

  void begin_stage() { stage_totals_ = empty_; }

  /// Extends the stage that starts at `start` by its next piece.
  void add_piece(int start, int piece) {
    stage_totals_.time += problem_.cost[piece] + leaving_[piece];
    stage_totals_.kept += problem_.kept[piece];
    stage_totals_.fixed += problem_.fixed[piece] + sent_[piece];
    for (int u = first_use_[piece]; u < first_use_[piece + 1]; ++u) {
      const PieceUse& use = problem_.uses[u];
      if (use.previous >= start) {
        stage_totals_.time -= use.cost;  // it does not leave after all
        stage_totals_.fixed -= use.sent;
        continue;
      }
      stage_totals_.time += use.cost;
      stage_totals_.kept += use.kept;
      stage_totals_.fixed += use.fixed;
      if (use.owner < 0) continue;
      stage_totals_.owned += use.foreign;
      stage_totals_.by_owner[use.owner] += use.foreign;
    }
  }

  /// Calls `visit(end, totals)` for the stages of one piece or more that start at `start`, by
  /// ascending end, until it returns false.
  template <class Visitor>
  void for_each_stage_from(int start, const Visitor& visit) {
    begin_stage();
    const int last = reach(start, limit_);
    for (int piece = start; piece < last; ++piece) {
      add_piece(start, piece);
      if (!visit(piece + 1, stage_totals_)) return;
    }
  }

  bool fits(const StageTotals& totals, int stage) const {
    return totals.time <= limit_of_stage_[stage] && memory(totals, stage) <= memory_limit_ &&
           foreign(totals, stage) <= foreign_limit_;
  }

  // ---- Where stages can start, by the cost of pieces alone ----

  /// The last end of a stage that starts at `start` and whose pieces cost at most `limit`.
  int reach(int start, int64_t limit) const {
    const auto past =
        std::upper_bound(prefix_.begin() + start, prefix_.end(), prefix_[start] + limit);
    return static_cast<int>(past - prefix_.begin()) - 1;
  }

  /// The first start of a stage that ends at `end` and whose pieces cost at most `limit`.
  int reach_back(int end, int64_t limit) const {
    const auto first =
        std::lower_bound(prefix_.begin(), prefix_.begin() + end, prefix_[end] - limit);
    return static_cast<int>(first - prefix_.begin());
  }

  /// Sets the limit on the maximum, and `ranges_[j]`, outside of which stage j cannot start (stage
  /// `stages`: the end). False if there is certainly no split.
  bool limit(int64_t limit) {
    limit_ = limit;
    limit_of_stage_.clear();
    for (int visits : visits_) limit_of_stage_.push_back(limit / visits);
    ranges_.assign(stages_ + 1, Range{0, 0});
    for (int j = 0; j < stages_; ++j) {
      const bool end = j + 1 == stages_;
      const Range before = ranges_[j];
      ranges_[j + 1] = {
          std::max(before.first + min_length(), end ? pieces_ : problem_.earliest[j]),
          std::min(reach(before.last, limit_of_stage_[j]), end ? pieces_ : problem_.latest[j])};
      if (ranges_[j + 1].first > ranges_[j + 1].last) return false;
    }
    for (int j = stages_ - 1; j >= 0; --j) {
      const Range after = ranges_[j + 1];
      ranges_[j].first = std::max(ranges_[j].first, reach_back(after.first, limit_of_stage_[j]));
      ranges_[j].last = std::min(ranges_[j].last, after.last - min_length());
      if (ranges_[j].first > ranges_[j].last) return false;
    }
    return true;
  }

  /// The stages that can start at a position: a run, since ranges ascend with the stage.
  Range stages_at(int position) const {
    Range result{0, stages_};
    while (result.first <= stages_ && ranges_[result.first].last < position) ++result.first;
    while (result.last >= 0 && ranges_[result.last].first > position) --result.last;
    return result;
  }

  // ---- The smallest goal under the limits ----

  enum class Goal { kSum, kMemory };

  Label& label(int stage, int start) {
    return labels_[static_cast<size_t>(start) * (stages_ + 1) + stage];
  }

  /// The label of stage `stage` having the pieces from `start` to `end`, then the best later
  /// stages.
  template <Goal goal>
  Label extend(int stage, int start, int end, const StageTotals& totals) {
    const Label& rest = label(stage + 1, end);
    if (rest.foreign >= kInfinite || !fits(totals, stage)) return Label();
    const int64_t bytes = foreign(totals, stage) + rest.foreign;
    if (goal == Goal::kMemory) return {bytes, std::max(memory(totals, stage), rest.goal)};
    return {bytes, totals.time + (end > start ? penalty(start) : 0) + rest.goal};
  }

  /// Improves the labels of stages `lowest` to `highest` at `start` by a stage to `end`.
  template <Goal goal>
  void improve(int lowest, int highest, int start, int end, const StageTotals& totals) {
    if (goal == Goal::kSum && !has_owned_) return improve_sum(lowest, highest, start, end, totals);
    // Descending: before an empty stage gets its label, the next one needs its own.
    for (int stage = highest; stage >= lowest; --stage) {
      const Label candidate = extend<goal>(stage, start, end, totals);
      Label& best = label(stage, start);
      if (candidate < best) best = candidate;
    }
  }

  /// The same for `Goal::kSum` without owned tensors: where nearly all the time goes.
  void improve_sum(int lowest, int highest, int start, int end, const StageTotals& totals) {
    if (totals.time > limit_ || totals.fixed > memory_limit_) return;
    const int64_t in_flight =
        totals.kept > 0 ? (memory_limit_ - totals.fixed) / totals.kept : kInfinite;
    const int64_t sum = totals.time + (end > start ? penalty(start) : 0);
    for (int stage = highest; stage >= lowest; --stage) {
      if (totals.time > limit_of_stage_[stage] || problem_.in_flight[stage] > in_flight) continue;
      const int64_t candidate = sum + label(stage + 1, end).goal;
      Label& best = label(stage, start);
      if (candidate < best.goal) best = {0, candidate};
    }
  }

  /// Fills the labels from the last start to the first.
  template <Goal goal>
  void solve() {
    labels_.assign(static_cast<size_t>(pieces_ + 1) * (stages_ + 1), Label());
    label(stages_, pieces_) = Label{0, 0};
    std::vector<Range> stages;
    for (int position = 0; position <= pieces_; ++position) stages.push_back(stages_at(position));
    for (int start = pieces_; start >= 0; --start) {
      const int last = std::min(stages[start].last, stages_ - 1);
      if (stages[start].first > last) continue;  // most, if stages are few
      const auto visit = [&](int end, const StageTotals& totals) {
        improve<goal>(std::max(stages[start].first, stages[end].first - 1),
                      std::min(last, stages[end].last - 1), start, end, totals);
        return stages[end].first - 1 <= last;
      };
      for_each_stage_from(start, visit);
      if (problem_.allow_empty) visit(start, empty_);
    }
  }

  /// The earliest cuts among the best.
  template <Goal goal>
  std::vector<int> walk() {
    std::vector<int> cuts;
    int start = 0;
    for (int stage = 0; stage + 1 < stages_; ++stage) {
      const Label best = label(stage, start);
      const int from = start;
      const auto missed = [&](int end, const StageTotals& totals) {
        if (!(extend<goal>(stage, from, end, totals) == best)) return true;
        start = end;
        return false;
      };
      if (!problem_.allow_empty || missed(start, empty_)) for_each_stage_from(start, missed);
      cuts.push_back(start);
    }
    return cuts;
  }

  /// The smallest sum with the maximum at most `peak`; remembers the best solution.
  std::optional<SplitScore> solve_under(int64_t peak) {
    if (!limit(peak)) return std::nullopt;
    solve<Goal::kSum>();
    if (label(0, 0).foreign > foreign_limit_) return std::nullopt;
    Solution solution;
    solution.cuts = walk<Goal::kSum>();
    solution.score = score(solution.cuts);
    const SplitScore result = solution.score;
    if (!best_ || step(result) < step(best_->score)) best_ = std::move(solution);
    return result;
  }

  // ---- The search over limits ----

  /// Sets the limit on foreign bytes to the fewest possible. False if there is no split. Usually
  /// that is 0, which is quick to find out, as it keeps stages short.
  bool find_fewest_foreign() {
    for (int64_t bound : {int64_t{0}, kInfinite}) {
      foreign_limit_ = bound;
      solve<Goal::kMemory>();
      if (label(0, 0).foreign > bound || label(0, 0).foreign >= kInfinite) continue;
      foreign_limit_ = label(0, 0).foreign;
      return true;
    }
    return false;
  }

  /// The first solution, under a limit near the smallest. Returns a limit below which there is
  /// none.
  std::optional<int64_t> find_first() {
    int64_t high = 0;
    for (int p = 0; p < pieces_; ++p) high += problem_.cost[p] + 2 * leaving_[p];
    high *= *std::max_element(visits_.begin(), visits_.end());
    int64_t low = smallest_peak_of_pieces(high);
    for (int64_t rise = std::max<int64_t>(low / 256, 1);; rise *= 2) {
      const int64_t bound = std::min(low + rise, high);
      if (solve_under(bound)) return low;
      if (bound == high) return std::nullopt;
      low = bound + 1;
    }
  }

  /// Bisects: whether a limit may be kept is decided in O(stages log pieces).
  int64_t smallest_peak_of_pieces(int64_t high) {
    int64_t low = 0;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (limit(middle)) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }

  /// A lower bound on the sum of all crossings and penalties. A tensor crosses between two uses if
  /// any cut lies between them: each of the at most `cuts` cuts there is charged an equal part.
  int64_t crossing_bound() const {
    if (problem_.allow_empty || stages_ == 1) return 0;
    const int cuts = stages_ - 1;
    std::vector<int64_t> change(pieces_ + 1, 0);
    for (const PieceUse& use : problem_.uses) {
      if (use.previous < 0) continue;
      const int64_t part = 2 * use.cost / std::min(cuts, use.piece - use.previous);
      change[use.previous + 1] += part;
      change[use.piece + 1] -= part;
    }
    std::vector<int64_t> of_cut;
    int64_t crossing = 0;
    for (int p = 0; p < pieces_; ++p) {
      crossing += change[p];
      if (p > 0) of_cut.push_back(crossing + problem_.penalty[p]);
    }
    std::nth_element(of_cut.begin(), of_cut.begin() + (cuts - 1), of_cut.end());
    int64_t total = 0;
    for (int j = 0; j < cuts; ++j) total += of_cut[j];
    return total;
  }

  /// Looks for better solutions under limits from `low` to `high`, where no sum is below `sum`.
  void explore(int64_t low, int64_t high, int64_t sum) {
    if (low > high || !promising(low, sum)) return;
    const std::optional<SplitScore> found = solve_under(high);
    if (!found) return;
    // The same sum is the smallest for all limits down to the maximum of this solution.
    const int64_t below = found->peak - 1;
    if (below < low) return;
    const int64_t middle = low + (below - low) / 2;
    explore(low, middle, found->sum);
    explore(middle + 1, below, found->sum);
  }

  bool promising(int64_t low, int64_t sum) const {
    const int64_t best = step(best_->score);
    const auto gap = static_cast<int64_t>(problem_.gap * static_cast<double>(best));
    return weight() * low + sum < best - gap;
  }

  const SplitProblem& problem_;
  const int pieces_;
  const int stages_;
  std::vector<int64_t> prefix_;
  std::vector<int> first_use_;    ///< per piece, an index into the problem's uses
  std::vector<int64_t> leaving_;  ///< per piece, the cost of values used after it next
  std::vector<int64_t> sent_;     ///< per piece, what their sender keeps
  std::vector<int> visits_;       ///< per stage, how many stages its rank has
  bool has_owned_ = false;
  int64_t limit_ = kInfinite;
  std::vector<int64_t> limit_of_stage_;
  int64_t memory_limit_ = problem_.memory_limit > 0 ? problem_.memory_limit : kInfinite;
  int64_t foreign_limit_ = kInfinite - 1;
  std::vector<Range> ranges_;
  std::vector<Label> labels_;
  StageTotals stage_totals_;
  StageTotals empty_;
  std::optional<Solution> best_;
};

}  // namespace

SplitScore score_split(const SplitProblem& problem, const std::vector<int>& cuts) {
  return Splitter(problem).score(cuts);
}

std::optional<std::vector<int>> split(const SplitProblem& problem) {
  return Splitter(problem).best();
}

std::optional<int64_t> smallest_memory_limit(const SplitProblem& problem) {
  return Splitter(problem).smallest_memory();
}

}  // namespace smp::partitioner
