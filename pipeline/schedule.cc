// SPDX-License-Identifier: Apache-2.0
#include "pipeline/schedule.h"

#include <algorithm>
#include <charconv>
#include <set>
#include <utility>

#include "core/check.h"
#include "core/text.h"

namespace smp::pipeline {
namespace {

/// Reads a schedule word by word and knows the line and column it is at.
class Reader {
 public:
  explicit Reader(std::string_view text) : rest_(text) {}

  /// Goes to the next line that says something; false at the end of the text.
  bool next_line() {
    while (!rest_.empty()) {
      const auto end = rest_.find('\n');
      line_ = rest_.substr(0, end);
      rest_ = end == std::string_view::npos ? std::string_view() : rest_.substr(end + 1);
      ++line_number_;
      column_ = 0;
      skip_spaces();
      if (column_ < line_.size() && line_[column_] != '#') {
        return true;
      }
    }
    line_ = {};
    column_ = 0;
    ++line_number_;
    return false;
  }

  bool at_end_of_line() const { return column_ == line_.size(); }

  /// "line 2, column 9", both counted from 1.
  std::string where() const { return c10::str("line ", line_number_, ", column ", column_ + 1); }

  /// The next word; empty at the end of the line.
  std::string_view word() {
    const auto end = line_.find_first_of(" \t\r", column_);
    const auto found = line_.substr(column_, end == std::string_view::npos ? end : end - column_);
    column_ += found.size();
    skip_spaces();
    return found;
  }

  void literal(std::string_view expected) {
    const auto at = where();
    const auto got = word();
    if (got != expected) {
      fail(at, c10::str("\"", expected, "\""), got);
    }
  }

  /// The value of the word `key=value`.
  std::string_view value(std::string_view key) {
    const auto at = where();
    const auto got = word();
    if (got.substr(0, key.size()) != key || got.substr(key.size(), 1) != "=") {
      fail(at, c10::str("\"", key, "=...\""), got);
    }
    return got.substr(key.size() + 1);
  }

  int number(std::string_view key) { return to_int(value(key), key); }

  std::vector<int> numbers(std::string_view key) {
    auto list = value(key);
    std::vector<int> result;
    for (;;) {
      const auto comma = list.find(',');
      result.push_back(to_int(list.substr(0, comma), key));
      if (comma == std::string_view::npos) {
        return result;
      }
      list.remove_prefix(comma + 1);
    }
  }

  void end_of_line() {
    if (!at_end_of_line()) {
      fail(where(), "the end of the line", line_.substr(column_));
    }
  }

  [[noreturn]] static void fail(const std::string& at, std::string_view expected,
                                std::string_view got) {
    ::smp::core::fail<Error>(
        "cannot read the schedule: ", at, ": expected ", expected, ", got ",
        got.empty() ? "the end of the line" : "\"" + core::printable(got, 100) + "\"",
        ". A schedule is a line \"schedule ranks=R microbatches=M backward=yes "
        "rank_of_stage=0,1,...\" and a line \"rank r: ACTIONS\" for each rank.");
  }

 private:
  int to_int(std::string_view text, std::string_view key) const {
    int value = 0;
    const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
    if (result.ec != std::errc() || result.ptr != text.data() + text.size()) {
      fail(c10::str("line ", line_number_), c10::str("a number in \"", key, "=...\""), text);
    }
    return value;
  }

  void skip_spaces() {
    const auto next = line_.find_first_not_of(" \t\r", column_);
    column_ = next == std::string_view::npos ? line_.size() : next;
  }

