// SPDX-License-Identifier: Apache-2.0
#include "runtime/save/loading.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/apply.h"
#include "checkpoint/reader.h"
#include "core/check.h"
#include "core/log.h"
#include "core/text.h"
#include "graph/recording.h"
#include "runtime/parameters/dividing.h"
#include "runtime/parameters/parameter_shards.h"
#include "runtime/parameters/storage.h"
#include "runtime/save/background_save.h"
#include "runtime/save/job_notes.h"
#include "runtime/save/program_tensors.h"
#include "runtime/together.h"
#include "runtime/update/average.h"
#include "runtime/update/complete_gradients.h"
#include "runtime/update/master_weights.h"
#include "runtime/update/optimizer.h"

namespace smp::runtime {
namespace {

using checkpoint::ExpectedTensor;
using checkpoint::kMasterField;
using checkpoint::Reader;
using Wanted = std::function<bool(const std::string&)>;

/// The tensors that files are expected to hold for `tensors`: wholes where they are divided.
std::vector<ExpectedTensor> expectations(const ParameterTable& table,
                                         const std::vector<checkpoint::NamedTensor>& tensors) {
  auto expected = checkpoint::expectations(tensors);
  for (size_t i = 0; i < tensors.size(); ++i) {
    expected[i].spec.shape = table.at(tensors[i].tensor).whole_sizes();
  }
  return expected;
}

/// The tensors that a checkpoint is expected to hold of the parameters of models.
std::vector<ExpectedTensor> expected_parameters(const ParameterTable& table,
                                                const std::vector<Model*>& models) {
  auto tensors = tensors_of(table, models);
  const auto is_buffer = [&](const checkpoint::NamedTensor& tensor) {
    return !table.at(tensor.tensor).is_parameter();
  };
  tensors.erase(std::remove_if(tensors.begin(), tensors.end(), is_buffer), tensors.end());
  return expectations(table, tensors);
}

/// A checkpoint that is being loaded into models.
class Load {
 public:
  Load(Runtime& runtime, std::string path, const CheckpointParts& parts, const LoadOptions& options)
      : runtime_(runtime), path_(std::move(path)), parts_(parts), options_(options) {
    tensors_ = tensors_of(runtime_.table(), parts.models());
    expected_ = expectations(runtime_.table(), tensors_);
    averages_ = averages_of(parts.models());
    program_tensors_ = program_tensors_of(*runtime.checkpoint_context, parts.models());
    parameters_ = names_of_parameters(runtime);
  }

  /// Throws on all ranks unless everything is there, fits and has the bytes that were written. The
  /// bytes are divided among the ranks. Collective.
  void check() {
    const auto world = runtime_.world();
    const auto identities = together(*world, [&] {
      reader_ = std::make_shared<Reader>(path_);
      checkpoint::check_names(expected_, reader_->index(), path_,
                              {options_.strict(), options_.convert()});
      check_averages();
      for (const auto& tensors : program_tensors_) {
        tensors->check(reader_->index(), path_, options_.strict());
      }
      if (with_optimizer()) {
        check_optimizers();
        runtime_.progress.step_functions.check_resumable(reader_->index().run.random.step_calls,
                                                         path_);
        check_schedulers();
      }
      return reader_->index().checksum + " at " + path_;
    });
    const size_t digits = reader_->index().checksum.size();
    for (size_t r = 0; r < identities.size(); ++r) {
      SMP_CHECK_WITH(
          CheckpointError, identities[r].compare(0, digits, identities[0], 0, digits) == 0,
          "ranks load different checkpoints: rank 0 that of checksum ", identities[0], ", rank ", r,
          " that of ", identities[r], ". All ranks must load the same files.");
    }
    check_bytes(with_optimizer() || options_.convert() || !averages_.empty() ||
                !program_tensors_.empty() || !options_.average().empty());
  }

  void load_optimizers() const {
    for (Optimizer* optimizer : parts_.optimizers()) {
      const auto own = optimizer->parameters();
      optimizer->load(groups_for(*optimizer), [load = *this, own](const Wanted& is_wanted) {
        const Wanted wanted = [&](const std::string& name) {
          return own.count(name) > 0 && is_wanted(name);
        };
        auto params = load.params_of_optimizer(wanted, [&load](const std::string& name) {
          return load.reader_->read_optimizer(name);
        });
        if (load.options_.convert()) load.add_masters(wanted, params);
        return params;
      });
      optimizer->loss_scaling().load_state(loss_scale());
    }
  }

  void load_model() const {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      if (!is_stored(expected_[i])) continue;
      assign(runtime_.table().at(tensors_[i].tensor), runtime_.rank(),
             [reader = reader_, expected = expected_[i], average = options_.average()] {
               return checkpoint::read_values(*reader, expected, average);
             });
    }
  }

