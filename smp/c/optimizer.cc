// SPDX-License-Identifier: Apache-2.0
#include "smp/c/optimizer.h"

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <map>
#include <nlohmann/json.hpp>
#include <tuple>
#include <utility>

#include "core/check.h"
#include "core/json.h"
#include "core/json_reader.h"
#include "core/text.h"
#include "smp/distributed_optimizer.h"
#include "smp/optim/fused.h"

namespace smp::c {
namespace {

using core::JsonReader;

template <class Base>
class Made final : public NamedOptimizer {
 public:
  template <class Options>
  Made(std::vector<at::Tensor> parameters, const Options& options)
      : optimizer_(std::move(parameters), options) {}

  void step() override { optimizer_.step(); }
  void set_learning_rate(double rate) override {
    for (auto& group : optimizer_.param_groups()) group.options().set_lr(rate);
  }
  const OptimizerCore& core() const override { return optimizer_; }

 private:
  DistributedOptimizer<Base> optimizer_;
};

/// Options by name, and their setters.
template <class Options>
using Setters = std::map<std::string, void (*)(Options&, const JsonReader&)>;

#define SMP_OPTION(name, read)                                                        \
  {                                                                                   \
#name, [](auto& options, const JsonReader& value) { options.name(value.read()); } \
  }

std::tuple<double, double> two_numbers(const JsonReader& value) {
  if (value.size() != 2) value.fail_expected("a list of two numbers");
  return {value.at(0).number(), value.at(1).number()};
}

Setters<torch::optim::SGDOptions> setters_of(const torch::optim::SGDOptions&) {
  return {SMP_OPTION(lr, number), SMP_OPTION(momentum, number), SMP_OPTION(dampening, number),
          SMP_OPTION(weight_decay, number), SMP_OPTION(nesterov, boolean)};
}

template <class Options>
Setters<Options> setters_of_adam() {
  return {SMP_OPTION(lr, number),
          SMP_OPTION(eps, number),
          SMP_OPTION(weight_decay, number),
          SMP_OPTION(amsgrad, boolean),
          {"betas",
           [](Options& options, const JsonReader& value) { options.betas(two_numbers(value)); }}};
}

Setters<torch::optim::AdamOptions> setters_of(const torch::optim::AdamOptions&) {
  return setters_of_adam<torch::optim::AdamOptions>();
}

Setters<torch::optim::AdamWOptions> setters_of(const torch::optim::AdamWOptions&) {
  return setters_of_adam<torch::optim::AdamWOptions>();
}

Setters<torch::optim::AdagradOptions> setters_of(const torch::optim::AdagradOptions&) {
  return {SMP_OPTION(lr, number), SMP_OPTION(lr_decay, number), SMP_OPTION(weight_decay, number),
          SMP_OPTION(initial_accumulator_value, number), SMP_OPTION(eps, number)};
}

Setters<torch::optim::RMSpropOptions> setters_of(const torch::optim::RMSpropOptions&) {
  return {SMP_OPTION(lr, number),       SMP_OPTION(alpha, number),
          SMP_OPTION(eps, number),      SMP_OPTION(weight_decay, number),
          SMP_OPTION(momentum, number), SMP_OPTION(centered, boolean)};
}

#undef SMP_OPTION

template <class Map>
std::string names_of(const Map& map) {
  std::string names;
  for (const auto& entry : map) names += (names.empty() ? "\"" : ", \"") + entry.first + "\"";
  return names;
}

constexpr const char* kClip = "clip_grad_norm";

std::string source_of(const std::string& name) {
  return "the options of optimizer \"" + name + "\"";
}

template <class Base, class Options>
std::unique_ptr<NamedOptimizer> make(const std::string& name, const nlohmann::json& json,
                                     std::vector<at::Tensor> parameters, Options options) {
  const JsonReader reader(json, source_of(name));
  std::optional<double> clip;
  const auto setters = setters_of(options);
  for (const auto& entry : json.items()) {
    const auto found = setters.find(entry.key());
    if (entry.key() == kClip) {
      clip = reader.at(kClip).number();
      if (!(*clip > 0)) reader.at(kClip).fail_expected("a number above 0");
      continue;
    }
    SMP_CHECK_WITH(ConfigError, found != setters.end(), "optimizer \"", name,
                   "\" has no option \"", core::printable(entry.key(), 100), "\". It has ",
                   names_of(setters), " and \"", kClip, "\"");
    found->second(options, reader.at(entry.key()));
  }
  try {
    auto optimizer = std::make_unique<Made<Base>>(std::move(parameters), options);
    optimizer->clip_grad_norm = clip;
    return optimizer;
  } catch (const Error&) {
    throw;
  } catch (const c10::Error& error) {  // libtorch's, of a number without meaning
    core::fail<ConfigError>(source_of(name), ": ", error.what_without_backtrace());
  }
}

using Make = std::unique_ptr<NamedOptimizer> (*)(const std::string& name,
                                                 const nlohmann::json& json,
                                                 std::vector<at::Tensor> parameters);

/// Learning rates without a default in libtorch's C++ have Python's.
template <class Base, class Options>
Make maker() {
  return
      [](const std::string& name, const nlohmann::json& json, std::vector<at::Tensor> parameters) {
        return make<Base>(name, json, std::move(parameters), Options(1e-3));
      };
}

const std::map<std::string, Make>& makers() {
  using namespace torch::optim;  // NOLINT(google-build-using-namespace)
  using namespace smp::optim;    // NOLINT(google-build-using-namespace)
  static const auto* table = new std::map<std::string, Make>{
      {"sgd", maker<SGD, SGDOptions>()},
      {"fused_sgd", maker<FusedSGD, SGDOptions>()},
      {"adam", maker<Adam, AdamOptions>()},
      {"fused_adam", maker<FusedAdam, AdamOptions>()},
      {"adamw", maker<AdamW, AdamWOptions>()},
      {"fused_adamw", maker<FusedAdamW, AdamWOptions>()},
      {"adagrad", maker<Adagrad, AdagradOptions>()},
      {"fused_adagrad", maker<FusedAdagrad, AdagradOptions>()},
      {"rmsprop", maker<RMSprop, RMSpropOptions>()},
  };
  return *table;
}

nlohmann::json parse(const std::string& name, const std::string& options) {
  if (options.empty()) return nlohmann::json::object();
  nlohmann::json json = core::parse_json(options, source_of(name));
  if (!json.is_object()) JsonReader(json, source_of(name)).fail_expected("an object");
  return json;
}

}  // namespace

std::unique_ptr<NamedOptimizer> make_optimizer(const std::string& name, const std::string& options,
                                               std::vector<at::Tensor> parameters) {
  const auto found = makers().find(name);
  SMP_CHECK_WITH(ConfigError, found != makers().end(), "there is no optimizer \"",
                 core::printable(name, 100), "\". There are ", names_of(makers()));
  return found->second(name, parse(name, options), std::move(parameters));
}

}  // namespace smp::c
