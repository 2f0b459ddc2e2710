// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/ordered_dict.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "smp/checkpoint_options.h"
#include "smp/checkpoint_parts.h"
#include "smp/detail/archive.h"
#include "smp/detail/plain_arguments.h"
#include "smp/export.h"
#include "smp/optimizer_core.h"
#include "smp/removable_handle.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace smp {

class ModelCore;

namespace runtime {
class BackgroundSave;
}  // namespace runtime

namespace detail {
SMP_API void save_object(const std::string& bytes, const std::string& path, bool partial);
/// Calls `read` with the bytes of a file; its exception becomes a `CheckpointError`.
SMP_API void load_object(const std::string& path, bool partial,
                         const std::function<void(const std::string&)>& read);
}  // namespace detail

/// A save that may still be under way; copies are the same one. It may be dropped: the save goes on
/// without it, and the next save, `load` and the end of the program wait for the save.
class SMP_API SaveHandle {
 public:
  explicit SaveHandle(std::shared_ptr<runtime::BackgroundSave> save) : save_(std::move(save)) {}

  /// True when the checkpoint is complete, or the save has failed.
  bool is_done() const;
  /// Returns when the checkpoint is complete. Throws the `CheckpointError` that the save ended
  /// with, the same on all ranks. If no rank waits, the next save throws it.
  void wait() const;

 private:
  std::shared_ptr<runtime::BackgroundSave> save_;
};

/// Saves a checkpoint as the folder `path`: model and optimizer, or several (`CheckpointParts`),
/// random streams, number of steps, registered state and `user_content`, text of JSON. Collective
/// over the world; the ranks share a file system. Every stage writes its own tensors, under names
/// that do not depend on the layout. A crash at any point leaves an earlier checkpoint of that name
/// loadable. Files that cannot be written are one `CheckpointError` on all ranks, after which
/// training can go on.
SMP_API void save(const std::string& path, const CheckpointParts& parts,
                  const std::string& user_content = "{}");
inline void save(const std::string& path, const ModelCore& model,
                 const std::string& user_content = "{}") {
  save(path, CheckpointParts().add(model), user_content);
}
inline void save(const std::string& path, const ModelCore& model, const OptimizerCore& optimizer,
                 const std::string& user_content = "{}") {
  save(path, CheckpointParts().add(model, optimizer), user_content);
}

/// The same, but returns as soon as this rank's share has been copied to host memory, while another
/// thread writes it. The values saved are those at the call. One save at a time: the next one
/// waits. Until it is complete, an earlier checkpoint of that name can be loaded, also when a rank
/// dies.
[[nodiscard]] SMP_API SaveHandle save_async(const std::string& path, const CheckpointParts& parts,
                                            const std::string& user_content = "{}");
[[nodiscard]] inline SaveHandle save_async(const std::string& path, const ModelCore& model,
                                           const std::string& user_content = "{}") {
  return save_async(path, CheckpointParts().add(model), user_content);
}
[[nodiscard]] inline SaveHandle save_async(const std::string& path, const ModelCore& model,
                                           const OptimizerCore& optimizer,
                                           const std::string& user_content = "{}") {
  return save_async(path, CheckpointParts().add(model, optimizer), user_content);
}

/// SMP's `save_checkpoint`: saves as `path`/`tag`_partial, or as `path`/`tag` with
/// `partial(false)`, and notes in `path`/newest that this is the newest. All ranks give the same
/// arguments, but for `user_content`, which is world rank 0's. Otherwise as `save`.
SMP_API SaveHandle save_checkpoint(const std::string& path, const std::string& tag,
                                   const CheckpointParts& parts,
                                   const SaveCheckpointOptions& options = {});
inline SaveHandle save_checkpoint(const std::string& path, const std::string& tag,
                                  const ModelCore& model,
                                  const SaveCheckpointOptions& options = {}) {
  return save_checkpoint(path, tag, CheckpointParts().add(model), options);
}
inline SaveHandle save_checkpoint(const std::string& path, const std::string& tag,
                                  const ModelCore& model, const OptimizerCore& optimizer,
                                  const SaveCheckpointOptions& options = {}) {
  return save_checkpoint(path, tag, CheckpointParts().add(model, optimizer), options);
}

