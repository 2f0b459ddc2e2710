// SPDX-License-Identifier: Apache-2.0
#include "core/table.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace smp::core {

void Table::column(std::string heading, Align align) {
  headings_.push_back(std::move(heading));
  align_.push_back(align);
}

void Table::row(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }

std::string Table::to_string(bool has_rule) const {
  std::vector<size_t> widths;
  for (size_t c = 0; c < headings_.size(); ++c) {
    size_t width = headings_[c].size();
    for (const auto& row : rows_) width = std::max(width, row[c].size());
    widths.push_back(width);
  }
  std::vector<std::string> rule;
  for (size_t width : widths) rule.push_back(std::string(width, '-'));
  std::string text = line(headings_, widths);
  if (has_rule) text += line(rule, widths);
  for (const auto& row : rows_) text += line(row, widths);
  return text;
}

std::string Table::line(const std::vector<std::string>& cells,
                        const std::vector<size_t>& widths) const {
  std::string text;
  for (size_t c = 0; c < cells.size(); ++c) {
    text += align_[c] == Align::kRight ? fmt::format("  {:>{}}", cells[c], widths[c])
                                       : fmt::format("  {:<{}}", cells[c], widths[c]);
  }
  text.erase(text.find_last_not_of(' ') + 1);
  return text + "\n";
}

}  // namespace smp::core