  /// Has averages begin anew where the checkpoint has none.
  void load_averages() const {
    for (Average* average : averages_) {
      const auto& name = average->name();
      const auto parameters = expected_parameters(runtime_.table(), {&average->model()});
      const auto updates = checkpoint::average_updates(parameters, reader_->index(), name);
      std::map<std::string, ExpectedTensor> expected;
      for (const auto& tensor : parameters) expected[tensor.names.front()] = tensor;
      if (!updates) warn_of_new_average(name);
      average->load(updates.value_or(0), [reader = reader_, expected, name](const auto& parameter) {
        return checkpoint::read_average(*reader, expected.at(parameter), name);
      });
    }
  }

  void load_program_tensors() const {
    for (const auto& tensors : program_tensors_) tensors->load(reader_);
  }

  LoadedRun load_run() const {
    const auto& run = reader_->index().run;
    runtime_.progress.seed = run.random.seed;
    runtime_.progress.training_steps = run.step;
    note_steps(*runtime_.checkpoint_context, runtime_.progress);
    runtime_.progress.gradient_shards = static_cast<int>(run.gradient_shards);
    if (with_optimizer()) {
      runtime_.progress.step_functions.resume(run.random.step_calls, path_);
    } else {
      runtime_.progress.step_functions.load(run.random.step_calls);
    }
    CheckpointContext& context = *runtime_.checkpoint_context;
    context.unclaimed.clear();
    for (const auto& [name, state] : run.extra.items()) {
      const auto extra = context.extras.find(name);
      if (extra == context.extras.end()) {
        if (with_optimizer()) context.unclaimed[name] = state.dump();
      } else if (with_optimizer() || extra->second.check == nullptr) {
        extra->second.load(state.dump());
      }
    }
    LoadedRun loaded{run.step, run.user_content.dump(), {}};
    for (const auto& [name, state] : run.extra.items()) loaded.extra[name] = state.dump();
    return loaded;
  }

 private:
  bool with_optimizer() const { return !parts_.optimizers().empty(); }

  /// Warns that the average does not contain the training so far.
  void warn_of_new_average(const std::string& name) const {
    if (runtime_.rank() > 0 || reader_->index().run.step == 0) return;
    core::log_warning(c10::str("checkpoint \"", core::printable(path_), "\" holds no average \"",
                               core::printable(name), "\" of the model's parameters after step ",
                               reader_->index().run.step,
                               ", so it begins anew with the next ema.update()"));
  }

  /// Which part of how many of the files this rank checks: all ranks see the same, but of a copy
  /// each holder its own.
  std::pair<int, int> my_share() const {
    const auto& holders = runtime_.checkpoint_context->holders;
    if (holders == nullptr || path_ != holders->copy()) {
      return {runtime_.rank(), runtime_.world()->size()};
    }
    return {holders->number(), static_cast<int>(holders->ranks(holders->mine()).size())};
  }

  void check_bytes(bool with_optimizer) const {
    const auto world = runtime_.world();
    const auto section = with_optimizer ? Reader::Section::kAll : Reader::Section::kModel;
    const auto [part, parts] = my_share();
    const nlohmann::json mine = reader_->find_damage(section, part, parts);
    std::set<std::string> damage;
    for (const std::string& lines : comm::all_gather_bytes(*world, mine.dump())) {
      damage.merge(nlohmann::json::parse(lines).get<std::set<std::string>>());
    }
    checkpoint::check_undamaged(path_, {damage.begin(), damage.end()});
  }

  void check_optimizers() const {
    const auto& index = reader_->index();
    SMP_CHECK_WITH(CheckpointError, index.optimizer.contains("state"), "checkpoint \"", path_,
                   "\" holds no optimizer. Load it without one: smp::load(path, model)");
    std::set<std::string> unknown;
    const auto look = [&](const std::string& name) {
      if (parameters_.count(name) == 0) unknown.insert(name);
    };
    for (const auto& [name, state] : index.optimizer.at("state").items()) look(name);
    for (const auto& [name, entry] : index.optimizer_tensors) look(parameter_of(name));
    std::string list;
    for (const std::string& name : unknown) list += "\n  " + name;
    SMP_CHECK_WITH(CheckpointError, unknown.empty() || !options_.strict(), "checkpoint \"", path_,
                   "\" has optimizer state of what is no parameter of the program:", list,
                   "\nBuild the models as they were when the checkpoint was written, or load with "
                   "strict = false to leave it out");
    const auto outlines = params_of_optimizer(
        [](const std::string&) { return true; },
        [&](const std::string& name) {
          const auto& spec = index.optimizer_tensors.at(name).spec;
          return at::empty(spec.shape, at::TensorOptions(spec.dtype).device(at::kMeta));
        });
    for (const Optimizer* optimizer : parts_.optimizers()) {
      optimizer->check_loadable({outlines, groups_for(*optimizer)}, path_, options_.strict());
    }
    std::string problems;
    for (const Optimizer* optimizer : parts_.optimizers()) {
      problems += other_fields(*optimizer, outlines);
    }
    SMP_CHECK_WITH(CheckpointError, problems.empty(), "checkpoint \"", path_,
                   "\" has optimizer state that does not fit its parameters:", problems,
                   "\nNothing was loaded. Use another checkpoint.");
    LossScaling::check_state(loss_scale());
  }