/// Loads a checkpoint of `save` into any number of stages and replicas, before or after the first
/// step. Collective over the world. First everything is checked, the bytes of all tensors too, of
/// which each rank reads a share: one `CheckpointError` on all ranks lists everything that is
/// missing, unexpected, different or damaged, and then nothing has changed. The following steps
/// give the losses of the run that was not interrupted, bit for bit, if `gradient_shards` is the
/// same (it is taken from the checkpoint unless the configuration sets it). Each rank reads its own
/// tensors, one at a time. To load into a plain module without `init`, use `load_into_module`.
SMP_API LoadedRun load(const std::string& path, const CheckpointParts& parts,
                       const LoadOptions& options = {});
inline LoadedRun load(const std::string& path, const ModelCore& model,
                      const LoadOptions& options = {}) {
  return load(path, CheckpointParts().add(model), options);
}
inline LoadedRun load(const std::string& path, const ModelCore& model,
                      const OptimizerCore& optimizer, const LoadOptions& options = {}) {
  return load(path, CheckpointParts().add(model, optimizer), options);
}

/// SMP's `resume_from_checkpoint`: loads the checkpoint that `save_checkpoint` saved under `tag`,
/// by default the newest of `path`. Otherwise as `load`; any layout may follow any other. With
/// `LoadOptions().begin_anew(true)` a program needs not look whether there is one.
SMP_API LoadedRun resume_from_checkpoint(const std::string& path,
                                         const std::optional<std::string>& tag,
                                         const CheckpointParts& parts,
                                         const LoadOptions& options = {});
inline LoadedRun resume_from_checkpoint(const std::string& path,
                                        const std::optional<std::string>& tag,
                                        const ModelCore& model, const LoadOptions& options = {}) {
  return resume_from_checkpoint(path, tag, CheckpointParts().add(model), options);
}
inline LoadedRun resume_from_checkpoint(const std::string& path,
                                        const std::optional<std::string>& tag,
                                        const ModelCore& model, const OptimizerCore& optimizer,
                                        const LoadOptions& options = {}) {
  return resume_from_checkpoint(path, tag, CheckpointParts().add(model, optimizer), options);
}

/// Keeps the checkpoint that `save` would write in memory that outlives the processes of the job:
/// for `"recovery"`, with which a job that fails goes on from there (see docs/recovery.md);
/// without, it does nothing. Must be called last in an iteration, since a job that goes on does not
/// repeat the work before it: `resumed->step` and `user_content` then say where the next iteration
/// begins. The first of `recovery_interval` calls keeps a copy; without that parameter, as many
/// calls do that copies take 3 % of the time. It returns as soon as this rank's share has been
/// copied; another thread completes the copy, and until then the one before remains. Collective
/// over the world; all ranks give the same arguments, but for `user_content`, which is world rank
/// 0's. Where the memory is full, a `CheckpointError` on all ranks, of this call or of the next,
/// after which training can go on.
SMP_API void keep_copy(const CheckpointParts& parts, const std::string& user_content = "{}");
inline void keep_copy(const ModelCore& model, const OptimizerCore& optimizer,
                      const std::string& user_content = "{}") {
  keep_copy(CheckpointParts().add(model, optimizer), user_content);
}

/// For jobs that are started again after a failure, by `"recovery"` or `smprun --restarts`: loads,
/// as `load` does, the newest of the copy in memory and the job's complete checkpoints with an
/// optimizer. If it cannot be loaded, the next older one is taken, with a warning; if none can, the
/// error is that of the oldest. Returns nothing, and does nothing, when the job is started for the
/// first time or has saved none. Collective over the world. Programs with several models save all
/// of them in one checkpoint, as `CheckpointParts`.
SMP_API std::optional<LoadedRun> resume_after_restart(const CheckpointParts& parts,
                                                      const LoadOptions& options = {});
inline std::optional<LoadedRun> resume_after_restart(const ModelCore& model,
                                                     const OptimizerCore& optimizer,
                                                     const LoadOptions& options = {}) {
  return resume_after_restart(CheckpointParts().add(model, optimizer), options);
}

/// Adds the result of `save`, text of JSON, to checkpoints under `name`, and calls `load` with it
/// when one is loaded: for positions in data and the like (`register_scheduler` is for
/// learning-rate schedulers). `save` is called on world rank 0 and `load` on all ranks, if the
/// checkpoint has the name. Throws `UsageError` for a name that is taken.
SMP_API RemovableHandle register_checkpoint_state(const std::string& name,
                                                  std::function<std::string()> save,
                                                  std::function<void(const std::string&)> load);

