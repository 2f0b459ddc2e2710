// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/SmallVector.h>

#include <optional>
#include <set>
#include <vector>

#include "nn/rewrite/call.h"

namespace smp::nn::rewrite {

/// The factor of a dimension along which an operator works: every rank needs all of it.
constexpr int kAlong = -1;

/// The loops that an operator consists of, its *factors* (as Shardy calls them): `matmul` of [i, j]
/// and [j, k] gives [i, k] and sums over j. Numbers of factors are arbitrary.
struct Factors {
  using Dims = c10::SmallVector<int, 5>;  ///< factor of each dimension

  std::vector<Dims> arguments;  ///< numbered like `Call::tensors`
  std::vector<Dims> results;    ///< numbered like `Call::results`
  std::set<int> summed;         ///< factors that the operator sums over
  std::set<int> added;          ///< arguments that it adds to such a sum
  /// Sets of arguments in which, together, it is linear.
  std::set<std::set<int>> linear;
  std::set<int> ignored;  ///< arguments of which only type and sizes matter
  /// Factors of which a group of one argument's elements meets one element of another's.
  std::set<int> grouped;
  /// The result has the elements of the first argument in row-major order. Dimensions that are
  /// taken apart or joined are one factor, in which the elements between two ranks' parts tell the
  /// cut.
  bool is_view = false;
};

/// The factors of an operator whose arguments lie as the call says; nothing if it is not
/// understood, and must get whole tensors.
std::optional<Factors> factors_of(const Call& call);

/// Operators of the same factors, by their names without "aten::".
struct NamedFactors {
  std::optional<Factors> (*factors)(const Call&);
  std::vector<const char*> names;
};
/// Those of products of matrices, attention and other layers.
std::vector<NamedFactors> layer_factors();

/// Factors from `first` on, one for each dimension.
Factors::Dims numbered(int count, int first = 0);
int result_dims(const Call& call, int index = 0);
/// The factors of an argument that is broadcast to `sizes`, of which dimension d is factor d. One
/// element that all of a dimension share belongs to no rank.
Factors::Dims broadcast_dims(const Call& call, int position, c10::IntArrayRef sizes);
/// The factors of an operator each element of whose results follows from one of each argument.
std::optional<Factors> elementwise_factors(const Call& call);
/// The dimensions of the first tensor that a constant names; all, if it names none.
std::set<int> dims_named(const Call& call, const char* argument);
/// The factors of an operator that works along dimensions of its first tensor, which may not be in
/// the results; the others hold numbers for these.
Factors factors_along(const Call& call, const std::set<int>& dims);
/// Along the last `count` dimensions.
Factors factors_along_last(const Call& call, int count);
/// Along all dimensions but that of the samples, the first. Nothing for a tensor without any.
std::optional<Factors> factors_of_samples(const Call& call);

/// The size of one block along the dimension that is divided, of a whole or of a rank's part; 0:
/// tensors of these sizes cannot be divided so.
int64_t block_of(c10::IntArrayRef sizes, const Layout& layout);

}  // namespace smp::nn::rewrite
