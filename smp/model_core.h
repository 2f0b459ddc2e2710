// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/ordered_dict.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "smp/comm_hooks.h"
#include "smp/export.h"
#include "smp/join.h"
#include "smp/model_options.h"
#include "smp/removable_handle.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace smp {

namespace runtime {
class Model;
}  // namespace runtime

class KeyedRandom;

/// The part of a `DistributedModel` that does not depend on the type of its module. Copies refer to
/// the same model.
class SMP_API ModelCore {
 public:
  using TensorDict = torch::OrderedDict<std::string, at::Tensor>;

  /// The same as the constructor of `DistributedModel`.
  ModelCore(std::shared_ptr<torch::nn::Module> module, const ModelOptions& options);

  /// Differentiates `loss` (a scalar) in the step function under way. Several calls are one pass
  /// over all losses, like one `torch::autograd::backward` of them. `loss` is multiplied by the
  /// loss scale of a `DistributedOptimizer` that has one. It is SMP's `model.backward`, without
  /// `retain_graph`.
  ///
  /// Throws `UsageError` outside a step function, for a tensor that is no scalar and has no
  /// gradient given, and in another mode (autocast) than the call before. When the function
  /// returns, it is thrown for two calls over the same operators, and for memory that was written
  /// in place between two calls that go back through it.
  void backward(const at::Tensor& loss) const;
  /// The same for several tensors, with their gradients unless all are scalars.
  void backward(const std::vector<at::Tensor>& tensors,
                const std::vector<at::Tensor>& gradients = {}) const;

  /// All parameters, each once: for building an optimizer, before or after partitioning. Parameters
  /// that other ranks of the pipeline own, and their gradients, have no numbers: writes into them,
  /// an optimizer's updates too, are left to the owner, and operations that need their numbers
  /// throw `UsageError` (docs/recipes.md).
  std::vector<at::Tensor> parameters() const;
  std::vector<at::Tensor> buffers() const;
  /// All parameters under every name they are registered with, as the plain module lists them.
  TensorDict named_parameters() const;
  TensorDict named_buffers() const;

  /// The parameters and buffers that this rank owns. Throw `UsageError` before the first step has
  /// partitioned the model.
  std::vector<at::Tensor> local_parameters() const;
  TensorDict local_named_parameters() const;
  std::vector<at::Tensor> local_buffers() const;
  TensorDict local_named_buffers() const;

  /// The tensors that the optimizer of this rank updates, each once, by the name of its parameter:
  /// with `shard_optimizer_state` this replica's pieces of the local parameters, one-dimensional
  /// tensors on their memory whose `.grad` is that piece of the gradient; otherwise the local
  /// parameters. Meant for code that clips or reads gradients: other replicas do not see a write of
  /// a piece after `optimizer.step()`, and the next step or save throws `UsageError`. Throw it
  /// before partitioning.
  std::vector<at::Tensor> local_virtual_parameters() const;
  TensorDict virtual_named_parameters() const;

  /// The modules with a parameter or buffer of their own (not of a child) that this rank owns, and
  /// the same by their path, which is empty for the wrapped module. Operators are divided, not
  /// modules, so one may be on two ranks, and one without parameters is on none. Throw `UsageError`
  /// before partitioning.
  std::vector<std::shared_ptr<torch::nn::Module>> local_modules() const;
  torch::OrderedDict<std::string, std::shared_ptr<torch::nn::Module>> local_named_modules() const;

  /// Copies of all parameters and buffers, whole, on every rank; with `gather_to_rank0` on mp_rank
  /// 0 of each replica only, and an empty dictionary on the others. Before partitioning they are
  /// the values with which training begins, those of world rank 0. Collective over the pipeline
  /// and its tensor-parallel groups, and with sharded data parallelism or before partitioning over
  /// the world: all ranks must call it, or the others wait until the time-out.
  TensorDict state_dict(bool gather_to_rank0 = false) const;
  /// Copies of the values that this rank owns: of a divided parameter its part, with sharded data
  /// parallelism its one-dimensional shard. Not collective.
  TensorDict local_state_dict() const;
  /// Copies values in. Before partitioning, and after, each rank takes the tensors that it holds;
  /// for delayed parameters the tensors are kept until the first step, unchanged. Divided
  /// parameters are given whole, and each rank takes its part. Throws one `CheckpointError` that
  /// lists all missing or unexpected names and other shapes or dtypes; then nothing has changed.
  /// `strict = false` accepts missing and unexpected names. With `fp16` or `bf16` other floating
  /// point types are rounded.
  ///
  /// With `same_partition_load`, `state` is the result of `local_state_dict` on this rank in a run
  /// of the same layout and partition. It is checked and loaded when the model is partitioned, so
  /// before the first step the tensors are kept until then.
  void load_state_dict(const TensorDict& state, bool strict = true,
                       bool same_partition_load = false) const;

