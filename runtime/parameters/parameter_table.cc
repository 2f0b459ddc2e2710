// SPDX-License-Identifier: Apache-2.0
#include "runtime/parameters/parameter_table.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "core/check.h"
#include "dp/parameter_slices.h"
#include "nn/parameter_sharding.h"
#include "runtime/parameters/scope_notes.h"

namespace smp::runtime {

const at::Tensor& ParameterTable::Slice::piece() const { return slices->pieces()[index]; }

bool ParameterTable::Slice::has_gradient() const { return slices->has_gradient(index); }

std::optional<int> ParameterTable::Entry::pin() const { return partition_pins().find(tensor); }

std::optional<TensorParallelismMark> ParameterTable::Entry::tensor_parallelism_mark() const {
  return tensor_parallelism_marks().find(tensor);
}

std::vector<int64_t> ParameterTable::Entry::whole_sizes() const {
  return is_divided() ? sharding.sizes : tensor.sizes().vec();
}

comm::Sharding ParameterTable::Entry::part() const {
  comm::Sharding part{sharding.sizes, sharding.order, {}};
  std::copy_if(sharding.cuts.begin(), sharding.cuts.end(), std::back_inserter(part.cuts),
               [](const comm::Cut& cut) { return std::holds_alternative<comm::Blocks>(cut.how); });
  return part;
}

std::string ParameterTable::Entry::name_on(int rank) const {
  if (!slice) return name;
  const int replica = sharding.cuts.back().over.index_of(rank);
  const auto [begin, end] = slice->slices->owned(slice->index, replica);
  return begin == end ? "" : c10::str(name, "[", begin, ":", end, "]");
}

std::optional<size_t> ParameterTable::Entry::shard() const {
  return slice && slice->is_shard ? std::optional(slice->index) : std::nullopt;
}

bool ParameterTable::Entry::shares_storage_in(const ParameterTable& table) const {
  return std::any_of(table.entries_.begin(), table.entries_.end(), [this](const Entry& other) {
    return !other.tensor.is_same(tensor) &&
           other.tensor.storage().unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl();
  });
}

void ParameterTable::add(graph::ValueKind kind, const std::string& name, const at::Tensor& tensor) {
  tensors_.add(kind, name, tensor);
  const graph::TensorTable::Entry& registered = *tensors_.find(tensor);
  const size_t index = index_of(registered);
  if (index == entries_.size()) {
    entries_.emplace_back(registered);
  } else {
    entries_[index].aliases = registered.aliases;
  }
}

void ParameterTable::divide(const std::string& name, const nn::ParameterSplit& split,
                            const core::Axis& over, bool captured_whole) {
  Entry& entry = entry_of(name);
  const comm::Sharding lies = nn::sharding_of(split, over);
  if (entry.is_divided()) {
    SMP_CHECK_WITH(UsageError, entry.sharding == lies, "parameter \"", name, "\" is tied to \"",
                   entry.name, "\" and divided in another way: ", split.to_string(), " against ",
                   entry.sharding.to_string(),
                   ". Modules that share a parameter must divide it alike; give them two "
                   "parameters, or set tensor_parallel_degree to 1");
    return;
  }
  SMP_CHECK_WITH(UsageError, entry.tensor.sizes() == at::IntArrayRef(split.local_sizes()),
                 "parameter \"", name, "\" of shape ", entry.tensor.sizes(),
                 " is said to be a part of ", split.to_string(), ", which would have shape ",
                 at::IntArrayRef(split.local_sizes()),
                 ". split_parameters() must tell how the module made it");
  entry.sharding = lies;
  entry.captured_whole = captured_whole;
}

void ParameterTable::set_waiting(const std::string& name, at::Tensor values) {
  Entry& entry = entry_of(name);
  entry.waiting = std::move(values);
  tensors_.renew_storage(entry.tensor);
}

void ParameterTable::set_owner(const std::string& name, int rank, std::string reason) {
  Entry& entry = entry_of(name);
  SMP_INTERNAL_ASSERT(!entry.owner, "\"", name, "\" has an owner already");
  entry.owner = rank;
  entry.owner_reason = std::move(reason);
}

void ParameterTable::set_slices(const std::shared_ptr<dp::ParameterSlices>& slices,
                                const core::Axis& over, bool are_shards) {
  for (size_t i = 0; i < slices->names().size(); ++i) {
    Entry& entry = entry_of(slices->names()[i]);
    entry.sharding = {entry.whole_sizes(), comm::memory_order(entry.tensor), entry.part().cuts};
    entry.sharding.cuts.push_back({over, slices->range(i)});
    entry.slice = Slice{slices, i, are_shards};
  }
}

void ParameterTable::set_written(const std::string& name) { entry_of(name).is_written = true; }

const ParameterTable::Entry* ParameterTable::find(const at::Tensor& tensor) const {
  const auto* registered = tensors_.find(tensor);
  return registered == nullptr ? nullptr : &entries_[index_of(*registered)];
}

const ParameterTable::Entry& ParameterTable::at(const at::Tensor& tensor) const {
  const Entry* entry = find(tensor);
  SMP_CHECK_WITH(UsageError, entry != nullptr, "a parameter or buffer of shape ", tensor.sizes(),
                 " was registered after its module was wrapped in a DistributedModel. Register all "
                 "of them before");
  return *entry;
}

const ParameterTable::Entry& ParameterTable::at(const std::string& name) const {
  return entries_[index_of(tensors_.at(name))];
}

std::vector<const ParameterTable::Entry*> ParameterTable::divided() const {
  std::vector<const Entry*> result;
  for (const Entry& entry : entries_) {
    if (entry.is_divided()) result.push_back(&entry);
  }
  return result;
}

}  // namespace smp::runtime
