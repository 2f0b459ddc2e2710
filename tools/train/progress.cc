// SPDX-License-Identifier: Apache-2.0
#include "tools/train/progress.h"

#include <unistd.h>

#include <iomanip>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/env.h"

namespace smp::tools::train {
namespace {

constexpr int64_t kBarWidth = 24;

std::string text_of(const StepReport& report, int64_t steps) {
  std::ostringstream text;
  text << "step " << report.step << "/" << steps << std::setprecision(6) << "  loss " << report.loss
       << "  lr " << std::setprecision(4) << report.lr;
  if (report.norm) text << "  norm " << *report.norm;
  return text.str();
}

std::string minutes(double seconds) {
  const auto whole = static_cast<int64_t>(seconds + 0.5);
  std::ostringstream text;
  text << whole / 60 << ":" << std::setw(2) << std::setfill('0') << whole % 60;
  return text.str();
}

}  // namespace

Progress::Progress(int64_t done, int64_t steps, int64_t log_every, Style style, std::ostream& out)
    : first_(done), steps_(steps), log_every_(log_every), style_(style), out_(out) {}

Progress::~Progress() { end_line(); }

void Progress::end_line() {
  if (line_is_open_) out_ << std::endl;
  line_is_open_ = false;
}

void Progress::show(const StepReport& report) {
  if (style_ == Style::kJson) {
    nlohmann::ordered_json line{{"step", report.step}, {"loss", report.loss}, {"lr", report.lr}};
    if (report.norm) line["norm"] = *report.norm;
    out_ << line.dump() << std::endl;
  } else if (style_ == Style::kBar) {
    draw_bar(report);
  } else if (report.step % log_every_ == 0 || report.step == steps_) {
    out_ << text_of(report, steps_) << std::endl;
  }
}

void Progress::draw_bar(const StepReport& report) {
  const int64_t filled = kBarWidth * report.step / steps_;
  const std::chrono::duration<double> passed = Clock::now() - start_;
  const double each = passed.count() / static_cast<double>(report.step - first_);
  out_ << "\r[" << std::string(static_cast<size_t>(filled), '#')
       << std::string(static_cast<size_t>(kBarWidth - filled), '-') << "] "
       << text_of(report, steps_) << "  "
       << minutes(each * static_cast<double>(steps_ - report.step)) << " left \033[K" << std::flush;
  line_is_open_ = true;
}

void Progress::show_evaluation(int64_t step, double loss) {
  end_line();
  if (style_ == Style::kJson) {
    out_ << nlohmann::ordered_json{{"step", step}, {"eval_loss", loss}}.dump() << std::endl;
  } else {
    out_ << "step " << step << "  evaluation loss " << std::setprecision(6) << loss << std::endl;
  }
}

void Progress::say(const std::string& line) {
  end_line();
  if (style_ != Style::kJson) out_ << line << std::endl;
}

Style style_of_stdout(bool json) {
  if (json) return Style::kJson;
  const bool is_terminal = isatty(STDOUT_FILENO) != 0 && core::env("TERM").value_or("") != "dumb";
  return is_terminal ? Style::kBar : Style::kLines;
}

}  // namespace smp::tools::train
