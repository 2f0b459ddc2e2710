// SPDX-License-Identifier: Apache-2.0
#include "runtime/save/saving.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <future>
#include <map>
#include <optional>
#include <utility>

#include "checkpoint/apply.h"
#include "checkpoint/pretrained.h"
#include "core/check.h"
#include "core/failure.h"
#include "core/text.h"
#include "runtime/first_difference.h"
#include "runtime/parameters/delayed.h"
#include "runtime/parameters/dividing.h"
#include "runtime/parameters/whole.h"
#include "runtime/runtime.h"
#include "runtime/save/copy_transfer.h"
#include "runtime/save/loading.h"
#include "runtime/save/program_tensors.h"
#include "runtime/save/written_shard.h"
#include "runtime/together.h"
#include "runtime/update/average.h"
#include "runtime/update/complete_gradients.h"
#include "runtime/update/update_watch.h"

namespace smp::runtime {
namespace {

using checkpoint::NamedSpec;
using checkpoint::NamedTensor;

/// A copy in host memory that no step changes.
at::Tensor snapshot(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.detach().to(at::kCPU, tensor.scalar_type(),
                                               /*non_blocking=*/false, /*copy=*/true)
                          : tensor;
}

void take_snapshots(checkpoint::Shard& shard) {
  for (NamedTensor& tensor : shard.model) tensor.tensor = snapshot(tensor.tensor);
  for (auto& [name, tensor] : shard.optimizer_tensors) tensor = snapshot(tensor);
}

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point time) {
  return std::chrono::duration<double>(Clock::now() - time).count();
}

/// The parts of those that wrote something.
std::vector<std::string> without_empty(std::vector<std::string> parts) {
  parts.erase(std::remove(parts.begin(), parts.end(), ""), parts.end());
  return parts;
}

/// Whether this rank begins and ends the checkpoint that all write to.
bool begins_and_ends(const CopyHolders* holders, int rank) {
  return holders != nullptr ? holders->is_first() : rank == 0;
}

/// Writes this rank's files and returns its part of the index, or nothing.
using WritePart = std::function<std::string()>;

/// A save that may write: who begins it has its lock. Its second half talks to other ranks through
/// `group` only.
class Save {
 public:
  Save(SaveRequest request, checkpoint::Writer writer, checkpoint::RunState run,
       comm::CommunicatorPtr group)
      : request_(std::move(request)),
        writer_(std::move(writer)),
        run_(std::move(run)),
        group_(std::move(group)) {}

  const checkpoint::Writer& writer() const { return writer_; }
  comm::Communicator& group() const { return *group_; }

  /// Writes the tensors that all ranks give.
  void write(const WritePart& part) const {
    const auto& note = request_.note;
    const CopyHolders* holders = request_.holders.get();
    const bool is_first = begins_and_ends(holders, group_->rank());
    const bool is_spread = holders != nullptr && holders->count() > 1;
    try {
      const auto commit = committing(meet(part));
      meet([&] {
        if (is_first) commit();
        if (group_->rank() > 0) return "";
        if (note && !is_spread) note();  // before earlier notes may be removed
        if (request_.when_saved) request_.when_saved(seconds_since(began_));
        return "";
      });
    } catch (const CheckpointError& error) {
      if (is_first) writer_.abandon();
      if (!request_.when_failed) throw;
      request_.when_failed(error);
      return;
    }
    if (note && (is_spread || group_->rank() > 0)) note();
  }

 private:
  /// `together`. A save beside steps may take longer than these may keep others waiting.
  std::vector<std::string> meet(const std::function<std::string()>& action) const {
    return request_.asynchronous ? together_for_long(*group_, action) : together(*group_, action);
  }

