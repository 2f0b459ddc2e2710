#include "smp/save_load.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <functional>

#include "checkpoint/apply.h"
#include "checkpoint/reader.h"
#include "checkpoint/writer.h"
#include "graph/recording.h"
#include "smp/core/error.h"
#include "smp/delayed.h"
#include "smp/runtime.h"
#include "smp/sharding.h"
#include "smp/storage.h"

namespace smp {
namespace {

using checkpoint::NamedTensor;

/// The model's tensors under their full names, each once.
std::vector<NamedTensor> tensors_of(const Runtime& runtime, const std::vector<ModelCore*>& models) {
  std::vector<NamedTensor> result;
  for (const auto& entry : runtime.table().entries()) {
    for (const ModelCore* model : models) {
      const std::string prefix = model->full_name("");
      if (entry.name.rfind(prefix, 0) != 0) continue;
      result.push_back({entry.name, entry.tensor, entry.aliases});
      break;
    }
  }
  return result;
}

/// The ranks that write, numbered.
struct Writers {
  /// The stages of the first replica; where replicas have parts of the optimizer's state those of
  /// all, and of the first that together have all parameters. Before partitioning every rank has
  /// the whole model, so one writes it.
  Writers(const Runtime& runtime, bool writes_optimizer) {
    const int stages = runtime.group(CommGroup::kPp)->size();
    const bool all = writes_optimizer && shards_optimizer_state(runtime);
    int replicas = all ? runtime.group(CommGroup::kDp)->size() : 1;
    if (runtime.sharding) replicas = runtime.sharding->parameters()->group()->size();
    if (runtime.partitioned) count = stages * replicas;
    mine = runtime.rank_in(CommGroup::kDp) * stages + runtime.rank_in(CommGroup::kPp);
  }

