// SPDX-License-Identifier: Apache-2.0
#include "partitioner/plan_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/json.h"
#include "core/json_reader.h"
#include "core/text.h"
#include "partitioner/complete.h"
#include "partitioner/modules.h"
#include "partitioner/order.h"
#include "partitioner/verify.h"

namespace smp::partitioner {
namespace {

using core::JsonReader;
using graph::Graph;
using nlohmann::ordered_json;

constexpr const char* kFormat = "smp partition";
constexpr int kVersion = 1;
constexpr size_t kMostStages = 4096;

/// "aten::addmm in blocks.0.fc1".
std::string label(const graph::Operator& op) {
  return op.scope.empty() ? op.name() : op.name() + " in " + op.scope;
}

/// The operators of a stage: first and last index; empty if first > last.
std::pair<int, int> range_of(const Plan& plan, int stage) {
  const auto& stages = plan.stage_of_operator;
  const auto [begin, end] = std::equal_range(stages.begin(), stages.end(), stage);
  return {static_cast<int>(begin - stages.begin()), static_cast<int>(end - stages.begin()) - 1};
}

/// "0-3, 8, 9-12": the operators from `first` to `last` of those that run, by captured index.
std::string ranges_to_text(const Order& order, int first, int last) {
  std::string text;
  for (int i = first; i <= last;) {
    int end = i;
    while (end < last && order[end + 1] == order[end] + 1) ++end;
    if (!text.empty()) text += ", ";
    text += i == end ? fmt::format("{}", order[i]) : fmt::format("{}-{}", order[i], order[end]);
    i = end + 1;
  }
  return text;
}

/// A number at the beginning of the text, which is cut off.
std::optional<int> take_number(std::string_view& text) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc()) return std::nullopt;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return number;
}

bool take(std::string_view& text, std::string_view expected) {
  if (text.substr(0, expected.size()) != expected) return false;
  text.remove_prefix(expected.size());
  return true;
}

/// The operators of such a text; nothing if it is none, or names one that is not among `operators`.
std::optional<std::vector<int>> ranges_from_text(std::string_view text, int operators) {
  std::vector<int> result;
  while (!text.empty()) {
    const auto first = take_number(text);
    const auto last = take(text, "-") ? take_number(text) : first;
    if (!first || !last || *first < 0 || *last < *first || *last >= operators) return std::nullopt;
    if (static_cast<int>(result.size()) + *last - *first >= operators) return std::nullopt;
    for (int op = *first; op <= *last; ++op) result.push_back(op);
    if (!text.empty() && (!take(text, ", ") || text.empty())) return std::nullopt;
  }
  return result;
}

class PlanReader {
 public:
  PlanReader(const Graph& graph, const nlohmann::json& document, int partitions,
             const std::string& source_name)
      : graph_(graph),
        partitions_(partitions),
        source_(source_name),
        json_(document, source_name) {}

  Plan read() {
    check_header();
    const JsonReader stages = json_.at("stages");
    stages.expect(stages.size() <= kMostStages, fmt::format("at most {} stages", kMostStages));
    for (const JsonReader& stage : stages.elements()) read_stage(stage);
    check_same(stage_of_operator_.size() == graph_.operators.size(), "its stages end at operator ",
               static_cast<int64_t>(stage_of_operator_.size()) - 1, ", the graph at operator ",
               static_cast<int64_t>(graph_.operators.size()) - 1);
    check_ranks();
    check_order();
    const Graph graph = reordered(graph_, order_);
    Plan plan = complete_plan(graph, rank_of_stage_, stage_of_operator_, read_owners());
    plan.order = std::is_sorted(order_.begin(), order_.end()) ? Order() : order_;
    plan.reason_of_operator.assign(graph_.operators.size(), "loaded from " + source_);
    try {
      verify_plan(graph, plan);
    } catch (const Error& error) {
      core::fail<PartitionError>(source_, ": the plan cannot be used. ",
                                 core::text_without_prefix(error));
    }
    return plan;
  }

 private:
  template <class... Parts>
  void check_same(bool same, const Parts&... parts) const {
    SMP_CHECK_WITH(PartitionError, same, source_,
                   ": the plan was made for another graph than that "
                   "of this step function (",
                   made_for_, " instead of ", this_graph(), "): ", parts...,
                   ". Delete the file or switch off \"load_partition\" to partition anew.");
  }

  std::string this_graph() const {
    return fmt::format("{} operators, fingerprint {:016x}", graph_.operators.size(),
                       graph_.fingerprint());
  }

  void check_header() {
    const JsonReader format = json_.at("format");
    format.expect(format.text() == kFormat, fmt::format("\"{}\"", kFormat));
    const JsonReader version = json_.at("version");
    version.expect(version.integer() == kVersion, std::to_string(kVersion));
    const JsonReader graph = json_.at("graph");
    const int64_t operators = graph.at("operators").integer(0);
    made_for_ = fmt::format("{} operators, fingerprint {}", operators,
                            core::printable(graph.at("fingerprint").text(), 100));
    const int64_t partitions = json_.at("partitions").integer(1);
    SMP_CHECK_WITH(PartitionError, partitions == partitions_, source_, ": the plan is for ",
                   partitions, " partitions, but the configuration asks for ", partitions_,
                   ". Set \"partitions\" to ", partitions,
                   ", or switch off \"load_partition\" to partition anew.");
  }