  /// The work left when all have written `parts`. Where several holders keep it, each gets files of
  /// another one, and all have the index of rank 0.
  std::function<void()> committing(const std::vector<std::string>& parts) const {
    const CopyHolders* holders = request_.holders.get();
    if (holders == nullptr || holders->count() == 1) {
      return [this, parts] { writer_.commit(without_empty(parts), run_); };
    }
    const WrittenFiles written = written_files(parts);
    std::string index;
    meet([&] {
      transfer_files(*group_, transfers_to_next(*holders, written),
                     checkpoint::temporary_folder(writer_.path()), writer_.medium());
      if (group_->rank() == 0) index = writer_.index_of(without_empty(parts), run_).to_text();
      return "";
    });
    index = comm::broadcast_bytes(*group_, index, 0);
    const auto files = files_of_holder(*holders, holders->mine(), written);
    return [this, index, files] { writer_.commit_one_of_several(index, files); };
  }

  SaveRequest request_;
  checkpoint::Writer writer_;
  checkpoint::RunState run_;
  comm::CommunicatorPtr group_;
  Clock::time_point began_ = Clock::now();
};

/// The model as one file, which rank 0 of a group writes and the owners of tensors send to it.
class MergedModel {
 public:
  MergedModel(const Runtime& runtime, const std::vector<Model*>& models) {
    const std::vector<int> owners = runtime.topology().members(CommGroup::kPp, 0);
    for (const NamedTensor& tensor : tensors_of(runtime.table(), models)) {
      const auto& entry = runtime.table().at(tensor.name);
      specs_.emplace_back(tensor.name, checkpoint::spec_of(tensor.tensor));
      specs_.back().second.shape = entry.whole_sizes();
      for (const std::string& alias : tensor.aliases) aliases_[alias] = tensor.name;
      sources_.push_back(owners[entry.owner().value_or(0)]);
      // The first of the ranks that have a divided parameter together gets the value.
      values_.emplace_back([&runtime, &entry] { return whole_on_one(runtime, entry, 0); });
    }
  }

  /// Reads all values of this rank, now. Collective over ranks that have parameters together.
  void take_snapshots(int rank) {
    for (const size_t i : order()) {
      const at::Tensor value = values_[i]();
      const at::Tensor copy = rank == sources_[i] ? snapshot(value) : at::Tensor();
      values_[i] = [copy] { return copy; };
    }
  }

  /// Collective. An error of the file is thrown when everything was sent.
  std::string write(const checkpoint::Writer& writer, comm::Communicator& group) const {
    std::optional<checkpoint::MergedShard> file;
    FileWork work(group.rank() == 0);
    work.attempt([&] { file.emplace(writer, specs_, aliases_); });
    for (const size_t i : order()) {
      const at::Tensor value = bring(i, group);
      work.attempt([&] { file->append(value); });
    }
    std::string part;
    work.attempt([&] { part = file->finish(); });
    work.finish();
    return part;
  }

  /// The same as a file of another program; `plan` is of these tensors.
  void write(const checkpoint::OutwardPlan& plan, const std::string& folder,
             comm::Communicator& group) const {
    std::optional<checkpoint::SafetensorsWriter> file;
    FileWork work(group.rank() == 0);
    work.attempt([&] { file.emplace(checkpoint::pretrained_file_in(folder), plan.stored()); });
    std::vector<size_t> brought;
    std::vector<at::Tensor> values;
    for (const size_t i : checkpoint::SafetensorsWriter::order_of(plan.stored())) {
      if (plan.sources(i) != brought) {  // else another part of the same
        brought = plan.sources(i);
        values.clear();
        for (const size_t source : brought) values.push_back(bring(source, group));
      }
      work.attempt([&] { file->append(plan.values(i, values)); });
    }
    work.attempt([&] { file->commit(); });
    work.finish();
  }

 private:
  std::vector<size_t> order() const { return checkpoint::SafetensorsWriter::order_of(specs_); }

  /// The value of a tensor on rank 0. Collective.
  at::Tensor bring(size_t i, comm::Communicator& group) const {
    at::Tensor value;
    const comm::Cut by_source{{/*stride=*/1, group.size()}, comm::Owner{sources_[i]}};
    const checkpoint::TensorSpec& spec = specs_[i].second;
    alone(group, [&] {
      const comm::Part part{{spec.shape, {}, {by_source}}, values_[i]()};
      value = comm::join(group, {part}, spec.dtype, group.rank(), 0).front();
    });
    return value;
  }

