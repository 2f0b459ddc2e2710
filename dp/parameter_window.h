// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "dp/sharded_parameters.h"

namespace smp::dp {

/// Has sharded parameters gathered while they are used, and gathers those that are used next ahead
/// of time. Its actions depend on the calls alone and never on time, so that ranks that use
/// parameters in the same order gather them in the same order.
///
/// May be used by several threads, one at a time.
class ParameterWindow {
 public:
  /// How many parameters are gathered ahead, and kept when their next use follows so soon.
  static constexpr size_t kAhead = 4;

  enum class Event {
    kGather,   ///< a gather has started
    kUse,      ///< an operator begins to use the parameter, whose data is there
    kRelease,  ///< its data was freed
  };

  /// While `max_live` elements are there, nothing more is gathered ahead, and parameters not in use
  /// are freed for the next ones.
  ParameterWindow(std::shared_ptr<ShardedParameters> parameters, int64_t max_live);

  /// The parameters that will be used next, in this order, in place of the ones expected before.
  /// Begins to gather them, and frees those that will not be used soon.
  void expect(std::vector<size_t> order);

  /// The caller uses these parameters from now until it releases them: gathers those that are not
  /// there, begins to gather those that follow, and waits for the former. Uses nest.
  void acquire(const std::vector<size_t>& parameters);
  void release(const std::vector<size_t>& parameters) noexcept;

  /// Elements of the parameters that are there or being gathered; and how many there ever were.
  int64_t live() const { return live_; }
  int64_t peak_live() const { return peak_live_; }

  /// Gets all events, if set; for tests.
  std::function<void(Event, size_t parameter)> on_event;

 private:
  void tell(Event event, size_t parameter) const {
    if (on_event) on_event(event, parameter);
  }
  size_t next_use(size_t parameter) const;
  bool is_next(size_t parameter) const { return next_use(parameter) < end_; }
  void move_to(size_t next);
  void look_ahead();
  void make_room(int64_t elements);
  void gather(size_t parameter);
  void drop(size_t parameter);

  const std::shared_ptr<ShardedParameters> parameters_;
  const int64_t max_live_;
  std::vector<size_t> order_;  // expected uses
  size_t next_ = 0;            // the first of them that has not come
  size_t end_ = 0;             // behind those of the next parameters
  std::vector<int> uses_;      // under way, by parameter
  int64_t live_ = 0;
  int64_t peak_live_ = 0;
};

}  // namespace smp::dp
