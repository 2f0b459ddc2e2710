// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/ordered_dict.h>

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/apply.h"
#include "dp/gradient_buckets.h"
#include "runtime/runtime.h"
#include "smp/comm_hooks.h"
#include "smp/model_options.h"
#include "smp/nn/parameter_split.h"
#include "smp/removable_handle.h"

namespace smp::runtime {

class Average;

/// A wrapped module: its tensors by name, how they are divided, and the program's hooks. The
/// methods that users call are documented in `smp::ModelCore`; those that need the parts of
/// runtime/ above this one are functions (session/model_calls.h).
class Model {
 public:
  using TensorDict = torch::OrderedDict<std::string, at::Tensor>;

  /// Converts the module, with `fp16` or `bf16`.
  Model(std::shared_ptr<torch::nn::Module> module, ModelOptions options,
        std::shared_ptr<Runtime> runtime);

  std::vector<at::Tensor> parameters() const;
  std::vector<at::Tensor> buffers() const;
  TensorDict named_parameters() const;
  TensorDict named_buffers() const;
  TensorDict local_named_parameters() const;
  TensorDict local_named_buffers() const;

  /// Whether this rank owns a parameter or buffer. Throws `UsageError` before partitioning.
  bool is_local(const at::Tensor& tensor) const;
  /// Whether each rank of a tensor-parallel group has its own part of a parameter.
  bool is_distributed_parameter(const at::Tensor& parameter) const;
  /// The parameters of which that is so, or not so.
  TensorDict parameters_that_are(bool distributed) const;
  const std::string& tensor_parallelism_report() const;

  bool partitioned() const;
  const std::string& partition_report() const { return report_; }
  void set_partition_report(std::string report) { report_ = std::move(report); }

  RemovableHandle register_post_partition_hook(std::function<void()> hook);
  RemovableHandle register_post_step_hook(std::function<void()> hook);
  void run_post_partition_hooks();
  void run_post_step_hooks();

  Runtime& runtime() const { return *runtime_; }
  const std::shared_ptr<torch::nn::Module>& module_ptr() const { return module_; }
  /// The type of its parameters by the configuration's `fp16` or `bf16`.
  const std::optional<at::ScalarType>& half() const { return half_; }
  const ModelOptions& options() const { return options_; }
  /// A name of the module's with the model's own before it.
  std::string full_name(const std::string& name) const;

  /// Adds parameters and buffers under their full names.
  void add_to(ParameterTable& table) const;
  /// How parameters of `nn::SplitModule`s are divided, by full name.
  std::vector<std::pair<std::string, nn::ParameterSplit>> split_parameters() const;
  /// The parameters whose gradients this rank reduces. Those that a later model has, too, are left
  /// to that one.
  std::vector<at::Tensor> trained_parameters() const;
  void register_comm_hook(CommHook hook);
  bool has_comm_hook() const { return comm_hook_ != nullptr; }
  /// The size of its gradient buckets.
  int64_t bucket_bytes() const;
  /// How those that are trained at first are divided among the replicas; null before partitioning,
  /// and without `shard_optimizer_state`.
  std::shared_ptr<dp::ParameterPieces> pieces();
  /// The sums of the gradients of these of its parameters. All programs that sum alike share it,
  /// one after the other: a program of another batch size needs no memory for gradients.
  std::shared_ptr<dp::WholeGradients> gradients(const std::vector<at::Tensor>& parameters,
                                                const dp::BucketOptions& options);

  /// Averages of its parameters, each from its construction to its end.
  std::vector<Average*> averages;
  /// The wholes that the last `model->cpu()` has lent.
  std::weak_ptr<LentWholes> gathered;
  /// How often the ranks of a tensor-parallel group have called it together outside of steps.
  uint64_t shared_calls = 0;

 private:
  struct SharedGradients {
    std::vector<at::Tensor> parameters;
    dp::BucketOptions options;
    std::weak_ptr<dp::WholeGradients> gradients;
  };
  using Hooks = std::list<std::function<void()>>;

  RemovableHandle add_hook(const std::shared_ptr<Hooks>& hooks, std::function<void()> hook);
  TensorDict local(const TensorDict& all) const;
  std::shared_ptr<dp::WholeGradients> make_gradients(const std::vector<at::Tensor>& parameters,
                                                     const dp::BucketOptions& options);

  std::shared_ptr<torch::nn::Module> module_;
  ModelOptions options_;
  std::shared_ptr<Runtime> runtime_;
  std::optional<at::ScalarType> half_;
  std::shared_ptr<Hooks> post_partition_ = std::make_shared<Hooks>();
  std::shared_ptr<Hooks> post_step_ = std::make_shared<Hooks>();
  std::shared_ptr<dp::ParameterPieces> pieces_;
  std::vector<SharedGradients> shared_gradients_;
  CommHook comm_hook_;
  std::string report_;
};

/// The models' tensors under their full names, each once.
std::vector<checkpoint::NamedTensor> tensors_of(const ParameterTable& table,
                                                const std::vector<Model*>& models);

/// The tensors, each once.
std::vector<at::Tensor> unique_values(const Model::TensorDict& dict);

}  // namespace smp::runtime
