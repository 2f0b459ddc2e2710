// SPDX-License-Identifier: Apache-2.0
#include "tools/train/optimizer.h"

#include <tuple>
#include <utility>
#include <vector>

#include "smp/distributed_optimizer.h"
#include "smp/optim/fused.h"

namespace smp::tools::train {
namespace {

using torch::optim::OptimizerParamGroup;

/// `own`: the options of the optimizer `Base`, to which the weight decay is added.
template <class Base, class Own>
AnyOptimizer make_any(const OptimizerOptions& options, const ModelCore& model, Own own,
                      double default_decay = 0) {
  std::vector<at::Tensor> decayed, others;
  for (const at::Tensor& parameter : model.parameters()) {
    if (!parameter.requires_grad()) continue;
    (options.decay_all || parameter.dim() >= 2 ? decayed : others).push_back(parameter);
  }
  own.weight_decay(options.weight_decay.value_or(default_decay));
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(decayed, std::make_unique<Own>(own));
  groups.emplace_back(others, std::make_unique<Own>(Own(own).weight_decay(0)));
  const auto optimizer = std::make_shared<DistributedOptimizer<Base>>(groups, own);
  return {optimizer, optimizer.get()};
}

}  // namespace

AnyOptimizer make_optimizer(const OptimizerOptions& options, const ModelCore& model) {
  const auto adaptive = [&](auto own) {
    const auto& [first, second] = options.betas;
    return own.betas(std::make_tuple(first, second)).eps(options.eps);
  };
  if (options.name == "sgd") {
    return make_any<optim::FusedSGD>(
        options, model, torch::optim::SGDOptions(options.lr).momentum(options.momentum));
  }
  if (options.name == "adam") {
    return make_any<optim::FusedAdam>(options, model,
                                      adaptive(torch::optim::AdamOptions(options.lr)));
  }
  return make_any<optim::FusedAdamW>(options, model,
                                     adaptive(torch::optim::AdamWOptions(options.lr)), 0.01);
}

}  // namespace smp::tools::train
