// SPDX-License-Identifier: Apache-2.0
#include "pipeline/schedule_file.h"

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/json.h"
#include "core/json_reader.h"
#include "core/text.h"

namespace smp::pipeline {
namespace {

using core::JsonReader;

constexpr const char* kFormat = "smp schedule";
constexpr int kVersion = 1;

// --- CSV --------------------------------------------------------------------------------------

std::string_view trimmed(std::string_view text) {
  constexpr const char* kBlanks = " \t\r";
  const auto begin = text.find_first_not_of(kBlanks);
  if (begin == std::string_view::npos) {
    return {};
  }
  return text.substr(begin, text.find_last_not_of(kBlanks) - begin + 1);
}

/// Cuts the part before the first `separator` off `rest`.
std::string_view cut(std::string_view& rest, char separator) {
  const auto end = rest.find(separator);
  const auto part = rest.substr(0, end);
  rest = end == std::string_view::npos ? std::string_view() : rest.substr(end + 1);
  return part;
}

/// Reads the rows and finds out the facts that the file leaves out.
class CsvReader {
 public:
  CsvReader(std::string_view text, const std::string& source) : source_(source) {
    for (int line = 1; !text.empty(); ++line) {
      const auto row = cut(text, '\n');
      if (!trimmed(row).empty()) {
        read_row(row, line);
      }
    }
    SMP_CHECK_WITH(ConfigError, !rank_of_stage_.empty(), "cannot read the schedule: ", source_,
                   ": expected a row of computes for each rank, got none.");
  }

  Schedule finish() && {
    for (size_t stage = 0; stage < rank_of_stage_.size(); ++stage) {
      SMP_CHECK_WITH(ConfigError, rank_of_stage_[stage] != kNowhere,
                     "cannot read the schedule: ", source_, ": expected computes of all stages to ",
                     rank_of_stage_.size() - 1, ", got none of stage ", stage, ".");
    }
    Schedule schedule(static_cast<int>(rows_.size()), microbatches_, std::move(rank_of_stage_),
                      std::move(backward_of_stage_));
    schedule.lists() = std::move(rows_);
    check_size(schedule, source_);
    return schedule;
  }

 private:
  static constexpr int kNowhere = -1;

  void read_row(std::string_view row, int line) {
    rows_.emplace_back();
    const char* const begin = row.data();
    while (!row.empty()) {
      const auto cell = trimmed(cut(row, ','));
      if (!cell.empty()) {
        read_cell(cell, c10::str(source_, ", line ", line, ", column ", cell.data() - begin + 1));
      }
    }
  }

  void read_cell(std::string_view cell, const std::string& where) {
    constexpr std::string_view kOverlap = ")OVERLAP_F_B";
    const bool overlap = cell.front() == '(' && cell.size() > kOverlap.size() &&
                         cell.substr(cell.size() - kOverlap.size()) == kOverlap;
    if (!overlap) {
      add(parse_action(cell, where), where);
      return;
    }
    auto parts = cell.substr(1, cell.size() - kOverlap.size() - 1);
    while (!parts.empty()) {
      add(parse_action(trimmed(cut(parts, ';')), where), where);
    }
  }

  void add(const Action& action, const std::string& where) {
    SMP_CHECK_WITH(ConfigError, action.is_compute(), "cannot read the schedule: ", where,
                   ": expected computes only, as 0F3, 1B0, 1I0 and 1W0, got ", to_string(action),
                   ". Leave transfers out: they follow from the computes.");
    const auto stage = static_cast<size_t>(action.stage);
    // Larger numbers are mistakes, and would only fill the memory.
    SMP_CHECK_WITH(ConfigError, action.stage < kMost && action.microbatch < kMost,
                   "cannot read the schedule: ", where, ": expected stages and microbatches below ",
                   kMost, ", got ", to_string(action), ".");
    if (stage >= rank_of_stage_.size()) {
      rank_of_stage_.resize(stage + 1, kNowhere);
      backward_of_stage_.resize(stage + 1, false);
    }
    const int rank = static_cast<int>(rows_.size()) - 1;
    auto& known = rank_of_stage_[stage];
    SMP_CHECK_WITH(ConfigError, known == kNowhere || known == rank,
                   "cannot read the schedule: ", where, ": expected all computes of stage ", stage,
                   " on rank ", known, ", got ", to_string(action), " on rank ", rank,
                   ". Put all computes of a stage into one row.");
    known = rank;
    microbatches_ = std::max(microbatches_, action.microbatch + 1);
    backward_of_stage_[stage] = backward_of_stage_[stage] || action.is_backward();
    rows_.back().push_back(action);
  }

  static constexpr int kMost = 1 << 20;

