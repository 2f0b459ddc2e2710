// SPDX-License-Identifier: Apache-2.0
#include "runtime/parameters/whole.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <map>
#include <utility>

#include "core/check.h"
#include "dp/parameter_pieces.h"
#include "graph/recording.h"
#include "runtime/model.h"
#include "runtime/parameters/parameter_shards.h"

namespace smp::runtime {
namespace {

/// Gives this rank's part of the values, once replicas have put shards together; `turn` as in
/// `join`.
at::Tensor part_of(const Runtime& runtime, const ParameterTable::Entry& entry,
                   std::optional<size_t> turn) {
  if (!entry.shard()) return graph::value_of(entry.values()).detach();
  const auto shards = entry.sharding.along(runtime.topology().pieces());
  return join(runtime, *shards, entry.updated(), entry.tensor.options(), turn);
}

/// The values with which training begins: all ranks have some, and those of the first count.
at::Tensor copy_before_training(const Runtime& runtime, const ParameterTable::Entry& entry,
                                bool to_first) {
  const at::Tensor own = graph::value_of(entry.values()).detach();
  const at::Tensor copy = own.to(at::kCPU, own.scalar_type(), /*non_blocking=*/false,
                                 /*copy=*/true);
  const at::Tensor dense = copy.contiguous();
  (entry.is_divided() ? runtime.same_parts() : runtime.world())->broadcast(dense, 0);
  if (!dense.is_alias_of(copy)) copy.copy_(dense);
  const auto turn = to_first ? std::optional<size_t>(0) : std::nullopt;
  const at::Tensor whole = join(runtime, entry.part(), copy, copy.options(), turn);
  return to_first && runtime.rank_in(CommGroup::kMp) > 0 ? at::Tensor() : whole;
}

/// Parameters that are put together on one rank, those of one type in one collective: of a bucket
/// of pieces, else one. Named by their memory's owner and the index there.
using Bucket = std::pair<const void*, size_t>;

Bucket bucket_of(const Held& held) {
  const auto& [entry, lies, own, dtype, exists] = held;
  const bool is_piece = entry->piece && lies.cuts.back().over == entry->sharding.cuts.back().over;
  if (!is_piece) return {entry, 0};
  const auto& [pieces, index] = *entry->piece;
  return {pieces.get(), pieces->layout().slots[index].bucket};
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
    const auto group = runtime_.along(first.lies.cuts.back().over);
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

std::vector<std::shared_ptr<dp::ParameterPieces>> pieces_of(const Runtime& runtime) {
  std::vector<std::shared_ptr<dp::ParameterPieces>> result;
  for (const auto& model : runtime.models()) {
    if (auto pieces = model->pieces()) result.push_back(std::move(pieces));
  }
  if (runtime.parameter_shards()) result.push_back(runtime.parameter_shards()->parameters());
  return result;
}

void check_pieces_unwritten(const Runtime& runtime) {
  for (const auto& entry : runtime.table().entries()) {
    const bool is_alike = !entry.piece || entry.shard().has_value() ||
                          !entry.piece->pieces->is_written(entry.piece->index);
    SMP_CHECK_WITH(UsageError, is_alike,
                   "the program has written this replica's piece of parameter \"", entry.name,
                   "\" (model->local_virtual_parameters()) after optimizer.step(), and the other "
                   "replicas, which with \"shard_optimizer_state\" have the parameter whole, do "
                   "not see that. Write model->parameters() instead, on all replicas alike");
  }
}

at::Tensor whole_copy(const Runtime& runtime, const ParameterTable::Entry& entry, bool to_first) {
  const at::NoGradGuard no_grad;
  if (!entry.owner()) return copy_before_training(runtime, entry, to_first);
  if (to_first && runtime.rank_in(CommGroup::kTp) > 0 && !entry.is_divided()) return {};
  comm::Sharding lies = entry.part();
  // The last cut, so that the owners send their parts, which are joined where they arrive.
  lies.cuts.push_back({runtime.topology().axis(CommGroup::kPp), comm::Owner{*entry.owner()}});
  const bool has_part = lies.is_on(runtime.rank());
  const bool is_joined = entry.shard() || entry.is_divided();  // else the owner keeps its own
  at::Tensor part = has_part ? part_of(runtime, entry, std::nullopt) : at::Tensor();
  if (has_part)
    part = part.to(at::kCPU, part.scalar_type(), /*non_blocking=*/false, /*copy=*/!is_joined);
  return join(runtime, lies, part, entry.tensor.options().device(at::kCPU),
              to_first ? std::optional<size_t>(0) : std::nullopt);
}

at::Tensor whole_on_one(const Runtime& runtime, const ParameterTable::Entry& entry, size_t turn,
                        int replica) {
  const at::NoGradGuard no_grad;
  const bool in_shards = entry.shard().has_value();
  const int together = in_shards ? runtime.topology().pieces().size : 1;
  const int place = runtime.replicas()->rank();
  const bool is_asked = in_shards ? place < together : place == replica;
  if (!runtime.owns(entry) || !is_asked) return {};
  at::Tensor part = part_of(runtime, entry, turn);
  const bool is_alike = !entry.is_divided() && runtime.rank_in(CommGroup::kTp) > 0;
  if (is_alike || !part.defined()) return {};
  // A device need not hold more than the parts.
  if (in_shards || entry.is_divided()) part = part.cpu();
  // The next digits, so that all pairs of ranks have turns.
  return join(runtime, entry.part(), part, part.options(), turn / together);
}

at::Tensor join(const Runtime& runtime, comm::Sharding lies, at::Tensor own,
                const at::TensorOptions& options, std::optional<size_t> turn) {
  for (; !lies.cuts.empty(); lies.cuts.pop_back()) {
    if (!lies.is_on(runtime.rank(), lies.cuts.size() - 1)) continue;  // its owner is to give it
    const core::Axis over = lies.cuts.back().over;
    const auto root = turn ? std::optional(static_cast<int>(*turn % over.size)) : std::nullopt;
    own = comm::join(*runtime.along(over), {{lies, own}}, options, runtime.rank(), root).front();
    if (!own.defined()) return {};
    if (turn) *turn /= over.size;
  }
  return own;
}

void for_each_whole(const Runtime& runtime, const std::vector<Held>& held, const UseOfHeld& use) {
  const at::NoGradGuard no_grad;
  Joins(runtime).join(held, use);
}

}  // namespace smp::runtime
