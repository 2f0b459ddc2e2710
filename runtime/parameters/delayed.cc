// SPDX-License-Identifier: Apache-2.0
#include "runtime/parameters/delayed.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <array>

#include "core/check.h"
#include "graph/recording.h"
#include "runtime/first_difference.h"

namespace smp::runtime {
namespace {

using graph::Recording;

/// The recordings of delayed tensors, in the order of the models' tensors.
std::vector<std::shared_ptr<Recording>> recordings(const ParameterTable& table) {
  std::vector<std::shared_ptr<Recording>> result;
  for (const auto& entry : table.entries()) {
    auto recording = graph::recording_of(entry.values()).first;
    if (recording && std::find(result.begin(), result.end(), recording) == result.end()) {
      result.push_back(std::move(recording));
    }
  }
  return result;
}

/// The first rank that has another text than rank 0; 0: none.
size_t first_with_other(comm::Communicator& ranks, const std::string& text) {
  return first_other(comm::all_gather_bytes(ranks, std::to_string(hash_of(text))));
}

}  // namespace

bool has_delayed(const ParameterTable& table) {
  const auto& entries = table.entries();
  return std::any_of(entries.begin(), entries.end(),
                     [](const auto& entry) { return graph::is_deferred(entry.values()); });
}

void agree_on_construction(const Runtime& runtime) {
  const auto all = recordings(runtime.table());
  std::string text, states;
  for (const auto& recording : all) {
    SMP_CHECK_WITH(UsageError, recording->is_made_by(runtime.world()),
                   "one thread constructed models of several ranks under delayed parameter "
                   "initialization, so each would make the others' parameters. Construct the model "
                   "of a rank on its own thread, after smp::init");
    text += recording->describe();
    states += recording->states();
  }
  // Other ranks keep other parts of divided parameters, made by other operators.
  comm::Communicator& alike = *runtime.same_parts();
  if (const size_t other = first_with_other(alike, text)) {
    const auto texts = comm::all_gather_bytes(alike, text);
    const auto [a, b] = first_difference(texts[0], texts[other]);
    core::fail<UsageError>(
        "the models were constructed in different ways under delayed "
        "parameter initialization: rank 0 has ",
        a, ", rank ", other, " has ", b,
        ". Construct the same model on every rank; if a constructor reads "
        "random numbers, call torch::manual_seed first");
  }
  if (first_with_other(*runtime.world(), states) == 0) return;
  for (const auto& recording : all) {
    recording->set_states(comm::broadcast_bytes(*runtime.world(), recording->states(), 0));
  }
}

void make_shared_tensors(const Runtime& runtime) {
  std::vector<std::pair<std::string, at::Tensor>> named;
  std::vector<at::Tensor> parameters;
  for (const auto& entry : runtime.table().entries()) {
    named.emplace_back(entry.name, entry.values());
    if (entry.is_parameter()) parameters.push_back(entry.values());
  }
  for (const auto& recording : recordings(runtime.table())) {
    recording->assign_seeds(named, *runtime.progress.seed);
    recording->materialize_all(parameters);
  }
}

void make_values(const ParameterTable::Entry& entry) {
  if (const auto recording = graph::recording_of(entry.values()).first) {
    recording->materialize(entry.values());
  }
}

void materialize(const torch::nn::Module& module) {
  for (const auto& tensors : {module.parameters(), module.buffers()}) {
    for (const at::Tensor& tensor : tensors) {
      if (const auto recording = graph::recording_of(tensor).first) {
        recording->materialize(tensor);
      }
    }
  }
}

}  // namespace smp::runtime
