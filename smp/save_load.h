// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>

#include "smp/checkpoint_options.h"
#include "smp/detail/archive.h"
#include "smp/detail/by_arrow.h"
#include "smp/export.h"
#include "smp/optimizer_core.h"
#include "smp/removable_handle.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn
namespace torch::optim {
class Optimizer;
}  // namespace torch::optim

namespace smp {

class ModelCore;

namespace runtime {
class BackgroundSave;
}  // namespace runtime

namespace detail {
SMP_API void save_object(const std::string& bytes, const std::string& path, bool partial);
/// Calls `read` with the bytes of a file; what it throws becomes a `CheckpointError`.
SMP_API void load_object(const std::string& path, bool partial,
                         const std::function<void(const std::string&)>& read);

/// An optimizer of libtorch's that is not a `DistributedOptimizer`.
template <class T>
using IfPlainOptimizer = std::enable_if_t<std::is_base_of_v<torch::optim::Optimizer, T> &&
                                          !std::is_base_of_v<OptimizerCore, T>>;

/// Does not compile: says which optimizers checkpoints hold.
template <class Optimizer>
constexpr void refuse_plain_optimizer() {
  static_assert(never<Optimizer>,
                "checkpoints hold the state of a smp::DistributedOptimizer, not of a plain "
                "torch::optim optimizer: wrap it, auto optimizer = smp::distributed(plain), and "
                "step and save that");
}
}  // namespace detail

/// A save that may still be under way; copies are the same one. Nothing needs to be done with it: a
/// save goes on without, and the next save, `load` and the end of the program wait for it.
class SMP_API SaveHandle {
 public:
  explicit SaveHandle(std::shared_ptr<runtime::BackgroundSave> save) : save_(std::move(save)) {}

  /// True when the checkpoint is complete, or the save has failed.
  bool is_done() const;
  /// Returns when the checkpoint is complete. Throws the `CheckpointError` that the save ended
  /// with, the same on all ranks; one that no rank asks for comes from the next save.
  void wait() const;

