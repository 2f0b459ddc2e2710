// SPDX-License-Identifier: Apache-2.0
#include "runtime/save/saving.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <future>
#include <map>
#include <optional>
#include <set>
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
#include "runtime/save/together.h"
#include "runtime/save/written_shard.h"
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

/// A save that may write: who begins it has its lock.
struct Begun {
  checkpoint::Writer writer;
  checkpoint::RunState run;
};

/// Writes the tensors that all ranks give, from the calls of `write` to the end: a save's second
/// half, which talks to other ranks through `group` only.
class Save {
 public:
  Save(const SaveRequest& request, Begun begun, comm::CommunicatorPtr group)
      : writer_(std::move(begun.writer)),
        run_(std::move(begun.run)),
        holders_(request.holders),
        when_saved_(request.when_saved),
        when_failed_(request.when_failed),
        note_(request.note),
        in_background_(request.asynchronous),
        group_(std::move(group)) {}

  const checkpoint::Writer& writer() const { return writer_; }

  /// `part` writes this rank's files and returns its part of the index, or nothing.
  void write(const std::function<std::string()>& part) const {
    const bool is_first = begins_and_ends(holders_.get(), group_->rank());
    const bool is_spread = holders_ != nullptr && holders_->count() > 1;
    try {
      const auto commit = committing(meet(part));
      meet([&] {
        if (is_first) commit();
        if (group_->rank() > 0) return "";
        if (note_ && !is_spread) note_();  // before earlier notes may be removed
        if (when_saved_) when_saved_(seconds_since(began_));
        return "";
      });
    } catch (const CheckpointError& error) {
      if (is_first) writer_.abandon();
      if (!when_failed_) throw;
      when_failed_(error);
      return;
    }
    if (note_ && (is_spread || group_->rank() > 0)) note_();
  }

 private:
  /// `together`. A save beside steps may take longer than these may keep others waiting.
  std::vector<std::string> meet(const std::function<std::string()>& action) const {
    return in_background_ ? together_for_long(*group_, action) : together(*group_, action);
  }

  /// The work left when all have written `parts`. Where several holders keep it, each gets files of
  /// another one, and all have the index of rank 0.
  std::function<void()> committing(const std::vector<std::string>& parts) const {
    if (holders_ == nullptr || holders_->count() == 1) {
      return [this, parts] { writer_.commit(without_empty(parts), run_); };
    }
    const WrittenFiles written = written_files(parts);
    std::string index;
    meet([&] {
      transfer_files(*group_, transfers_to_next(*holders_, written),
                     checkpoint::temporary_folder(writer_.path()), writer_.medium());
      if (group_->rank() == 0) index = writer_.index_of(without_empty(parts), run_).to_text();
      return "";
    });
    index = comm::broadcast_bytes(*group_, index, 0);
    const auto files = files_of_holder(*holders_, holders_->mine(), written);
    return [this, index, files] { writer_.commit_one_of_several(index, files); };
  }

  checkpoint::Writer writer_;
  checkpoint::RunState run_;
  std::shared_ptr<const CopyHolders> holders_;
  std::function<void(double)> when_saved_;
  std::function<void(const CheckpointError&)> when_failed_;
  std::function<void()> note_;
  bool in_background_;
  Clock::time_point began_ = Clock::now();
  comm::CommunicatorPtr group_;
};

