// SPDX-License-Identifier: Apache-2.0
#include "runtime/parameters/parameter_table.h"

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "dp/parameter_pieces.h"
#include "nn/parameter_sharding.h"
#include "runtime/parameters/scope_notes.h"

namespace smp::runtime {

const at::Tensor& ParameterTable::Piece::tensor() const { return pieces->own()[index]; }

bool ParameterTable::Piece::has_gradient() const { return pieces->has_gradient(index); }

std::optional<int> ParameterTable::Entry::pin() const { return partition_pins().find(tensor); }

std::optional<TensorParallelismMark> ParameterTable::Entry::tensor_parallelism_mark() const {
  return tensor_parallelism_marks().find(tensor);
}

std::vector<int64_t> ParameterTable::Entry::whole_sizes() const {
  return is_divided() ? sharding.sizes : tensor.sizes().vec();
}

std::optional<int> ParameterTable::Entry::owner() const {
  if (sharding.cuts.empty()) return std::nullopt;
  const auto* owner = std::get_if<comm::Owner>(&sharding.cuts.front().how);
  return owner ? std::optional(owner->position) : std::nullopt;
}

std::string ParameterTable::Entry::name_on(int rank) const {
  if (!piece) return name;
  const auto& [over, how] = sharding.cuts.back();
  const auto [begin, end] = std::get<comm::Range>(how).of(over.index_of(rank), tensor.numel());
  return begin == end ? "" : c10::str(name, "[", begin, ":", end, "]");
}

std::optional<size_t> ParameterTable::Entry::shard() const {
  return piece && piece->pieces->divides_values() ? std::optional(piece->index) : std::nullopt;
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
    SMP_CHECK_WITH(UsageError, entry.part() == lies, "parameter \"", name, "\" is tied to \"",
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
  entry.sharding.sizes = lies.sizes;
  entry.sharding.cuts.push_back(lies.cuts.front());
  entry.captured_whole = captured_whole;
}

void ParameterTable::set_waiting(const std::string& name, at::Tensor values) {
  Entry& entry = entry_of(name);
  entry.waiting = std::move(values);
  tensors_.renew_storage(entry.tensor);
}

void ParameterTable::set_owner(const std::string& name, const core::Axis& over, int rank,
                               std::string reason) {
  Entry& entry = entry_of(name);
  SMP_INTERNAL_ASSERT(!entry.owner(), "\"", name, "\" has an owner already");
  entry.sharding.cuts.insert(entry.sharding.cuts.begin(), {over, comm::Owner{rank}});
  entry.owner_reason = std::move(reason);
}

void ParameterTable::set_pieces(const std::shared_ptr<dp::ParameterPieces>& pieces,
                                const core::Axis& over) {
  for (size_t i = 0; i < pieces->names().size(); ++i) {
    Entry& entry = entry_of(pieces->names()[i]);
    entry.sharding.sizes = entry.whole_sizes();
    entry.sharding.order = comm::memory_order(entry.tensor);
    entry.sharding.cuts.push_back({over, pieces->range(i)});
    entry.piece = Piece{pieces, i};
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
