// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/ivalue.h>

#include <cstddef>
#include <string>
#include <vector>

#include "core/json_reader.h"

namespace smp::exported {

/// How the arguments or results of a program are made of tensors and numbers: a tree of tuples,
/// lists and dictionaries (Python's "pytree").
struct Structure {
  enum class Kind { kLeaf, kTuple, kList, kDictionary };

  Kind kind = Kind::kLeaf;
  std::vector<Structure> children;
  std::vector<c10::IValue> keys;  ///< keys of a dictionary: strings, or integers

  /// How many leaves it has.
  size_t leaves() const;
};

/// Reads the output of torch.utils._pytree.treespec_dumps. Named tuples are tuples, and classes
/// that have registered themselves are dictionaries where their context is the list of their
/// fields, otherwise tuples.
Structure read_structure(const core::JsonReader& text);

/// A leaf of a value, and where it is in it: "inputs[1]["mask"]".
struct Leaf {
  c10::IValue value;
  std::string place;
};

/// Adds the leaves of `value`, which `place` is in. Throws `UsageError` where it has another
/// structure; a tuple may be given for a list and a list for a tuple.
void flatten(const Structure& structure, const c10::IValue& value, const std::string& place,
             std::vector<Leaf>& leaves);

/// The value of the structure with these leaves. Lists and dictionaries of tensors only have that
/// type if `typed`; others have values of any.
c10::IValue unflatten(const Structure& structure, const std::vector<c10::IValue>& leaves,
                      bool typed = true);

/// The structure of a value; adds its leaves, which are whatever is no tuple, list or dictionary.
/// Throws `UsageError` for a dictionary with keys other than strings and integers.
Structure structure_of(const c10::IValue& value, std::vector<c10::IValue>& leaves);

/// Writes the form that `read_structure` reads.
std::string write_structure(const Structure& structure);

}  // namespace smp::exported