  void read_stage(const JsonReader& stage) {
    const auto index = static_cast<int>(rank_of_stage_.size());
    rank_of_stage_.push_back(static_cast<int>(stage.at("partition").integer(0, partitions_ - 1)));
    const auto ranges = stage.find("operators");
    const std::vector<int> operators = ranges ? read_ranges(*ranges) : read_range(stage, index);
    if (!operators.empty()) {
      check_label(stage.at("from").text(), operators.front(), index, "begins");
      check_label(stage.at("to").text(), operators.back(), index, "ends");
    }
    order_.insert(order_.end(), operators.begin(), operators.end());
    stage_of_operator_.resize(order_.size(), index);
  }

  /// A stage of a plan in the order of the program.
  std::vector<int> read_range(const JsonReader& stage, int index) const {
    const int64_t count = static_cast<int64_t>(graph_.operators.size());
    const int64_t begin = static_cast<int64_t>(stage_of_operator_.size());
    const JsonReader first = stage.at("first"), last = stage.at("last");
    if (first.integer(0) != begin) {
      first.fail(fmt::format("expected {}, the operator after the stage before, got {}", begin,
                             first.integer()),
                 "Stages follow each other without a gap.");
    }
    const int64_t end = last.integer(begin - 1) + 1;
    check_same(end <= count, "stage ", index, " ends at operator ", end - 1, ", the graph at ",
               count - 1);
    std::vector<int> operators(end - begin);
    std::iota(operators.begin(), operators.end(), static_cast<int>(begin));
    return operators;
  }

  /// A stage of a plan in another order.
  std::vector<int> read_ranges(const JsonReader& json) const {
    const auto count = static_cast<int>(graph_.operators.size());
    const auto operators = ranges_from_text(json.text(), count);
    json.expect(operators.has_value(),
                fmt::format("operators from 0 to {} like \"0-3, 8, 9-12\"", count - 1));
    return *operators;
  }

  void check_order() const {
    const core::Refusal refusal = why_illegal_order(graph_, order_);
    SMP_CHECK_WITH(PartitionError, !refusal, source_,
                   ": the operators cannot run in this order: ", *refusal,
                   ". Move them to other stages, or delete the file to partition anew.");
  }

  void check_label(const std::string& expected, int op, int stage, const char* what) const {
    const std::string found = label(graph_.operators[op]);
    check_same(found == expected, "stage ", stage, " ", what, " with operator ", op, ", ",
               core::printable(expected), ", but operator ", op, " of the graph is ", found);
  }

  void check_ranks() const {
    const std::set<int> ranks(rank_of_stage_.begin(), rank_of_stage_.end());
    SMP_CHECK_WITH(PartitionError, static_cast<int>(ranks.size()) == partitions_, source_,
                   ": expected a stage for each of the ", partitions_,
                   " partitions, got stages for ", ranks.size(),
                   ". Give the others a stage, too; \"last\" = \"first\" - 1 makes it "
                   "empty.");
  }

  std::map<std::string, int> read_owners() const {
    std::map<std::string, int> owners;
    for (const auto& [name, owner] : json_.at("owners").members()) {
      owners[name] = static_cast<int>(owner.integer(0, partitions_ - 1));
    }
    return owners;
  }

  const Graph& graph_;
  const int partitions_;
  const std::string source_;
  const JsonReader json_;
  std::string made_for_;
  std::vector<int> rank_of_stage_;
  Order order_;
  std::vector<int> stage_of_operator_;  ///< in this order
};

}  // namespace

std::string plan_to_json(const Graph& graph, const Plan& plan) {
  ordered_json json;
  json["format"] = kFormat;
  json["version"] = kVersion;
  json["graph"] = {{"operators", graph.operators.size()},
                   {"fingerprint", fmt::format("{:016x}", graph.fingerprint())}};
  json["partitions"] = std::set<int>(plan.rank_of_stage.begin(), plan.rank_of_stage.end()).size();
  json["stages"] = ordered_json::array();
  const Graph ordered = reordered(graph, plan.order);
  const std::vector<std::string> modules = stage_modules(ordered, plan);
  for (int s = 0; s < plan.stages(); ++s) {
    const auto [first, last] = range_of(plan, s);
    ordered_json stage = {{"partition", plan.rank_of_stage[s]}};
    if (plan.order.empty()) {
      stage["first"] = first;
      stage["last"] = last;
    } else {
      stage["operators"] = ranges_to_text(plan.order, first, last);
    }
    if (first <= last) {
      stage["from"] = label(ordered.operators[first]);
      stage["to"] = label(ordered.operators[last]);
      stage["modules"] = modules[s];
    }
    json["stages"].push_back(std::move(stage));
  }
  json["owners"] = ordered_json::object();
  for (const auto& [name, stage] : plan.owner) json["owners"][name] = plan.rank_of_stage[stage];
  try {
    return json.dump(2) + "\n";
  } catch (const nlohmann::json::exception& error) {
    core::fail<PartitionError>(
        "the plan cannot be written: expected names of modules and parameters "
        "in UTF-8, got: ",
        error.what(), ". Rename them");
  }
}

Plan plan_from_json(const Graph& graph, const std::string& text, int partitions,
                    const std::string& source_name) {
  const nlohmann::json document = core::parse_json(text, source_name);
  return PlanReader(graph, document, partitions, source_name).read();
}

}  // namespace smp::partitioner
