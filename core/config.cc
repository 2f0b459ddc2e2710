#include "core/config.h"

#include <xxhash.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <ostream>

#include "core/check.h"
#include "core/config_file.h"
#include "core/env.h"

namespace smp {
namespace {

const Parameter& parameter_called(const std::string& name) {
  const Parameter* parameter = find_parameter(name);
  SMP_CHECK_WITH(ConfigError, parameter != nullptr, "config key \"", name,
                 "\": unknown parameter. Did you mean \"", nearest_parameter(name), "\"?");
  return *parameter;
}

}  // namespace

Config Config::from_file(const std::string& path) { return Distribution::from_file(path).config; }

Config Config::from_json(const std::string& text, const std::string& source_name) {
  return Distribution::from_json(text, source_name).config;
}

Config Config::merged_with_environment() const {
  Config merged = *this;
  if (const auto text = env(kParametersVariable)) {
    merged.environment_ = from_json(*text, kParametersVariable).file_;
  }
  return merged;
}

Config& Config::set(const std::string& name, Value value) {
  auto& settings = program_.settings;
  const auto old = std::find_if(settings.begin(), settings.end(),
                                [&](const Setting& setting) { return setting.name == name; });
  if (old != settings.end()) {
    old->value = std::move(value);
  } else {
    settings.push_back({name, name, std::move(value)});
  }
  return *this;
}

const Config::Setting* Config::find(const Layer& layer, const Parameter& parameter) {
  for (const Setting& setting : layer.settings) {
    if (find_parameter(setting.name) == &parameter) return &setting;
  }
  return nullptr;
}

std::vector<const Config::Layer*> Config::layers() const {
  return {&environment_, &file_, &program_};
}

Value Config::default_of(const Parameter& parameter) const {
  if (parameter.name == "active_microbatches") return as<int64_t>("partitions") + 2;
  if (parameter.name == "memory_weight") return as<std::string>("optimize") == "speed" ? 0.2 : 0.8;
  return parameter.default_value;
}

Config::InEffect Config::in_effect(const Parameter& parameter) const {
  for (const Layer* layer : layers()) {
    if (const Setting* setting = find(*layer, parameter)) {
      return {normalised(parameter, setting->value), layer->source, setting->path, setting->name};
    }
  }
  return {default_of(parameter), "default", parameter.name, parameter.name};
}

Value Config::get(const std::string& name) const {
  const Parameter& parameter = parameter_called(name);
  const InEffect current = in_effect(parameter);
  if (is_set(name)) {
    const auto problem = value_problem(parameter, current.name, current.value);
    SMP_CHECK_WITH(ConfigError, !problem, current.source, ": \"", current.path, "\": ", *problem);
  }
  return current.value;
}

bool Config::is_set(const std::string& name) const {
  const Parameter& parameter = parameter_called(name);
  const auto all = layers();
  return std::any_of(all.begin(), all.end(),
                     [&](const Layer* layer) { return find(*layer, parameter) != nullptr; });
}

std::string Config::source(const std::string& name) const {
  const Parameter& parameter = parameter_called(name);
  for (const Layer* layer : layers()) {
    if (find(*layer, parameter) != nullptr) return layer->source;
  }
  return "default";
}

template <class T>
T Config::as(const char* name) const {
  return std::get<T>(get(name));
}

#define SMP_CONFIG_ARG(T, name)                                                 \
  Config& Config::name(T value) { return set(#name, Value(std::move(value))); } \
  T Config::name() const { return as<T>(#name); }

SMP_CONFIG_ARG(int64_t, partitions)
SMP_CONFIG_ARG(int64_t, pipeline_parallel_degree)
SMP_CONFIG_ARG(int64_t, microbatches)
SMP_CONFIG_ARG(std::string, pipeline)
SMP_CONFIG_ARG(int64_t, virtual_stages)
SMP_CONFIG_ARG(int64_t, active_microbatches)
SMP_CONFIG_ARG(bool, deterministic_server)
SMP_CONFIG_ARG(std::string, input_source)
SMP_CONFIG_ARG(std::string, numerics)
SMP_CONFIG_ARG(bool, gradient_accumulation_fusion)
SMP_CONFIG_ARG(std::string, guard)
SMP_CONFIG_ARG(int64_t, gradient_shards)
SMP_CONFIG_ARG(int64_t, seed)
SMP_CONFIG_ARG(bool, auto_partition)
SMP_CONFIG_ARG(int64_t, default_partition)
SMP_CONFIG_ARG(std::string, optimize)
SMP_CONFIG_ARG(double, memory_weight)
SMP_CONFIG_ARG(double, memory_limit_mb)
SMP_CONFIG_ARG(std::string, activation_checkpointing)
SMP_CONFIG_ARG(bool, offload_activations)
SMP_CONFIG_ARG(int64_t, activation_loading_horizon)
SMP_CONFIG_ARG(double, optimizer_state_factor)
SMP_CONFIG_ARG(bool, load_partition)
SMP_CONFIG_ARG(bool, trace_execution_times)
SMP_CONFIG_ARG(bool, trace_memory_usage)
SMP_CONFIG_ARG(bool, skip_tracing)
SMP_CONFIG_ARG(bool, delayed_parameter_initialization)
SMP_CONFIG_ARG(std::string, placement_strategy)
SMP_CONFIG_ARG(bool, ddp)
SMP_CONFIG_ARG(std::string, ddp_dist_backend)
SMP_CONFIG_ARG(bool, fp16)
SMP_CONFIG_ARG(bool, bf16)
SMP_CONFIG_ARG(bool, shard_optimizer_state)
SMP_CONFIG_ARG(double, bucket_cap_mb)
SMP_CONFIG_ARG(bool, keep_freed_memory)
SMP_CONFIG_ARG(double, timeout_seconds)
SMP_CONFIG_ARG(bool, check_collectives)
SMP_CONFIG_ARG(int64_t, tensor_parallel_degree)
SMP_CONFIG_ARG(bool, prescaled_batch)
SMP_CONFIG_ARG(std::string, tensor_parallelism)
SMP_CONFIG_ARG(bool, strict_tensor_parallelism)
SMP_CONFIG_ARG(int64_t, sharded_data_parallel_degree)
SMP_CONFIG_ARG(int64_t, sdp_reduce_bucket_size)
SMP_CONFIG_ARG(int64_t, sdp_param_persistence_threshold)
SMP_CONFIG_ARG(int64_t, sdp_max_live_parameters)
SMP_CONFIG_ARG(bool, sdp_hierarchical_allgather)
SMP_CONFIG_ARG(double, sdp_gradient_clipping)

#undef SMP_CONFIG_ARG

Config& Config::ddp_port(int64_t port) { return set("ddp_port", port); }

std::optional<int64_t> Config::ddp_port() const {
  if (!is_set("ddp_port")) return std::nullopt;
  return as<int64_t>("ddp_port");
}

Config& Config::graph_file(const std::string& path) { return set("graph_file", path); }

std::optional<std::string> Config::graph_file() const {
  if (!is_set("graph_file")) return std::nullopt;
  return as<std::string>("graph_file");
}

Config& Config::partition_file(const std::string& path) { return set("partition_file", path); }

Config& Config::offload_directory(const std::string& path) {
  return set("offload_directory", path);
}

std::optional<std::string> Config::offload_directory() const {
  if (!is_set("offload_directory")) return std::nullopt;
  return as<std::string>("offload_directory");
}

Config& Config::timeline(const std::string& path) { return set("timeline", path); }

std::optional<std::string> Config::timeline() const {
  if (!is_set("timeline")) return std::nullopt;
  return as<std::string>("timeline");
}

Config& Config::schedule_file(const std::string& path) { return set("schedule_file", path); }

std::optional<std::string> Config::schedule_file() const {
  if (!is_set("schedule_file")) return std::nullopt;
  return as<std::string>("schedule_file");
}

std::optional<std::string> Config::partition_file() const {
  if (!is_set("partition_file")) return std::nullopt;
  return as<std::string>("partition_file");
}

// What a reader of the configuration wants to see: all that has a value, and of the features that
// do not exist in this version, or that `ddp` switches off, only what is not the default.
std::vector<const Parameter*> Config::shown() const {
  std::vector<const Parameter*> rows;
  for (const Parameter& parameter : schema()) {
    const std::string value = smp::to_string(get(parameter.name));
    const bool differs = value != smp::to_string(default_of(parameter));
    const bool exists = parameter.availability == Availability::kAvailable;
    const bool needed = parameter.needs.empty() || get(parameter.needs) == Value(true);
    const bool has_value = value != smp::to_string(Value());
    if (has_value && (differs || (exists && needed))) rows.push_back(&parameter);
  }
  return rows;
}

std::string Config::to_json() const {
  nlohmann::json object = nlohmann::json::object();
  for (const Parameter* parameter : shown()) {
    const Value value = get(parameter->name);
    object[parameter->name] = nlohmann::json::parse(smp::to_string(value));
  }
  return object.dump();
}

// " (overrides 4 from smp.json)" for each weaker source that also set the parameter.
std::string Config::overridden(const Parameter& parameter) const {
  std::string text;
  bool strongest = true;
  for (const Layer* layer : layers()) {
    const Setting* setting = find(*layer, parameter);
    if (setting == nullptr) continue;
    if (!strongest) {
      text += (text.empty() ? " (overrides " : ", ") + smp::to_string(setting->value) + " from " +
              layer->source;
    }
    strongest = false;
  }
  return text.empty() ? "" : text + ")";
}

std::string Config::to_string() const {
  const auto rows = shown();
  size_t name_width = 0;
  size_t value_width = 0;
  for (const Parameter* parameter : rows) {
    name_width = std::max(name_width, parameter->name.size());
    value_width = std::max(value_width, smp::to_string(get(parameter->name)).size());
  }
  std::string text;
  for (const Parameter* parameter : rows) {
    std::string name = parameter->name;
    std::string value = smp::to_string(get(parameter->name));
    name.resize(name_width, ' ');
    value.resize(value_width, ' ');
    text += name + "  " + value + "  " + source(parameter->name) + overridden(*parameter) + "\n";
  }
  return text;
}

uint64_t Config::fingerprint() const {
  const std::string text = to_json();
  return XXH64(text.data(), text.size(), /*seed=*/0);
}

std::ostream& operator<<(std::ostream& out, const Config& config) {
  return out << config.to_string();
}

}  // namespace smp