 private:
  std::shared_ptr<runtime::BackgroundSave> save_;
};

/// Saves a checkpoint as the folder `path`: model, optimizer, random streams, number of steps,
/// registered state and `user_content`, text of JSON. Collective over the world; the ranks share a
/// file system. Every stage writes its own tensors, under names that do not depend on the layout. A
/// crash at any point leaves an earlier checkpoint of that name loadable. Files that cannot be
/// written are one `CheckpointError` on all ranks, after which training can go on.
SMP_API void save(const std::string& path, const ModelCore& model,
                  const std::string& user_content = "{}");
SMP_API void save(const std::string& path, const ModelCore& model, const OptimizerCore& optimizer,
                  const std::string& user_content = "{}");

/// The same, but returns as soon as this rank's share has been copied to host memory, while another
/// thread writes it. What is saved is what there was at the call. One save at a time: the next one
/// waits. Until it is complete, an earlier checkpoint of that name can be loaded, also when a rank
/// dies.
[[nodiscard]] SMP_API SaveHandle save_async(const std::string& path, const ModelCore& model,
                                            const std::string& user_content = "{}");
[[nodiscard]] SMP_API SaveHandle save_async(const std::string& path, const ModelCore& model,
                                            const OptimizerCore& optimizer,
                                            const std::string& user_content = "{}");

/// Does not compile: a plain optimizer has to be wrapped.
template <class Plain, class... More, class = detail::IfPlainOptimizer<Plain>>
void save(const std::string&, const ModelCore&, const Plain&, const More&...) {
  detail::refuse_plain_optimizer<Plain>();
}

/// SMP's `save_checkpoint`: saves as `path`/`tag`_partial, or as `path`/`tag` with
/// `partial(false)`, and notes in `path`/newest that this is the newest. All ranks give the same
/// arguments, but for `user_content`, which is world rank 0's. Otherwise as `save`.
SMP_API SaveHandle save_checkpoint(const std::string& path, const std::string& tag,
                                   const ModelCore& model,
                                   const SaveCheckpointOptions& options = {});
SMP_API SaveHandle save_checkpoint(const std::string& path, const std::string& tag,
                                   const ModelCore& model, const OptimizerCore& optimizer,
                                   const SaveCheckpointOptions& options = {});

/// Loads what `save` wrote, into any number of stages and replicas, before or after the first
/// step. Collective over the world. First everything is checked, the bytes of all tensors too, of
/// which each rank reads a share: one `CheckpointError` on all ranks lists everything that is
/// missing, unexpected, different or damaged, and then nothing has changed. The following steps
/// give the losses of the run that was not interrupted, bit for bit, if `gradient_shards` is the
/// same (it is taken from the checkpoint unless the configuration sets it). Each rank reads what it
/// holds, one tensor at a time. To load into a plain module without `init`, use `load_into_module`.
SMP_API LoadedRun load(const std::string& path, const ModelCore& model,
                       const LoadOptions& options = {});
SMP_API LoadedRun load(const std::string& path, const ModelCore& model,
                       const OptimizerCore& optimizer, const LoadOptions& options = {});

/// Does not compile: a plain optimizer has to be wrapped.
template <class Plain, class... More, class = detail::IfPlainOptimizer<Plain>>
LoadedRun load(const std::string&, const ModelCore&, const Plain&, const More&...) {
  detail::refuse_plain_optimizer<Plain>();
  return {};
}

/// SMP's `resume_from_checkpoint`: loads what `save_checkpoint` saved under `tag`, by default the
/// newest of `path`. Otherwise as `load`; any layout may follow any other. With
/// `LoadOptions().begin_anew(true)` a program needs not look whether there is one.
SMP_API LoadedRun resume_from_checkpoint(const std::string& path,
                                         const std::optional<std::string>& tag,
                                         const ModelCore& model, const LoadOptions& options = {});
SMP_API LoadedRun resume_from_checkpoint(const std::string& path,
                                         const std::optional<std::string>& tag,
                                         const ModelCore& model, const OptimizerCore& optimizer,
                                         const LoadOptions& options = {});

/// Keeps what `save` would write in memory that outlives the processes of the job: for
/// `"recovery"`, with which a job that fails goes on from there (see docs/recovery.md); without, it
/// does nothing. To be called last in an iteration, since what comes before is not done again:
/// `resumed->step` and `user_content` then say where the next one begins. Of `recovery_interval`
/// calls the first keeps a copy, or of as many as it takes for copies to need 3 % of the time; it
/// returns as soon as this rank's share has been copied, while another thread completes it and the
/// copy before remains. Collective over the world; all ranks give the same arguments, but for
/// `user_content`, which is world rank 0's. Where the memory is full, a `CheckpointError` on all
/// ranks, of this call or of the next, after which training can go on.
SMP_API void keep_copy(const ModelCore& model, const OptimizerCore& optimizer,
                       const std::string& user_content = "{}");

/// For jobs that are started again after a failure, by `"recovery"` or `smprun --restarts`: loads,
/// as `load` does, the newest of the copy in memory and the checkpoints with an optimizer that the
/// job completed before. One that cannot be loaded is left out with a warning, and the one before
/// it is taken; when none can be loaded, the error is that of the oldest. Returns nothing, and does
/// nothing, when the job is started for the first time or has saved none. Collective over the
/// world. For one model: programs with several load themselves.
SMP_API std::optional<LoadedRun> resume_after_restart(const ModelCore& model,
                                                      const OptimizerCore& optimizer,
                                                      const LoadOptions& options = {});

/// Has checkpoints hold what `save` returns, text of JSON, under a name of its own, and calls
/// `load` with it when one is loaded: for positions in data and the like (for learning-rate
/// schedulers there is `register_scheduler`).
/// `save` is called on world rank 0 and `load` on all ranks, if the checkpoint has the name. Throws
/// `UsageError` for a name that is taken.
SMP_API RemovableHandle register_checkpoint_state(const std::string& name,
                                                  std::function<std::string()> save,
                                                  std::function<void(const std::string&)> load);

/// Writes an object to a file of its own: what `smp::send` takes (see smp/objects.h), such as
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

/// Loads the model of a checkpoint into a plain module of this process; needs no `init`. Of the
/// options, `strict`, `convert` and `average` count. Checks as `load` does.
SMP_API void load_into_module(const std::string& path, torch::nn::Module& module,
                              const LoadOptions& options = {});

}  // namespace smp
