#include "partitioner/split.h"

#include <algorithm>
#include <limits>

#include "smp/core/error.h"

namespace smp::partitioner {
namespace {

/// More than any sum, and small enough that sums with it do not overflow.
constexpr int64_t kInfinite = std::numeric_limits<int64_t>::max() / 4;

/// Positions that are allowed for one cut; none if first > last.
struct Range {
  int first = 0;
  int last = 0;

  bool contains(int position) const { return first <= position && position <= last; }
};

/// Value of the best stages from one on to the end, compared in this order.
struct Label {
  int64_t foreign = kInfinite;  ///< bytes of owned tensors used outside their owner's stage
  int64_t goal = kInfinite;     ///< the maximum cost, or the bytes crossing

  bool operator<(const Label& other) const {
    return foreign < other.foreign || (foreign == other.foreign && goal < other.goal);
  }
  bool operator==(const Label& other) const {
    return foreign == other.foreign && goal == other.goal;
  }
};

/// What a stage of pieces [start, end) costs.
struct Segment {
  int64_t cost = 0;
  int64_t crossing = 0;           ///< bytes that enter it
  int64_t owned = 0;              ///< bytes of owned tensors that it uses
  std::vector<int64_t> by_owner;  ///< the same, per owner

  int64_t foreign(int stage) const { return owned - by_owner[stage]; }
};

class Splitter {
 public:
  explicit Splitter(const SplitProblem& problem)
      : problem_(problem),
        pieces_(static_cast<int>(problem.cost.size())),
        prefix_(problem.cost.size() + 1, 0),
        first_use_(problem.cost.size() + 1, 0),
        empty_{0, 0, 0, std::vector<int64_t>(problem.stages, 0)} {
    for (int p = 0; p < pieces_; ++p) prefix_[p + 1] = prefix_[p] + problem.cost[p];
    for (const PieceUse& use : problem.uses) {
      ++first_use_[use.piece + 1];
      has_owned_ |= use.owner >= 0;
    }
    for (int p = 0; p < pieces_; ++p) first_use_[p + 1] += first_use_[p];
  }

  std::optional<std::vector<int>> run() {
    if (!limit(kInfinite)) return std::nullopt;
    const int64_t peak = has_owned_ ? smallest_peak_with_owners() : smallest_peak();
    const auto slack = static_cast<int64_t>(static_cast<double>(peak) * problem_.tolerance);
    SMP_INTERNAL_ASSERT(limit(peak + slack), "a smallest maximum cost that no split has");
    const auto add = [](const Segment& segment, int64_t rest) { return segment.crossing + rest; };
    solve(add);
    return walk(add);
  }

 private:
  int min_length() const { return problem_.allow_empty ? 0 : 1; }

  /// The last end of a stage that starts at `start` and costs at most the limit.
  int reach(int start) const {
    const auto past =
        std::upper_bound(prefix_.begin() + start, prefix_.end(), prefix_[start] + limit_);
    return static_cast<int>(past - prefix_.begin()) - 1;
  }

  /// The first start of a stage that ends at `end` and costs at most the limit.
  int reach_back(int end) const {
    const auto first =
        std::lower_bound(prefix_.begin(), prefix_.begin() + end, prefix_[end] - limit_);
    return static_cast<int>(first - prefix_.begin());
  }

  /// Sets the limit on a stage's cost, and `ranges_[j]`, the starts that stage j can have (those
  /// of stage `stages`: the end). As every piece fits the limit, the starts that a range of
  /// starts leads to are a range again. False if there is no split.
  bool limit(int64_t limit) {
    limit_ = limit;
    ranges_.assign(problem_.stages + 1, Range{0, 0});
    for (int j = 0; j < problem_.stages; ++j) {
      const bool end = j + 1 == problem_.stages;
      const Range before = ranges_[j];
      ranges_[j + 1] = {std::max(before.first + min_length(), end ? pieces_ : problem_.earliest[j]),
                        std::min(reach(before.last), end ? pieces_ : problem_.latest[j])};
      if (ranges_[j + 1].first > ranges_[j + 1].last) return false;
    }
    for (int j = problem_.stages - 1; j >= 0; --j) {
      const Range after = ranges_[j + 1];
      ranges_[j].first = std::max(ranges_[j].first, reach_back(after.first));
      ranges_[j].last = std::min(ranges_[j].last, after.last - min_length());
      if (ranges_[j].first > ranges_[j].last) return false;
    }
    return true;
  }

