#pragma once

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/nn/module.h>
#include <torch/ordered_dict.h>

#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "graph/tensor_table.h"
#include "runtime/runtime.h"

namespace smp {

namespace dp {
class ParameterSlices;
}  // namespace dp

/// Options of a `DistributedModel`.
struct ModelOptions {
  /// Put before the names of its parameters and buffers, with a dot. Needed only when two models
  /// of a program would use the same names.
  TORCH_ARG(std::string, name) = "";
  /// Divide gradients by the number of microbatches (as well as by the number of replicas).
  TORCH_ARG(bool, average_grads_across_microbatches) = true;
  /// Size of a gradient bucket in MiB; 0: the configuration's `bucket_cap_mb`.
  TORCH_ARG(double, bucket_cap_mb) = 0;
  /// Reduce a bucket over the replicas as soon as the stages of this rank that make its gradients
  /// are done, not when all are.
  TORCH_ARG(bool, overlapping_allreduce) = true;
  /// Reduce in every n-th step that trains; the gradients of the others add up and do not reach
  /// `.grad` before. All n run the same operators.
  TORCH_ARG(int64_t, backward_passes_per_step) = 1;
  /// Give the first replica's buffers to all before each step that trains.
  TORCH_ARG(bool, broadcast_buffers) = false;
  /// `.grad` lies in the bucket where it can, which saves the memory of a copy.
  TORCH_ARG(bool, gradient_as_bucket_view) = false;
};

/// Takes a hook away again.
class RemovableHandle {
 public:
  explicit RemovableHandle(std::function<void()> remove) : remove_(std::move(remove)) {}
  /// Removes the hook; later calls do nothing.
  void remove() {
    if (remove_) std::exchange(remove_, nullptr)();
  }

 private:
  std::function<void()> remove_;
};

/// What a `DistributedModel` does apart from calling the module; reached through its `->`.
class ModelCore {
 public:
  using TensorDict = torch::OrderedDict<std::string, at::Tensor>;

  ModelCore(std::shared_ptr<torch::nn::Module> module, ModelOptions options,
            std::shared_ptr<Runtime> runtime);

  /// Differentiates `loss` (a scalar) in the step function under way. Throws `UsageError` outside
  /// a step function, at a second call in it, and for a tensor that needs a gradient of its own.
  /// As documented for SMP's `model.backward`; there is no `retain_graph`. Multiplies by the loss
  /// scale of the `DistributedOptimizer` that has one.
  void backward(const at::Tensor& loss);
  /// As above for several tensors, with their gradients unless all are scalars.
  void backward(const std::vector<at::Tensor>& tensors,
                const std::vector<at::Tensor>& gradients = {});

  /// All parameters, each once: what to build an optimizer from, before or after partitioning.
  /// Those of other ranks stay without gradient, so optimizers pass over them.
  std::vector<at::Tensor> parameters() const;
  std::vector<at::Tensor> buffers() const;
  /// All parameters under every name they are registered with, as the plain module lists them.
  TensorDict named_parameters() const;
  TensorDict named_buffers() const;

  /// Those that this rank owns. Throw `UsageError` before partitioning, which is at the first step.
  std::vector<at::Tensor> local_parameters() const;
  TensorDict local_named_parameters() const;
  std::vector<at::Tensor> local_buffers() const;
  TensorDict local_named_buffers() const;

  /// What the optimizer of this rank updates, each once, by the name of its parameter: with
  /// `shard_optimizer_state` this replica's pieces of the local parameters, one-dimensional tensors
  /// on their memory whose `.grad` is that piece of the gradient; otherwise the local parameters.
  /// For whoever clips or reads gradients. Throw `UsageError` before partitioning.
  std::vector<at::Tensor> local_virtual_parameters();
  TensorDict virtual_named_parameters();

  /// Copies of all parameters and buffers, whole, on every rank. Collective over the pipeline and
  /// its tensor-parallel groups, and with sharded data parallelism over the world: all ranks must
  /// call it, or the others wait until the time-out.
  TensorDict state_dict() const;
  /// Copies of what this rank owns: of a divided parameter its part, and of one that sharded data
  /// parallelism divides, its shard, which has one dimension. Not collective.
  TensorDict local_state_dict() const;
  /// Copies values in. Before partitioning, and after, each rank takes what it holds; for
  /// delayed parameters the tensors are kept until the first step, unchanged. Divided parameters
  /// are given whole, and each rank takes its part. Throws one
  /// `CheckpointError` that lists all missing or unexpected names and other shapes or dtypes; then
  /// nothing has changed. `strict = false` accepts missing and unexpected names. With `fp16` or
  /// `bf16` other floating point types are rounded.
  void load_state_dict(const TensorDict& state, bool strict = true);