  std::vector<NamedSpec> specs_;
  std::map<std::string, std::string> aliases_;
  std::vector<int> sources_;  // world ranks
  std::vector<std::function<at::Tensor()>> values_;
};

nlohmann::json parse(const std::string& text, const std::string& what) {
  SMP_CHECK_WITH(UsageError, nlohmann::json::accept(text), what,
                 " of a checkpoint must be text of JSON, got: ", text,
                 ". Quote a plain text, or give what a JSON library prints");
  return nlohmann::json::parse(text);
}

checkpoint::RunState run_state(const Runtime& runtime, const std::string& user_content) {
  checkpoint::RunState state;
  state.step = runtime.progress.training_steps;
  state.gradient_shards = runtime.gradient_shards();
  state.random.seed = *runtime.progress.seed;
  state.random.step_calls = runtime.progress.step_functions.all();
  state.user_content = parse(user_content, "the user_content");
  const CheckpointContext& context = *runtime.checkpoint_context;
  if (runtime.rank() == 0) {
    for (const auto& [name, loaded] : context.unclaimed) {
      state.extra[name] = nlohmann::json::parse(loaded);
    }
    for (const auto& [name, extra] : context.extras) {
      state.extra[name] = parse(extra.save(), "the state \"" + name + "\"");
    }
  }
  return state;
}

/// Throws where two models have averages of one name that were not updated equally often.
void check_common_averages(const std::vector<Average*>& averages, const std::string& call) {
  std::map<std::string, int64_t> updates;
  for (const Average* average : averages) {
    const auto other = updates.emplace(average->name(), average->updates()).first;
    SMP_CHECK_WITH(UsageError, other->second == average->updates(), call,
                   ": two models have averages \"", core::printable(average->name()),
                   "\", updated ", other->second, " and ", average->updates(),
                   " times, and a checkpoint has one number of updates for a name. Update them "
                   "together, or name one: smp::EmaOptions().name(...)");
  }
}

/// Throws unless all ranks, which tell each other their calls, save the same.
void check_same_call(const std::vector<std::string>& all) {
  const size_t other = first_other(all);
  SMP_CHECK_WITH(UsageError, other == 0, "ranks save different checkpoints: rank 0 calls ", all[0],
                 ", rank ", other, " calls ", all[other],
                 ". Give the same arguments on every rank, and make and update the same averages "
                 "(smp::Ema)");
}

/// The averages and further tensors that a checkpoint of the models holds, for comparison.
std::string describe_further(const CheckpointContext& context, const std::vector<Model*>& models) {
  std::string text;
  for (const Average* average : averages_of(models)) {
    text += c10::str(", average \"", core::printable(average->name()), "\" of ", average->updates(),
                     " updates");
  }
  for (const auto& tensors : program_tensors_of(context, models)) {
    text += c10::str(", tensors \"", tensors->name(), "\"");
  }
  return text;
}

/// The first half: the checks that must pass before any rank writes.
Save begin(const Runtime& runtime, const SaveRequest& request, const CheckpointParts& parts) {
  CheckpointContext& context = *runtime.checkpoint_context;
  const std::string mine =
      c10::str(request.call, request.holders ? "" : " of " + request.path, request.arguments, ", ",
               parts.models().size(), " models, ", parts.optimizers().size(), " optimizers",
               request.merged ? "" : describe_further(context, parts.models()),
               request.asynchronous ? ", asynchronous" : "");
  std::optional<checkpoint::Writer> writer;
  checkpoint::RunState run;
  const auto all = together(*runtime.world(), [&] {
    writer.emplace(request.path, context.lock(request.lock), request.medium);
    run = run_state(runtime, request.user_content);
    if (begins_and_ends(request.holders.get(), runtime.rank())) writer->begin();
    return mine;
  });
  check_same_call(all);
  const auto group = request.asynchronous ? context.group() : runtime.world();
  return Save(request, *std::move(writer), std::move(run), group);
}

/// Takes the model as it is now, for one file.
WritePart take_merged(Runtime& runtime, const Save& save, bool asynchronous,
                      const CheckpointParts& parts) {
  const auto merged = std::make_shared<MergedModel>(runtime, parts.models());
  if (asynchronous) {
    alone(*runtime.world(), [&] { merged->take_snapshots(runtime.rank()); });
  }
  return [merged, save] { return merged->write(save.writer(), save.group()); };
}

/// Takes the tensors that this rank writes as they are now.
WritePart take_shard(Runtime& runtime, const Save& save, bool asynchronous,
                     const CheckpointParts& parts) {
  const checkpoint::Writer& writer = save.writer();
  const Turns turns(runtime, parts.models(), writer.medium());
  const bool writes_states = !parts.optimizers().empty() || !averages_of(parts.models()).empty();
  const Writers writers(runtime, turns, writes_states);
  const bool writes = writers.mine < writers.count;
  const bool writes_now = writer.medium() == checkpoint::Medium::kMemory;
  std::shared_future<std::string> part;
  alone(*runtime.world(), [&] {
    checkpoint::Shard shard;
    if (writes) shard = shard_of(runtime, parts, turns);
    if (asynchronous && !writes_now) take_snapshots(shard);
    part = std::async(std::launch::deferred, [writes, writers, shard = std::move(shard), writer] {
      return writes ? writer.write_shard(writers.mine, writers.count, shard) : "";
    });
  });
  if (writes_now) part.wait();
  return [part] { return part.get(); };
}

std::shared_ptr<BackgroundSave> start_saving(Runtime& runtime, const SaveRequest& request,
                                             const CheckpointParts& parts) {
  const Save save = begin(runtime, request, parts);
  const at::NoGradGuard no_grad;
  const auto take = request.merged ? take_merged : take_shard;
  const auto write = [save, part = take(runtime, save, request.asynchronous, parts)] {
    save.write(part);
  };
  if (request.asynchronous) return runtime.checkpoint_context->start(write);
  write();
  return std::make_shared<BackgroundSave>();
}

/// Throws if nothing can be saved now.
void begin_saving(Runtime& runtime, const std::string& call) {
  SMP_CHECK_WITH(UsageError, !runtime.current_step.is_running, call,
                 " was called inside a step function; call it after the step");
  SMP_CHECK_WITH(UsageError, !has_delayed(runtime.table()), call,
                 " was called before the first step, and the model was made under delayed "
                 "parameter initialization: its parameters do not exist yet. Save after a step");
  const OwnUse parameters(runtime);
  check_pieces_unwritten(runtime);
  runtime.checkpoint_context->finish();
  runtime.update_watch->compare_now();
  runtime.settle_seed();  // the first step after this save draws the same as one that resumes
}

}  // namespace

