// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "smp/work.h"

namespace smp::dp {

/// The reductions of gradient buckets: a bucket starts when all its gradients are ready, and
/// buckets start in ascending order, so that all ranks start the same ones in turn whatever becomes
/// ready first. Its owner decides how a bucket is reduced.
///
/// Belongs to one thread at a time.
class BucketQueue {
 public:
  struct Policy {
    /// Starts to reduce a bucket. Null where nothing is left to wait for.
    std::function<WorkPtr(size_t bucket)> start;
    /// Words for errors in the communication: they end with "[while ", this and the bucket; then
    /// advice.
    std::string doing;
    std::string advice;
    /// Whether all parameters are awaited from the beginning; else those that `await` says.
    bool awaits_all;
    /// At most so many buckets are being reduced at one time: the next one waits for the first.
    size_t most_under_way = std::numeric_limits<size_t>::max();
  };

  /// `members`: by bucket, the indices of its parameters. `names`: of all parameters.
  BucketQueue(std::vector<std::vector<size_t>> members, std::vector<std::string> names,
              Policy policy);

  const std::vector<std::vector<size_t>>& members() const { return members_; }
  size_t size() const { return members_.size(); }
  const std::string& name(size_t parameter) const { return names_[parameter]; }

  /// Begins anew.
  void reset();
  /// Changes the policy, before a bucket has started.
  void set_most_under_way(size_t count) { policy_.most_under_way = count; }
  /// Says that a parameter's gradient is still to come, or that it is there.
  void await(size_t parameter);
  void mark_ready(size_t parameter);
  /// Whether the gradient of each parameter is ready.
  const std::vector<bool>& ready() const { return ready_; }

  /// Starts the buckets that are ready, up to the first that is not. Returns whether all have
  /// started.
  bool start_ready();
  /// Starts the rest, ready or not.
  void start_all();
  bool all_started() const { return next_ == size(); }
  /// Whether the bucket of a parameter has.
  bool has_started(size_t parameter) const { return bucket_of_[parameter] < next_; }
  /// Waits for all, in order.
  void wait();

 private:
  void start_next();
  void wait_for(size_t bucket);
  template <class Call>
  void name_in_errors(size_t bucket, const Call& call) const;

  const std::vector<std::vector<size_t>> members_;
  const std::vector<std::string> names_;
  Policy policy_;
  std::vector<size_t> bucket_of_;  // bucket of each parameter that is in one
  std::vector<bool> ready_;        // readiness of each parameter
  std::vector<size_t> awaited_;    // gradients of each bucket that are not ready
  std::vector<WorkPtr> works_;     // work of each bucket
  size_t next_ = 0;                // the first that has not started
};

/// Bytes, one for each parameter: 1 where some list of them says that it is used.
at::Tensor used_by_any(const std::vector<std::vector<bool>>& used);

}  // namespace smp::dp
