// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdlib>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace smp::testing {

/// The choices of a case for each factor, as text: {"TiedGpt", "3 stages", "zb_h1"}.
using Factors = std::vector<std::string>;

/// The values of two factors: (number of the first, its value), (number of the second, its value).
using Pair = std::pair<std::pair<size_t, std::string>, std::pair<size_t, std::string>>;

/// All pairs of values that a case has.
inline std::set<Pair> pairs_of(const Factors& factors) {
  std::set<Pair> pairs;
  for (size_t i = 0; i < factors.size(); ++i) {
    for (size_t j = i + 1; j < factors.size(); ++j) {
      pairs.insert({{i, factors[i]}, {j, factors[j]}});
    }
  }
  return pairs;
}

/// Chooses cases such that every pair of values that some case has is in one of those chosen: a
/// covering array of strength two, whatever combinations `all` leaves out. Always takes the case
/// with most pairs that none has yet, the first of equals, so the choice depends on nothing else.
///
/// Returns indices into `all`, in ascending order.
inline std::set<size_t> cover_pairs(const std::vector<Factors>& all) {
  std::set<Pair> open;
  for (const Factors& factors : all) open.merge(pairs_of(factors));
  std::set<size_t> chosen;
  while (!open.empty()) {
    size_t best = 0, most = 0;
    for (size_t i = 0; i < all.size(); ++i) {
      size_t count = 0;
      for (const Pair& pair : pairs_of(all[i])) count += open.count(pair);
      if (count > most) {
        best = i;
        most = count;
      }
    }
    for (const Pair& pair : pairs_of(all[best])) open.erase(pair);
    chosen.insert(best);
  }
  return chosen;
}

/// The cases that a test runs of a product of factors: a covering array of pairs, or the whole
/// product if the environment has SMP_FULL_PRODUCT, as tools/soak sets it.
template <class Case, class FactorsOf>
std::vector<Case> cases_of(const std::vector<Case>& product, const FactorsOf& factors_of) {
  if (std::getenv("SMP_FULL_PRODUCT") != nullptr) return product;
  std::vector<Factors> all;
  for (const Case& one : product) all.push_back(factors_of(one));
  std::vector<Case> cases;
  for (size_t i : cover_pairs(all)) cases.push_back(product[i]);
  return cases;
}

}  // namespace smp::testing
