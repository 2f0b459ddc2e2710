#pragma once

#include <string>
#include <vector>

#include "smp/comm_group.h"
#include "smp/detail/archive.h"

namespace smp {

/// Among which ranks a rank number counts: `send(x, 1, RankType::kDpRank)` goes to dp_rank 1 of
/// this rank's data-parallel group.
enum class RankType { kWorldRank, kPpRank, kTpRank, kRdpRank, kMpRank, kDpRank };

namespace detail {

void send_object(const std::string& bytes, int dest_rank, RankType type);
std::string recv_object(int src_rank, RankType type);
void broadcast_object(const std::string& bytes, CommGroup group);
std::vector<std::string> allgather_objects(const std::string& bytes, CommGroup group);
RankType rank_type_of(CommGroup group);
int this_rank_in(CommGroup group);

}  // namespace detail

// Whole objects between ranks: numbers, enumerations, strings, standard containers, pairs, tuples,
// optionals, tensors (which arrive on the CPU), `c10::IValue`, and user types that name their
// fields, in a member or in a free function:
//
//     struct Result {
//       int64_t step;
//       at::Tensor best;
//       template <class Archive>
//       void serialize(Archive& archive) { archive(step, best); }
//     };
//
//     template <class Archive>
//     void serialize(Archive& archive, Point& point) { archive(point.x, point.y); }
//
// A type that has changed its fields says so by `static constexpr int kVersion = 2;`. For results,
// settings and the like; not inside of step functions. All are blocking and throw a `TimeoutError`
// that names the peer, a `CommError` when the object is of another type than was asked for, and a
// `UsageError` for a rank that is not in the group.

/// Sends `object` and returns when it was received, with `recv_from`.
template <class T>
void send(const T& object, int dest_rank, RankType type) {
  detail::send_object(detail::to_bytes(object), dest_rank, type);
}

/// The next object that `src_rank` sends to this rank, by `send` or `broadcast`.
template <class T>
T recv_from(int src_rank, RankType type) {
  return detail::from_bytes<T>(detail::recv_object(src_rank, type), src_rank);
}

/// Sends `object` to all other ranks of this rank's group. They call `recv_from`, as in SMP 1.x.
template <class T>
void broadcast(const T& object, CommGroup group) {
  detail::broadcast_object(detail::to_bytes(object), group);
}

/// The same in one call on all ranks of the group: returns the object of `src_rank`, a rank in the
/// group.
template <class T>
T broadcast(const T& object, CommGroup group, int src_rank) {
  if (detail::this_rank_in(group) != src_rank) {
    return recv_from<T>(src_rank, detail::rank_type_of(group));
  }
  broadcast(object, group);
  return object;
}

/// The objects of all ranks of this rank's group, in their order there. Collective.
template <class T>
std::vector<T> allgather(const T& object, CommGroup group) {
  std::vector<T> objects;
  for (const std::string& bytes : detail::allgather_objects(detail::to_bytes(object), group)) {
    objects.push_back(detail::from_bytes<T>(bytes, static_cast<int>(objects.size())));
  }
  return objects;
}

}  // namespace smp