std::shared_ptr<BackgroundSave> save(const SaveRequest& request, const CheckpointParts& parts) {
  Runtime& runtime = Runtime::get();
  begin_saving(runtime, request.call);
  const OwnUse parameters(runtime);
  if (!parts.optimizers().empty()) {
    check_nothing_adds_up(runtime.current_step, request.call);
    // An optimizer may be of several models.
    check_no_average_in_use(runtime.models(), request.call);
    check_no_common_parameters(parts.optimizers(), request.call);
  }
  if (!request.merged) check_common_averages(averages_of(parts.models()), request.call);
  try {
    return start_saving(runtime, request, parts);
  } catch (const CheckpointError& error) {  // on all ranks
    if (!request.when_failed) throw;
    request.when_failed(error);
    return std::make_shared<BackgroundSave>();
  }
}

void save_pretrained(const std::string& folder, Model& model, const NameMap& names) {
  Runtime& runtime = Runtime::get();
  begin_saving(runtime, "smp::save_pretrained");
  const OwnUse parameters(runtime);
  const auto mine = c10::str("smp::save_pretrained to ", folder);
  const auto tensors = tensors_of(runtime.table(), {&model});
  std::optional<checkpoint::OutwardPlan> plan;
  const auto all = together(*runtime.world(), [&] {
    plan.emplace(expected_by(runtime.table(), model, tensors), names);
    return mine;
  });
  check_same_call(all);
  const at::NoGradGuard no_grad;
  together(*runtime.world(), [&] {
    MergedModel(runtime, {&model}).write(*plan, folder, *runtime.world());
    return "";
  });
}

}  // namespace smp::runtime