  const std::string& source_;
  std::vector<std::vector<Action>> rows_;
  std::vector<int> rank_of_stage_;
  int microbatches_ = 0;
  std::vector<bool> backward_of_stage_;
};

// --- JSON -------------------------------------------------------------------------------------

void check_header(const JsonReader& root) {
  const auto format = root.at("format");
  if (format.text() != kFormat) {
    format.fail_expected(c10::str("\"", kFormat, "\""));
  }
  const auto version = root.at("version");
  if (version.integer() != kVersion) {
    version.fail_expected(std::to_string(kVersion));
  }
}

/// For all stages, or for each.
std::vector<bool> read_backwards(const JsonReader& json, size_t stages) {
  if (!json.value().is_array()) {
    return std::vector<bool>(stages, json.boolean());
  }
  if (json.size() != stages) {
    json.fail_expected(c10::str("true, false or one of them for each of ", stages, " stages"));
  }
  std::vector<bool> result;
  for (size_t stage = 0; stage < stages; ++stage) {
    result.push_back(json.at(stage).boolean());
  }
  return result;
}

nlohmann::json backwards_to_json(const Schedule& schedule) {
  const auto& of_stage = schedule.backward_of_stage();
  const auto some = std::count(of_stage.begin(), of_stage.end(), true);
  if (some == 0 || some == schedule.stages()) {
    return some > 0;
  }
  return of_stage;
}

std::vector<int> read_ranks_of_stages(const JsonReader& json, size_t ranks) {
  std::vector<int> result;
  for (size_t stage = 0; stage < json.size(); ++stage) {
    result.push_back(static_cast<int>(json.at(stage).integer(0, static_cast<int64_t>(ranks) - 1)));
  }
  if (result.size() < ranks) {
    json.fail_expected(
        c10::str("a rank for each stage, and at least ", ranks, " stages for ", ranks, " ranks"));
  }
  return result;
}

}  // namespace

Schedule schedule_from_csv(const std::string& text, const std::string& source_name) {
  return CsvReader(text, source_name).finish();
}

std::string schedule_to_json(const Schedule& schedule) {
  std::string text =
      c10::str("{\n  \"format\": \"", kFormat, "\",\n  \"version\": ", kVersion,
               ",\n  \"microbatches\": ", schedule.microbatches(),
               ",\n  \"backward\": ", backwards_to_json(schedule).dump(),
               ",\n  \"rank_of_stage\": ", nlohmann::json(schedule.rank_of_stage()).dump(),
               ",\n  \"actions\": [");
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    auto actions = nlohmann::json::array();
    for (const auto& action : schedule.actions(rank)) {
      actions.push_back(to_string(action));
    }
    text += (rank == 0 ? "\n    " : ",\n    ") + actions.dump();
  }
  return text + "\n  ]\n}\n";
}

Schedule schedule_from_json(const std::string& text, const std::string& source_name) {
  const auto document = core::parse_json(text, source_name);
  const JsonReader root(document, source_name);
  check_header(root);
  const auto lists = root.at("actions");
  if (lists.size() == 0) {
    lists.fail_expected("a list of actions for each rank");
  }
  const auto microbatches = root.at("microbatches").integer(1, std::numeric_limits<int>::max());
  auto rank_of_stage = read_ranks_of_stages(root.at("rank_of_stage"), lists.size());
  auto backwards = read_backwards(root.at("backward"), rank_of_stage.size());
  Schedule schedule(static_cast<int>(lists.size()), static_cast<int>(microbatches),
                    std::move(rank_of_stage), std::move(backwards));
  for (size_t rank = 0; rank < lists.size(); ++rank) {
    const auto actions = lists.at(rank);
    for (size_t i = 0; i < actions.size(); ++i) {
      const auto where = c10::str(source_name, ", actions[", rank, "][", i, "]");
      const Action action = parse_action(actions.at(i).text(), where);
      check_action(schedule, action, where);
      schedule.actions(static_cast<int>(rank)).push_back(action);
    }
  }
  check_size(schedule, source_name);
  return schedule;
}

bool is_compute_order(const Schedule& schedule) {
  const auto is_compute = [](const Action& action) { return action.is_compute(); };
  return std::all_of(schedule.lists().begin(), schedule.lists().end(), [&](const auto& actions) {
    return std::all_of(actions.begin(), actions.end(), is_compute);
  });
}

Schedule load_schedule(const std::string& path) {
  const auto ending = std::filesystem::path(path).extension();
  SMP_CHECK_WITH(ConfigError, ending == ".csv" || ending == ".json" || ending == ".txt",
                 "the name of a schedule's file must say its form: expected it to end in .csv, "
                 ".json or .txt, got \"",
                 core::printable(path), "\". Rename the file.");
  const auto text = core::read_file(path, "the schedule");
  if (ending == ".csv") return schedule_from_csv(text, path);
  Schedule schedule = ending == ".json" ? schedule_from_json(text, path) : parse_schedule(text);
  for (const auto& actions : schedule.lists()) {
    for (const Action& action : actions) {
      SMP_CHECK_WITH(ConfigError, !action.is_added(), "cannot read the schedule: ", path,
                     ": expected computes, transfers and reduces, got ", to_string(action),
                     ". Leave it out: such actions follow from the program.");
    }
  }
  return schedule;
}

}  // namespace smp::pipeline