  std::string_view rest_;
  std::string_view line_;
  size_t line_number_ = 0;
  size_t column_ = 0;
};

/// Which of so many stages have a backward: "yes", "no" or their numbers, as "0,2".
std::vector<bool> backwards_from(std::string_view text, size_t stages, const std::string& where) {
  if (text == "yes" || text == "no") {
    return std::vector<bool>(stages, text == "yes");
  }
  std::vector<bool> result(stages, false);
  for (size_t begin = 0; begin <= text.size();) {
    const auto number = text.substr(begin, text.find(',', begin) - begin);
    size_t stage = stages;
    const auto parsed = std::from_chars(number.data(), number.data() + number.size(), stage);
    if (parsed.ptr != number.data() + number.size() || stage >= stages) {
      Reader::fail(where, "\"backward=yes\", \"backward=no\" or stages as in \"backward=1,2\"",
                   c10::str("backward=", text));
    }
    result[stage] = true;
    begin += number.size() + 1;
  }
  return result;
}

std::string backwards_to_string(const std::vector<bool>& backward_of_stage) {
  std::string stages;
  for (size_t stage = 0; stage < backward_of_stage.size(); ++stage) {
    if (backward_of_stage[stage]) {
      stages += (stages.empty() ? "" : ",") + std::to_string(stage);
    }
  }
  const bool all = std::find(backward_of_stage.begin(), backward_of_stage.end(), false) ==
                   backward_of_stage.end();
  return all ? "yes" : stages.empty() ? "no" : stages;
}

Schedule parse_header(Reader& reader) {
  reader.next_line();
  reader.literal("schedule");
  const int ranks = reader.number("ranks");
  const int microbatches = reader.number("microbatches");
  const auto where = reader.where();
  const auto backward = reader.value("backward");
  auto rank_of_stage = reader.numbers("rank_of_stage");
  reader.end_of_line();
  auto backward_of_stage = backwards_from(backward, rank_of_stage.size(), where);
  return Schedule(ranks, microbatches, std::move(rank_of_stage), std::move(backward_of_stage));
}

}  // namespace

std::vector<StageEdge> chain_edges(int stages) {
  std::vector<StageEdge> edges;
  for (int stage = 0; stage + 1 < stages; ++stage) {
    edges.push_back({stage, stage + 1});
  }
  return edges;
}

void check_edges(const std::vector<StageEdge>& edges, int stages) {
  std::set<std::pair<int, int>> seen;
  for (const auto& edge : edges) {
    SMP_CHECK_WITH(ConfigError, 0 <= edge.from && edge.from < edge.to && edge.to < stages,
                   "stage edges: expected an edge from a stage to a later one of 0 to ", stages - 1,
                   ", got ", edge.from, " -> ", edge.to, ".");
    SMP_CHECK_WITH(ConfigError, seen.insert({edge.from, edge.to}).second,
                   "stage edges: ", edge.from, " -> ", edge.to,
                   " appears twice. Give one edge for all values from one stage to another.");
  }
}

size_t edge_of(const Action& transfer, const std::vector<StageEdge>& edges) {
  const auto [from, to] = std::minmax(transfer.stage, transfer.peer);
  const auto found = std::find_if(
      edges.begin(), edges.end(),
      [from = from, to = to](const StageEdge& edge) { return edge.from == from && edge.to == to; });
  return static_cast<size_t>(found - edges.begin());
}

std::vector<Action> inserted(const std::vector<Action>& actions,
                             const std::multimap<size_t, Action>& others) {
  std::vector<Action> result;
  for (size_t i = 0; i <= actions.size(); ++i) {
    const auto [first, last] = others.equal_range(i);
    for (auto entry = first; entry != last; ++entry) result.push_back(entry->second);
    if (i < actions.size()) result.push_back(actions[i]);
  }
  return result;
}

Schedule::Schedule(int ranks, int microbatches, std::vector<int> rank_of_stage, bool has_backward)
    : Schedule(ranks, microbatches, rank_of_stage,
               std::vector<bool>(rank_of_stage.size(), has_backward)) {}

Schedule::Schedule(int ranks, int microbatches, std::vector<int> rank_of_stage,
                   std::vector<bool> backward_of_stage)
    : microbatches_(microbatches),
      rank_of_stage_(std::move(rank_of_stage)),
      backward_of_stage_(std::move(backward_of_stage)) {
  SMP_CHECK(ranks > 0 && microbatches > 0 && !rank_of_stage_.empty(),
            "a schedule needs at least one rank, one stage and one microbatch; got ", ranks,
            " ranks, ", rank_of_stage_.size(), " stages and ", microbatches, " microbatches.");
  SMP_CHECK(static_cast<size_t>(ranks) <= rank_of_stage_.size(), "a schedule has ", ranks,
            " ranks but only ", rank_of_stage_.size(),
            " stages, so some ranks have none. Use at most as many ranks as stages.");
  SMP_CHECK(backward_of_stage_.size() == rank_of_stage_.size(), "a schedule of ",
            rank_of_stage_.size(), " stages was told of ", backward_of_stage_.size(),
            " whether they have a backward. Tell it of each stage.");
  for (size_t stage = 0; stage < rank_of_stage_.size(); ++stage) {
    const int rank = rank_of_stage_[stage];
    SMP_CHECK(rank >= 0 && rank < ranks, "stage ", stage, " of a schedule is on rank ", rank,
              ", expected 0 to ", ranks - 1, ". Correct rank_of_stage.");
  }
  actions_.resize(static_cast<size_t>(ranks));
}

bool Schedule::has_backward() const {
  return std::find(backward_of_stage_.begin(), backward_of_stage_.end(), true) !=
         backward_of_stage_.end();
}

std::string Schedule::at(int rank, size_t position) const {
  return c10::str("schedule: rank ", rank, " at action ", position, " (",
                  to_string(actions(rank).at(position)), "): ");
}

std::string to_string(const Schedule& schedule) {
  std::string text =
      c10::str("schedule ranks=", schedule.ranks(), " microbatches=", schedule.microbatches(),
               " backward=", backwards_to_string(schedule.backward_of_stage()), " rank_of_stage=");
  for (int stage = 0; stage < schedule.stages(); ++stage) {
    text += (stage == 0 ? "" : ",") + std::to_string(schedule.rank_of(stage));
  }
  text += '\n';
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    text += c10::str("rank ", rank, ":");
    for (const auto& action : schedule.actions(rank)) {
      text += ' ' + to_string(action);
    }
    text += '\n';
  }
  return text;
}

