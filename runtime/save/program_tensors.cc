// SPDX-License-Identifier: Apache-2.0
#include "runtime/save/program_tensors.h"

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "core/text.h"

namespace smp::runtime {

ProgramTensors::ProgramTensors(std::string name, Model& model, Save save, Load load)
    : name_(std::move(name)), model_(model), save_(std::move(save)), load_(std::move(load)) {
  for (const auto& known : model.runtime().models()) {
    if (known.get() == &model) life_ = known;
  }
}

OptimizerState ProgramTensors::local_state() const {
  const Runtime& runtime = model_.runtime();
  OptimizerState state;
  for (const auto& item : save_()) {
    const at::Tensor* parameter = model_.named_parameters().find(item.key());
    const auto* entry = parameter != nullptr ? runtime.table().find(*parameter) : nullptr;
    SMP_CHECK_WITH(UsageError, entry != nullptr && runtime.owns(*entry), "the tensors \"", name_,
                   "\" of a checkpoint: \"", core::printable(item.key()),
                   "\" is no parameter that this rank owns. Give tensors by the names of "
                   "model->local_named_parameters()");
    const at::Tensor& tensor = item.value();
    SMP_CHECK_WITH(
        UsageError, tensor.defined() && tensor.sizes() == entry->tensor.sizes() && !entry->shard(),
        "the tensors \"", name_, "\" of a checkpoint: expected for \"", core::printable(item.key()),
        "\" one of the sizes ", entry->tensor.sizes(), " of the parameter, got ",
        tensor.defined() ? c10::str(tensor.sizes()) : "an undefined one",
        ". They are divided as the parameters are, whole on each replica: with sharded "
        "data parallelism there is no such tensor");
    state.params[entry->name] = {
        entry->tensor.sizes().vec(), {{checkpoint::tensors_field(name_), tensor}}, ""};
  }
  return state;
}

std::vector<ProgramTensors::Stored> ProgramTensors::stored_in(
    const checkpoint::Index& index) const {
  const ParameterTable& table = model_.runtime().table();
  std::vector<Stored> result;
  for (const checkpoint::NamedTensor& named : tensors_of(table, {&model_})) {
    const auto& entry = table.at(named.name);
    auto names = named.aliases;  // another one may have been the first when it was saved
    names.insert(names.begin(), named.name);
    for (const std::string& name : names) {
      const std::string tensor = name + "/" + checkpoint::tensors_field(name_);
      const auto found = index.optimizer_tensors.find(tensor);
      if (found == index.optimizer_tensors.end()) continue;
      if (found->second.spec.shape != entry.whole_sizes()) continue;
      result.push_back({&entry, tensor});
      break;
    }
  }
  return result;
}

void ProgramTensors::check(const checkpoint::Index& index, const std::string& path,
                           bool strict) const {
  SMP_CHECK_WITH(
      CheckpointError, !stored_in(index).empty() || !strict, "checkpoint \"", core::printable(path),
      "\" holds no tensors \"", name_,
      "\" that fit the model's parameters: they were not registered when it was written, or it "
      "is a full checkpoint, which has the model alone. Load with strict = false to go "
      "on without");
}

void ProgramTensors::load(std::shared_ptr<checkpoint::Reader> reader) {
  if (stored_in(reader->index()).empty()) return;
  loaded_ = std::move(reader);
  take_loaded();
}

void ProgramTensors::take_loaded() {
  const Runtime& runtime = model_.runtime();
  if (loaded_ == nullptr || !runtime.partitioned()) return;
  const auto reader = std::exchange(loaded_, nullptr);
  Model::TensorDict tensors;
  const size_t prefix = model_.full_name("").size();
  for (const auto& [entry, tensor] : stored_in(reader->index())) {
    if (!runtime.owns(*entry)) continue;
    const at::Tensor whole = reader->read_optimizer(tensor);
    tensors.insert(entry->name.substr(prefix), entry->part().cut(whole, runtime.rank()));
  }
  load_(tensors);
}

std::vector<std::shared_ptr<ProgramTensors>> program_tensors_of(const CheckpointContext& context,
                                                                const std::vector<Model*>& models) {
  std::vector<std::shared_ptr<ProgramTensors>> result;
  for (const auto& tensors : context.tensors) {
    const bool is_of_one =
        std::find(models.begin(), models.end(), tensors->model()) != models.end();
    if (is_of_one) result.push_back(tensors);
  }
  return result;
}

RemovableHandle register_program_tensors(const std::string& name, Model& model,
                                         ProgramTensors::Save save, ProgramTensors::Load load) {
  checkpoint::check_field_name("smp::register_checkpoint_tensors", name, checkpoint::tensors_field);
  const auto& context = model.runtime().checkpoint_context;
  auto& known = context->tensors;
  const auto is_gone = [](const auto& tensors) { return tensors->model() == nullptr; };
  known.erase(std::remove_if(known.begin(), known.end(), is_gone), known.end());
  for (const auto& other : program_tensors_of(*context, {&model})) {
    SMP_CHECK_WITH(UsageError, other->name() != name,
                   "smp::register_checkpoint_tensors was called twice for \"", name,
                   "\" of a model: give each set of tensors a name of its own");
  }
  const auto tensors =
      std::make_shared<ProgramTensors>(name, model, std::move(save), std::move(load));
  known.push_back(tensors);
  const std::weak_ptr<ProgramTensors> weak = tensors;
  auto hook = std::make_shared<RemovableHandle>(model.register_post_partition_hook([weak] {
    if (const auto alive = weak.lock()) alive->take_loaded();
  }));
  return RemovableHandle([of = std::weak_ptr<CheckpointContext>(context), weak, hook] {
    hook->remove();
    const auto alive = of.lock();
    if (alive == nullptr) return;
    auto& all = alive->tensors;
    all.erase(std::remove(all.begin(), all.end(), weak.lock()), all.end());
  });
}

}  // namespace smp::runtime