  /// The saved groups without the parameters of the other optimizers.
  std::vector<OptimizerState::Group> groups_for(const Optimizer& optimizer) const {
    std::set<std::string> others;
    for (const Optimizer* other : parts_.optimizers()) {
      if (other != &optimizer) others.merge(other->parameters());
    }
    auto groups = optim::from_parts(reader_->index().optimizer, {}).groups;
    const auto leave_out = [&](auto& group) {
      const bool had_none = group.params.empty();
      const auto is_other = [&](const std::string& name) { return others.count(name) > 0; };
      auto& params = group.params;
      params.erase(std::remove_if(params.begin(), params.end(), is_other), params.end());
      return params.empty() && !had_none;
    };
    groups.erase(std::remove_if(groups.begin(), groups.end(), leave_out), groups.end());
    return groups;
  }

  nlohmann::json loss_scale() const {
    return reader_->index().optimizer.value(kLossScale, nlohmann::json::object());
  }

  void check_averages() const {
    const auto& index = reader_->index();
    if (!options_.average().empty()) {
      checkpoint::check_average(expected_parameters(runtime_.table(), parts_.models()), index,
                                options_.average(), path_);
    }
    if (!options_.strict()) return;
    for (const Average* average : averages_) {
      checkpoint::check_average(expected_parameters(runtime_.table(), {&average->model()}), index,
                                average->name(), path_);
    }
  }

  /// That of "parameter/field".
  static std::string parameter_of(const std::string& tensor) {
    return tensor.substr(0, tensor.rfind('/'));
  }

  /// The schedulers of the optimizer must be there, or learning rates would not go on as they did.
  void check_schedulers() const {
    const auto& stored = reader_->index().run.extra;
    for (const auto& [name, extra] : runtime_.checkpoint_context->extras) {
      if (extra.check == nullptr) continue;
      SMP_CHECK_WITH(CheckpointError, stored.contains(name) || !options_.strict(), "checkpoint \"",
                     path_, "\" holds nothing of scheduler \"", name,
                     "\": it was not registered when that was written. Load with strict = false "
                     "for its schedule to begin anew");
      if (stored.contains(name)) extra.check(stored.at(name).dump());
    }
  }

  bool is_stored(const ExpectedTensor& expected) const {
    for (const std::string& name : expected.names) {
      if (reader_->index().find_model(name) != nullptr) return true;
    }
    return false;
  }

  bool loads_field(const std::string& field) const {
    return options_.load_sharded_optimizer_state() || field == kMasterField;
  }

  using Values = std::function<at::Tensor(const std::string& optimizer_tensor)>;
  using Params = std::map<std::string, OptimizerState::Param>;

  /// The states of the parameters that are wanted, with tensors as `values` gives them.
  Params params_of_optimizer(const Wanted& is_wanted, const Values& values) const {
    const Wanted wanted = [&](const std::string& name) {
      return parameters_.count(name) > 0 && is_wanted(name);
    };
    const auto& index = reader_->index();
    const Params all = optim::from_parts(index.optimizer, {}).params;
    Params params;
    for (const auto& [name, param] : all) {
      if (options_.load_sharded_optimizer_state() && wanted(name)) params[name] = param;
    }
    for (const auto& [name, entry] : index.optimizer_tensors) {
      const std::string param = parameter_of(name), field = name.substr(name.rfind('/') + 1);
      if (checkpoint::is_of_program(field) || !wanted(param) || !loads_field(field)) continue;
      const auto saved = all.find(param);
      SMP_CHECK_WITH(CheckpointError, saved != all.end(), "checkpoint \"", path_,
                     "\" has optimizer tensor \"", name,
                     "\" of a parameter without state. Use another checkpoint.");
      params.emplace(param, OptimizerState::Param{saved->second.shape, {}, {}});
      params[param].tensors[field] = values(name);
    }
    return params;
  }

