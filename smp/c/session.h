// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/session/session.h"
#include "smp/c/optimizer.h"
#include "smp/c/output_gradient.h"
#include "smp/c/tensors.h"
#include "smp/config.h"
#include "smp/distributed_model.h"
#include "smp/exported.h"
#include "smp/step_output.h"

/// The session of the C interface. Internal.
namespace smp::c {

/// A loaded program that takes and returns tensors in lists.
class Program final : public ExportedModuleImpl {
 public:
  using ExportedModuleImpl::ExportedModuleImpl;

  /// Those with a name are given by it, the others by position. Returns the tensors in the result.
  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs,
                                  const std::vector<std::string>& names);
};

/// The configuration that smp_open is given, and the environment's.
Config read_config(const char* config);

/// Loads a program in evaluation mode.
std::shared_ptr<Program> load_for_inference(const std::string& path);

/// The loss of that name ("output": the first output itself) of a model's outputs. Throws
/// `UsageError` for an unknown name and for a target that is missing or not wanted.
at::Tensor loss_of(const std::string& name, const std::vector<at::Tensor>& outputs,
                   const at::Tensor& target);

/// The outputs that need a gradient, in their order. Throws `UsageError` where none does.
std::vector<at::Tensor> need_gradients(const std::vector<at::Tensor>& outputs);

/// The operations of a session in C++. Each method throws the errors of the functions of smp.h that
/// it calls, and `UsageError` where the model or the optimizer is missing or there already. All but
/// `fail` and `end` are called in a `SessionScope` of its ranks.
class Session {
 public:
  /// Begins it as `runtime::Session` does.
  Session(const std::function<Config()>& config, const std::optional<int64_t>& communicator);
  /// Ends the session, if `end` was not called; its errors are not told.
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  const runtime::Session& ranks() const { return ranks_; }

  /// Tells the other ranks that this one has failed.
  void fail(const std::string& reason) noexcept;
  /// Ends the session; collective.
  void end();

  /// Where this rank computes.
  at::Device device() const;
  void set_device(at::Device device);
  void load(const std::string& train, const std::string& eval);
  void make_optimizer(const std::string& name, const std::string& options);
  void set_learning_rate(double rate);
  const NamedOptimizer& optimizer() const;

  /// The mean of the loss over the microbatches of all replicas.
  double train(NamedTensors inputs, const std::string& loss, const at::Tensor& target);
  void train_by_gradient(NamedTensors inputs, const OutputGradient& gradient);
  /// The outputs, each for the whole batch, and the loss; without a name of one it is 0.
  std::pair<std::vector<at::Tensor>, double> evaluate(NamedTensors inputs,
                                                      const std::optional<std::string>& loss,
                                                      const at::Tensor& target);

  void save(const std::string& folder, const std::string& tag);
  void save_weights(const std::string& folder, const std::string& tag);
  /// Writes `program`, or if empty one of those loaded, with the weights now as `path`.
  void save_program(const std::string& program, const std::string& path);
  int64_t resume(const std::string& folder, const std::optional<std::string>& tag);

  /// Copies of all tensors by name, in the order of the model.
  using State = std::vector<std::pair<std::string, at::Tensor>>;
  void gather_state();
  const State& state() const { return state_; }

 private:
  using Model = DistributedModel<std::shared_ptr<Program>>;
  using Tensors = std::vector<at::Tensor>;
  /// The arguments of a step beside its tensors, which are the same for all microbatches.
  struct Given {
    std::vector<std::string> names;
    std::optional<std::string> loss;
  };

  const Model& model() const;
  Tensors call(const Tensors& inputs) const { return model()(inputs, given_.names); }
  void make_steps();
  void update();

  runtime::Session ranks_;
  std::string program_;  // the one that `save_program` writes
  std::optional<Model> model_;
  std::optional<NamedOptimizer> optimizer_;
  Given given_;
  std::function<StepOutput(const Tensors& inputs, const Tensors& target)> train_;
  std::function<void(const Tensors& inputs)> train_by_gradient_;
  std::function<std::vector<StepOutput>(const Tensors& inputs, const Tensors& target)> evaluate_;
  State state_;
};

}  // namespace smp::c
