// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "checkpoint/safetensors.h"
#include "exported/structure.h"
#include "smp/export_program.h"
#include "smp/exported.h"
#include "tests/temp_folder.h"

/// Programs that C++ writes, and the results of the models that they were written of.
namespace smp::testing {

/// The folder that the environment variable SMP_WRITTEN_PROGRAMS names, where written programs stay
/// for check_written.py, or one that is removed.
class WrittenFolder {
 public:
  std::string file(const std::string& name) const {
    return kept_ == nullptr ? folder_.file(name) : std::string(kept_) + "/" + name;
  }

 private:
  const char* kept_ = std::getenv("SMP_WRITTEN_PROGRAMS");
  TempFolder folder_;
};

/// One run of a program: its results, and its side effects, by name.
using RunTensors = std::map<std::string, torch::Tensor>;

inline std::vector<torch::Tensor> tensors_of(const std::vector<c10::IValue>& values) {
  std::vector<c10::IValue> leaves;
  for (const c10::IValue& value : values) exported::structure_of(value, leaves);
  std::vector<torch::Tensor> tensors;
  for (const c10::IValue& leaf : leaves) {
    if (leaf.isTensor()) tensors.push_back(leaf.toTensor());
  }
  return tensors;
}

/// Runs a program and, where a gradient flows, its backward from the mean of all squares. `renamed`
/// has names other than the module's.
template <class Call>
RunTensors run_of(torch::nn::Module& module, const Call& call,
                  const std::map<std::string, std::string>& renamed = {}) {
  module.zero_grad();
  torch::manual_seed(7);
  RunTensors run;
  torch::Tensor loss;
  const std::vector<torch::Tensor> results = tensors_of({call()});
  for (size_t i = 0; i < results.size(); ++i) {
    run["output." + std::to_string(i)] = results[i].detach().clone();
    if (!results[i].requires_grad()) continue;
    const auto square = results[i].to(torch::kFloat).pow(2).mean();
    loss = loss.defined() ? loss + square : square;
  }
  if (loss.defined()) loss.backward();
  const auto name_of = [&](const std::string& name) {
    const auto other = renamed.find(name);
    return other == renamed.end() ? name : other->second;
  };
  for (const auto& item : module.named_parameters()) {
    const torch::Tensor& gradient = item.value().grad();
    if (!gradient.defined()) continue;
    run["gradient." + name_of(item.key())] =
        gradient.is_sparse() ? gradient.to_dense() : gradient.clone();
  }
  for (const auto& item : module.named_buffers()) {
    run["buffer." + name_of(item.key())] = item.value().clone();
  }
  return run;
}

inline void expect_same_run(const RunTensors& got, const RunTensors& expected,
                            const std::string& what) {
  EXPECT_EQ(got.size(), expected.size()) << what;
  for (const auto& [name, tensor] : expected) {
    const auto found = got.find(name);
    ASSERT_TRUE(found != got.end()) << what << " lacks " << name;
    EXPECT_TRUE(torch::equal(found->second, tensor)) << what << ": " << name;
  }
}

/// Keeps a run for Python, under the name of the program and the number of the run.
inline void keep_run(const WrittenFolder& folder, const std::string& name, int number,
                     const std::vector<torch::Tensor>& inputs, const RunTensors& run) {
  std::vector<std::pair<std::string, torch::Tensor>> tensors(run.begin(), run.end());
  for (size_t i = 0; i < inputs.size(); ++i) {
    tensors.emplace_back("input." + std::to_string(i), inputs[i]);
  }
  for (auto& entry : tensors) {
    if (entry.second.is_complex()) entry.second = torch::view_as_real(entry.second);
  }
  checkpoint::write_safetensors(folder.file(name + "." + std::to_string(number) + ".safetensors"),
                                tensors);
}

/// Writes a program of `net` for a batch of any size, loads it, and compares the results of both,
/// with gradients and buffers, at several sizes. `make(batch)` gives arguments as a tuple; `axes`
/// says which axis of each tensor among them is the batch: 0 if it is empty, and none where it is
/// -1.
template <class Net, class Make>
void expect_same_when_loaded(const std::string& name, Net net, const Make& make,
                             std::vector<int64_t> axes = {}) {
  const WrittenFolder folder;
  const std::string path = folder.file(name + ".pt2");
  torch::manual_seed(3);
  const auto first = make(6);
  const auto values_of = [](const auto& arguments) {
    std::vector<c10::IValue> values;
    std::apply(
        [&](const auto&... argument) { (values.push_back(detail::as_ivalue(argument)), ...); },
        arguments);
    return values;
  };
  axes.resize(tensors_of(values_of(first)).size(), 0);
  ExportProgramOptions options;
  for (int64_t axis : axes) {
    options.dynamic_shapes().emplace_back();
    if (axis >= 0) options.dynamic_shapes().back().emplace(axis, ExportDim("batch"));
  }
  const ExportedParts parts = export_program(path, net, first, options);
  ExportedModule loaded = load_exported(path);
  int number = 0;
  for (int64_t batch : {6, 4, 9}) {
    const auto arguments = number == 0 ? first : make(batch);
    const std::vector<c10::IValue> values = values_of(arguments);
    const auto forward = [&] {
      return detail::as_ivalue(std::apply(
          [&](const auto&... argument) { return net->forward(argument...); }, arguments));
    };
    const RunTensors expected = run_of(*net, forward, parts.renamed);
    expect_same_run(run_of(*loaded, [&] { return loaded->call(values); }), expected,
                    name + ", batch " + std::to_string(batch));
    keep_run(folder, name, number++, tensors_of(values), expected);
  }
}

}  // namespace smp::testing