/// The model as one file, which rank 0 of a group writes and the owners of tensors send to it.
class MergedModel {
 public:
  MergedModel(const Runtime& runtime, const std::vector<Model*>& models) {
    const std::vector<int> owners = runtime.topology().members(CommGroup::kPp, 0);
    for (const NamedTensor& tensor : tensors_of(runtime, models)) {
      const auto& entry = runtime.table().at(tensor.name);
      specs_.emplace_back(tensor.name, checkpoint::spec_of(tensor.tensor));
      specs_.back().second.shape = entry.whole_sizes();
      for (const std::string& alias : tensor.aliases) aliases_[alias] = tensor.name;
      sources_.push_back(owners[entry.owner.value_or(0)]);
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
  static constexpr comm::Tag kTag = 0;

  std::vector<size_t> order() const { return checkpoint::SafetensorsWriter::order_of(specs_); }

  /// The value of a tensor on rank 0. Collective.
  at::Tensor bring(size_t i, comm::Communicator& group) const {
    at::Tensor value;
    alone(group, [&] { value = send_or_receive(i, group); });
    return value;
  }

  at::Tensor send_or_receive(size_t i, comm::Communicator& group) const {
    const at::Tensor value = values_[i]();
    const bool is_source = group.rank() == sources_[i];
    if (sources_[i] == 0 || checkpoint::byte_size(specs_[i].second) == 0) {
      return is_source ? value : at::empty(specs_[i].second.shape, specs_[i].second.dtype);
    }
    if (is_source) {
      group.send(value.detach().cpu().contiguous(), 0, kTag);
    } else if (group.rank() == 0) {
      const auto received = at::empty(specs_[i].second.shape, specs_[i].second.dtype);
      group.recv(received, sources_[i], kTag);
      return received;
    }
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
  if (runtime.checkpoint_context && runtime.rank() == 0) {
    for (const auto& [name, loaded] : runtime.checkpoint_context->unclaimed) {
      state.extra[name] = nlohmann::json::parse(loaded);
    }
    for (const auto& [name, extra] : runtime.checkpoint_context->extras) {
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
std::string describe_further(const Runtime& runtime, const std::vector<Model*>& models) {
  std::string text;
  for (const Average* average : averages_of(runtime, models)) {
    text += c10::str(", average \"", core::printable(average->name()), "\" of ", average->updates(),
                     " updates");
  }
  for (const auto& tensors : program_tensors_of(runtime, models)) {
    text += c10::str(", tensors \"", tensors->name(), "\"");
  }
  return text;
}

/// The first half: the checks that must pass before any rank writes.
Begun begin(Runtime& runtime, const SaveRequest& request, const CheckpointParts& parts) {
  const std::string mine =
      c10::str(request.call, request.holders ? "" : " of " + request.path, request.arguments, ", ",
               parts.models().size(), " models, ", parts.optimizers().size(), " optimizers",
               request.merged ? "" : describe_further(runtime, parts.models()),
               request.asynchronous ? ", asynchronous" : "");
  std::optional<Begun> begun;
  const auto all = together(*runtime.world(), [&] {
    begun =
        Begun{checkpoint::Writer(request.path, CheckpointContext::of(runtime).lock(request.lock),
                                 request.medium),
              run_state(runtime, request.user_content)};
    if (begins_and_ends(request.holders.get(), runtime.rank())) begun->writer.begin();
    return mine;
  });
  check_same_call(all);
  return std::move(*begun);
}

std::shared_ptr<BackgroundSave> save_merged(Runtime& runtime, const SaveRequest& request,
                                            Begun begun, const CheckpointParts& parts) {
  const auto merged = std::make_shared<MergedModel>(runtime, parts.models());
  auto& context = CheckpointContext::of(runtime);
  const auto group = request.asynchronous ? context.group() : runtime.world();
  const Save save(request, std::move(begun), group);
  const auto write = [merged, save, group] {
    save.write([&] { return merged->write(save.writer(), *group); });
  };
  if (request.asynchronous) {
    alone(*runtime.world(), [&] { merged->take_snapshots(runtime.rank()); });
    return context.start(write);
  }
  write();
  return std::make_shared<BackgroundSave>();
}

std::shared_ptr<BackgroundSave> save_parts(Runtime& runtime, const SaveRequest& request,
                                           Begun begun, const CheckpointParts& parts) {
  const Turns turns(runtime, parts.models(), request.medium);
  const bool writes_states =
      !parts.optimizers().empty() || !averages_of(runtime, parts.models()).empty();
  const Writers writers(runtime, turns, writes_states);
  auto& context = CheckpointContext::of(runtime);
  const auto group = request.asynchronous ? context.group() : runtime.world();
  const Save save(request, std::move(begun), group);
  const bool writes = writers.mine < writers.count;
  const bool writes_now = request.medium == checkpoint::Medium::kMemory;
  std::shared_future<std::string> part;
  alone(*runtime.world(), [&] {
    checkpoint::Shard shard;
    if (writes) shard = shard_of(runtime, parts, turns);
    if (request.asynchronous && !writes_now) take_snapshots(shard);
    part = std::async(std::launch::deferred, [writes, writers, shard = std::move(shard), save]() {
      return writes ? save.writer().write_shard(writers.mine, writers.count, shard) : "";
    });
  });
  if (writes_now) part.wait();
  const auto write = [part, save] { save.write([&] { return part.get(); }); };
  if (request.asynchronous) return context.start(write);
  write();
  return std::make_shared<BackgroundSave>();
}

std::shared_ptr<BackgroundSave> start_saving(Runtime& runtime, const SaveRequest& request,
                                             const CheckpointParts& parts) {
  Begun begun = begin(runtime, request, parts);
  const at::NoGradGuard no_grad;
  return request.merged ? save_merged(runtime, request, std::move(begun), parts)
                        : save_parts(runtime, request, std::move(begun), parts);
}

/// Throws if nothing can be saved now.
void begin_saving(Runtime& runtime, const std::string& call) {
  SMP_CHECK_WITH(UsageError, !runtime.current_step.is_running, call,
                 " was called inside a step function; call it after the step");
  SMP_CHECK_WITH(UsageError, !has_delayed(runtime.table()), call,
                 " was called before the first step, and the model was made under delayed "
                 "parameter initialization: its parameters do not exist yet. Save after a step");
  take_back_wholes(runtime);
  CheckpointContext::of(runtime).finish();
  runtime.update_watch->compare_now();
  runtime.settle_seed();  // the first step after this save draws the same as one that resumes
}

}  // namespace

std::shared_ptr<BackgroundSave> save(const SaveRequest& request, const CheckpointParts& parts) {
  Runtime& runtime = Runtime::get();
  begin_saving(runtime, request.call);
  if (!parts.optimizers().empty()) {
    check_nothing_adds_up(runtime, request.call);
    check_no_average_in_use(runtime, request.call);  // an optimizer may be of several models
    check_no_common_parameters(parts.optimizers(), request.call);
  }
  if (!request.merged) check_common_averages(averages_of(runtime, parts.models()), request.call);
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
  const auto mine = c10::str("smp::save_pretrained to ", folder);
  const auto tensors = tensors_of(runtime, {&model});
  std::optional<checkpoint::OutwardPlan> plan;
  const auto all = together(*runtime.world(), [&] {
    plan.emplace(expected_by(runtime, model, tensors), names);
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
