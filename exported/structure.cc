// SPDX-License-Identifier: Apache-2.0
#include "exported/structure.h"

#include <ATen/core/jit_type.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/check.h"
#include "core/json.h"
#include "core/text.h"
#include "exported/program_json.h"

namespace smp::exported {
namespace {

using StructureKind = Structure::Kind;

/// The keys in the context of a dictionary, itself JSON in a string; none if it is something else.
std::vector<c10::IValue> keys_in(const core::JsonReader& context, size_t count) {
  std::vector<c10::IValue> keys;
  if (!context.value().is_string()) return keys;
  const nlohmann::json list = core::parse_untrusted(context.text());
  if (!list.is_array() || list.size() != count) return keys;
  for (const auto& key : list) {
    if (key.is_string()) keys.emplace_back(key.get<std::string>());
    if (key.is_number_integer()) keys.emplace_back(key.get<int64_t>());
  }
  const bool alike = std::all_of(keys.begin(), keys.end(), [&](const c10::IValue& key) {
    return key.isString() == keys.front().isString();
  });
  if (keys.size() != count || !alike) keys.clear();
  return keys;
}

Structure read_node(const core::JsonReader& node) {
  Structure structure;
  if (!node.has("type")) return structure;
  const std::string type = node.at("type").text();
  for (const core::JsonReader& child : node.at("children_spec").elements()) {
    structure.children.push_back(read_node(child));
  }
  if (type == "builtins.list" || type == "collections.deque") {
    structure.kind = StructureKind::kList;
  } else if (type == "builtins.tuple" || type == "collections.namedtuple") {
    structure.kind = StructureKind::kTuple;
  } else {
    structure.keys = keys_in(node.at("context"), structure.children.size());
    const bool named = !structure.keys.empty() || structure.children.empty();
    structure.kind = named ? StructureKind::kDictionary : StructureKind::kTuple;
    const bool is_dictionary = type == "builtins.dict" || type == "collections.OrderedDict" ||
                               type == "collections.defaultdict";
    if (is_dictionary && !named) {
      node.at("context").fail_expected("a list of strings, or of integers, one for each child");
    }
  }
  return structure;
}

std::string text_of_key(const c10::IValue& key) {
  return key.isString() ? "\"" + key.toStringRef() + "\"" : std::to_string(key.toInt());
}

std::string described(const Structure& structure) {
  const std::string count = std::to_string(structure.children.size());
  switch (structure.kind) {
    case StructureKind::kLeaf:
      return "a tensor or a number";
    case StructureKind::kTuple:
      return "a tuple of " + count;
    case StructureKind::kList:
      return "a list of " + count;
    case StructureKind::kDictionary: {
      std::string keys;
      for (const c10::IValue& key : structure.keys) {
        keys += (keys.empty() ? "" : ", ") + text_of_key(key);
      }
      return "a dictionary of " + keys;
    }
  }
  return "";
}

[[noreturn]] void refuse_structure(const Structure& structure, const c10::IValue& value,
                                   const std::string& place) {
  core::fail<UsageError>("argument ", place, " of an exported program: expected ",
                         described(structure), ", got a value of type ", value.tagKind(),
                         value.isList() ? " with " + std::to_string(value.toListRef().size()) : "",
                         ". Pass what the program was exported with");
}

/// The type of the values of a list or dictionary.
c10::TypePtr type_of(const std::vector<c10::IValue>& values, bool typed) {
  const bool tensors = typed && std::all_of(values.begin(), values.end(),
                                            [](const auto& value) { return value.isTensor(); });
  return tensors ? c10::TypePtr(c10::TensorType::get()) : c10::TypePtr(c10::AnyType::get());
}

c10::IValue unflatten_from(const Structure& structure, const std::vector<c10::IValue>& leaves,
                           bool typed, size_t& next) {
  if (structure.kind == StructureKind::kLeaf) return leaves.at(next++);
  std::vector<c10::IValue> children;
  for (const Structure& child : structure.children) {
    children.push_back(unflatten_from(child, leaves, typed, next));
  }
  if (structure.kind == StructureKind::kTuple) {
    return c10::ivalue::Tuple::create(std::move(children));
  }
  const c10::TypePtr type = type_of(children, typed);
  if (structure.kind == StructureKind::kList) {
    c10::impl::GenericList list(type);
    for (const c10::IValue& child : children) list.push_back(child);
    return list;
  }
  const bool strings = structure.keys.empty() || structure.keys.front().isString();
  c10::impl::GenericDict dictionary(
      strings ? c10::TypePtr(c10::StringType::get()) : c10::TypePtr(c10::IntType::get()), type);
  for (size_t i = 0; i < children.size(); ++i) {
    dictionary.insert_or_assign(structure.keys[i], children[i]);
  }
  return dictionary;
}

void add_child(Structure& structure, const c10::IValue& child, std::vector<c10::IValue>& leaves) {
  structure.children.push_back(structure_of(child, leaves));
}

nlohmann::json keys_of(const Structure& structure) {
  auto keys = nlohmann::json::array();
  for (const c10::IValue& key : structure.keys) {
    if (key.isString()) {
      keys.push_back(key.toStringRef());
    } else {
      keys.push_back(key.toInt());
    }
  }
  return keys;
}

/// A structure as torch.utils._pytree has it: the context of a dictionary is its keys, as text.
nlohmann::json node_of(const Structure& structure) {
  auto children = nlohmann::json::array();
  for (const Structure& child : structure.children) children.push_back(node_of(child));
  nlohmann::json node = {{"type", nullptr}, {"context", nullptr}};
  if (structure.kind != StructureKind::kLeaf) node["context"] = "null";
  if (structure.kind == StructureKind::kTuple) node["type"] = "builtins.tuple";
  if (structure.kind == StructureKind::kList) node["type"] = "builtins.list";
  if (structure.kind == StructureKind::kDictionary) {
    node["type"] = "builtins.dict";
    node["context"] = keys_of(structure).dump();
  }
  node["children_spec"] = std::move(children);
  return node;
}

}  // namespace

size_t Structure::leaves() const {
  if (kind == StructureKind::kLeaf) return 1;
  size_t count = 0;
  for (const Structure& child : children) count += child.leaves();
  return count;
}

Structure read_structure(const core::JsonReader& text) {
  const nlohmann::json json = core::parse_untrusted(text.text());
  const core::JsonReader parts = program_json(json, text.source());
  if (parts.size() != 2) text.fail_expected("a list of a version and a structure");
  const core::JsonReader version = parts.at(0);
  if (version.integer() != 1) version.fail_expected("version 1 of structures");
  return read_node(parts.at(1));
}

void flatten(const Structure& structure, const c10::IValue& value, const std::string& place,
             std::vector<Leaf>& leaves) {
  if (structure.kind == StructureKind::kLeaf) {
    leaves.push_back({value, place});
    return;
  }
  const size_t count = structure.children.size();
  if (structure.kind == StructureKind::kDictionary) {
    if (!value.isGenericDict() || value.toGenericDict().size() != count) {
      refuse_structure(structure, value, place);
    }
    const auto dictionary = value.toGenericDict();
    for (size_t i = 0; i < count; ++i) {
      const c10::IValue& key = structure.keys[i];
      const bool same_keys = *dictionary.keyType() == *key.type();
      if (!same_keys || !dictionary.contains(key)) refuse_structure(structure, value, place);
      flatten(structure.children[i], dictionary.at(key), place + "[" + text_of_key(key) + "]",
              leaves);
    }
    return;
  }
  if (!value.isTuple() && !value.isList()) refuse_structure(structure, value, place);
  const std::vector<c10::IValue> parts =
      value.isTuple() ? std::vector<c10::IValue>(value.toTupleRef().elements().begin(),
                                                 value.toTupleRef().elements().end())
                      : value.toListRef().vec();
  if (parts.size() != count) refuse_structure(structure, value, place);
  for (size_t i = 0; i < count; ++i) {
    flatten(structure.children[i], parts[i], place + "[" + std::to_string(i) + "]", leaves);
  }
}

c10::IValue unflatten(const Structure& structure, const std::vector<c10::IValue>& leaves,
                      bool typed) {
  size_t next = 0;
  return unflatten_from(structure, leaves, typed, next);
}

Structure structure_of(const c10::IValue& value, std::vector<c10::IValue>& leaves) {
  Structure structure;
  if (value.isTuple()) {
    structure.kind = StructureKind::kTuple;
    for (const c10::IValue& child : value.toTupleRef().elements()) {
      add_child(structure, child, leaves);
    }
  } else if (value.isList()) {
    structure.kind = StructureKind::kList;
    for (const c10::IValue& child : value.toListRef()) add_child(structure, child, leaves);
  } else if (value.isGenericDict()) {
    structure.kind = StructureKind::kDictionary;
    for (const auto& entry : value.toGenericDict()) {
      SMP_CHECK_WITH(UsageError, entry.key().isString() || entry.key().isInt(),
                     "a dictionary of an exported program has a key of type ",
                     entry.key().tagKind(), ". Use strings, or integers");
      structure.keys.push_back(entry.key());
      add_child(structure, entry.value(), leaves);
    }
  } else {
    leaves.push_back(value);
  }
  return structure;
}

std::string write_structure(const Structure& structure) {
  return nlohmann::json::array({1, node_of(structure)}).dump();
}

}  // namespace smp::exported
