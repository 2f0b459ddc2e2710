#include "smp/save_load.h"

#include <utility>

#include "checkpoint/apply.h"
#include "checkpoint/catalog.h"
#include "core/check.h"
#include "runtime/runtime.h"
#include "runtime/save/checkpointing.h"
#include "runtime/save/loading.h"
#include "runtime/save/saving.h"
#include "runtime/save/together.h"

namespace smp {

bool SaveHandle::is_done() const { return save_->is_done(); }

void SaveHandle::wait() const { save_->wait(); }

namespace detail {

SaveHandle save_run(const std::string& path, const Models& models, const Optimizers& optimizers,
                    const nlohmann::json& user_content, bool asynchronous) {
  SaveRequest request;
  request.call = "smp::save";
  request.path = path;
  request.asynchronous = asynchronous;
  request.user_content = user_content;
  return SaveHandle(smp::save(request, models, optimizers));
}

SaveHandle save_tagged(const std::string& path, const std::string& tag, const Models& models,
                       const Optimizers& optimizers, const SaveCheckpointOptions& options) {
  const std::optional<int64_t> kept = options.num_kept_partial_checkpoints();
  SMP_CHECK_WITH(UsageError, !kept || *kept >= 1,
                 "smp::save_checkpoint: expected num_kept_partial_checkpoints of at least 1, got ",
                 *kept, ". Leave it out to keep all");
  const std::string name = checkpoint::folder_name(tag, options.partial());
  SaveRequest request;
  request.call = "smp::save_checkpoint";
  request.path = path + "/" + name;
  request.merged = !options.partial();
  request.asynchronous = options.asynchronous();
  request.user_content = options.user_content();
  if (kept) request.arguments = c10::str(", ", *kept, " kept");
  request.when_saved = [path, name, kept, partial = options.partial()] {
    checkpoint::update_newest(path, name);
    if (kept && partial) checkpoint::keep_partial(path, static_cast<size_t>(*kept), name);
  };
  // A full checkpoint is the model alone.
  return SaveHandle(smp::save(request, models, options.partial() ? optimizers : Optimizers()));
}

LoadedRun resume_run(const std::string& path, const std::optional<std::string>& tag,
                     const Models& models, const Optimizers& optimizers,
                     const LoadOptions& options) {
  Runtime& runtime = Runtime::get();
  Checkpointing::of(runtime).finish();
  const auto names = together(
      *runtime.world(), [&] { return checkpoint::find_checkpoint(path, tag, options.partial()); });
  return load_run(path + "/" + names[0], models, options.partial() ? optimizers : Optimizers(),
                  options);
}

}  // namespace detail

RemovableHandle register_checkpoint_state(const std::string& name,
                                          std::function<nlohmann::json()> save,
                                          std::function<void(const nlohmann::json&)> load) {
  const auto runtime = Runtime::get_shared();
  auto& extras = Checkpointing::of(*runtime).extras;
  const bool is_new =
      extras.emplace(name, Checkpointing::Extra{std::move(save), std::move(load)}).second;
  SMP_CHECK_WITH(UsageError, is_new, "register_checkpoint_state was called twice for \"", name,
                 "\": give each state a name of its own");
  return RemovableHandle([weak = std::weak_ptr<Runtime>(runtime), name] {
    if (const auto runtime = weak.lock()) Checkpointing::of(*runtime).extras.erase(name);
  });
}

void load_into_module(const std::string& path, torch::nn::Module& module,
                      const LoadOptions& options) {
  checkpoint::load_into_module(module, path, {options.strict(), options.convert()});
}

}  // namespace smp
