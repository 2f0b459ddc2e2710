// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "smp/export.h"

namespace smp {

/// The change of a tensor between a file and a model, in both directions.
enum class Transform {
  kNone,
  kTranspose,  ///< a matrix is transposed: GPT-2's Conv1D stores [in, out], Linear has [out, in]
};

/// How the tensors of a model are called in another program's files, and how they lie there: for
/// `load_pretrained` and `save_pretrained`. *Theirs* is a name in the files, *ours* the model's.
///
/// Names may have placeholders: `{layer}` stands for a number, `{rest*}` for any text; both sides
/// of a rule have the same ones. Rules are tried in the order in which they were added, and the
/// first that fits a name decides; a name that no rule fits is the same on both sides. All
/// functions that add a rule throw `UsageError` for one whose placeholders do not fit.
///
/// Example, a part of GPT-2 of Hugging Face's library (all of it: examples/huggingface/gpt2.json):
/// \code
///   NameMap()
///       .ignore("transformer.h.{layer}.attn.bias")
///       .rename("transformer.h.{layer}.attn.c_attn.weight", "blocks.{layer}.qkv.weight",
///               Transform::kTranspose)
///       .rename("transformer.wte.weight", "tokens.weight")
///       .rename("transformer.{rest*}", "{rest*}");
/// \endcode
class SMP_API NameMap {
 public:
  /// The map's answer for a name: the tensors of `theirs`, concatenated along the first dimension
  /// and each transformed, are those of `ours`, concatenated. One of the two has one name only, or
  /// none: then the other side has no such tensor.
  struct Match {
    std::vector<std::string> theirs;
    std::vector<std::string> ours;
    Transform transform = Transform::kNone;
    size_t index = 0;  ///< where the name is among those of its side
  };

  /// The map in a file of JSON, see docs/recipes.md. Throws `ConfigError` for a file that
  /// cannot be read or has another form.
  static NameMap from_file(const std::string& path);

  /// One tensor is one.
  NameMap& rename(const std::string& theirs, const std::string& ours,
                  Transform transform = Transform::kNone);
  /// Several of theirs are one of ours: queries, keys and values that we have in one matrix. When
  /// they are written they have equal sizes.
  NameMap& join(const std::vector<std::string>& theirs, const std::string& ours,
                Transform transform = Transform::kNone);
  /// One of theirs is several of ours.
  NameMap& split(const std::string& theirs, const std::vector<std::string>& ours,
                 Transform transform = Transform::kNone);
  /// The model has no such tensor: it is left out when files are read.
  NameMap& ignore(const std::string& theirs);
  /// The files have no such tensor: it is neither read nor written.
  NameMap& omit(const std::string& ours);
  /// Files may leave this out of the beginning of all names: the rules have it, and so have the
  /// files that are written.
  NameMap& optional_prefix(std::string prefix);

  /// The match of a name of a file, or of the model.
  Match of_theirs(const std::string& name) const;
  Match of_ours(const std::string& name) const;

 private:
  /// A name with placeholders.
  struct Pattern {
    std::string text;
    std::vector<std::string> placeholders = {};  // in their order
    std::vector<std::string> literals = {};      // texts before each of them, and after the last
  };
  struct Rule {
    std::vector<Pattern> theirs;
    std::vector<Pattern> ours;
    Transform transform;
  };
  using Values = std::map<std::string, std::string>;  // keys are the placeholders

  static Pattern parse(const std::string& text);
  static std::optional<Values> match(const Pattern& pattern, const std::string& name);
  static std::vector<std::string> fill(const std::vector<Pattern>& patterns, const Values& values);
  NameMap& add(const std::vector<std::string>& theirs, const std::vector<std::string>& ours,
               Transform transform = Transform::kNone);
  std::optional<Match> find(const std::string& name, std::vector<Pattern> Rule::*side) const;

  std::vector<Rule> rules_;
  std::string prefix_;
};

}  // namespace smp
