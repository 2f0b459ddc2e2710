// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "checkpoint/writer.h"
#include "runtime/model.h"
#include "runtime/save/background_save.h"
#include "runtime/save/copy_holders.h"
#include "runtime/update/optimizer.h"
#include "smp/checkpoint_parts.h"
#include "smp/error.h"
#include "smp/name_map.h"

namespace smp::runtime {

/// The request of a save. Internal.
struct SaveRequest {
  std::string call;  ///< for errors: "smp::save"
  std::string path;  ///< path of the checkpoint's folder
  std::string lock;  ///< the file that the job has locked from then on
  /// One file with the model, written by world rank 0, instead of files by all.
  bool merged = false;
  bool asynchronous = false;
  /// Where it lies. To write into memory is to copy, so an asynchronous save into memory copies
  /// nothing before: a rank's own tensors are written at once, and the rest in the background.
  checkpoint::Medium medium = checkpoint::Medium::kDisk;
  std::string user_content;    ///< text of JSON
  std::string arguments = "";  ///< others that all ranks must give alike
  /// Notes for the launcher that it is complete; called on those that have it.
  std::function<void()> note = nullptr;
  /// Called on world rank 0 after that, with the seconds since all ranks had begun.
  std::function<void(double)> when_saved = nullptr;
  /// Called on all ranks with the error of files that cannot be written, if set, which is not
  /// thrown then.
  std::function<void(const CheckpointError&)> when_failed = nullptr;
  /// Holders that keep it, if it is a copy; null: it lies where all ranks see it.
  std::shared_ptr<const CopyHolders> holders = nullptr;
};

/// Writes a checkpoint of models and optimizers. Collective over the world. Files that cannot be
/// written are one `CheckpointError` on all ranks, and then an earlier checkpoint is as it was; for
/// an asynchronous save it comes from the returned handle, or from the next save.
std::shared_ptr<BackgroundSave> save(const SaveRequest& request, const CheckpointParts& parts);

/// Writes a model as `folder`/model.safetensors by the names of another program; see
/// `smp::save_pretrained`.
void save_pretrained(const std::string& folder, Model& model, const NameMap& names);

}  // namespace smp::runtime