  int count = 1;
  int mine;
};

/// The divided parameters in turn by the ranks that have them together, so that none needs the
/// memory for all. Collective over these ranks.
NamedTensor gather_divided(const Sharding& sharding, NamedTensor tensor, size_t index) {
  const auto& parameters = *sharding.parameters();
  const int root = static_cast<int>(index) % parameters.group()->size();
  tensor.tensor = parameters.full_on(root, index);
  return tensor;
}

/// What this rank writes: the model's tensors are the first replica's, but for divided parameters.
checkpoint::Shard shard_of(const Runtime& runtime, const std::vector<ModelCore*>& models,
                           const std::vector<OptimizerCore*>& optimizers) {
  checkpoint::Shard shard;
  for (auto& tensor : tensors_of(runtime, models)) {
    if (const auto index =
            runtime.sharding ? runtime.sharding->find(tensor.tensor) : std::nullopt) {
      auto gathered = gather_divided(*runtime.sharding, tensor, *index);
      if (gathered.tensor.defined()) shard.model.push_back(std::move(gathered));
      continue;
    }
    const bool mine = runtime.rank_in(CommGroup::kDp) == 0 && runtime.owns(tensor.name);
    if (mine) shard.model.push_back(std::move(tensor));
  }
  for (OptimizerCore* optimizer : optimizers) {
    const auto state = optimizer->local_state();
    shard.optimizer = optim::to_json(state);
    shard.optimizer_tensors = optim::tensors_of(state);
  }
  return shard;
}

checkpoint::RunState run_state(const Runtime& runtime, const nlohmann::json& user_content) {
  checkpoint::RunState state;
  state.step = runtime.training_steps;
  state.gradient_shards = runtime.gradient_shards();
  state.random.seed = runtime.seed;
  for (const auto& [ordinal, calls] : runtime.step_calls) {
    state.random.step_calls.resize(std::max<size_t>(state.random.step_calls.size(), ordinal + 1));
    state.random.step_calls[ordinal] = static_cast<int64_t>(calls);
  }
  state.user_content = user_content;
  return state;
}

/// The checkpoint's optimizer with the state of the parameters that are `wanted`.
optim::OptimizerState read_optimizer(checkpoint::Reader& reader,
                                     const std::function<bool(const std::string&)>& wanted) {
  nlohmann::json json = reader.index().optimizer;
  std::map<std::string, at::Tensor> tensors;
  for (const auto& [name, entry] : reader.index().optimizer_tensors) {
    if (wanted(name.substr(0, name.rfind('/')))) tensors[name] = reader.read_optimizer(name);
  }
  auto& states = json["state"];
  for (auto it = states.begin(); it != states.end();) {
    it = wanted(it.key()) ? std::next(it) : states.erase(it);
  }
  return optim::from_parts(json, tensors);
}

}  // namespace

void save_run(const std::string& path, const std::vector<ModelCore*>& models,
              const std::vector<OptimizerCore*>& optimizers, const nlohmann::json& user_content) {
  Runtime& runtime = Runtime::get();
  SMP_CHECK_WITH(UsageError, !runtime.in_step,
                 "smp::save was called inside a step function; call it after the step");
  SMP_CHECK_WITH(UsageError, !has_delayed(runtime),
                 "smp::save was called before the first step, and the model was made under delayed "
                 "parameter initialization: its parameters do not exist yet. Save after a step");
  try {
    at::NoGradGuard no_grad;
    const checkpoint::Writer writer(path);
    const auto world = runtime.world();
    const Writers writers(runtime, !optimizers.empty());
    if (world->rank() == 0) writer.begin();
    world->barrier();
    std::string part;
    if (writers.mine < writers.count) {
      part = writer.write_shard(writers.mine, writers.count, shard_of(runtime, models, optimizers));
    }
    auto parts = comm::all_gather_bytes(*world, part);
    parts.erase(std::remove(parts.begin(), parts.end(), ""), parts.end());
    if (world->rank() == 0) writer.commit(parts, run_state(runtime, user_content));
    world->barrier();
  } catch (const std::exception& error) {
    runtime.fail(error.what());
    throw;
  }
}

LoadedRun load_run(const std::string& path, const std::vector<ModelCore*>& models,
                   const std::vector<OptimizerCore*>& optimizers, bool strict) {
  Runtime& runtime = Runtime::get();
  SMP_CHECK_WITH(UsageError, !runtime.in_step,
                 "smp::load was called inside a step function; call it before or after the step");
  auto reader = std::make_shared<checkpoint::Reader>(path);
  const auto tensors = tensors_of(runtime, models);
  checkpoint::check_names(checkpoint::expectations(tensors), reader->index(), path, strict);
  SMP_CHECK_WITH(CheckpointError, optimizers.empty() || reader->index().optimizer.contains("state"),
                 "checkpoint \"", path,
                 "\" holds no optimizer. Load it without one: smp::load(path, model)");
  at::NoGradGuard no_grad;
  ++runtime.parameter_loads;
  for (const auto& [name, tensor, aliases] : tensors) {
    if (reader->index().find_model(name) == nullptr) continue;
    if (const auto recording = graph::recording_of(tensor).first) {
      // Read by the rank that will own it.
      recording->set_source(tensor, [reader, name = name] { return reader->read_model(name); });
    } else if (const auto index =
                   runtime.sharding ? runtime.sharding->find(tensor) : std::nullopt) {
      runtime.sharding->parameters()->load(*index, reader->read_model(name));
    } else if (has_data(tensor)) {
      tensor.detach().copy_(reader->read_model(name));
    }
  }
  for (OptimizerCore* optimizer : optimizers) {
    const auto options = read_optimizer(*reader, [](const std::string&) { return false; });
    optimizer->load(options.groups, [reader](const auto& wanted) {
      return read_optimizer(*reader, wanted).params;
    });
  }
  const auto& run = reader->index().run;
  runtime.seed = run.random.seed;
  runtime.seed_is_set = true;
  runtime.training_steps = run.step;
  runtime.saved_gradient_shards = static_cast<int>(run.gradient_shards);
  for (size_t i = 0; i < run.random.step_calls.size(); ++i) {
    runtime.step_calls[static_cast<int>(i)] = static_cast<uint64_t>(run.random.step_calls[i]);
  }
  return {run.step, run.user_content};
}

void load_into_module(const std::string& path, torch::nn::Module& module, bool strict) {
  checkpoint::load_into_module(module, path, strict);
}

}  // namespace smp