  void train(bool on = true) const;
  void eval() const;
  bool is_training() const;
  /// Sets gradients to undefined. Throws `UsageError` inside a step function.
  void zero_grad() const;
  /// Ignored with one warning before partitioning: move the module before it is wrapped. Throws
  /// `UsageError` after, as documented for SMP.
  void to(at::Device device) const;
  /// Gathers all parameters and buffers into the module on every rank of the pipeline, so that it
  /// can be used as a plain module until the next step that trains. Collective over the pipeline
  /// and its tensor-parallel groups, and with sharded data parallelism over the world. Training
  /// goes on with the owners' values. Tensors divided among sharded ranks are released at the next
  /// step; those of tensor-parallel groups also at any call of this class, an optimizer or a
  /// checkpoint. Until then modules of `smp::nn` do not communicate.
  void cpu() const;

  /// Whether each rank of a tensor-parallel group has its own part of a parameter. Known for
  /// modules of `smp::nn` from the start, for others after the first step.
  bool is_distributed_parameter(const at::Tensor& parameter) const;
  /// The modules that have such parameters themselves, by their path.
  torch::OrderedDict<std::string, std::shared_ptr<torch::nn::Module>> distributed_modules() const;
  /// The parameters that all ranks of a tensor-parallel group hold alike, and the distributed ones.
  /// In SMP gradients of the former are reduced over the data-parallel group. Here gradients of
  /// both are reduced over the replicas and divided by the same number, since the ranks of a
  /// tensor-parallel group run the same samples.
  TensorDict default_reducer_named_parameters() const;
  TensorDict scaled_batch_reducer_named_parameters() const;
  /// A report of the parameters of all models: along which dimension the ranks of a tensor-parallel
  /// group divide each, or why they do not. Empty before the first step and without tensor
  /// parallelism.
  const std::string& tensor_parallelism_report() const;

  /// True once the first step has divided the model among the ranks.
  bool partitioned() const;
  /// The report of the first step: the share of each stage, and why. Empty before.
  const std::string& partition_report() const;

  /// Called once when the models have been partitioned, before the first microbatch runs; at once
  /// if that was already.
  RemovableHandle register_post_partition_hook(std::function<void()> hook) const;
  /// Called after every step that trained.
  RemovableHandle register_post_step_hook(std::function<void()> hook) const;

  /// Reduces each bucket over the replicas by `hook` instead of the mean: see comm_hooks.h. The
  /// bucket holds the sums over this replica's microbatches, and its `divisor` is the number of
  /// microbatches of all replicas (of replicas, without `average_grads_across_microbatches`), so
  /// the hook averages over both. Called on all ranks with the same hook, once, before the first
  /// step. Throws `UsageError` the second time, after the first step, and where replicas get parts
  /// of gradients only (`shard_optimizer_state`, `sharded_data_parallel_degree`) or
  /// `gradient_shards` is set. (SMP needs `ddp` and `overlapping_allreduce` for it.)
  void register_comm_hook(CommHook hook) const;

  /// While the result lives, replicas may run out of batches: at the end of the block they take
  /// part in the reductions of the others' steps with zeros, until none has batches, and then take
  /// parameters and buffers of one that was last; their gradients are undefined then, and the
  /// optimizer's state stays as it was. Each replica calls its step functions at least once; the
  /// ranks of one pipeline, and of a tensor-parallel group, equally often. It covers all models of
  /// the program. Inside, call nothing else that is collective over the replicas, such as a save.
  ///
  /// Collective over the replicas. Throws `UsageError` inside another `join`, in a step function,
  /// with `shard_optimizer_state`, `sharded_data_parallel_degree`, `fp16`, `bf16` or a loss scale,
  /// and at the end of the block where a replica has trained nothing. As documented for SMP.
  [[nodiscard]] Join join(const JoinOptions& options = {}) const;

  /// The wrapped module.
  const std::shared_ptr<torch::nn::Module>& module_ptr() const;
  /// The type of its parameters by the configuration's `fp16` or `bf16`.
  std::optional<at::ScalarType> half() const;
  const ModelOptions& options() const;

  /// The library's record of the model; its type is internal.
  runtime::Model& impl() const { return *model_; }

 private:
  /// The modules with a parameter or buffer of their own for which `holds` is true.
  torch::OrderedDict<std::string, std::shared_ptr<torch::nn::Module>> modules_that(
      const std::function<bool(const at::Tensor&)>& holds) const;

  std::shared_ptr<runtime::Model> model_;
};

namespace detail {
/// A call of a `DistributedModel`, while it runs. Outside a step function it throws `UsageError`
/// unless this rank has the whole model or shares it, by layers that divide themselves, with the
/// other ranks of its tensor-parallel group. These call it with the same `inputs`, which is
/// checked, and draw random numbers from the same streams.
class SMP_API ModelCall {
 public:
  ModelCall(const ModelCore& model, const std::vector<at::Tensor>& inputs);
  ~ModelCall();
  ModelCall(const ModelCall&) = delete;
  ModelCall& operator=(const ModelCall&) = delete;

 private:
  std::unique_ptr<KeyedRandom> random_;
};
}  // namespace detail

}  // namespace smp
