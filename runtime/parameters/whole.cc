// SPDX-License-Identifier: Apache-2.0
#include "runtime/parameters/whole.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <map>
#include <utility>

#include "dp/parameter_slices.h"
#include "graph/recording.h"
#include "runtime/model.h"
#include "runtime/parameters/sharding.h"

namespace smp::runtime {
namespace {

/// The owner's values, on all ranks of its pipeline or on the first, undefined on all others.
at::Tensor from_owner(const Runtime& runtime, const ParameterTable::Entry& entry, bool to_first) {
  const auto pipeline = runtime.group(CommGroup::kPp);
  const int owner = entry.owner.value_or(0);
  const bool is_owner = pipeline->rank() == owner;
  const bool receives = !to_first || pipeline->rank() == 0;
  if (!is_owner && !receives) return {};
  const at::Tensor& tensor = entry.tensor;
  const at::Tensor copy = is_owner
                              ? graph::value_of(entry.values()).detach().cpu().contiguous().clone()
                              : at::empty(tensor.sizes(), tensor.options().device(at::kCPU));
  if (!to_first) {
    pipeline->broadcast(copy, owner);
  } else if (!receives) {
    pipeline->send(copy, /*destination=*/0, /*tag=*/0);
  } else if (!is_owner) {
    pipeline->recv(copy, owner, /*tag=*/0);
  }
  return receives ? copy : at::Tensor();
}

/// A copy of the whole on all ranks of the model or on the first.
at::Tensor gather(const Runtime& runtime, const ParameterTable::Entry& entry, bool to_first) {
  at::NoGradGuard no_grad;
  const bool is_alike = !entry.is_divided() && runtime.rank_in(CommGroup::kTp) > 0;
  if (to_first && is_alike && !entry.shard()) return {};
  const auto shard = entry.shard();
  at::Tensor held = shard
                        ? join(runtime, CommGroup::kRdp, entry, entry.updated()).cpu().contiguous()
                        : from_owner(runtime, entry, to_first);
  if (!held.defined()) return {};
  if (entry.is_divided()) {
    held = join(runtime, CommGroup::kTp, entry, held, to_first ? std::optional(0) : std::nullopt);
  }
  return to_first && runtime.rank_in(CommGroup::kMp) > 0 ? at::Tensor() : held;
}

/// Where the ranks of a tensor-parallel group put their parts together: an entry's on one of them,
/// that of a further entry on the one that was given the fewest elements.
class Roots {
 public:
  explicit Roots(const Runtime& runtime) : elements_(runtime.topology().tp_size()) {}

  int of(const ParameterTable::Entry& entry) {
    const auto [root, is_new] = roots_.try_emplace(&entry);
    const auto fewest = std::min_element(elements_.begin(), elements_.end());
    if (is_new) root->second = static_cast<int>(fewest - elements_.begin());
    elements_[root->second] += c10::multiply_integers(entry.sharding.sizes);
    return root->second;
  }

