// SPDX-License-Identifier: Apache-2.0
#include "examples/gpt/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

namespace gpt {
namespace {

constexpr int64_t kBarWidth = 20;
/// Seconds between two lines: often enough to look alive, seldom enough for a log.
constexpr double kSecondsInPlace = 0.2;
constexpr double kSecondsInLog = 5.0;
/// Weight of the newest loss in the running mean that is shown; single batches are noisy.
constexpr double kSmoothing = 0.1;

}  // namespace

double bits_per_byte(double loss) { return loss / std::log(2.0); }

std::string progress_line(const ProgressState& state) {
  const int64_t filled = state.step * kBarWidth / std::max<int64_t>(state.steps, 1);
  const auto left = static_cast<int64_t>(std::ceil(state.seconds_left));
  return fmt::format(
      "[{}{}] {:3}%  step {}/{}  loss {:.3f}  {:.3f} bits/byte  {:.0f} tokens/s  "
      "{}:{:02} left",
      std::string(filled, '#'), std::string(kBarWidth - filled, '-'),
      state.step * 100 / std::max<int64_t>(state.steps, 1), state.step, state.steps, state.loss,
      bits_per_byte(state.loss), state.tokens_per_second, left / 60, left % 60);
}

Progress::Progress(int64_t first_step, int64_t steps, int64_t tokens_per_step, std::ostream& out,
                   bool in_place)
    : first_step_(first_step),
      steps_(steps),
      tokens_per_step_(tokens_per_step),
      out_(out),
      in_place_(in_place) {}

void Progress::update(int64_t step, double loss) {
  const bool first = step == first_step_ + 1;
  smooth_loss_ = first ? loss : smooth_loss_ + kSmoothing * (loss - smooth_loss_);
  const auto now = Clock::now();
  const double waited = std::chrono::duration<double>(now - shown_).count();
  const bool last = step == steps_;
  if (!first && !last && waited < (in_place_ ? kSecondsInPlace : kSecondsInLog)) return;
  shown_ = now;

  const double seconds = std::max(std::chrono::duration<double>(now - start_).count(), 1e-9);
  const double per_step = seconds / static_cast<double>(step - first_step_);
  const ProgressState state{step, steps_, smooth_loss_,
                            static_cast<double>(tokens_per_step_) / per_step,
                            per_step * static_cast<double>(steps_ - step)};
  // "\x1b[K" clears the rest of a longer line.
  out_ << (in_place_ ? "\r" : "") << progress_line(state) << (in_place_ ? "\x1b[K" : "\n");
  if (in_place_ && last) out_ << "\n";
  out_.flush();
}

bool stdout_is_terminal() {
  const char* terminal = std::getenv("TERM");
  return isatty(STDOUT_FILENO) == 1 && terminal != nullptr && std::string(terminal) != "dumb";
}

}  // namespace gpt
