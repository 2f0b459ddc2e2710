// SPDX-License-Identifier: Apache-2.0
#include "tools/hosts.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <sstream>

#include "core/check.h"

namespace smp::tools {
namespace {

constexpr const char* kNodeList = "SLURM_JOB_NODELIST";
constexpr const char* kTasks = "SLURM_TASKS_PER_NODE";

/// A number; negative for any other text.
int number_of(const std::string& text) {
  int number = -1;
  const char* const end = text.data() + text.size();
  return std::from_chars(text.data(), end, number).ptr == end ? number : -1;
}

/// The parts between commas that are in no brackets.
std::vector<std::string> split_at_commas(const std::string& text) {
  std::vector<std::string> parts(1);
  int depth = 0;
  for (const char c : text) {
    depth += c == '[' ? 1 : c == ']' ? -1 : 0;
    if (c == ',' && depth == 0) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

[[noreturn]] void fail_slurm(const char* variable, const std::string& text) {
  smp::core::fail<ConfigError>("the environment variable ", variable, " cannot be read: ", text,
                               ". Name the hosts with --hosts HOST:RANKS,...");
}

/// "01-03" as 01, 02, 03; a number alone as itself.
std::vector<std::string> expand_range(const std::string& range) {
  const size_t dash = range.find('-');
  const std::string first = range.substr(0, dash);
  const int begin = number_of(first);
  const int end = dash == std::string::npos ? begin : number_of(range.substr(dash + 1));
  if (begin < 0 || end < begin) fail_slurm(kNodeList, range);
  std::vector<std::string> numbers;
  for (int64_t number = begin; number <= end; ++number) {
    const std::string digits = std::to_string(number);
    numbers.push_back(std::string(first.size() - std::min(first.size(), digits.size()), '0') +
                      digits);
  }
  return numbers;
}

/// "n[01-03,7]" as n01, n02, n03, n7.
std::vector<std::string> expand_nodes(const std::string& nodes) {
  const size_t open = nodes.find('[');
  if (open == std::string::npos) return {nodes};
  const size_t close = nodes.find(']', open);
  if (close == std::string::npos) fail_slurm(kNodeList, nodes);
  std::vector<std::string> names;
  for (const std::string& range : split_at_commas(nodes.substr(open + 1, close - open - 1))) {
    for (const std::string& number : expand_range(range)) {
      for (const std::string& rest : expand_nodes(nodes.substr(close + 1))) {
        names.push_back(nodes.substr(0, open) + number + rest);
      }
    }
  }
  return names;
}

/// "2(x3),1" as 2, 2, 2, 1.
std::vector<int> expand_tasks(const std::string& text) {
  std::vector<int> tasks;
  for (const std::string& part : split_at_commas(text)) {
    const size_t open = part.find("(x");
    const int ranks = number_of(part.substr(0, open));
    const bool repeats = open != std::string::npos && part.back() == ')';
    const int times = repeats ? number_of(part.substr(open + 2, part.size() - open - 3)) : 1;
    if (ranks < 1 || times < 1) fail_slurm(kTasks, text);
    tasks.insert(tasks.end(), times, ranks);
  }
  return tasks;
}

}  // namespace

std::vector<Host> parse_hosts(const std::string& text, int default_ranks) {
  std::vector<Host> hosts;
  for (const std::string& part : split_at_commas(text)) {
    const size_t colon = part.rfind(':');
    const Host host{part.substr(0, colon),
                    colon == std::string::npos ? default_ranks : number_of(part.substr(colon + 1))};
    SMP_CHECK_WITH(ConfigError, !host.name.empty() && host.ranks > 0,
                   "--hosts: expected HOST or HOST:RANKS, separated by commas, got ",
                   part.empty() ? "nothing" : part, " in ", text, ".");
    hosts.push_back(host);
  }
  return hosts;
}

std::vector<Host> slurm_hosts(const std::string& node_list, const std::string& tasks_per_node) {
  std::vector<Host> hosts;
  for (const std::string& nodes : split_at_commas(node_list)) {
    for (const std::string& name : expand_nodes(nodes)) hosts.push_back({name, 1});
  }
  if (tasks_per_node.empty()) return hosts;
  const std::vector<int> tasks = expand_tasks(tasks_per_node);
  if (tasks.size() != hosts.size()) fail_slurm(kTasks, tasks_per_node);
  for (size_t i = 0; i < hosts.size(); ++i) hosts[i].ranks = tasks[i];
  return hosts;
}

int total_ranks(const std::vector<Host>& hosts) {
  int ranks = 0;
  for (const Host& host : hosts) ranks += host.ranks;
  return ranks;
}

std::string to_string(const std::vector<Host>& hosts) {
  std::ostringstream text;
  for (size_t i = 0; i < hosts.size(); ++i) {
    text << (i > 0 ? "," : "") << hosts[i].name << ":" << hosts[i].ranks;
  }
  return text.str();
}

}  // namespace smp::tools
