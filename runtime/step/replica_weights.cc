// SPDX-License-Identifier: Apache-2.0
#include "runtime/step/replica_weights.h"

#include <c10/util/StringUtil.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "graph/content.h"
#include "runtime/first_difference.h"

namespace smp::runtime {
namespace {

std::string bytes_of(const std::vector<uint64_t>& hashes) {
  return {reinterpret_cast<const char*>(hashes.data()), hashes.size() * sizeof(uint64_t)};
}

uint64_t hash_at(const std::string& bytes, size_t index) {
  uint64_t hash = 0;
  std::memcpy(&hash, bytes.data() + index * sizeof(hash), sizeof(hash));
  return hash;
}

}  // namespace

std::string differing_weight(const Runtime& runtime) {
  comm::Communicator& replicas = *runtime.replicas();
  if (replicas.size() == 1) return "";
  std::vector<const ParameterTable::Entry*> entries;
  std::vector<at::Tensor> weights;
  for (const auto& entry : runtime.table().entries()) {
    if (!entry.is_parameter() || !runtime.owns(entry) || entry.shard()) continue;
    entries.push_back(&entry);
    weights.push_back(entry.tensor);
  }
  const std::string mine = bytes_of(graph::hashes_in_place(weights));
  const auto digests = comm::all_gather_bytes(replicas, std::to_string(hash_of(mine)));
  if (first_other(digests) == 0) return "";
  const auto all = comm::all_gather_bytes(replicas, mine);
  const size_t other = first_other(all);
  size_t index = 0;
  while (hash_at(all[0], index) == hash_at(all[other], index)) ++index;
  const auto ranks = runtime.topology().members(CommGroup::kRdp, runtime.rank());
  const graph::TensorMeta meta = graph::TensorMeta::of(entries[index]->tensor);
  return c10::str("parameter \"", entries[index]->name, "\", ", meta.to_string(),
                  ", has other bits on world rank ", ranks[other], " (hash ",
                  hash_at(all[other], index), ") than on its replica, world rank ", ranks[0],
                  " (hash ", hash_at(all[0], index), ")");
}

}  // namespace smp::runtime