 private:
  std::vector<int64_t> elements_;  // elements by rank
  std::map<const ParameterTable::Entry*, int> roots_;
};

/// The whole on the entry's root, undefined on others; an undivided tensor as it is.
at::Tensor whole_on_root(const Runtime& runtime, const ParameterTable::Entry& entry,
                         const at::Tensor& own, Roots& roots) {
  return entry.is_divided() ? join(runtime, CommGroup::kTp, entry, own, roots.of(entry)) : own;
}

/// Undoes the cuts over replicas: of a list of `held`, those of a bucket that have one type.
void join_pieces(const Runtime& runtime, const std::vector<Held>& held,
                 const std::vector<size_t>& list, comm::Communicator& replicas, int root,
                 const UseOfHeld& use) {
  std::vector<comm::Part> parts;
  for (const size_t i : list) parts.push_back({held[i].entry->sharding, held[i].own});
  const Held& first = held[list.front()];
  const auto options = first.entry->tensor.options().dtype(first.dtype);
  const auto joined = comm::join(replicas, parts, options, runtime.rank(), root);
  for (size_t j = 0; j < joined.size(); ++j) {
    if (joined[j].defined()) use(list[j], joined[j]);
  }
}

}  // namespace

std::vector<std::shared_ptr<dp::ParameterSlices>> slices_of(const Runtime& runtime) {
  std::vector<std::shared_ptr<dp::ParameterSlices>> result;
  for (const auto& model : runtime.models()) {
    if (auto slices = model->slices()) result.push_back(std::move(slices));
  }
  if (runtime.sharding()) result.push_back(runtime.sharding()->parameters());
  return result;
}

at::Tensor whole_on_all(const Runtime& runtime, const ParameterTable::Entry& entry) {
  return gather(runtime, entry, /*to_first=*/false);
}

at::Tensor whole_on_first(const Runtime& runtime, const ParameterTable::Entry& entry) {
  return gather(runtime, entry, /*to_first=*/true);
}

at::Tensor whole_on_one(const Runtime& runtime, const ParameterTable::Entry& entry, size_t turn,
                        int replica) {
  at::NoGradGuard no_grad;
  const auto shard = entry.shard();
  const int together = shard ? runtime.sharding()->parameters()->group()->size() : 1;
  const int place = runtime.replicas()->rank();
  const bool is_asked = shard ? place < together : place == replica;
  if (!runtime.owns(entry) || !is_asked) return {};
  at::Tensor held = entry.tensor;
  if (shard) {
    held = join(runtime, CommGroup::kRdp, entry, entry.updated(), turn % together);
    turn /= together;  // so that all pairs of ranks have turns
  }
  if (!held.defined()) return {};
  // A device need not hold more than the parts.
  if (shard || entry.is_divided()) held = held.cpu();
  const auto group = runtime.group(CommGroup::kTp);
  if (!entry.is_divided()) return group->rank() == 0 ? held : at::Tensor();
  return join(runtime, CommGroup::kTp, entry, held, turn % group->size());
}

at::Tensor join(const Runtime& runtime, CommGroup over, const ParameterTable::Entry& entry,
                const at::Tensor& own, std::optional<int> root) {
  const bool parts = over == CommGroup::kTp;
  const comm::CommunicatorPtr group = parts ? runtime.group(over) : entry.slice->slices->group();
  const auto options = (own.defined() ? own : entry.tensor).options();
  return comm::join(*group, {{parts ? entry.part() : entry.sharding, own}}, options, runtime.rank(),
                    root)
      .front();
}

void for_each_joined(const Runtime& runtime, CommGroup over, const std::vector<Held>& held,
                     const UseOfHeld& use) {
  at::NoGradGuard no_grad;
  Roots roots(runtime);
  for (size_t i = 0; i < held.size(); ++i) {
    const auto& [entry, own, dtype, exists] = held[i];
    if (!own.defined() || (over == CommGroup::kRdp && entry->slice)) continue;
    at::Tensor tensor = own.to(dtype);
    if (over == CommGroup::kTp) tensor = whole_on_root(runtime, *entry, tensor, roots);
    if (tensor.defined()) use(i, tensor);
  }
  if (over == CommGroup::kTp) return;
  for (const auto& slices : slices_of(runtime)) {
    std::map<std::pair<size_t, at::ScalarType>, std::vector<size_t>> lists;  // lists by bucket
    for (size_t i = 0; i < held.size(); ++i) {
      const auto& slice = held[i].entry->slice;
      if (!slice || slice->slices != slices || !held[i].exists) continue;
      lists[{slices->layout().slots[slice->index].bucket, held[i].dtype}].push_back(i);
    }
    for (const auto& [of, list] : lists) {
      const int root = static_cast<int>(of.first) % slices->group()->size();
      join_pieces(runtime, held, list, *slices->group(), root, use);
    }
  }
}

void for_each_whole(const Runtime& runtime, const std::vector<Held>& held, const UseOfHeld& use) {
  Roots roots(runtime);
  for_each_joined(runtime, CommGroup::kRdp, held, [&](size_t i, const at::Tensor& part) {
    const at::Tensor whole = whole_on_root(runtime, *held[i].entry, part, roots);
    if (whole.defined()) use(i, whole);
  });
}

}  // namespace smp::runtime
