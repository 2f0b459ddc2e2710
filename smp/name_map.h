// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <regex>
#include <string>
#include <vector>

#include "smp/export.h"

namespace smp {

/// What happens to a tensor on its way from a file into a model.
enum class Transform {
  kNone,
  kTranspose,  ///< a matrix is transposed: GPT-2's Conv1D stores [in, out], Linear has [out, in]
};

/// How the tensors of one program are called in another. Rules are tried in the order in which they
/// were added, and the first that fits decides; a name that no rule fits stays as it is.
///
/// Example, GPT-2 of Hugging Face's library:
/// \code
///   NameMap()
///       .ignore("(transformer\\.)?h\\.\\d+\\.attn\\.(masked_)?bias")
///       .pattern("(?:transformer\\.)?h\\.(\\d+)\\.attn\\.c_attn\\.weight", "blocks.$1.qkv.weight",
///                Transform::kTranspose)
///       .rename("wte.weight", "tokens.weight")
///       .prefix("transformer.", "");
/// \endcode
class SMP_API NameMap {
 public:
  /// What a stored tensor is in the model.
  struct Target {
    std::string name;
    Transform transform = Transform::kNone;
  };

  /// The tensor of this very name.
  NameMap& rename(std::string from, std::string to, Transform transform = Transform::kNone);
  /// All names that begin with `from` begin with `to` instead.
  NameMap& prefix(std::string from, std::string to, Transform transform = Transform::kNone);
  /// All names that fit a regular expression as a whole (ECMAScript, as std::regex); `to` may refer
  /// to its groups by $1, $2 ... Throws UsageError for an expression that is none.
  NameMap& pattern(const std::string& from, std::string to, Transform transform = Transform::kNone);
  /// All names that fit a regular expression are left out.
  NameMap& ignore(const std::string& expression);

  /// None for a name that is ignored.
  std::optional<Target> apply(const std::string& name) const;

 private:
  struct Rule {
    enum class Kind { kName, kPrefix, kPattern, kIgnore } kind;
    std::string from;
    std::string to;
    Transform transform = Transform::kNone;
    std::regex expression = {};
  };

  NameMap& add_pattern(Rule rule);

  std::vector<Rule> rules_;
};

}  // namespace smp
