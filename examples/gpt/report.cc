// SPDX-License-Identifier: Apache-2.0
#include "examples/gpt/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace gpt {

LossLog::LossLog(const std::string& file, int64_t first) {
  if (file.empty()) return;
  std::string before;
  std::ifstream old(file);
  int64_t step = 0;
  for (std::string line; old >> step && std::getline(old, line) && step < first;) {
    before += std::to_string(step) + line + "\n";
  }
  file_.open(file);
  if (!file_.is_open()) {
    throw std::runtime_error("losses: cannot write \"" + file + "\". Check --losses.");
  }
  file_ << before << std::flush;
}

void LossLog::add(int64_t step, double loss) {
  if (file_.is_open()) file_ << fmt::format("{} {:a}\n", step, loss) << std::flush;
}

std::string held_out_line(double ours, double trigram) {
  return fmt::format("held-out text: {:.3f} bits/byte; a trigram model: {:.3f} ({:.3f} {})", ours,
                     trigram, std::abs(trigram - ours), ours < trigram ? "lower" : "higher");
}

std::string printable(const std::string& text) {
  std::string result = text;
  std::replace_if(
      result.begin(), result.end(),
      [](unsigned char c) { return (c < ' ' && c != '\n' && c != '\t') || c > '~'; }, '?');
  return result;
}

}  // namespace gpt
