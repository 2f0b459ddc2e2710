// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/arg.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>

namespace smp {

/// The state of the run that a checkpoint was taken from.
struct LoadedRun {
  int64_t step = 0;                          ///< training steps done
  std::string user_content;                  ///< text of JSON that the program gave to `save`
  std::map<std::string, std::string> extra;  ///< texts by name, see `register_checkpoint_state`
  /// False: there was none, and nothing was loaded; see `LoadOptions::begin_anew`.
  bool found = true;
};

/// Options of `save_checkpoint`; but for the last, SMP's arguments and defaults.
struct SaveCheckpointOptions {
  /// True: all ranks write their own tensors, and the optimizer: fast, and a run can continue from
  /// it. False: world rank 0 writes the model as one file, "model.safetensors", which other
  /// programs read, and nothing else.
  TORCH_ARG(bool, partial) = true;
  /// Text of JSON, which `load` gives back.
  TORCH_ARG(std::string, user_content) = "{}";
  /// How many partial checkpoints of the folder are kept, this one among them; none: all. The
  /// oldest are removed when this one is complete.
  TORCH_ARG(std::optional<int64_t>, num_kept_partial_checkpoints) = std::nullopt;
  /// Return when model and optimizer have been copied to host memory, and write meanwhile.
  TORCH_ARG(bool, asynchronous) = false;
};

/// Options of `load` and `resume_from_checkpoint`.
struct LoadOptions {
  /// Tensors that are missing or unexpected are an error, and so are parameters that the
  /// optimizer's groups lack, have besides, or divide in another way.
  TORCH_ARG(bool, strict) = true;
  /// Floating point tensors may be stored in another floating point type than the model's: values
  /// are converted, float32 ones from master weights where the checkpoint has them.
  TORCH_ARG(bool, convert) = false;
  /// Resuming only: whether to load the checkpoint that all ranks wrote, with the optimizer, or the
  /// model that is one file.
  TORCH_ARG(bool, partial) = true;
  /// Resuming only: where there is no checkpoint, or none of the tag, load nothing and return a run
  /// of step 0 that was not found, instead of an error. One that is damaged stays an error.
  TORCH_ARG(bool, begin_anew) = false;
  /// Gives the model's parameters the values of the `smp::Ema` of this name that the checkpoint
  /// has, for programs that evaluate, and `load_into_module`; empty: their own.
  TORCH_ARG(std::string, average) = "";
  /// `load_into_module` only: the one of several models that had this name
  /// (`ModelOptions::name`); empty: the checkpoint is of one model without a name, or the module
  /// has each model as a child of its name.
  TORCH_ARG(std::string, model) = "";
  /// False: the optimizer is left as it is.
  TORCH_ARG(bool, load_optimizer) = true;
  /// False: of the optimizer's state only master weights are loaded, as documented for sharded data
  /// parallelism; the options of the param groups too.
  TORCH_ARG(bool, load_sharded_optimizer_state) = true;
};

}  // namespace smp