  /// A line for each field of another shape than libtorch's optimizers and ours make it. Those of a
  /// program's own optimizer may have any.
  static std::string other_fields(const Optimizer& optimizer, const Params& saved) {
    const auto& [type, layouts] = optimizer.fields();
    if (type.rfind("torch::optim::", 0) != 0 && type.rfind("smp::optim::", 0) != 0) return "";
    std::string lines;
    for (const std::string& name : optimizer.parameters()) {
      const auto param = saved.find(name);
      if (param == saved.end()) continue;
      const at::IntArrayRef shape = param->second.shape;
      for (const auto& [field, tensor] : param->second.tensors) {
        const bool is_elementwise = layouts.count(field) == 0 && tensor.dim() > 0;
        if (!is_elementwise || tensor.sizes() == shape) continue;
        lines += c10::str("\n  ", name, "/", field, ": expected shape ", shape, ", got ",
                          tensor.sizes());
      }
    }
    return lines;
  }

  /// Parameters in half precision that are stored in float32: the stored values are masters.
  void add_masters(const Wanted& wanted, Params& params) const {
    for (const ExpectedTensor& expected : expected_) {
      const std::string& name = expected.names.front();
      const bool has_master =
          MasterWeights::concerns(expected.spec.dtype) && parameters_.count(name) > 0;
      if (!has_master || !wanted(name) || !is_stored(expected)) continue;
      params.emplace(name, OptimizerState::Param{expected.spec.shape, {}, {}});
      at::Tensor& master = params[name].tensors[kMasterField];
      ExpectedTensor in_float = expected;
      in_float.spec.dtype = at::kFloat;
      if (!master.defined()) master = checkpoint::read_values(*reader_, in_float);
    }
  }

  Runtime& runtime_;
  const std::string path_;
  const CheckpointParts parts_;
  const LoadOptions options_;
  std::vector<checkpoint::NamedTensor> tensors_;
  std::vector<ExpectedTensor> expected_;
  std::vector<Average*> averages_;
  std::vector<std::shared_ptr<ProgramTensors>> program_tensors_;
  std::set<std::string> parameters_;  // names, of all models
  std::shared_ptr<Reader> reader_;
};

}  // namespace

std::vector<ExpectedTensor> expected_by(const ParameterTable& table, const Model& model,
                                        std::vector<checkpoint::NamedTensor> tensors) {
  const size_t prefix = model.full_name("").size();
  for (auto& tensor : tensors) {
    tensor.name.erase(0, prefix);
    for (std::string& alias : tensor.aliases) alias.erase(0, prefix);
  }
  return expectations(table, tensors);
}

void assign(const ParameterTable::Entry& entry, int rank, std::function<at::Tensor()> read) {
  const auto own = [sharding = entry.shard() ? entry.sharding : entry.part(), rank,
                    whole = std::move(read)] { return sharding.cut(whole(), rank); };
  const at::Tensor& target = entry.shard() ? entry.updated() : entry.tensor;
  if (const auto recording = graph::recording_of(entry.tensor).first) {
    recording->set_source(entry.tensor, own);
  } else if (target.defined() && has_data(target)) {
    target.detach().copy_(own());
  }
}

void load_values(Runtime& runtime, const std::function<void()>& load) {
  const at::NoGradGuard no_grad;
  const OwnUse parameters(runtime);
  ++runtime.progress.parameter_loads;
  try {
    load();
  } catch (const std::exception& error) {
    runtime.fail(error);
    throw;
  }
}

LoadedRun load(const std::string& path, const CheckpointParts& given, const LoadOptions& options) {
  Runtime& runtime = Runtime::get();
  SMP_CHECK_WITH(UsageError, !runtime.current_step.is_running,
                 "smp::load was called inside a step function; call it before or after the step");
  SMP_CHECK_WITH(UsageError, options.model().empty(), "smp::load: LoadOptions().model(\"",
                 core::printable(options.model()),
                 "\") is for smp::load_into_module. A DistributedModel takes the tensors of the "
                 "model of its own name: ModelOptions().name");
  runtime.checkpoint_context->finish();
  const CheckpointParts parts =
      options.load_optimizer() ? given : CheckpointParts(given.models(), {});
  if (!parts.optimizers().empty()) {
    check_nothing_adds_up(runtime.current_step, "smp::load");
    // An optimizer may be of several models.
    check_no_average_in_use(runtime.models(), "smp::load");
    check_no_common_parameters(parts.optimizers(), "smp::load");
  }
  for (Model* model : parts.models()) check_no_average_in_use(*model, "smp::load");
  Load load(runtime, path, parts, options);
  load.check();
  // Before the model: an optimizer of another form is found out, too, while nothing has changed.
  together(*runtime.world(), [&] {
    const at::NoGradGuard no_grad;
    load.load_optimizers();
    return "";
  });
  LoadedRun run;
  load_values(runtime, [&] {
    load.load_model();
    load.load_averages();
    load.load_program_tensors();
    run = load.load_run();
  });
  return run;
}

}  // namespace smp::runtime
