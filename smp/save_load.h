#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "smp/distributed_model.h"
#include "smp/distributed_optimizer.h"

namespace smp {

/// What a checkpoint says about the run it was taken from.
struct LoadedRun {
  int64_t step = 0;             ///< training steps done
  nlohmann::json user_content;  ///< what the program gave to `save`
};

/// With types erased. Internal: use the templates below.
void save_run(const std::string& path, const std::vector<ModelCore*>& models,
              const std::vector<OptimizerCore*>& optimizers, const nlohmann::json& user_content);
LoadedRun load_run(const std::string& path, const std::vector<ModelCore*>& models,
                   const std::vector<OptimizerCore*>& optimizers, bool strict);

/// Saves a full checkpoint as the folder `path`: model, optimizer, random streams, number of
/// steps and `user_content`. Collective over the world; the ranks share a file system. Every stage
/// writes its own tensors, under names that do not depend on the layout. A crash at any point
/// leaves an earlier checkpoint of that name loadable. Throws `CheckpointError`.
template <class M>
void save(const std::string& path, const DistributedModel<M>& model,
          const nlohmann::json& user_content = nlohmann::json::object()) {
  save_run(path, {&model.core()}, {}, user_content);
}
template <class M, class Optimizer>
auto save(const std::string& path, const DistributedModel<M>& model, const Optimizer& optimizer,
          const nlohmann::json& user_content = nlohmann::json::object())
    -> decltype(optimizer.core(), void()) {
  save_run(path, {&model.core()}, {&optimizer.core()}, user_content);
}

/// Loads what `save` wrote, into any number of stages and replicas, before or after the first
/// step. Names, shapes and types are checked first: one `CheckpointError` lists everything that
/// is missing, unexpected or different, and then nothing has changed. The following steps give
/// the losses of the run that was not interrupted, bit for bit, if `gradient_shards` is the same
/// (it is taken from the checkpoint unless the configuration sets it). Each rank reads what it
/// holds. To load into a plain module without `init`, use `load_into_module`.
template <class M>
LoadedRun load(const std::string& path, DistributedModel<M>& model, bool strict = true) {
  return load_run(path, {&model.core()}, {}, strict);
}
template <class M, class Optimizer>
auto load(const std::string& path, DistributedModel<M>& model, Optimizer& optimizer,
          bool strict = true) -> decltype(optimizer.core(), LoadedRun()) {
  return load_run(path, {&model.core()}, {&optimizer.core()}, strict);
}

/// Loads the model of a checkpoint into a plain module of this process; needs no `init`. Names,
/// shapes and types are checked as in `load`.
void load_into_module(const std::string& path, torch::nn::Module& module, bool strict = true);

}  // namespace smp
