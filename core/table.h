// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

namespace smp::core {

/// Columns of texts under headings, as wide as their widest cell.
class Table {
 public:
  enum class Align { kLeft, kRight };

  void column(std::string heading, Align align);
  /// A cell for each column.
  void row(std::vector<std::string> cells);

  /// Headings, perhaps a rule, and the rows, each line indented by two; ends with a newline.
  std::string to_string(bool has_rule = true) const;

 private:
  std::string line(const std::vector<std::string>& cells, const std::vector<size_t>& widths) const;

  std::vector<std::string> headings_;
  std::vector<Align> align_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace smp::core
