// What `Config::validate()` checks: names, values one by one, then parameters against each other.

#include "core/check.h"
#include "core/config.h"

namespace smp {

// Rules between parameters skip a parameter whose own value is already reported as wrong.
template <class T>
std::optional<T> Config::if_valid(const std::string& name) const {
  try {
    return std::get<T>(get(name));
  } catch (const ConfigError&) {
    return std::nullopt;
  }
}

// `text` with the place that set parameter `name`.
std::string Config::at(const std::string& name, const std::string& text) const {
  const Parameter& parameter = *find_parameter(name);
  for (const Layer* layer : layers()) {
    if (const Setting* setting = find(*layer, parameter)) {
      return layer->source + ": \"" + setting->path + "\": " + text;
    }
  }
  return "default: \"" + name + "\": " + text;
}

void Config::check_names(std::vector<std::string>& problems) const {
  for (const Layer* layer : layers()) {
    for (const Setting& setting : layer->settings) {
      if (find_parameter(setting.name) != nullptr) continue;
      const std::string where = layer->source + ": \"" + setting.path + "\": ";
      problems.push_back(
          where +
          (is_undocumented_key(setting.name)
               ? "an undocumented key of some SMP 1.x scripts, which has no meaning here. "
                 "Remove it."
               : "unknown parameter. Did you mean \"" + nearest_parameter(setting.name) + "\"?"));
    }
  }
}

void Config::check_values(std::vector<std::string>& problems) const {
  for (const Parameter& parameter : schema()) {
    for (const Layer* layer : layers()) {
      const Setting* setting = find(*layer, parameter);
      if (setting == nullptr) continue;
      auto problem = value_problem(parameter, setting->name, setting->value);
      if (!problem) problem = availability_problem(parameter, setting->value);
      if (problem) problems.push_back(at(parameter.name, *problem));
      break;  // weaker sources are not in effect
    }
  }
}

void Config::check_partition_rules(std::vector<std::string>& problems) const {
  for (const Layer* layer : layers()) {
    const Setting* name = nullptr;
    const Setting* alias = nullptr;
    for (const Setting& setting : layer->settings) {
      if (setting.name == "partitions") name = &setting;
      if (setting.name == "pipeline_parallel_degree") alias = &setting;
    }
    if (name == nullptr && alias == nullptr) continue;
    if (name != nullptr && alias != nullptr &&
        smp::to_string(name->value) != smp::to_string(alias->value)) {
      problems.push_back(layer->source + ": \"" + alias->path +
                         "\": another name of \"partitions\": expected " +
                         smp::to_string(name->value) + ", as there, got " +
                         smp::to_string(alias->value) + ". Give one of the two.");
    }
    break;  // weaker sources are not in effect
  }

  const auto partitions = if_valid<int64_t>("partitions");
  const auto default_partition = if_valid<int64_t>("default_partition");
  if (if_valid<bool>("auto_partition") == false && !is_set("default_partition")) {
    problems.push_back(at("auto_partition",
                          "default_partition must be supplied if auto_partition is set to False!"));
  }
  if (if_valid<bool>("load_partition") == true && !is_set("partition_file")) {
    problems.push_back(at("load_partition",
                          "needs \"partition_file\", the file to load. Give its "
                          "path."));
  }
  if (if_valid<std::string>("activation_checkpointing") == "auto" &&
      if_valid<double>("memory_limit_mb") == 0.0) {
    problems.push_back(at("activation_checkpointing",
                          "'auto' needs \"memory_limit_mb\", the limit to keep. Set it."));
  }
  check_schedule_rules(problems);
  if (partitions && default_partition && *default_partition >= *partitions) {
    problems.push_back(at("default_partition",
                          c10::str("default_partition must be less than the number of partitions! "
                                   "(got ",
                                   *default_partition, " with ", *partitions, " partitions)")));
  }
}

void Config::check_schedule_rules(std::vector<std::string>& problems) const {
  const auto pipeline = if_valid<std::string>("pipeline").value_or("");
  if (pipeline == "file" && !is_set("schedule_file")) {
    problems.push_back(
        at("pipeline", "'file' needs \"schedule_file\", the schedule to load. Give its path."));
  }
  if (pipeline != "file" && is_set("schedule_file")) {
    problems.push_back(at("schedule_file",
                          "is loaded with \"pipeline\": \"file\" only. Set that, "
                          "or leave the file out."));
  }
  const int64_t stages = if_valid<int64_t>("virtual_stages").value_or(0);
  const bool v_shaped = pipeline == "zbv" || pipeline == "dualpipe_v";
  const bool single =
      pipeline == "1f1b" || pipeline == "eager_1f1b" || pipeline == "zb_h1" || pipeline == "zb_h2";
  if ((v_shaped && stages > 0 && stages != 2) || (single && stages > 1)) {
    problems.push_back(
        at("virtual_stages", c10::str("the schedule '", pipeline, "' needs ",
                                      v_shaped ? "two" : "one", " for each rank, got ", stages,
                                      ". Leave it out, or choose another \"pipeline\".")));
  }
}

void Config::check_data_parallel_rules(std::vector<std::string>& problems) const {
  for (const Parameter& parameter : schema()) {
    if (parameter.needs.empty() || !is_set(parameter.name)) continue;
    if (if_valid<bool>(parameter.needs) == false) {
      problems.push_back(at(parameter.name, "`" + parameter.name + "` needs `" + parameter.needs +
                                                "` to be set as well"));
    }
  }
  const bool ddp = if_valid<bool>("ddp").value_or(true);
  if (ddp && is_set("ddp") && if_valid<bool>("horovod") == true) {
    problems.push_back(at("horovod", "'ddp' and 'horovod' cannot be simultaneously enabled."));
  }
  const auto tensor = if_valid<int64_t>("tensor_parallel_degree");
  if (tensor && *tensor > 1 && !ddp) {
    problems.push_back(
        at("tensor_parallel_degree", "`tensor_parallel_degree` > 1 needs `ddp` to be set as well"));
  }
  if (tensor && *tensor > 1) check_tensor_parallel_rules(*tensor, problems);
  if (if_valid<bool>("shard_optimizer_state") == true && !ddp) {
    problems.push_back(
        at("shard_optimizer_state", "`shard_optimizer_state` needs `ddp` to be set as well"));
  }
  const auto sharded = if_valid<int64_t>("sharded_data_parallel_degree");
  if (!sharded || *sharded <= 1) return;
  const auto refuse = [&](const std::string& text) {
    problems.push_back(
        at("sharded_data_parallel_degree", c10::str("a degree of ", *sharded, " needs ", text)));
  };
  const auto partitions = if_valid<int64_t>("partitions");
  if (partitions && *partitions > 1) {
    refuse(c10::str("\"partitions\" to be 1, got ", *partitions, "."));
  }
  if (if_valid<bool>("shard_optimizer_state") == true) {
    refuse("\"shard_optimizer_state\" to be false, got true.");
  }
  if (if_valid<bool>("gradient_accumulation_fusion") == true) {
    refuse("\"gradient_accumulation_fusion\" to be false, got true.");
  }
}

/// What does not go together with layers that are divided among `degree` ranks.
void Config::check_tensor_parallel_rules(int64_t degree, std::vector<std::string>& problems) const {
  const auto refuse = [&](const std::string& text) {
    problems.push_back(
        at("tensor_parallel_degree", c10::str("a degree of ", degree, " needs ", text)));
  };
  if (if_valid<bool>("shard_optimizer_state") == true) {
    refuse("\"shard_optimizer_state\" to be false, got true.");
  }
  const auto sharded = if_valid<int64_t>("sharded_data_parallel_degree");
  if (sharded && *sharded > 1) {
    refuse(c10::str("\"sharded_data_parallel_degree\" to be 1, got ", *sharded, "."));
  }
  for (const char* file : {"partition_file", "graph_file"}) {
    if (!is_set(file)) continue;
    refuse(c10::str("\"", file, "\" to be unset: the file does not say how layers are divided."));
  }
}

void Config::check_precision_rules(std::vector<std::string>& problems) const {
  if (if_valid<bool>("bf16") == true && if_valid<bool>("fp16") == true) {
    problems.push_back(at("bf16", "FP16 and BF16 cannot be simultaneously enabled."));
  }
}

std::vector<std::string> Config::problems() const {
  std::vector<std::string> all;
  check_names(all);
  check_values(all);
  check_partition_rules(all);
  check_data_parallel_rules(all);
  check_precision_rules(all);
  return all;
}

void Config::validate() const {
  const auto all = problems();
  if (all.empty()) return;
  SMP_CHECK_WITH(ConfigError, all.size() > 1, all.front());
  std::string lines;
  for (const std::string& problem : all) lines += "\n  " + problem;
  detail::fail<ConfigError>("the configuration has ", all.size(), " errors:", lines);
}

}  // namespace smp
