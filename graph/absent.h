// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>

namespace smp::graph {

/// Why this rank does not have the numbers of a tensor, for errors.
struct Absence {
  std::string what;    ///< for example: parameter "fc.weight", which pp rank 1 owns
  std::string remedy;  ///< sentences: which calls to use instead
  /// A write is the business of the rank that has the numbers, and does nothing on this one.
  bool ignores_writes = true;
};
using AbsencePtr = std::shared_ptr<const Absence>;

// Absent tensors: they have sizes, strides, a type and a device, and their numbers are on another
// rank. Operators on them (below_autograd.h) either do the right thing on this rank or throw a
// `UsageError` that names the absent tensor and the remedy:
//  - results from absent tensors, numbers and, element by element, tensors of this rank are absent,
//    too; shapes are computed, and random operators advance the generators as ever;
//  - writes into an absent tensor are left to the rank that has it;
//  - an operator that would write an absent tensor into one of this rank, bring it to the host, or
//    combine it with tensors of this rank in another way than element by element is refused.

/// An absent tensor with the sizes, strides and device of `like`, and with its type unless that is
/// given. Reading its data by pointer throws a `c10::Error` that says the same.
at::Tensor make_absent_like(const at::Tensor& like, AbsencePtr absence,
                            std::optional<at::ScalarType> type = std::nullopt);

/// From now on operators find a tensor absent, whatever its storage has.
void become_absent(const at::Tensor& tensor, AbsencePtr absence);
/// The same, and frees the memory of its storage. Code that reads the data by pointer throws.
void release_as_absent(const at::Tensor& tensor, AbsencePtr absence);
/// Ends that; does nothing to a tensor that is not absent.
void become_present(const at::Tensor& tensor);

/// False for an undefined tensor.
bool is_absent(const at::Tensor& tensor);

}  // namespace smp::graph