/// Adds tensors of the program to checkpoints of `model`, one for each parameter or for some,
/// divided among the ranks as the parameters are: averages by a rule of your own, masks, momenta.
/// `save` is called on the ranks that write. It returns tensors of this rank's parameters, with the
/// names and sizes of `model->local_named_parameters()`, in any type, and the same on all replicas;
/// before the first step each rank owns all parameters. `load` is called on all ranks with the
/// tensors of the rank's parameters, on the CPU: when a checkpoint is loaded, or at the first step,
/// if that is later. Neither is collective.
///
/// Register them on all ranks, under a name that the model has once, before a checkpoint is loaded.
/// A checkpoint without them is a `CheckpointError`, or leaves the program's as they are with
/// `strict(false)`. Full checkpoints (`partial(false)`) have the model alone. For a tensor that all
/// ranks have alike register a buffer of the module, or a text (`register_checkpoint_state`).
///
/// Throws `UsageError` for a name that is taken; saves throw it for tensors of other names or
/// sizes, and with sharded data parallelism.
///
/// Example:
/// \code
///   torch::OrderedDict<std::string, torch::Tensor> slow;  // of this rank's parameters
///   smp::register_checkpoint_tensors(
///       "slow", model, [&] { return slow; }, [&](const auto& tensors) { slow = tensors; });
/// \endcode
SMP_API RemovableHandle register_checkpoint_tensors(
    const std::string& name, const ModelCore& model,
    std::function<torch::OrderedDict<std::string, at::Tensor>()> save,
    std::function<void(const torch::OrderedDict<std::string, at::Tensor>&)> load);

/// Writes an object to a file of its own: any that `smp::send` takes (see smp/objects.h), such as
/// `model->local_state_dict()`'s tensors in a map, positions or results. SMP's `save(obj, f,
/// partial)`. With `partial` the file is `path`_{pp_rank}_{tp_rank}, which each rank of a model
/// writes for itself, so call it where `rdp_rank()` is 0; otherwise it is `path`, for one rank to
/// write. Not collective. Its name only ever holds complete contents. Throws `CheckpointError`.
template <class T>
void save(const T& object, const std::string& path, bool partial = true) {
  detail::save_object(detail::to_bytes(object), path, partial);
}

/// The object that `save` wrote; with `partial` this rank's. Throws `CheckpointError` for a file
/// that is damaged or holds another type. Tensors are on the CPU.
template <class T>
T load(const std::string& path, bool partial = true) {
  T object{};
  detail::load_object(path, partial, [&](const std::string& bytes) {
    object = detail::from_bytes<T>(bytes, "the file");
  });
  return object;
}

/// Loads the model of a checkpoint into a plain module of this process; needs no `init`. The
/// options `strict`, `convert`, `average` and `model` count. Checks as `load` does.
SMP_API void load_into_module(const std::string& path, torch::nn::Module& module,
                              const LoadOptions& options = {});

/// None of these compiles: they name the argument to pass instead of a plain module or optimizer.
template <class... Arguments, class = detail::IfPlain<Arguments...>>
void save(const std::string&, const Arguments&...) {
  detail::refuse_plain<Arguments...>();
}
template <class... Arguments, class = detail::IfPlain<Arguments...>>
SaveHandle save_async(const std::string&, const Arguments&...) {
  detail::refuse_plain<Arguments...>();
  return SaveHandle(nullptr);
}
template <class... Arguments, class = detail::IfPlain<Arguments...>>
SaveHandle save_checkpoint(const std::string&, const std::string&, const Arguments&...) {
  detail::refuse_plain<Arguments...>();
  return SaveHandle(nullptr);
}
template <class... Arguments, class = detail::IfPlain<Arguments...>>
LoadedRun load(const std::string&, const Arguments&...) {
  detail::refuse_plain<Arguments...>();
  return {};
}
template <class... Arguments, class = detail::IfPlain<Arguments...>>
LoadedRun resume_from_checkpoint(const std::string&, const std::optional<std::string>&,
                                 const Arguments&...) {
  detail::refuse_plain<Arguments...>();
  return {};
}
template <class... Arguments, class = detail::IfPlain<Arguments...>>
void keep_copy(const Arguments&...) {
  detail::refuse_plain<Arguments...>();
}
template <class... Arguments, class = detail::IfPlain<Arguments...>>
std::optional<LoadedRun> resume_after_restart(const Arguments&...) {
  detail::refuse_plain<Arguments...>();
  return std::nullopt;
}

}  // namespace smp
