// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/apply.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <set>

#include "core/check.h"
#include "core/refusal.h"
#include "core/text.h"

namespace smp::checkpoint {
namespace {

constexpr const char* kAverage = "average.";
constexpr const char* kTensors = "tensors.";

/// The names under which `index` has an expected tensor.
std::vector<std::string> stored_names(const ExpectedTensor& expected, const Index& index) {
  std::vector<std::string> found;
  for (const std::string& name : expected.names) {
    if (index.find_model(name) != nullptr) {
      found.push_back(name);
    }
  }
  return found;
}

/// The name under which `index` has the average of an expected tensor; none if it has none.
std::optional<std::string> stored_average(const ExpectedTensor& expected, const Index& index,
                                          const std::string& average) {
  for (const std::string& name : expected.names) {
    const std::string stored = name + "/" + average_field(average);
    if (index.optimizer_tensors.count(stored) == 1) return stored;
  }
  return std::nullopt;
}

/// The count of updates that `index` has for an average.
std::optional<int64_t> stored_updates(const Index& index, const std::string& average) {
  const auto averages = index.optimizer.find(kAverages);
  if (averages == index.optimizer.end() || !averages->is_object()) return std::nullopt;
  const auto updates = averages->find(average);
  if (updates == averages->end() || !updates->is_number_unsigned()) return std::nullopt;
  return updates->get<int64_t>();
}

/// Lists the reasons for which parameters cannot take an average that had updates, one a line.
std::vector<std::string> misfits_of_average(const std::vector<ExpectedTensor>& parameters,
                                            const Index& index, const std::string& average) {
  std::vector<std::string> lines;
  for (const ExpectedTensor& parameter : parameters) {
    const at::ScalarType dtype = parameter.spec.dtype;
    if (!at::isFloatingType(dtype) && !at::isComplexType(dtype)) continue;
    if (c10::multiply_integers(parameter.spec.shape) == 0) continue;  // no replica has a piece
    const auto stored = stored_average(parameter, index, average);
    // One that is new in the program is in neither, and begins its average.
    if (!stored && stored_names(parameter, index).empty()) continue;
    const TensorSpec* got = stored ? &index.optimizer_tensors.at(*stored).spec : nullptr;
    if (got != nullptr && fits(*got, parameter.spec, /*convert=*/true)) continue;
    lines.push_back(c10::str(core::printable(parameter.names.front()), ": expected ",
                             to_string(parameter.spec), ", got ",
                             got != nullptr ? to_string(*got) : "none"));
  }
  return lines;
}

/// Why the checkpoint does not give an expected tensor its values.
core::Refusal problem_with(const ExpectedTensor& expected, const Index& index,
                           const Tolerance& tolerance) {
  const std::vector<std::string> found = stored_names(expected, index);
  if (found.empty() && !tolerance.strict) return std::nullopt;
  if (found.empty()) return c10::str("missing, expected ", to_string(expected.spec));
  const TensorEntry& first = *index.find_model(found.front());
  for (const std::string& name : found) {
    const TensorEntry& entry = *index.find_model(name);
    if (!fits(entry.spec, expected.spec, tolerance.convert)) {
      return c10::str("expected ", to_string(expected.spec), ", got ", to_string(entry.spec));
    }
    if (entry.hash != first.hash) {
      return c10::str("tied to \"", core::printable(name),
                      "\" in the model, but the checkpoint stores different ",
                      "contents for the two");
    }
  }
  return std::nullopt;
}

/// The text before the names of a model's tensors in a checkpoint.
std::string prefix_of(const std::string& model) { return model.empty() ? "" : model + "."; }

ExpectedTensor of_model(const std::string& model, ExpectedTensor expected) {
  for (std::string& name : expected.names) name.insert(0, prefix_of(model));
  return expected;
}

/// The models of the checkpoint that have all expected tensors.
std::vector<std::string> fitting_models(const std::vector<ExpectedTensor>& expected,
                                        const Index& index) {
  std::set<std::string> models;
  const auto look = [&](const std::string& stored) {
    for (const std::string& name : expected.front().names) {
      if (!c10::ends_with(stored, "." + name)) continue;
      const std::string model = stored.substr(0, stored.size() - name.size() - 1);
      const bool has_all = std::all_of(expected.begin(), expected.end(), [&](const auto& tensor) {
        return !problem_with(of_model(model, tensor), index, {/*strict=*/true, /*convert=*/true});
      });
      if (has_all) models.insert(core::printable(model));
    }
  };
  for (const auto& [name, entry] : index.model) look(name);
  for (const auto& [alias, name] : index.aliases) look(alias);
  return {models.begin(), models.end()};
}

/// The ways to load a checkpoint of several models, of which none is asked for.
std::string remedy_of_several(const std::vector<std::string>& models) {
  if (models.empty()) return "";
  return c10::str(" The checkpoint has the model's tensors under the name of a model before them:",
                  core::indented(models, /*most=*/8),
                  "\nLoad one into a plain module with LoadOptions().model(\"", models.front(),
                  "\"), or wrap the module under its name: ModelOptions().name(\"", models.front(),
                  "\").");
}

/// Names of the index for tensors that no model expects. Another name of a tensor that is expected
/// is not one: its contents are used.
std::set<std::string> unexpected_names(const std::vector<ExpectedTensor>& expected,
                                       const Index& index, const std::string& model) {
  std::set<const TensorEntry*> used;
  for (const ExpectedTensor& tensor : expected) {
    for (const std::string& name : stored_names(tensor, index)) {
      used.insert(index.find_model(name));
    }
  }
  std::set<std::string> names;
  for (const auto& [name, entry] : index.model) {
    if (used.count(&entry) == 0 && c10::starts_with(name, prefix_of(model))) {
      names.insert(name);
    }
  }
  return names;
}

}  // namespace

StateDict state_dict(const torch::nn::Module& module) {
  StateDict dict;
  for (const auto& tensors : {module.named_parameters(), module.named_buffers()}) {
    for (const auto& item : tensors) {
      if (item.value().defined()) {  // a buffer may be registered without a tensor
        dict.insert(item.key(), item.value());
      }
    }
  }
  return dict;
}

std::vector<NamedTensor> named_tensors(const StateDict& dict) {
  std::vector<NamedTensor> tensors;
  std::map<const c10::TensorImpl*, size_t> known;
  for (const auto& item : dict) {
    const at::Tensor& tensor = item.value();
    const auto [found, is_new] = known.emplace(tensor.unsafeGetTensorImpl(), tensors.size());
    if (is_new) {
      tensors.push_back({item.key(), tensor, {}});
    } else {
      tensors[found->second].aliases.push_back(item.key());
    }
  }
  return tensors;
}

bool fits(const TensorSpec& stored, const TensorSpec& expected, bool convert) {
  const bool converts =
      convert && at::isFloatingType(stored.dtype) && at::isFloatingType(expected.dtype);
  return stored.shape == expected.shape && (converts || stored.dtype == expected.dtype);
}

std::vector<ExpectedTensor> expectations(const std::vector<NamedTensor>& tensors) {
  std::vector<ExpectedTensor> expected;
  for (const NamedTensor& tensor : tensors) {
    ExpectedTensor& item = expected.emplace_back();
    item.names = {tensor.name};
    item.names.insert(item.names.end(), tensor.aliases.begin(), tensor.aliases.end());
    item.spec = spec_of(tensor.tensor);
  }
  return expected;
}

std::string list_problems(const Problems& problems) {
  std::vector<std::string> lines;
  for (const auto& [name, problem] : problems) {
    lines.push_back(core::printable(name) + ": " + problem);
  }
  return core::indented(lines);
}

void check_names(const std::vector<ExpectedTensor>& expected, const Index& index,
                 const std::string& path, const Tolerance& tolerance) {
  Problems problems;
  const auto is_stored = [&](const auto& tensor) { return !stored_names(tensor, index).empty(); };
  const bool has_any = expected.empty() || std::any_of(expected.begin(), expected.end(), is_stored);
  Tolerance tolerated = tolerance;
  tolerated.strict = tolerance.strict || !has_any;
  bool converts = false;  // the option would help
  bool skips = false;
  for (const ExpectedTensor& tensor : expected) {
    const core::Refusal problem = problem_with(tensor, index, tolerated);
    if (!problem) continue;
    problems[tensor.names.front()] = *problem;
    converts = converts || !problem_with(tensor, index, {tolerated.strict, /*convert=*/true, ""});
    skips = skips || !is_stored(tensor);
  }
  if (tolerated.strict) {
    for (const std::string& name : unexpected_names(expected, index, tolerance.model)) {
      skips = true;
      problems[name] = c10::str("not in the model, got ", to_string(index.model.at(name).spec));
    }
  }
  SMP_CHECK_WITH(CheckpointError, problems.empty(), "checkpoint \"", core::printable(path),
                 "\" does not fit the model:", list_problems(problems),
                 "\nBuild the model as it was when the checkpoint was written",
                 converts ? ", or load with convert = true to convert floating point types" : "",
                 skips && has_any
                     ? ", or load with strict = false to skip missing and unexpected tensors"
                     : "",
                 ".", has_any ? "" : remedy_of_several(fitting_models(expected, index)));
}

std::string average_field(const std::string& name) { return kAverage + name; }

std::string tensors_field(const std::string& name) { return kTensors + name; }

void check_field_name(const char* call, const std::string& name,
                      std::string (*field)(const std::string&)) {
  const bool fits = !name.empty() && name.size() <= kLongestName;
  const bool is_text = core::printable(name, kLongestName) == name;
  SMP_CHECK_WITH(UsageError, fits && is_text && name.find('/') == std::string::npos, call,
                 ": expected a name without \"/\" and control characters, of at most ",
                 kLongestName, " bytes of UTF-8, got \"", core::printable(name),
                 "\". Checkpoints have its tensors as \"parameter/", field("name"), "\"");
}

bool is_of_program(const std::string& field) {
  return field.rfind(kAverage, 0) == 0 || field.rfind(kTensors, 0) == 0;
}

std::optional<int64_t> average_updates(const std::vector<ExpectedTensor>& parameters,
                                       const Index& index, const std::string& name) {
  const auto updates = stored_updates(index, name);
  const bool fits = updates == 0 || misfits_of_average(parameters, index, name).empty();
  return fits ? updates : std::nullopt;
}

void check_average(const std::vector<ExpectedTensor>& parameters, const Index& index,
                   const std::string& name, const std::string& path) {
  const auto updates = stored_updates(index, name);
  SMP_CHECK_WITH(CheckpointError, updates.has_value(), "checkpoint \"", core::printable(path),
                 "\" holds no average \"", core::printable(name),
                 "\" of the model's parameters: the program that wrote it had no smp::Ema of that "
                 "name then, or it is a full checkpoint, which has the model alone. Load with "
                 "strict = false for an average to begin anew, or give the name that was saved");
  if (*updates == 0) return;
  const auto lines = misfits_of_average(parameters, index, name);
  SMP_CHECK_WITH(CheckpointError, lines.empty(), "checkpoint \"", core::printable(path),
                 "\" holds an average \"", core::printable(name),
                 "\" that does not fit the model's parameters:", core::indented(lines),
                 "\nBuild the model, and make the smp::Ema on all ranks, as when the checkpoint "
                 "was written, or load with strict = false for an average to begin anew");
}

at::Tensor read_average(Reader& reader, const ExpectedTensor& expected, const std::string& name) {
  const auto stored = stored_average(expected, reader.index(), name);
  return stored ? reader.read_optimizer(*stored) : at::Tensor();
}

at::Tensor read_values(Reader& reader, const ExpectedTensor& expected, const std::string& average) {
  const Index& index = reader.index();
  const std::vector<std::string> names = stored_names(expected, index);
  if (names.empty()) return {};
  if (!average.empty()) {
    const at::Tensor averaged = read_average(reader, expected, average);
    if (averaged.defined()) return averaged.to(expected.spec.dtype);
  }
  if (index.find_model(names.front())->spec.dtype != expected.spec.dtype) {
    for (const std::string& name : names) {
      const std::string master = name + "/" + kMasterField;
      const auto found = index.optimizer_tensors.find(master);
      if (found == index.optimizer_tensors.end()) continue;
      if (found->second.spec.shape == expected.spec.shape) {
        return reader.read_optimizer(master).to(expected.spec.dtype);
      }
    }
  }
  return reader.read_model(names.front()).to(expected.spec.dtype);
}

void load_into_module(torch::nn::Module& module, const std::string& path,
                      const Tolerance& tolerance, const std::string& average) {
  Reader reader(path);
  const std::vector<NamedTensor> targets = named_tensors(state_dict(module));
  const auto expected_of = [&](const std::vector<NamedTensor>& tensors) {
    auto result = expectations(tensors);
    for (ExpectedTensor& item : result) item = of_model(tolerance.model, std::move(item));
    return result;
  };
  const std::vector<ExpectedTensor> expected = expected_of(targets);
  check_names(expected, reader.index(), path, tolerance);
  if (!average.empty()) {
    const auto parameters = expected_of(named_tensors(module.named_parameters()));
    check_average(parameters, reader.index(), average, path);
  }
  // Two passes, so that a damaged file is found before anything changes without a second copy
  // of the model in memory; the second pass reads from the page cache.
  const bool reads_all = tolerance.convert || !average.empty();
  check_undamaged(path,
                  reader.find_damage(reads_all ? Reader::Section::kAll : Reader::Section::kModel));
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < targets.size(); ++i) {
    const at::Tensor values = read_values(reader, expected[i], average);
    if (values.defined()) at::Tensor(targets[i].tensor).copy_(values);
  }
}

}  // namespace smp::checkpoint
