// SPDX-License-Identifier: Apache-2.0
#include "smp/c/optimizer.h"

#include <torch/arg.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <cstdint>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/check.h"
#include "core/json.h"
#include "core/json_reader.h"
#include "core/text.h"
#include "optim/state_dict_fields.h"
#include "smp/distributed_optimizer.h"
#include "smp/loss_scale_options.h"
#include "smp/optim/fused.h"

namespace smp::c {
namespace {

using core::JsonReader;

/// Options by name, and their setters.
template <class Options>
using Setters = std::map<std::string, void (*)(Options&, const JsonReader&)>;

double number(const JsonReader& value) { return value.number(); }
bool boolean(const JsonReader& value) { return value.boolean(); }
int64_t integer(const JsonReader& value) { return value.integer(); }

double above_zero(const JsonReader& value) {
  if (!(value.number() > 0)) value.fail_expected("a number above 0");
  return value.number();
}

/// The value of an optimizer's option, of the kind that the default has.
nlohmann::json value_like(const nlohmann::json& usual, const JsonReader& value) {
  if (usual.is_boolean()) return value.boolean();
  if (!usual.is_array()) return value.number();
  if (value.size() != 2) value.fail_expected("a list of two numbers");
  return {value.at(0).number(), value.at(1).number()};
}

#define SMP_OPTION(name, read)                                                       \
  {                                                                                  \
#name, [](auto& options, const JsonReader& value) { options.name(read(value)); } \
  }

template <class Map>
std::string names_of(const Map& map) {
  std::string names;
  for (const auto& entry : map) names += (names.empty() ? "\"" : ", \"") + entry.first + "\"";
  return names;
}

std::string source_of(const std::string& name) {
  return "the options of optimizer \"" + name + "\"";
}

/// The options of all optimizers.
struct CommonOptions {
  TORCH_ARG(std::optional<double>, clip_grad_norm);
  TORCH_ARG(std::optional<double>, static_loss_scale);
  TORCH_ARG(bool, dynamic_loss_scale) = false;
  TORCH_ARG(std::optional<DynamicLossArgs>, dynamic_loss_args);
};

Setters<DynamicLossArgs> setters_of(const DynamicLossArgs&) {
  return {SMP_OPTION(init_scale, number),     SMP_OPTION(scale_factor, number),
          SMP_OPTION(scale_window, integer),  SMP_OPTION(min_scale, number),
          SMP_OPTION(delayed_shift, integer), SMP_OPTION(consecutive_hysteresis, boolean)};
}

DynamicLossArgs dynamic_loss_args(const JsonReader& value) {
  if (!value.value().is_object()) value.fail_expected("an object");
  DynamicLossArgs args;
  const auto setters = setters_of(args);
  for (const auto& entry : value.value().items()) {
    const auto found = setters.find(entry.key());
    if (found == setters.end()) value.fail_expected("an object of " + names_of(setters));
    found->second(args, value.at(entry.key()));
  }
  return args;
}

Setters<CommonOptions> setters_of(const CommonOptions&) {
  return {SMP_OPTION(clip_grad_norm, above_zero), SMP_OPTION(static_loss_scale, above_zero),
          SMP_OPTION(dynamic_loss_scale, boolean),
          SMP_OPTION(dynamic_loss_args, dynamic_loss_args)};
}

#undef SMP_OPTION

/// Nothing where no scale was asked for. Throws `ConfigError` for options that would do nothing.
std::optional<LossScaleOptions> loss_scale_of(const std::string& name,
                                              const CommonOptions& options) {
  const bool is_dynamic = options.dynamic_loss_scale();
  SMP_CHECK_WITH(ConfigError, !is_dynamic || !options.static_loss_scale(), source_of(name),
                 ": static_loss_scale and dynamic_loss_scale were both given. Give ",
                 "one of them");
  SMP_CHECK_WITH(ConfigError, is_dynamic || !options.dynamic_loss_args(), source_of(name),
                 ": dynamic_loss_args were given, and the loss scale is not dynamic. ",
                 "Give \"dynamic_loss_scale\": true, too, or leave them out");
  if (!is_dynamic && !options.static_loss_scale()) return std::nullopt;
  return LossScaleOptions()
      .static_loss_scale(options.static_loss_scale().value_or(1))
      .dynamic_loss_scale(is_dynamic)
      .dynamic_loss_args(options.dynamic_loss_args().value_or(DynamicLossArgs()));
}

/// Sets the options of this optimizer, by the names under which libtorch serialises them, and those
/// of all.
template <class Options>
void read_options(const std::string& name, const nlohmann::json& json, Options& options,
                  CommonOptions& common) {
  const JsonReader reader(json, source_of(name));
  std::map<std::string, nlohmann::json> fields = optim::fields_of(options).scalars;
  const auto common_setters = setters_of(common);
  for (const auto& entry : json.items()) {
    const auto own = fields.find(entry.key());
    const auto found = common_setters.find(entry.key());
    SMP_CHECK_WITH(ConfigError, own != fields.end() || found != common_setters.end(),
                   "optimizer \"", name, "\" has no option \"", core::printable(entry.key(), 100),
                   "\". It has ", names_of(fields), ", ", names_of(common_setters));
    if (own != fields.end()) own->second = value_like(own->second, reader.at(entry.key()));
    if (found != common_setters.end()) found->second(common, reader.at(entry.key()));
  }
  optim::assign_fields(options, {{}, fields});
}

template <class Base, class Options>
NamedOptimizer make(const std::string& name, const nlohmann::json& json,
                    std::vector<at::Tensor> parameters, Options options) {
  CommonOptions common;
  read_options(name, json, options, common);
  try {
    const auto made = std::make_shared<DistributedOptimizer<Base>>(std::move(parameters), options);
    if (const auto scale = loss_scale_of(name, common)) made->scale_loss(*scale);
    return {made, made.get(), common.clip_grad_norm()};
  } catch (const UsageError& error) {  // ours, of a loss scale's
    core::fail<ConfigError>(source_of(name), ": ", core::text_without_prefix(error));
  } catch (const Error&) {
    throw;
  } catch (const c10::Error& error) {  // libtorch's, of a number without meaning
    core::fail<ConfigError>(source_of(name), ": ", error.what_without_backtrace());
  }
}

using Make = NamedOptimizer (*)(const std::string& name, const nlohmann::json& json,
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

NamedOptimizer make_optimizer(const std::string& name, const std::string& options,
                              std::vector<at::Tensor> parameters) {
  const auto found = makers().find(name);
  SMP_CHECK_WITH(ConfigError, found != makers().end(), "there is no optimizer \"",
                 core::printable(name, 100), "\". There are ", names_of(makers()));
  return found->second(name, parse(name, options), std::move(parameters));
}

}  // namespace smp::c
