// SPDX-License-Identifier: Apache-2.0
#include "tools/checkpoint_commands.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/util/string_view.h>

#include <algorithm>
#include <functional>
#include <map>
#include <set>

#include "checkpoint/apply.h"
#include "checkpoint/state_file.h"
#include "checkpoint/writer.h"
#include "core/check.h"
#include "core/text.h"

namespace smp::tools {
namespace {

using checkpoint::NamedSpec;
using checkpoint::TensorSpec;
using Read = std::function<at::Tensor(const std::string&)>;

constexpr const char* kSafetensors = ".safetensors";
constexpr const char* kStateFile = ".pt";
constexpr size_t kShownValue = 100;  // bytes

/// The specs that the tensors get.
std::vector<NamedSpec> converted(std::vector<NamedSpec> tensors, const Conversion& conversion) {
  for (auto& [name, spec] : tensors) {
    if (conversion.dtype && at::isFloatingType(spec.dtype)) spec.dtype = *conversion.dtype;
  }
  return tensors;
}

at::Tensor read_as(CheckpointSource& source, const std::string& name, const TensorSpec& spec) {
  if (source.checkpoint() == nullptr) return source.read(name).to(spec.dtype);
  return checkpoint::read_values(*source.checkpoint(), {{name}, spec});
}

void write_safetensors_file(const std::string& output, const std::vector<NamedSpec>& tensors,
                            const Read& read) {
  checkpoint::SafetensorsWriter writer(output, tensors);
  for (const size_t i : writer.order()) writer.append(read(tensors[i].first));
  writer.commit();
}

/// Divides tensors into runs of about as many bytes.
std::vector<std::vector<NamedSpec>> divide(const std::vector<NamedSpec>& tensors, int64_t shards) {
  uint64_t total = 0, begin = 0;
  for (const auto& [name, spec] : tensors) total += checkpoint::byte_size(spec);
  std::vector<std::vector<NamedSpec>> result(shards);
  for (const auto& tensor : tensors) {
    result[checkpoint::share_of(begin, total, shards)].push_back(tensor);
    begin += checkpoint::byte_size(tensor.second);
  }
  return result;
}

/// One shard after the other, so that it takes the memory for one.
void write_checkpoint(CheckpointSource& source, const std::string& output,
                      const std::vector<NamedSpec>& tensors, const Conversion& conversion,
                      const Read& read) {
  const checkpoint::Reader* from = source.checkpoint();
  const bool with_optimizer = from != nullptr && !conversion.model_only;
  const auto model = divide(tensors, conversion.shards);
  std::vector<NamedSpec> state;
  if (with_optimizer) {
    for (const auto& [name, entry] : from->index().optimizer_tensors) {
      state.emplace_back(name, entry.spec);
    }
  }
  const auto optimizer = divide(state, conversion.shards);
  std::map<std::string, std::vector<std::string>> aliases;
  for (const auto& [alias, name] : source.aliases()) aliases[name].push_back(alias);

  const checkpoint::Writer writer(output);
  writer.begin();
  std::vector<std::string> parts;
  for (int64_t i = 0; i < conversion.shards; ++i) {
    checkpoint::Shard shard;
    for (const auto& [name, spec] : model[i]) {
      shard.model.push_back({name, read(name), aliases[name]});
    }
    for (const auto& [name, spec] : optimizer[i]) {
      shard.optimizer_tensors[name] = source.checkpoint()->read_optimizer(name);
    }
    if (i == 0 && with_optimizer) shard.optimizer = from->index().optimizer;
    parts.push_back(writer.write_shard(i, conversion.shards, shard));
  }
  writer.commit(parts, from == nullptr ? checkpoint::RunState() : from->index().run);
}

/// Tensors as bytes: NaN equals NaN, and 0 does not equal -0.
int64_t count_other_bits(const at::Tensor& a, const at::Tensor& b) {
  const auto bits = [](const at::Tensor& tensor) {
    return tensor.contiguous().view(at::kByte).reshape({tensor.numel(), tensor.element_size()});
  };
  if (a.numel() == 0) return 0;
  return (bits(a.reshape({-1})) != bits(b.reshape({-1}))).any(1).sum().item<int64_t>();
}

double largest_difference(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0) return 0;
  const bool is_complex = a.is_complex() || b.is_complex();
  const auto type = is_complex ? at::kComplexDouble : at::kDouble;
  return (a.to(type) - b.to(type)).abs().nan_to_num(0).max().item<double>();
}

/// How a tensor differs, or empty.
std::string difference(const at::Tensor& a, const at::Tensor& b) {
  const TensorSpec left = checkpoint::spec_of(a), right = checkpoint::spec_of(b);
  if (left.shape != right.shape) return c10::str(to_string(left), " against ", to_string(right));
  const double largest = largest_difference(a, b);
  if (left.dtype != right.dtype) {
    return c10::str(to_string(left), " against ", to_string(right), ", largest difference ",
                    largest);
  }
  const int64_t other = count_other_bits(a, b);
  return other == 0
             ? ""
             : c10::str(other, " of ", a.numel(), " elements differ, largest difference ", largest);
}

/// Some of the tensors: which names there are, and how to read one.
struct Section {
  std::set<std::string> names;
  Read read;
};

void compare(const std::string& kind, const Section& a, const Section& b,
             std::vector<std::string>& lines) {
  std::set<std::string> names = a.names;
  names.insert(b.names.begin(), b.names.end());
  for (const std::string& name : names) {
    if (a.names.count(name) == 0 || b.names.count(name) == 0) {
      lines.push_back(kind + core::printable(name) + ": only in the " +
                      (a.names.count(name) ? "first" : "second"));
      continue;
    }
    const std::string found = difference(a.read(name), b.read(name));
    if (!found.empty()) lines.push_back(kind + core::printable(name) + ": " + found);
  }
}

Section model_of(CheckpointSource& source) {
  Section section;
  for (const auto& [name, spec] : source.tensors()) section.names.insert(name);
  for (const auto& [alias, name] : source.aliases()) section.names.insert(alias);
  section.read = [&source, aliases = source.aliases()](const std::string& name) {
    const auto alias = aliases.find(name);
    return source.read(alias == aliases.end() ? name : alias->second);
  };
  return section;
}

Section optimizer_of(CheckpointSource& source) {
  Section section;
  for (const auto& [name, entry] : source.checkpoint()->index().optimizer_tensors) {
    section.names.insert(name);
  }
  section.read = [&source](const std::string& name) {
    return source.checkpoint()->read_optimizer(name);
  };
  return section;
}

/// Compares all but tensors, value by value: "extra/scheduler/lr: 0.1 against 0.2".
void compare_values(const std::string& path, const nlohmann::json& a, const nlohmann::json& b,
                    std::vector<std::string>& lines) {
  if (a == b) return;
  if (!a.is_object() || !b.is_object()) {
    lines.push_back(c10::str(path, ": ", core::printable(a.dump(), kShownValue), " against ",
                             core::printable(b.dump(), kShownValue)));
    return;
  }
  nlohmann::json all = a;
  all.update(b);
  for (const auto& [key, value] : all.items()) {
    const std::string of_key = path + "/" + core::printable(key);
    if (a.contains(key) && b.contains(key)) {
      compare_values(of_key, a[key], b[key], lines);
    } else {
      lines.push_back(of_key + ": only in the " + (a.contains(key) ? "first" : "second"));
    }
  }
}

/// Groups of parameters, whatever the order in which ranks have stored these.
void compare_groups(const nlohmann::json& a, const nlohmann::json& b,
                    std::vector<std::string>& lines) {
  const auto by_name = [](const nlohmann::json& group) {
    nlohmann::json result = group;
    result["params"] = nlohmann::json::object();
    for (const auto& name : group["params"]) result["params"][name.get<std::string>()] = true;
    return result;
  };
  for (size_t i = 0; i < std::max(a.size(), b.size()); ++i) {
    const std::string group = c10::str("optimizer group ", i);
    if (i < a.size() && i < b.size()) {
      compare_values(group, by_name(a[i]), by_name(b[i]), lines);
    } else {
      lines.push_back(group + ": only in the " + (i < a.size() ? "first" : "second"));
    }
  }
}

void compare_rest(const checkpoint::Index& a, const checkpoint::Index& b,
                  std::vector<std::string>& lines) {
  compare_values("step", a.run.step, b.run.step, lines);
  compare_values("gradient_shards", a.run.gradient_shards, b.run.gradient_shards, lines);
  compare_values("seed", a.run.random.seed, b.run.random.seed, lines);
  compare_values("step_calls", a.run.random.step_calls, b.run.random.step_calls, lines);
  compare_values("user_content", a.run.user_content, b.run.user_content, lines);
  compare_values("extra", a.run.extra, b.run.extra, lines);
  nlohmann::json of_a = a.optimizer, of_b = b.optimizer;
  constexpr const char* kGroups = "param_groups";
  if (of_a.contains(kGroups) && of_b.contains(kGroups)) {
    compare_groups(of_a[kGroups], of_b[kGroups], lines);
    of_a.erase(kGroups);
    of_b.erase(kGroups);
  }
  compare_values("optimizer", of_a, of_b, lines);
}

}  // namespace

void convert(CheckpointSource& source, const std::string& output, const Conversion& conversion) {
  const auto tensors = converted(source.tensors(), conversion);
  std::map<std::string, TensorSpec> specs(tensors.begin(), tensors.end());
  const Read read = [&](const std::string& name) { return read_as(source, name, specs.at(name)); };
  if (c10::ends_with(output, kSafetensors)) {
    write_safetensors_file(output, tensors, read);
  } else if (c10::ends_with(output, kStateFile)) {
    checkpoint::write_state_file(output, tensors, source.aliases(), read);
  } else {
    write_checkpoint(source, output, tensors, conversion, read);
  }
}

bool is_one_file(const std::string& output) {
  return c10::ends_with(output, kSafetensors) || c10::ends_with(output, kStateFile);
}

std::vector<std::string> differences(CheckpointSource& a, CheckpointSource& b) {
  std::vector<std::string> lines;
  compare("", model_of(a), model_of(b), lines);
  if (a.checkpoint() != nullptr && b.checkpoint() != nullptr) {
    compare("optimizer ", optimizer_of(a), optimizer_of(b), lines);
    compare_rest(a.checkpoint()->index(), b.checkpoint()->index(), lines);
  }
  return lines;
}

}  // namespace smp::tools
