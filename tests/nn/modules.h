// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "graph/keyed_random.h"
#include "smp/nn/split_module.h"
#include "tests/nn/harness.h"

/// One module on all ranks, and the same in one process.
namespace smp::nn::testing {

using Named = std::map<std::string, torch::Tensor>;

/// The splits of all divided parameters below `module`, by dotted path.
inline std::map<std::string, ParameterSplit> splits_of(torch::nn::Module& module) {
  std::map<std::string, ParameterSplit> splits;
  for (const auto& item : module.named_modules("", /*include_self=*/true)) {
    const auto* divided = dynamic_cast<const SplitModule*>(item.value().get());
    if (divided == nullptr) continue;
    const std::string prefix = item.key().empty() ? "" : item.key() + ".";
    for (const auto& [name, split] : divided->split_parameters()) splits[prefix + name] = split;
  }
  return splits;
}

/// The wholes of tensors that ranks have by name; those that are not divided must be equal.
inline Named joined(const std::vector<Named>& of_ranks,
                    const std::map<std::string, ParameterSplit>& splits) {
  Named result;
  for (const auto& [name, first] : of_ranks[0]) {
    Tensors parts;
    for (const Named& of_rank : of_ranks) parts.push_back(of_rank.at(name));
    const auto split = splits.find(name);
    if (split != splits.end()) {
      result[name] = whole_of(parts, split->second.dim, split->second.blocks);
      EXPECT_EQ(result[name].sizes(), at::IntArrayRef(split->second.sizes)) << name;
      continue;
    }
    for (const auto& part : parts) expect_equal(part, first, name + ", which all ranks hold alike");
    result[name] = first;
  }
  return result;
}

/// The results of ranks, as wholes.
struct Outcome {
  Named parameters, gradients;
  Tensors outputs;  ///< the same on all ranks
  std::vector<std::shared_ptr<CountingGroup>> groups;
};

/// Makes a module on each rank, all with the same seed, and calls `use` on it with its rank.
/// Parameters are converted to `dtype`; random operators draw from keyed streams.
template <class Holder>
Outcome run_module(int ranks, const std::function<Holder()>& make,
                   const std::function<Tensors(Holder&)>& use,
                   torch::Dtype dtype = torch::kDouble) {
  std::vector<Named> parameters(ranks), gradients(ranks);
  std::vector<Tensors> outputs(ranks);
  std::map<std::string, ParameterSplit> splits;
  Outcome run;
  run.groups.resize(ranks);
  on_ranks(
      ranks,
      [&](int rank) {
        Holder module{nullptr};
        make_in_turn([&] {
          module = make();
          module->to(dtype);
          for (const auto& item : module->named_parameters()) {
            parameters[rank][item.key()] = item.value().detach().clone();
          }
          if (rank == 0) splits = splits_of(*module);
        });
        const graph::KeyedRandomScope random({3, 0, 1, 2});
        outputs[rank] = use(module);
        for (const auto& item : module->named_parameters()) {
          if (item.value().grad().defined()) {
            gradients[rank][item.key()] = item.value().grad().clone();
          }
        }
      },
      [&](const comm::CommunicatorPtr& group) {
        return run.groups[group->rank()] = std::make_shared<CountingGroup>(group);
      });
  run.parameters = joined(parameters, splits);
  run.gradients = joined(gradients, splits);
  for (int r = 1; r < ranks; ++r) {
    EXPECT_EQ(outputs[r].size(), outputs[0].size());
    for (size_t i = 0; i < outputs[0].size(); ++i) {
      expect_equal(outputs[r][i], outputs[0][i], "output " + std::to_string(i) + " of all ranks");
    }
  }
  run.outputs = outputs[0];
  return run;
}

/// Compares outputs and gradients.
inline void expect_close(const Outcome& run, const Tensors& outputs, const Named& gradients,
                         const std::string& what, double relative = 1e-12) {
  ASSERT_EQ(run.outputs.size(), outputs.size()) << what;
  for (size_t i = 0; i < outputs.size(); ++i) {
    expect_close(run.outputs[i], outputs[i], what + ", output " + std::to_string(i), relative);
  }
  ASSERT_EQ(run.gradients.size(), gradients.size()) << what;
  for (const auto& [name, gradient] : gradients) {
    ASSERT_EQ(run.gradients.count(name), 1u) << what << ": no gradient of " << name;
    expect_close(run.gradients.at(name), gradient, what + ", gradient of " + name, relative);
  }
}

/// Leaves with the values of parameters, for plain functions of them.
inline Named leaves(const Named& parameters) {
  Named result;
  for (const auto& [name, tensor] : parameters) {
    result[name] = tensor.detach().clone().requires_grad_();
  }
  return result;
}

inline Named gradients_of(const Named& leaves) {
  Named result;
  for (const auto& [name, tensor] : leaves) {
    if (tensor.grad().defined()) result[name] = tensor.grad();
  }
  return result;
}

}  // namespace smp::nn::testing
