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

/// `make(weight_decay)` gives the options of a group.
template <class Base, class Make>
AnyOptimizer make_any(const OptimizerOptions& options, const ModelCore& model, double weight_decay,
                      const Make& make) {
  std::vector<at::Tensor> decayed, others;
  for (const at::Tensor& parameter : model.parameters()) {
    if (!parameter.requires_grad()) continue;
    (options.decay_all || parameter.dim() >= 2 ? decayed : others).push_back(parameter);
  }
  using Own = decltype(make(weight_decay));
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(decayed, std::make_unique<Own>(make(weight_decay)));
  groups.emplace_back(others, std::make_unique<Own>(make(0)));
  const auto optimizer = std::make_shared<DistributedOptimizer<Base>>(groups, make(weight_decay));
  return {optimizer, optimizer.get()};
}

}  // namespace

AnyOptimizer make_optimizer(const OptimizerOptions& options, const ModelCore& model) {
  const auto betas = std::make_tuple(options.betas.first, options.betas.second);
  if (options.name == "sgd") {
    return make_any<optim::FusedSGD>(options, model, options.weight_decay.value_or(0),
                                     [&](double weight_decay) {
                                       return torch::optim::SGDOptions(options.lr)
                                           .momentum(options.momentum)
                                           .weight_decay(weight_decay);
                                     });
  }
  if (options.name == "adam") {
    return make_any<optim::FusedAdam>(options, model, options.weight_decay.value_or(0),
                                      [&](double weight_decay) {
                                        return torch::optim::AdamOptions(options.lr)
                                            .betas(betas)
                                            .eps(options.eps)
                                            .weight_decay(weight_decay);
                                      });
  }
  return make_any<optim::FusedAdamW>(options, model, options.weight_decay.value_or(0.01),
                                     [&](double weight_decay) {
                                       return torch::optim::AdamWOptions(options.lr)
                                           .betas(betas)
                                           .eps(options.eps)
                                           .weight_decay(weight_decay);
                                     });
}

}  // namespace smp::tools::train
