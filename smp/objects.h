// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "smp/comm_group.h"
#include "smp/detail/archive.h"
#include "smp/export.h"

namespace smp {

namespace detail {

SMP_API void send_object(const std::string& bytes, int dest_rank, CommGroup group);
SMP_API std::string recv_object(int src_rank, CommGroup group);
SMP_API void broadcast_object(const std::string& bytes, CommGroup group);
SMP_API std::vector<std::string> allgather_objects(const std::string& bytes, CommGroup group);
SMP_API int this_rank_in(CommGroup group);
inline std::string rank_text(int rank) { return "rank " + std::to_string(rank); }

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

/// Sends `object` to rank `dest_rank` of this rank's group, and returns when it was received, with
/// `recv_from`: `send(x, 1, CommGroup::kDp)` goes to dp_rank 1.
template <class T>
void send(const T& object, int dest_rank, CommGroup group) {
  detail::send_object(detail::to_bytes(object), dest_rank, group);
}

/// The next object that rank `src_rank` of this rank's group sends here, by `send` or `broadcast`.
template <class T>
T recv_from(int src_rank, CommGroup group) {
  return detail::from_bytes<T>(detail::recv_object(src_rank, group), detail::rank_text(src_rank));
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
    return recv_from<T>(src_rank, group);
  }
  broadcast(object, group);
  return object;
}

/// The objects of all ranks of this rank's group, in their order there. Collective.
template <class T>
std::vector<T> allgather(const T& object, CommGroup group) {
  std::vector<T> objects;
  for (const std::string& bytes : detail::allgather_objects(detail::to_bytes(object), group)) {
    objects.push_back(
        detail::from_bytes<T>(bytes, detail::rank_text(static_cast<int>(objects.size()))));
  }
  return objects;
}

}  // namespace smp
