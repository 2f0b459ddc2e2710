// SPDX-License-Identifier: Apache-2.0
#include "dp/parameter_window.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace smp::dp {
namespace {

constexpr size_t kNever = std::numeric_limits<size_t>::max();

}  // namespace

ParameterWindow::ParameterWindow(std::shared_ptr<ShardedParameters> parameters, int64_t max_live)
    : parameters_(std::move(parameters)), max_live_(max_live), uses_(parameters_->size(), 0) {}

void ParameterWindow::expect(std::vector<size_t> order) {
  order_ = std::move(order);
  move_to(0);
  look_ahead();
}

/// The position of the parameter's next expected use.
size_t ParameterWindow::next_use(size_t parameter) const {
  const auto first = order_.begin() + static_cast<std::ptrdiff_t>(next_);
  const auto found = std::find(first, order_.end(), parameter);
  return found == order_.end() ? kNever : static_cast<size_t>(found - order_.begin());
}

void ParameterWindow::move_to(size_t next) {
  next_ = next;
  std::vector<size_t> seen;
  for (end_ = next_; end_ < order_.size(); ++end_) {
    if (std::find(seen.begin(), seen.end(), order_[end_]) != seen.end()) continue;
    if (seen.size() == kAhead) return;
    seen.push_back(order_[end_]);
  }
}

void ParameterWindow::look_ahead() {
  for (size_t p = 0; p < parameters_->size(); ++p) {
    if (parameters_->is_live(p) && uses_[p] == 0 && !is_next(p)) drop(p);
  }
  for (size_t i = next_; i < end_; ++i) {
    const size_t p = order_[i];
    if (parameters_->is_live(p)) continue;
    if (live_ + parameters_->numel(p) > max_live_) return;
    gather(p);
  }
}

void ParameterWindow::acquire(const std::vector<size_t>& parameters) {
  for (size_t p : parameters) ++uses_[p];
  for (size_t p : parameters) {
    if (!parameters_->is_live(p)) {
      make_room(parameters_->numel(p));
      gather(p);
    }
    if (is_next(p)) move_to(next_use(p) + 1);  // one that was not expected soon changes nothing
  }
  look_ahead();
  for (size_t p : parameters) {
    parameters_->wait(p);
    tell(Event::kUse, p);
  }
}

void ParameterWindow::release(const std::vector<size_t>& parameters) noexcept {
  for (size_t p : parameters) {
    if (--uses_[p] == 0 && !is_next(p)) drop(p);
  }
}

/// Frees the parameters that are used last.
void ParameterWindow::make_room(int64_t elements) {
  while (live_ + elements > max_live_) {
    size_t last = kNever;
    for (size_t p = 0; p < parameters_->size(); ++p) {
      if (!parameters_->is_live(p) || uses_[p] > 0) continue;
      if (last == kNever || next_use(p) > next_use(last)) last = p;
    }
    if (last == kNever) return;
    drop(last);
  }
}

void ParameterWindow::gather(size_t parameter) {
  parameters_->gather(parameter);
  live_ += parameters_->numel(parameter);
  peak_live_ = std::max(peak_live_, live_);
  tell(Event::kGather, parameter);
}

void ParameterWindow::drop(size_t parameter) {
  parameters_->wait(parameter);
  parameters_->release(parameter);
  live_ -= parameters_->numel(parameter);
  tell(Event::kRelease, parameter);
}

}  // namespace smp::dp
