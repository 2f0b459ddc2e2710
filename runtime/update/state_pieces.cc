// SPDX-License-Identifier: Apache-2.0
#include "runtime/update/state_pieces.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/StringUtil.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"

namespace smp::runtime {
namespace {

using dp::ParameterSlices;
using nlohmann::json;

constexpr const char* kScalars = "scalars";
constexpr const char* kDtypes = "dtypes";  // dtypes of the tensors, by field

/// Everything of a piece's state but the elements, which is the same for all pieces of a parameter.
json describe(const std::string& name, const OptimizerState::Param& piece) {
  json dtypes = json::object();
  for (const auto& [field, tensor] : piece.tensors) {
    SMP_CHECK_WITH(UsageError, tensor.sizes() == piece.shape,
                   "cannot save the optimizer's state of parameter \"", name,
                   "\": with \"shard_optimizer_state\" each of its tensors has an element for each "
                   "of the parameter's, but \"",
                   field, "\" has shape ", tensor.sizes(), " for a piece of ",
                   at::IntArrayRef(piece.shape),
                   " elements. Keep it as a number, or set \"shard_optimizer_state\" to false");
    dtypes[field] = static_cast<int>(tensor.scalar_type());
  }
  return {{kScalars, optim::parse_fields(piece.scalars)}, {kDtypes, std::move(dtypes)}};
}

/// The descriptions of all parameters with a state, by name; the same on all replicas.
json agree_on_states(const ParameterSlices& slices, const OptimizerState& pieces) {
  json mine = json::object();
  for (const std::string& name : slices.names()) {
    const auto found = pieces.params.find(name);
    if (found != pieces.params.end()) mine[name] = describe(name, found->second);
  }
  json merged = json::object();
  std::vector<json> all;
  for (const auto& text : comm::all_gather_bytes(*slices.group(), mine.dump())) {
    all.push_back(json::parse(text));
    merged.update(all.back());
  }
  for (size_t i = 0; i < slices.names().size(); ++i) {
    const std::string& name = slices.names()[i];
    if (!merged.contains(name)) continue;
    for (size_t r = 0; r < all.size(); ++r) {
      if (slices.piece_of(i, static_cast<int>(r)).numel() == 0) continue;
      const std::string got = all[r].contains(name) ? all[r][name].dump() : "none";
      SMP_CHECK_WITH(UsageError, got == merged[name].dump(),
                     "the optimizer's state of parameter \"", name,
                     "\" differs between replicas: expected ", merged[name].dump(), ", replica ", r,
                     " has ", got, ". Call optimizer.step() on all replicas alike");
    }
  }
  return merged;
}

/// Name and dtype of a tensor in the states.
using Field = std::pair<std::string, int>;

/// The elements of a field of all parameters in a bucket, on `root`; undefined elsewhere.
at::Tensor join_field(const ParameterSlices& slices, const OptimizerState& pieces, size_t bucket,
                      const Field& field, int root) {
  const auto of_piece = [&](size_t i) {
    const auto param = pieces.params.find(slices.names()[i]);
    if (param == pieces.params.end()) return at::Tensor();
    const auto tensor = param->second.tensors.find(field.first);
    return tensor == param->second.tensors.end() ? at::Tensor() : tensor->second;
  };
  return slices.gather_bucket(bucket, static_cast<at::ScalarType>(field.second), of_piece, root);
}

}  // namespace

std::string piece_name(const ParameterSlices& slices, size_t index) {
  const ParameterSlices::Piece& piece = slices.pieces()[index];
  if (piece.numel() == 0) return "";
  return c10::str(slices.names()[index], "[", piece.begin, ":", piece.end, "]");
}

std::string whole_name(const std::string& name) {
  return name.empty() || name.back() != ']' ? name : name.substr(0, name.rfind('['));
}

void name_pieces(const ParameterSlices& slices, OptimizerState& state) {
  std::map<std::string, std::string> new_names;
  for (size_t i = 0; i < slices.names().size(); ++i) {
    const std::string& name = slices.names()[i];
    new_names[name] = piece_name(slices, i);
    if (auto node = state.params.extract(name)) {
      node.key() = new_names[name];
      state.params.insert(std::move(node));
    }
  }
  for (auto& group : state.groups) {
    for (std::string& name : group.params) {
      const auto found = new_names.find(name);
      if (found != new_names.end()) name = found->second;
    }
  }
}

void cut_states(const ParameterSlices& slices, OptimizerState& state) {
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < slices.names().size(); ++i) {
    if (auto node = state.params.extract(piece_name(slices, i))) {
      node.key() = slices.names()[i];
      state.params.insert(std::move(node));
      continue;
    }
    const auto found = state.params.find(slices.names()[i]);
    if (found == state.params.end()) continue;
    const ParameterSlices::Piece& piece = slices.pieces()[i];
    if (piece.numel() == 0) {
      state.params.erase(found);
      continue;
    }
    const at::Tensor& parameter = slices.parameters()[i];
    OptimizerState::Param& param = found->second;
    SMP_CHECK_WITH(CheckpointError, parameter.sizes() == param.shape,
                   "the saved optimizer state does not fit this optimizer: ", found->first,
                   ": expected shape ", parameter.sizes(), ", got ",
                   at::IntArrayRef(param.shape));
    for (auto& [field, tensor] : param.tensors) {
      if (tensor.sizes() == parameter.sizes()) tensor = slices.elements(tensor, i, piece).clone();
    }
    param.shape = {piece.numel()};
  }
}

void join_states(const ParameterSlices& slices, const OptimizerState& pieces,
                 OptimizerState& whole) {
  at::NoGradGuard no_grad;
  const json states = agree_on_states(slices, pieces);
  const int replicas = slices.group()->size();
  for (size_t b = 0; b < slices.layout().size(); ++b) {
    const int root = static_cast<int>(b) % replicas;
    const bool is_root = slices.group()->rank() == root;
    std::set<Field> fields;
    for (size_t i : slices.layout().members[b]) {
      const std::string& name = slices.names()[i];
      if (!states.contains(name)) continue;
      for (const auto& [field, dtype] : states[name][kDtypes].items()) fields.emplace(field, dtype);
      if (!is_root) continue;
      whole.params[name] = {
          slices.parameters()[i].sizes().vec(), {}, optim::text_of(states[name][kScalars])};
    }
    for (const Field& field : fields) {
      const at::Tensor flat = join_field(slices, pieces, b, field, root);
      for (size_t i : slices.layout().members[b]) {
        const std::string& name = slices.names()[i];
        if (!is_root || !states.contains(name)) continue;
        if (!states[name][kDtypes].contains(field.first)) continue;
        whole.params[name].tensors[field.first] = slices.place(flat, i);
      }
    }
  }
}

}  // namespace smp::runtime
