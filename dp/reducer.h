// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "comm/communicator.h"
#include "core/node.h"
#include "dp/bucket_layout.h"
#include "dp/bucket_queue.h"
#include "smp/comm_hooks.h"

namespace torch::autograd {
struct Node;
}  // namespace torch::autograd

namespace smp::dp {

/// How a `Reducer` works; the names are those of PyTorch's DistributedDataParallel.
struct ReducerOptions {
  BucketSizes bucket_sizes;
  bool find_unused_parameters = false;
  bool gradient_as_bucket_view = true;
  bool static_graph = false;
};

/// Averages gradients over the ranks of a group while an ordinary backward pass computes them: as
/// c10d::Reducer does for PyTorch's DDP. It hooks into each parameter's accumulation, copies the
/// gradient into its bucket, and starts to reduce a bucket when its last gradient is there; buckets
/// start in the same order on all ranks. When `backward()` returns, `.grad` holds the mean: the sum
/// in rank order, divided once.
///
/// A reduction is *under way* from the first gradient of a backward pass until all buckets are
/// reduced, which is in that pass or, where losses cover the parameters only together, in a later
/// one. After the first, buckets are rebuilt in the order in which rank 0's gradients became ready.
///
/// Belongs to the thread that calls it; its hooks run in the engine's threads.
class Reducer {
 public:
  /// `parameters`: those that require gradients, each once. All ranks give the same in the same
  /// order. `names` are for errors. `group` takes their tensors and has no other use.
  Reducer(std::vector<at::Tensor> parameters, std::vector<std::string> names, const Group& group,
          const ReducerOptions& options);
  /// Takes its hooks away; gradients stay.
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  /// Throws `UsageError` when a reduction is under way, that is when the backward pass before has
  /// left out parameters; it lists them.
  void check_complete() const;

  /// Before a forward pass whose gradients are reduced: parameters that were given other memory
  /// since (by `torch::load`, say) go on being reduced.
  void keep_hooks();

  /// Whether buckets are to be rebuilt before the next forward pass; the same on all ranks.
  bool rebuild_is_due() const { return rebuild_is_due_; }
  /// Rebuilds them in the order that `root` found. Collective.
  void rebuild(int root);

  /// After a forward pass: from now on backward passes are reduced, or with `reduces` false only
  /// add up on this rank. The loss will be computed from `outputs`; parameters on which they do not
  /// depend count as unused, with `find_unused_parameters`.
  void expect_backward(bool reduces, const std::vector<at::Tensor>& outputs);

  /// Backward passes since the last reduction.
  int local_passes() const { return local_passes_; }

  /// Sets the divisor of the sums; at first the number of ranks.
  void set_divisor(double divisor) { divisor_ = divisor; }

  /// Takes part in a reduction with zeros, for a rank without data; `.grad` is then of no meaning.
  void reduce_zeros();

  /// Reduces by `hook` instead. Throws `UsageError` the second time.
  void register_comm_hook(CommHook hook);

  /// The names of the parameters by bucket.
  std::vector<std::vector<std::string>> buckets() const;

 private:
  using Node = torch::autograd::Node;

  void add_hook(size_t index);
  void make_buckets(const BucketLayout& layout);
  bool tracks_usage() const { return options_.find_unused_parameters || options_.static_graph; }
  bool learns_graph() const { return options_.static_graph && !knows_graph_; }

  void on_gradient(size_t index);
  void check_gradient(size_t index) const;
  void join_pass();
  void begin_reduction();
  bool is_last_gradient(size_t index);
  void fill(size_t index);
  void fill_unused(size_t index);
  void mark_ready(size_t index);
  void reduce_usage();
  GradBucket grad_bucket(size_t bucket) const;
  void on_end_of_pass();
  void add_what_was_learned();
  void add_unused();
  void watch(const std::vector<at::Tensor>& outputs);
  void find_reachable(const std::vector<at::Tensor>& outputs);
  void finish();
  void wait();
  void publish(size_t index);
  void end_reduction();

  const std::vector<at::Tensor> parameters_;
  const std::vector<std::string> names_;
  const Group group_;
  const comm::CommunicatorPtr communicator_;
  const ReducerOptions options_;
  double divisor_;
  CommHook hook_ = all_reduce_hook;
  bool has_hook_ = false;
  std::vector<core::NodePtr> accumulators_;  // accumulator of each parameter
  std::vector<uintptr_t> hook_keys_;         // hook of each parameter
  std::unordered_map<const Node*, size_t> index_of_;
  const std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  // for hooks of outputs
  mutable std::mutex mutex_;                                          // guards the members below

  BucketMemory memory_;
  std::unique_ptr<BucketQueue> queue_;
  bool rebuild_is_due_ = false;
  bool was_rebuilt_ = false;
  std::vector<size_t> ready_order_;  // order of the first reduction

  bool reduces_ = false;          // backward passes are reduced
  bool callback_queued_ = false;  // for the end of the pass under way
  int local_passes_ = 0;
  std::vector<bool> used_;             // whether each parameter got one since the last reduction
  std::vector<bool> reachable_;        // whether an output reaches the parameter; empty: not known
  bool knows_graph_ = false;           // true with static_graph, after the first pass
  std::vector<int> gradients_of_;      // gradients of each parameter in a pass of a static graph
  std::vector<int> gradients_left_;    // those still awaited in the reduction under way
  std::vector<size_t> learned_order_;  // in which they came

  bool is_reducing_ = false;
  at::Tensor used_anywhere_;  // per parameter, when usage is tracked
  WorkPtr usage_work_;
  std::unordered_map<size_t, at::Tensor> kept_;  // gradients of unused parameters, as they were
};

}  // namespace smp::dp
