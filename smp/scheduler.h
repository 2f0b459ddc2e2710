// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>

#include <functional>
#include <string>

#include "smp/export.h"
#include "smp/removable_handle.h"

namespace smp {

/// The state that a scheduler has beside libtorch's own fields, for `register_scheduler`.
struct SchedulerState {
  std::function<std::string()> save;             ///< returns text of JSON
  std::function<void(const std::string&)> load;  ///< takes the result of `save`
};

/// Has checkpoints hold where a learning-rate scheduler stands, under a name of its own, so that a
/// run that is loaded goes on with the learning rates that the uninterrupted one would have had.
/// Loads that leave out the optimizer leave out its schedulers. One that is registered after `load`
/// takes its state at once. It must outlive the registration and stay where it is.
///
/// `own` is for a class of yours with state beside the count of its steps. Throws `UsageError` for
/// a name that is taken; a load throws a `CheckpointError` on all ranks, before anything changes,
/// where the checkpoint holds nothing of that name (unless `strict(false)`), or of a scheduler of
/// another form.
///
/// Example:
/// \code
///   torch::optim::StepLR scheduler(optimizer, /*step_size=*/10, /*gamma=*/0.5);
///   smp::register_scheduler("lr", scheduler);
/// \endcode
SMP_API RemovableHandle register_scheduler(const std::string& name,
                                           torch::optim::LRScheduler& scheduler,
                                           SchedulerState own = {});
SMP_API RemovableHandle register_scheduler(const std::string& name,
                                           torch::optim::ReduceLROnPlateauScheduler& scheduler);

}  // namespace smp
