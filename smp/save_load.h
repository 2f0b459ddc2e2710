#pragma once

#include <torch/arg.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "smp/distributed_model.h"
#include "smp/distributed_optimizer.h"

namespace smp {

class SaveUnderWay;

/// What a checkpoint says about the run it was taken from.
struct LoadedRun {
  int64_t step = 0;             ///< training steps done
  nlohmann::json user_content;  ///< what the program gave to `save`
  nlohmann::json extra;         ///< by name, see `register_checkpoint_state`
};

/// A save that may still be under way; copies are the same one. Nothing needs to be done with it: a
/// save goes on without, and the next save, `load` and the end of the program wait for it.
class SaveHandle {
 public:
  explicit SaveHandle(std::shared_ptr<SaveUnderWay> save) : save_(std::move(save)) {}

  /// True when the checkpoint is complete, or the save has failed.
  bool is_done() const;
  /// Returns when the checkpoint is complete. Throws the `CheckpointError` that the save ended
  /// with, the same on all ranks; one that no rank asks for comes from the next save.
  void wait() const;

 private:
  std::shared_ptr<SaveUnderWay> save_;
};

/// Options of `save_checkpoint`; but for the last, SMP's arguments and defaults.
struct SaveCheckpointOptions {
  /// True: all ranks write what they own, and the optimizer: fast, and what a run continues from.
  /// False: world rank 0 writes the model as one file, "model.safetensors", which other programs
  /// read, and nothing else.
  TORCH_ARG(bool, partial) = true;
  TORCH_ARG(nlohmann::json, user_content) = nlohmann::json::object();
  /// How many partial checkpoints of the folder are kept, this one among them; none: all. The
  /// oldest are removed when this one is complete.
  TORCH_ARG(std::optional<int64_t>, num_kept_partial_checkpoints) = std::nullopt;
  /// Return when model and optimizer have been copied to host memory, and write meanwhile.
  TORCH_ARG(bool, asynchronous) = false;
};

/// Options of `load` and `resume_from_checkpoint`.
struct LoadOptions {
  /// Tensors that are missing or unexpected are an error.
  TORCH_ARG(bool, strict) = true;
  /// Floating point tensors may be stored in another floating point type than the model's: values
  /// are converted, float32 ones from master weights where the checkpoint has them.
  TORCH_ARG(bool, convert) = false;
  /// Resuming only: whether to load the checkpoint that all ranks wrote, with the optimizer, or the
  /// model that is one file.
  TORCH_ARG(bool, partial) = true;
  /// False: the optimizer is left as it is.
  TORCH_ARG(bool, load_optimizer) = true;
  /// False: of the optimizer's state only master weights are loaded, as documented for sharded data
  /// parallelism; the options of the param groups too.
  TORCH_ARG(bool, load_sharded_optimizer_state) = true;
};

namespace detail {

using Models = std::vector<ModelCore*>;
using Optimizers = std::vector<OptimizerCore*>;

SaveHandle save_run(const std::string& path, const Models& models, const Optimizers& optimizers,
                    const nlohmann::json& user_content, bool asynchronous);
SaveHandle save_tagged(const std::string& path, const std::string& tag, const Models& models,
                       const Optimizers& optimizers, const SaveCheckpointOptions& options);
LoadedRun load_run(const std::string& path, const Models& models, const Optimizers& optimizers,
                   const LoadOptions& options);
LoadedRun resume_run(const std::string& path, const std::optional<std::string>& tag,
                     const Models& models, const Optimizers& optimizers,
                     const LoadOptions& options);

/// Nothing that is no optimizer has this type.
template <class Optimizer>
using IfOptimizer = decltype(std::declval<const Optimizer&>().core(), void());

}  // namespace detail

/// Saves a checkpoint as the folder `path`: model, optimizer, random streams, number of steps,
/// registered state and `user_content`. Collective over the world; the ranks share a file system.
/// Every stage writes its own tensors, under names that do not depend on the layout. A crash at any
/// point leaves an earlier checkpoint of that name loadable. Files that cannot be written are one
/// `CheckpointError` on all ranks, after which training can go on.
template <class M>
void save(const std::string& path, const DistributedModel<M>& model,
          const nlohmann::json& user_content = nlohmann::json::object()) {
  detail::save_run(path, {&model.core()}, {}, user_content, /*asynchronous=*/false);
}
template <class M, class Optimizer>
auto save(const std::string& path, const DistributedModel<M>& model, const Optimizer& optimizer,
          const nlohmann::json& user_content = nlohmann::json::object())
    -> detail::IfOptimizer<Optimizer> {
  detail::save_run(path, {&model.core()}, {&optimizer.core()}, user_content,
                   /*asynchronous=*/false);
}

/// The same, but returns as soon as this rank's share has been copied to host memory, while another
/// thread writes it. What is saved is what there was at the call. One save at a time: the next one
/// waits. Until it is complete, an earlier checkpoint of that name can be loaded, also when a rank
/// dies.
template <class M>
SaveHandle save_async(const std::string& path, const DistributedModel<M>& model,
                      const nlohmann::json& user_content = nlohmann::json::object()) {
  return detail::save_run(path, {&model.core()}, {}, user_content, /*asynchronous=*/true);
}
template <class M, class Optimizer, class = detail::IfOptimizer<Optimizer>>
SaveHandle save_async(const std::string& path, const DistributedModel<M>& model,
                      const Optimizer& optimizer,
                      const nlohmann::json& user_content = nlohmann::json::object()) {
  return detail::save_run(path, {&model.core()}, {&optimizer.core()}, user_content,
                          /*asynchronous=*/true);
}

/// SMP's `save_checkpoint`: saves as `path`/`tag`_partial, or as `path`/`tag` with
/// `partial(false)`, and notes in `path`/newest that this is the newest. All ranks give the same
/// arguments, but for `user_content`, which is world rank 0's. Otherwise as `save`.
template <class M>
SaveHandle save_checkpoint(const std::string& path, const std::string& tag,
                           const DistributedModel<M>& model,
                           const SaveCheckpointOptions& options = {}) {
  return detail::save_tagged(path, tag, {&model.core()}, {}, options);
}
template <class M, class Optimizer, class = detail::IfOptimizer<Optimizer>>
SaveHandle save_checkpoint(const std::string& path, const std::string& tag,
                           const DistributedModel<M>& model, const Optimizer& optimizer,
                           const SaveCheckpointOptions& options = {}) {
  return detail::save_tagged(path, tag, {&model.core()}, {&optimizer.core()}, options);
}

/// Loads what `save` wrote, into any number of stages and replicas, before or after the first
/// step. Collective over the world. First everything is checked, the bytes of all tensors too, of
/// which each rank reads a share: one `CheckpointError` on all ranks lists everything that is
/// missing, unexpected, different or damaged, and then nothing has changed. The following steps
/// give the losses of the run that was not interrupted, bit for bit, if `gradient_shards` is the
/// same (it is taken from the checkpoint unless the configuration sets it). Each rank reads what it
/// holds, one tensor at a time. To load into a plain module without `init`, use `load_into_module`.
template <class M>
LoadedRun load(const std::string& path, DistributedModel<M>& model,
               const LoadOptions& options = {}) {
  return detail::load_run(path, {&model.core()}, {}, options);
}
template <class M, class Optimizer, class = detail::IfOptimizer<Optimizer>>
LoadedRun load(const std::string& path, DistributedModel<M>& model, Optimizer& optimizer,
               const LoadOptions& options = {}) {
  return detail::load_run(path, {&model.core()}, {&optimizer.core()}, options);
}

/// SMP's `resume_from_checkpoint`: loads what `save_checkpoint` saved under `tag`, by default the
/// newest of `path`. Otherwise as `load`; any layout may follow any other.
template <class M>
LoadedRun resume_from_checkpoint(const std::string& path, const std::optional<std::string>& tag,
                                 DistributedModel<M>& model, const LoadOptions& options = {}) {
  return detail::resume_run(path, tag, {&model.core()}, {}, options);
}
template <class M, class Optimizer, class = detail::IfOptimizer<Optimizer>>
LoadedRun resume_from_checkpoint(const std::string& path, const std::optional<std::string>& tag,
                                 DistributedModel<M>& model, Optimizer& optimizer,
                                 const LoadOptions& options = {}) {
  return detail::resume_run(path, tag, {&model.core()}, {&optimizer.core()}, options);
}

/// Has checkpoints hold what `save` returns, under a name of its own, and calls `load` with it when
/// one is loaded: for learning-rate schedulers, positions in data and the like. `save` is called on
/// world rank 0 and `load` on all ranks, if the checkpoint has the name. Throws `UsageError` for a
/// name that is taken.
RemovableHandle register_checkpoint_state(const std::string& name,
                                          std::function<nlohmann::json()> save,
                                          std::function<void(const nlohmann::json&)> load);

/// Loads the model of a checkpoint into a plain module of this process; needs no `init`. Of the
/// options, `strict` and `convert` count. Checks as `load` does.
void load_into_module(const std::string& path, torch::nn::Module& module,
                      const LoadOptions& options = {});

}  // namespace smp
