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

/// What the owner holds, on all ranks of its pipeline.
at::Tensor from_owner(const Runtime& runtime, const ParameterTable::Entry& entry) {
  const auto pipeline = runtime.group(CommGroup::kPp);
  const int root = entry.owner.value_or(0);
  const at::Tensor& tensor = entry.tensor;
  const at::Tensor copy = pipeline->rank() == root
                              ? graph::value_of(tensor).detach().cpu().contiguous().clone()
                              : at::empty(tensor.sizes(), tensor.options().device(at::kCPU));
  pipeline->broadcast(copy, root);
  return copy;
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
  /// By parameter of `slices`: which of `held` it is.
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
  at::NoGradGuard no_grad;
  const auto shard = entry.shard();
  const at::Tensor held = shard ? runtime.sharding()->parameters()->full(*shard).cpu().contiguous()
                                : from_owner(runtime, entry);
  if (!entry.split) return held;
  return join_on_all(*runtime.group(CommGroup::kTp), *entry.split, held);
}

at::Tensor whole_on_one(const Runtime& runtime, const ParameterTable::Entry& entry, size_t turn) {
  at::NoGradGuard no_grad;
  const auto shard = entry.shard();
  const int together = shard ? runtime.sharding()->parameters()->group()->size() : 1;
  if (!runtime.owns(entry) || runtime.replicas()->rank() >= together) return {};
  at::Tensor held = entry.tensor;
  if (shard) {
    held = runtime.sharding()->parameters()->full_on(static_cast<int>(turn) % together, *shard);
    turn /= together;  // so that all pairs of ranks have turns
  }
  if (!held.defined()) return {};
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