void check_action(const Schedule& schedule, const Action& action, std::string_view where) {
  const int stages = schedule.stages(), microbatches = schedule.microbatches();
  const bool exists =
      action.stage < stages && action.peer < stages && action.microbatch < microbatches;
  SMP_CHECK(exists, "cannot read the schedule: ", where, ": expected stages from 0 to ", stages - 1,
            " and microbatches from 0 to ", microbatches - 1, ", got ", to_string(action),
            ". Correct the action, or the numbers at the beginning.");
}

void check_size(const Schedule& schedule, std::string_view where) {
  constexpr int kMostStages = 4096;
  constexpr size_t kMostMissing = size_t{1} << 20;
  SMP_CHECK(schedule.stages() <= kMostStages, "cannot read the schedule: ", where,
            ": expected at most ", kMostStages, " stages, got ", schedule.stages(),
            ". Use fewer stages.");
  size_t actions = 0;
  for (const auto& list : schedule.lists()) actions += list.size();
  const auto forwards =
      static_cast<size_t>(schedule.stages()) * static_cast<size_t>(schedule.microbatches());
  SMP_CHECK(actions + kMostMissing >= forwards, "cannot read the schedule: ", where,
            ": expected a forward of ", schedule.microbatches(), " microbatches on each of ",
            schedule.stages(), " stages, got ", actions,
            " actions. Correct the number of microbatches, or add what is missing.");
}

Schedule parse_schedule(std::string_view text) {
  Reader reader(text);
  auto schedule = parse_header(reader);
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    if (!reader.next_line()) {
      Reader::fail(reader.where(), c10::str("the line of rank ", rank), "");
    }
    reader.literal("rank");
    reader.literal(c10::str(rank, ":"));
    while (!reader.at_end_of_line()) {
      const auto where = reader.where();
      const Action action = parse_action(reader.word(), where);
      check_action(schedule, action, where);
      schedule.actions(rank).push_back(action);
    }
  }
  if (reader.next_line()) {
    const auto where = reader.where();
    Reader::fail(where, c10::str("no more than ", schedule.ranks(), " ranks"), reader.word());
  }
  check_size(schedule, reader.where());
  return schedule;
}

}  // namespace smp::pipeline