  void train(bool on = true) { module_->train(on); }
  void eval() { module_->eval(); }
  bool is_training() const { return module_->is_training(); }
  /// Sets gradients to undefined. Throws `UsageError` inside a step function.
  void zero_grad();
  /// Ignored with one warning before partitioning: move the module before it is wrapped. Throws
  /// `UsageError` after, as documented for SMP.
  void to(at::Device device);
  /// Gathers all parameters and buffers into the module on every rank of the pipeline, so that it
  /// can be used as a plain module. Collective over the pipeline, as documented for SMP; with
  /// sharded data parallelism over the world. Training goes on with the owners' values. Throws
  /// `UsageError` where parameters are divided among the ranks of a tensor-parallel group:
  /// `state_dict` has them whole.
  void cpu();

  /// Whether each rank of a tensor-parallel group has its own part of a parameter. Known for
  /// modules of `smp::nn` from the start, for others after the first step.
  bool is_distributed_parameter(const at::Tensor& parameter) const;
  /// The modules that have such parameters themselves, by their path.
  torch::OrderedDict<std::string, std::shared_ptr<torch::nn::Module>> distributed_modules() const;
  /// The parameters that all ranks of a tensor-parallel group hold alike, and the distributed ones.
  /// In SMP gradients of the former are reduced over the data-parallel group, and of the latter
  /// over that of the replicas. Here the ranks of a tensor-parallel group run the same samples, so
  /// that all are reduced over the replicas, and all are divided by the same number.
  TensorDict default_reducer_named_parameters() const;
  TensorDict scaled_batch_reducer_named_parameters() const;
  /// Which parameters, of all models, the ranks of a tensor-parallel group divided, along which
  /// dimension, and of the others why not. Empty before the first step and without tensor
  /// parallelism.
  const std::string& tensor_parallelism_report() const;

  /// True once the first step has divided the model among the ranks.
  bool partitioned() const;
  /// Which stage got what, and why: the report of the first step. Empty before.
  const std::string& partition_report() const { return report_; }

  /// Called once when the models have been partitioned, before the first microbatch runs; at once
  /// if that was already.
  RemovableHandle register_post_partition_hook(std::function<void()> hook);
  /// Called after every step that trained.
  RemovableHandle register_post_step_hook(std::function<void()> hook);

  /// The wrapped module.
  const std::shared_ptr<torch::nn::Module>& module_ptr() const { return module_; }
  /// The type of its parameters by the configuration's `fp16` or `bf16`.
  const std::optional<at::ScalarType>& half() const { return half_; }
  const ModelOptions& options() const { return options_; }
  /// A name of the module's with the model's own before it.
  std::string full_name(const std::string& name) const;

  /// For the runtime: the parameters whose gradients this rank reduces. Those that a later model
  /// has, too, are left to that one.
  std::vector<at::Tensor> trained_parameters() const;
  /// The size of its gradient buckets.
  int64_t bucket_bytes() const;
  /// How those that are trained at first are divided among the replicas; null before partitioning,
  /// and without `shard_optimizer_state`.
  std::shared_ptr<dp::ParameterSlices> slices();

  /// For the runtime: how parameters of `nn::SplitModule`s are divided, by full name.
  std::vector<std::pair<std::string, nn::ParameterSplit>> split_parameters() const;
  /// For the runtime: adds parameters and buffers, runs hooks, keeps the report.
  void add_to(graph::TensorTable& table) const;
  void run_post_partition_hooks();
  void run_post_step_hooks();
  void set_partition_report(std::string report) { report_ = std::move(report); }

 private:
  using Hooks = std::list<std::function<void()>>;

  RemovableHandle add_hook(const std::shared_ptr<Hooks>& hooks, std::function<void()> hook);
  TensorDict local(const TensorDict& all) const;
  std::optional<size_t> shard_of(const at::Tensor& parameter) const;
  TensorDict parameters_that_are(bool distributed) const;
  void check_outside_step(const char* call) const;

  std::shared_ptr<torch::nn::Module> module_;
  ModelOptions options_;
  std::shared_ptr<Runtime> runtime_;
  std::optional<at::ScalarType> half_;
  std::shared_ptr<Hooks> post_partition_ = std::make_shared<Hooks>();
  std::shared_ptr<Hooks> post_step_ = std::make_shared<Hooks>();
  std::shared_ptr<dp::ParameterSlices> slices_;
  std::string report_;
};

}  // namespace smp
