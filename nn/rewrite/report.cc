// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <iomanip>
#include <sstream>

#include "nn/rewrite/divide.h"

namespace smp::nn::rewrite {
namespace {

using Row = std::vector<std::string>;

std::string text_of(const std::vector<int64_t>& sizes) { return c10::str(c10::IntArrayRef(sizes)); }

/// Bytes in a unit that leaves few digits: "512 B", "1.5 KiB".
std::string text_of_bytes(int64_t bytes) {
  const char* const units[] = {"B", "KiB", "MiB", "GiB"};
  auto number = static_cast<double>(bytes);
  size_t unit = 0;
  while (number >= 1024 && unit + 1 < std::size(units)) {
    number /= 1024;
    ++unit;
  }
  std::ostringstream out;
  out << std::fixed << std::setprecision(unit == 0 ? 0 : 1) << number << " " << units[unit];
  return out.str();
}

/// Columns as wide as their widest cell, indented by two; the last may be of any width.
void add_table(const std::vector<Row>& rows, std::ostream& out) {
  std::vector<size_t> widths(rows.at(0).size());
  for (const Row& row : rows) {
    for (size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  }
  for (const Row& row : rows) {
    std::string line = "  ";
    for (size_t c = 0; c < row.size(); ++c) {
      line += row[c];
      if (c + 1 < row.size()) line += std::string(widths[c] - row[c].size() + 2, ' ');
    }
    out << line << "\n";
  }
}

Row row_of(const ParameterDecision& decision) {
  if (!decision.split) {
    return {decision.name, text_of(decision.sizes), text_of(decision.sizes),
            "whole: " + *decision.why_whole};
  }
  std::string how = c10::str("divided along dimension ", decision.split->dim);
  if (decision.split->blocks > 1) how += c10::str(" in ", decision.split->blocks, " blocks");
  return {decision.name, text_of(decision.sizes), text_of(decision.split->local_sizes()), how};
}

Row row_of(const std::string& scope, const Traffic& traffic) {
  return {scope.empty() ? "(no module)" : scope, std::to_string(traffic.forward_calls),
          text_of_bytes(traffic.forward_bytes), std::to_string(traffic.backward_calls),
          text_of_bytes(traffic.backward_bytes)};
}

Row row_of(const ResidualStreamDecision& decision, int ranks) {
  std::string name = decision.first.empty() ? "(no module)" : decision.first;
  if (decision.last != decision.first) name += " to " + decision.last;
  if (decision.alike > 1) name += c10::str(" (", decision.alike, " alike)");
  std::vector<int64_t> local = decision.sizes;
  if (decision.dim >= 0) local[decision.dim] /= ranks;
  return {name, text_of(decision.sizes), text_of(local),
          decision.dim < 0 ? "whole: " + *decision.why_whole
                           : c10::str("divided along dimension ", decision.dim)};
}

/// Which activations between divided layers are divided, and the savings.
void add_residual_streams(const DividedGraph& divided, std::ostream& out) {
  if (divided.residual_streams.empty()) return;
  std::vector<Row> rows = {{"activations between divided layers", "sizes", "on a rank", ""}};
  for (const ResidualStreamDecision& decision : divided.residual_streams) {
    rows.push_back(row_of(decision, divided.ranks));
  }
  add_table(rows, out);
  out << "Of a microbatch a rank keeps about " << text_of_bytes(divided.kept_bytes)
      << " of activations until its backward pass, "
      << text_of_bytes(divided.kept_bytes_with_whole_streams)
      << " with all between divided layers whole\n";
}

}  // namespace

std::string report(const DividedGraph& divided) {
  std::ostringstream out;
  int64_t whole = 0, local = 0;
  std::vector<Row> parameters = {{"parameter", "sizes", "on a rank", ""}};
  for (const ParameterDecision& decision : divided.decisions) {
    parameters.push_back(row_of(decision));
    whole += decision.bytes;
    local += decision.split ? decision.bytes / decision.split->ranks : decision.bytes;
  }
  out << "Parameters: " << divided.parameters.size() << " of " << divided.decisions.size()
      << " divided; a rank holds " << text_of_bytes(local) << " of " << text_of_bytes(whole)
      << "\n";
  add_table(parameters, out);
  add_residual_streams(divided, out);
  out << "Predicted for a microbatch: " << std::llround(divided.divided_us) << " us instead of "
      << std::llround(divided.whole_us) << "\n";
  if (divided.traffic_of.empty()) return out.str();
  out << "What a rank sends for a microbatch:\n";
  std::vector<Row> traffic = {{"module", "forward calls", "bytes", "backward calls", "bytes"}};
  for (const auto& [scope, moved] : divided.traffic_of) traffic.push_back(row_of(scope, moved));
  traffic.push_back(row_of("total", divided.traffic));
  add_table(traffic, out);
  return out.str();
}

}  // namespace smp::nn::rewrite
