// SPDX-License-Identifier: Apache-2.0
#include "core/mesh.h"

namespace smp::core {

int Axes::size() const {
  int result = 1;
  for (const Axis& axis : digits) result *= axis.size;
  return result;
}

int Axes::index_of(int rank) const {
  int result = 0;
  for (const Axis& axis : digits) result = result * axis.size + axis.index_of(rank);
  return result;
}

std::vector<int> Axes::members(int rank) const {
  for (const Axis& axis : digits) rank = axis.member(rank, 0);
  std::vector<int> result{rank};
  for (const Axis& axis : digits) {
    std::vector<int> all;
    for (const int first : result) {
      for (int i = 0; i < axis.size; ++i) all.push_back(axis.member(first, i));
    }
    result = std::move(all);
  }
  return result;
}

}  // namespace smp::core
