// SPDX-License-Identifier: Apache-2.0
#include "runtime/parameters/whole.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "dp/parameter_slices.h"
#include "graph/recording.h"
#include "runtime/parameters/join_parts.h"
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
  const bool is_alike = !entry.split && runtime.rank_in(CommGroup::kTp) > 0;
  if (to_first && is_alike && !entry.shard()) return {};
  const auto shard = entry.shard();
  at::Tensor held = shard ? runtime.sharding()->parameters()->full(*shard).cpu().contiguous()
                          : from_owner(runtime, entry, to_first);
  if (!held.defined()) return {};
  if (entry.split) {
    comm::Communicator& group = *runtime.group(CommGroup::kTp);
    held =
        to_first ? join_on(0, group, *entry.split, held) : join_on_all(group, *entry.split, held);
  }
  return to_first && runtime.rank_in(CommGroup::kMp) > 0 ? at::Tensor() : held;
}

/// Puts tensors together from pieces and parts.
class Joining {
 public:
  using Use = std::function<void(size_t, const at::Tensor&)>;

  Joining(const Runtime& runtime, const std::vector<Held>& held, const Use& use)
      : runtime_(runtime), held_(held), use_(use) {}

  void run() const {
    std::vector<std::shared_ptr<dp::ParameterSlices>> joined;
    for (size_t i = 0; i < held_.size(); ++i) {
      const auto& slice = held_[i].entry->slice;
      if (!slice) {
        if (held_[i].own.defined()) join_parts_of(i, held_[i].own);
      } else if (std::count(joined.begin(), joined.end(), slice->slices) == 0) {
        joined.push_back(slice->slices);
        join_pieces(*slice->slices);
      }
    }
  }

 private:
  /// The index in `held` of each parameter of `slices`.
  std::vector<std::optional<size_t>> places_in(const dp::ParameterSlices& slices) const {
    std::vector<std::optional<size_t>> places(slices.parameters().size());
    for (size_t i = 0; i < held_.size(); ++i) {
      const auto& slice = held_[i].entry->slice;
      if (slice && slice->slices.get() == &slices && held_[i].exists) places[slice->index] = i;
    }
    return places;
  }

  void join_pieces(const dp::ParameterSlices& slices) const {
    const auto places = places_in(slices);
    const auto own = [&](size_t p) { return places[p] ? held_[*places[p]].own : at::Tensor(); };
    for (size_t b = 0; b < slices.layout().size(); ++b) {
      const auto& members = slices.layout().members[b];
      if (std::none_of(members.begin(), members.end(), [&](size_t p) { return places[p]; })) {
        continue;
      }
      const int root = static_cast<int>(b) % slices.group()->size();
      const auto dtype = slices.layout().options[b].dtype().toScalarType();
      const at::Tensor flat = slices.gather_bucket(b, dtype, own, root);
      if (!flat.defined()) continue;
      for (size_t p : members) {
        if (places[p]) join_parts_of(*places[p], slices.place(flat, p));
      }
    }
  }

  void join_parts_of(size_t i, const at::Tensor& part) const {
    const Held& held = held_[i];
    if (!held.entry->split) return use_(i, part.to(held.dtype));
    comm::Communicator& group = *runtime_.group(CommGroup::kTp);
    const int root = static_cast<int>(i) % group.size();
    const at::Tensor whole = join_on(root, group, *held.entry->split, part.to(held.dtype));
    if (whole.defined()) use_(i, whole);
  }

  const Runtime& runtime_;
  const std::vector<Held>& held_;
  const Use& use_;
};

}  // namespace

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
    held = runtime.sharding()->parameters()->full_on(static_cast<int>(turn) % together, *shard);
    turn /= together;  // so that all pairs of ranks have turns
  }
  if (!held.defined()) return {};
  // A device need not hold more than the parts.
  if (shard || entry.split) held = held.cpu();
  comm::Communicator& group = *runtime.group(CommGroup::kTp);
  if (!entry.split) return group.rank() == 0 ? held : at::Tensor();
  return join_on(static_cast<int>(turn) % group.size(), group, *entry.split, held);
}

void for_each_whole(const Runtime& runtime, const std::vector<Held>& held,
                    const std::function<void(size_t, const at::Tensor&)>& use) {
  at::NoGradGuard no_grad;
  Joining(runtime, held, use).run();
}

}  // namespace smp::runtime
