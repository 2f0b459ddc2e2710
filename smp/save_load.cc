// SPDX-License-Identifier: Apache-2.0
#include "smp/save_load.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "checkpoint/apply.h"
#include "checkpoint/catalog.h"
#include "checkpoint/file.h"
#include "checkpoint/save_lock.h"
#include "checkpoint/writer.h"
#include "core/check.h"
#include "core/log.h"
#include "core/restart.h"
#include "core/status.h"
#include "runtime/runtime.h"
#include "runtime/save/background_save.h"
#include "runtime/save/kept_copy.h"
#include "runtime/save/loading.h"
#include "runtime/save/program_tensors.h"
#include "runtime/save/saving.h"
#include "runtime/together.h"
#include "smp/model_core.h"
#include "smp/optimizer_core.h"

namespace smp {
namespace {

using runtime::Runtime;

int64_t steps_done() { return Runtime::get().progress.training_steps; }

/// The function that notes a checkpoint, on the ranks that note.
std::function<void()> noting(const core::SavedCheckpoint& saved) {
  if (!Runtime::get().checkpoint_context->notes_progress()) return nullptr;
  return [saved] { core::note_checkpoint(saved); };
}

SaveHandle save_run(const std::string& path, const CheckpointParts& parts,
                    const std::string& user_content, bool asynchronous) {
  runtime::SaveRequest request;
  request.call = "smp::save";
  const core::CallScope here(request.call);
  request.path = path;
  request.lock = checkpoint::lock_of_writer(path);
  request.asynchronous = asynchronous;
  request.user_content = user_content;
  if (!parts.optimizers().empty()) request.note = noting({path, steps_done()});
  return SaveHandle(runtime::save(request, parts));
}

}  // namespace

SaveHandle save_checkpoint(const std::string& path, const std::string& tag,
                           const CheckpointParts& given, const SaveCheckpointOptions& options) {
  const std::optional<int64_t> kept = options.num_kept_partial_checkpoints();
  SMP_CHECK_WITH(UsageError, !kept || *kept >= 1,
                 "smp::save_checkpoint: expected num_kept_partial_checkpoints of at least 1, got ",
                 *kept, ". Leave it out to keep all");
  const std::string name = checkpoint::folder_name(tag, options.partial());
  runtime::SaveRequest request;
  request.call = "smp::save_checkpoint";
  const core::CallScope here(request.call);
  request.path = path + "/" + name;
  request.lock = checkpoint::lock_file(path + "/");
  request.merged = !options.partial();
  request.asynchronous = options.asynchronous();
  request.user_content = options.user_content();
  if (kept) request.arguments = c10::str(", ", *kept, " kept");
  // A full checkpoint is the model alone.
  const CheckpointParts parts = options.partial() ? given : CheckpointParts(given.models(), {});
  if (!parts.optimizers().empty()) request.note = noting({request.path, steps_done()});
  request.when_saved = [path, name, kept, options](double /*seconds*/) {
    checkpoint::update_newest(path, name);
    if (kept && options.partial()) {
      checkpoint::keep_partial(path, static_cast<size_t>(*kept), name);
    }
  };
  return SaveHandle(runtime::save(request, parts));
}

namespace {

constexpr std::string_view kObjectFile = "smp object 1\n";

/// "smp object 1", the hash of the object's bytes, a line each, and the bytes.
std::string to_file(const std::string& bytes) {
  checkpoint::Hasher hasher;
  hasher.update(bytes.data(), bytes.size());
  return c10::str(kObjectFile, checkpoint::hash_text(hasher.digest()), "\n", bytes);
}

std::string object_path(const std::string& path, bool partial) {
  if (!partial) return path;
  const Runtime& runtime = Runtime::get();
  return c10::str(path, "_", runtime.rank_in(CommGroup::kPp), "_", runtime.rank_in(CommGroup::kTp));
}

}  // namespace

CheckpointParts& CheckpointParts::add(const ModelCore& model) {
  const bool is_new = std::find(models_.begin(), models_.end(), &model.impl()) == models_.end();
  if (is_new) models_.push_back(&model.impl());
  return *this;
}
CheckpointParts& CheckpointParts::add(const OptimizerCore& optimizer) {
  optimizers_.push_back(&optimizer.impl());
  return *this;
}
CheckpointParts& CheckpointParts::add(const ModelCore& model, const OptimizerCore& optimizer) {
  return add(model).add(optimizer);
}

LoadedRun resume_from_checkpoint(const std::string& path, const std::optional<std::string>& tag,
                                 const CheckpointParts& parts, const LoadOptions& options) {
  const core::CallScope here("smp::resume_from_checkpoint", "smp::resume");
  Runtime& runtime = Runtime::get();
  runtime.checkpoint_context->finish();
  const auto names = runtime::together(*runtime.world(), [&]() -> std::string {
    const bool looks = options.begin_anew();
    if (looks && !checkpoint::has_checkpoint(path, tag, options.partial())) return "";
    return checkpoint::find_checkpoint(path, tag, options.partial());
  });
  // Where a rank sees one, none begins anew.
  const auto found =
      std::find_if(names.begin(), names.end(), [](const auto& name) { return !name.empty(); });
  if (found == names.end()) return {/*step=*/0, /*user_content=*/"{}", {}, /*found=*/false};
  return runtime::load(path + "/" + *found,
                       options.partial() ? parts : CheckpointParts(parts.models(), {}), options);
}

void detail::save_object(const std::string& bytes, const std::string& path, bool partial) {
  checkpoint::write_file(object_path(path, partial), to_file(bytes));
}

void detail::load_object(const std::string& path, bool partial,
                         const std::function<void(const std::string&)>& read) {
  const std::string name = object_path(path, partial);
  const std::string text = checkpoint::read_file(name);
  const size_t header = to_file("").size();
  const std::string bytes = text.substr(std::min(header, text.size()));
  SMP_CHECK_WITH(CheckpointError, text == to_file(bytes), "smp::load: \"", name,
                 "\" is no file that smp::save(object, path) wrote, or it is damaged. Give "
                 "the path, and partial or not, that it was saved with");
  try {
    read(bytes);
  } catch (const CommError& error) {
    core::fail<CheckpointError>("smp::load: \"", name,
                                "\" holds another object than was asked "
                                "for: ",
                                core::text_without_prefix(error));
  }
}

bool SaveHandle::is_done() const { return save_->is_done(); }

void SaveHandle::wait() const {
  const core::CallScope here("smp::SaveHandle::wait");
  save_->wait();
}

void save(const std::string& path, const CheckpointParts& parts, const std::string& user_content) {
  save_run(path, parts, user_content, /*asynchronous=*/false);
}

SaveHandle save_async(const std::string& path, const CheckpointParts& parts,
                      const std::string& user_content) {
  return save_run(path, parts, user_content, /*asynchronous=*/true);
}

LoadedRun load(const std::string& path, const CheckpointParts& parts, const LoadOptions& options) {
  const core::CallScope here("smp::load");
  return runtime::load(path, parts, options);
}

void keep_copy(const CheckpointParts& parts, const std::string& user_content) {
  const core::CallScope here("smp::keep_copy");
  runtime::keep_copy(Runtime::get(), parts, user_content);
}

std::optional<LoadedRun> resume_after_restart(const CheckpointParts& parts,
                                              const LoadOptions& options) {
  const core::CallScope here("smp::resume_after_restart", "smp::resume");
  const Runtime& runtime = Runtime::get();
  auto checkpoints = runtime::checkpoints_before(runtime, *runtime.checkpoint_context);
  while (!checkpoints.empty()) {
    const std::string newest = std::move(checkpoints.back());
    checkpoints.pop_back();
    try {
      return load(newest, parts, options);
    } catch (const CheckpointError& error) {  // on all ranks, and nothing has changed
      if (checkpoints.empty()) throw;
      if (runtime.rank() > 0) continue;
      core::log_warning(c10::str(core::text_without_prefix(error), "\nGoing on from \"",
                                 checkpoints.back(), "\" instead"));
    }
  }
  return std::nullopt;
}

RemovableHandle register_checkpoint_state(const std::string& name,
                                          std::function<std::string()> save,
                                          std::function<void(const std::string&)> load) {
  return runtime::register_extra(Runtime::get().checkpoint_context, "register_checkpoint_state",
                                 name, {std::move(save), std::move(load)});
}

RemovableHandle register_checkpoint_tensors(
    const std::string& name, const ModelCore& model,
    std::function<torch::OrderedDict<std::string, at::Tensor>()> save,
    std::function<void(const torch::OrderedDict<std::string, at::Tensor>&)> load) {
  return runtime::register_program_tensors(name, model.impl(), std::move(save), std::move(load));
}

void load_into_module(const std::string& path, torch::nn::Module& module,
                      const LoadOptions& options) {
  checkpoint::load_into_module(module, path, {options.strict(), options.convert(), options.model()},
                               options.average());
}

}  // namespace smp