  /// By bisection: whether a limit can be kept is decided in O(stages log pieces).
  int64_t smallest_peak() {
    int64_t low = 0, high = prefix_[pieces_];
    for (int64_t cost : problem_.cost) low = std::max(low, cost);
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

  /// The smallest maximum cost among the splits with the fewest foreign bytes.
  int64_t smallest_peak_with_owners() {
    solve([](const Segment& segment, int64_t rest) { return std::max(segment.cost, rest); });
    return label(0, 0).goal;
  }

  Label& label(int stage, int start) {
    return labels_[static_cast<size_t>(start) * (problem_.stages + 1) + stage];
  }

  /// Calls `visit(end, segment)` for the stages of one piece or more that start at `start`, by
  /// ascending end, until it returns false.
  template <class Visitor>
  void for_each_segment(int start, const Visitor& visit) {
    segment_ = empty_;
    const int last = reach(start);
    for (int piece = start; piece < last; ++piece) {
      segment_.cost += problem_.cost[piece];
      for (int u = first_use_[piece]; u < first_use_[piece + 1]; ++u) add_use(start, u);
      if (!visit(piece + 1, segment_)) return;
    }
  }

  void add_use(int start, int index) {
    const PieceUse& use = problem_.uses[index];
    if (use.previous >= start) return;  // this stage has it already
    if (use.owner < 0) {
      segment_.crossing += use.bytes;
    } else {
      segment_.owned += use.bytes;
      segment_.by_owner[use.owner] += use.bytes;
    }
  }

  /// The label of stage `stage` being a segment that ends at `end`, then the best later stages.
  template <class Combine>
  Label extend(int stage, int end, const Segment& segment, const Combine& combine) {
    const Label& rest = label(stage + 1, end);
    return {segment.foreign(stage) + rest.foreign, combine(segment, rest.goal)};
  }

  /// The stages that can start at a position: a run, since ranges ascend with the stage.
  Range stages_at(int position) const {
    Range result{0, problem_.stages};
    while (result.first <= problem_.stages && ranges_[result.first].last < position) ++result.first;
    while (result.last >= 0 && ranges_[result.last].first > position) --result.last;
    return result;
  }

  /// Fills the labels from the last start to the first.
  template <class Combine>
  void solve(const Combine& combine) {
    labels_.assign(static_cast<size_t>(pieces_ + 1) * (problem_.stages + 1), Label());
    label(problem_.stages, pieces_) = Label{0, 0};
    std::vector<Range> stages;
    for (int position = 0; position <= pieces_; ++position) stages.push_back(stages_at(position));
    for (int start = pieces_; start >= 0; --start) {
      const int last = std::min(stages[start].last, problem_.stages - 1);
      const auto improve = [&](int end, const Segment& segment) {
        // Descending: before an empty stage gets its label, the next one needs its own.
        const int highest = std::min(last, stages[end].last - 1);
        const int lowest = std::max(stages[start].first, stages[end].first - 1);
        for (int stage = highest; stage >= lowest; --stage) {
          const Label candidate = extend(stage, end, segment, combine);
          Label& best = label(stage, start);
          if (candidate < best) best = candidate;
        }
        return stages[end].first - 1 <= last;
      };
      for_each_segment(start, improve);
      if (problem_.allow_empty) improve(start, empty_);
    }
  }

  /// The earliest cuts among the best.
  template <class Combine>
  std::vector<int> walk(const Combine& combine) {
    std::vector<int> cuts;
    int start = 0;
    for (int stage = 0; stage + 1 < problem_.stages; ++stage) {
      const Label best = label(stage, start);
      const auto missed = [&](int end, const Segment& segment) {
        if (!(extend(stage, end, segment, combine) == best)) return true;
        start = end;
        return false;
      };
      if (!problem_.allow_empty || missed(start, empty_)) for_each_segment(start, missed);
      cuts.push_back(start);
    }
    return cuts;
  }

  const SplitProblem& problem_;
  const int pieces_;
  std::vector<int64_t> prefix_;
  std::vector<int> first_use_;  ///< per piece, an index into the problem's uses
  bool has_owned_ = false;
  int64_t limit_ = kInfinite;
  std::vector<Range> ranges_;
  std::vector<Label> labels_;
  Segment segment_;
  const Segment empty_;
};

}  // namespace

std::optional<std::vector<int>> split(const SplitProblem& problem) {
  return Splitter(problem).run();
}

}  // namespace smp::partitioner
