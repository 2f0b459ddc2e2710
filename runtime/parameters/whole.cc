// SPDX-License-Identifier: Apache-2.0
#include "runtime/parameters/whole.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <map>
#include <utility>

#include "core/check.h"
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
  const auto options = entry.tensor.options();
  at::Tensor held = shard
                        ? join(runtime, entry.sharding, entry.updated(), options).cpu().contiguous()
                        : from_owner(runtime, entry, to_first);
  if (!held.defined()) return {};
  if (entry.is_divided()) {
    const auto root = to_first ? std::optional(0) : std::nullopt;
    held = join(runtime, entry.part(), held, held.options(), root);
  }
  return to_first && runtime.rank_in(CommGroup::kMp) > 0 ? at::Tensor() : held;
}

/// Parameters that are put together on one rank, those of one type in one collective: of a bucket
/// of pieces, else one. Named by their memory's owner and the index there.
using Bucket = std::pair<const void*, size_t>;

Bucket bucket_of(const Held& held) {
  const auto& [entry, lies, own, dtype, exists] = held;
  const bool is_piece = entry->slice && lies.cuts.back().over == entry->sharding.cuts.back().over;
  if (!is_piece) return {entry, 0};
  const auto& [slices, index, is_shard] = *entry->slice;
  return {slices.get(), slices->layout().slots[index].bucket};
}

/// Puts tensors together, the cuts from the last to the first.
class Joins {
 public:
  explicit Joins(const Runtime& runtime) : runtime_(runtime) {}

  void join(const std::vector<Held>& held, const UseOfHeld& use) {
    std::map<std::pair<Bucket, at::ScalarType>, size_t> known;
    std::vector<std::vector<size_t>> lists;  // in the order of `held`, which all ranks have
    for (size_t i = 0; i < held.size(); ++i) {
      const auto& [entry, lies, own, dtype, exists] = held[i];
      if (lies.cuts.empty() && own.defined()) use(i, own.to(dtype));
      if (lies.cuts.empty() || !exists) continue;
      const auto [list, is_new] = known.try_emplace({bucket_of(held[i]), dtype}, lists.size());
      if (is_new) lists.emplace_back();
      lists[list->second].push_back(i);
    }
    for (const auto& list : lists) join_list(held, list, use);
  }

 private:
  void join_list(const std::vector<Held>& held, const std::vector<size_t>& list,
                 const UseOfHeld& use) {
    const Held& first = held[list.front()];
    const auto group = group_along(runtime_, first.lies.cuts.back().over);
    std::vector<comm::Part> parts;
    for (const size_t i : list) parts.push_back({held[i].lies, held[i].own});
    const auto options = (first.own.defined() ? first.own : first.entry->tensor).options();
    const int root = root_of(bucket_of(first), *group, parts);
    const auto joined =
        comm::join(*group, parts, options.dtype(first.dtype), runtime_.rank(), root);
    for (size_t j = 0; j < joined.size(); ++j) {
      if (!joined[j].defined()) continue;
      Held part = held[list[j]];
      part.lies.cuts.pop_back();
      part.own = joined[j];
      join({part}, [&](size_t, const at::Tensor& whole) { use(list[j], whole); });
    }
  }

  /// The rank of a group that puts a bucket together: at first the one that was given the fewest
  /// elements.
  int root_of(const Bucket& bucket, const comm::Communicator& group,
              const std::vector<comm::Part>& parts) {
    auto& given = given_.try_emplace(&group, group.size()).first->second;
    const auto fewest = std::min_element(given.begin(), given.end()) - given.begin();
    const int root = roots_.try_emplace(bucket, static_cast<int>(fewest)).first->second;
    for (const auto& part : parts) given[root] += c10::multiply_integers(part.sharding.sizes);
    return root;
  }

  const Runtime& runtime_;
  std::map<const comm::Communicator*, std::vector<int64_t>> given_;  // elements by rank
  std::map<Bucket, int> roots_;
};

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
  const int together = shard ? entry.sharding.cuts.back().over.size : 1;
  const int place = runtime.replicas()->rank();
  const bool is_asked = shard ? place < together : place == replica;
  if (!runtime.owns(entry) || !is_asked) return {};
  at::Tensor held = entry.tensor;
  if (shard) {
    const auto options = held.options();
    held = join(runtime, entry.sharding, entry.updated(), options, turn % together);
    turn /= together;  // so that all pairs of ranks have turns
  }
  if (!held.defined()) return {};
  // A device need not hold more than the parts.
  if (shard || entry.is_divided()) held = held.cpu();
  const auto group = runtime.group(CommGroup::kTp);
  if (!entry.is_divided()) return group->rank() == 0 ? held : at::Tensor();
  return join(runtime, entry.part(), held, held.options(), turn % group->size());
}

comm::CommunicatorPtr group_along(const Runtime& runtime, const core::Axis& axis) {
  if (axis == runtime.topology().axis(CommGroup::kTp)) return runtime.group(CommGroup::kTp);
  SMP_INTERNAL_ASSERT(axis == runtime.topology().pieces(), "no group along an axis of ", axis.size);
  return runtime.sharding() ? runtime.sharding()->parameters()->group() : runtime.replicas();
}

at::Tensor join(const Runtime& runtime, const comm::Sharding& sharding, const at::Tensor& own,
                const at::TensorOptions& options, std::optional<int> root) {
  const auto group = group_along(runtime, sharding.cuts.back().over);
  return comm::join(*group, {{sharding, own}}, options, runtime.rank(), root).front();
}

void for_each_whole(const Runtime& runtime, const std::vector<Held>& held, const UseOfHeld& use) {
  const at::NoGradGuard no_grad;
  Joins(runtime).join(held, use);
}

}  // namespace smp::runtime
