// SPDX-License-Identifier: Apache-2.0
// Checks of `Config::validate()`: names, values one by one, then parameters against each other.

#include "core/check.h"
#include "core/settings.h"
#include "core/text.h"

namespace smp::core {
namespace {

/// Collects the errors of the settings.
class Rules {
 public:
  explicit Rules(const Settings& settings) : settings_(settings) {}

  std::vector<std::string> problems() {
    check_names();
    check_values();
    check_aliases();
    check_partition_rules();
    check_data_parallel_rules();
    check_precision_rules();
    return std::move(problems_);
  }

 private:
  // Rules between parameters skip a parameter whose own value is already reported as wrong.
  template <class T>
  std::optional<T> if_valid(const std::string& name) const {
    try {
      return std::get<T>(settings_.get(name));
    } catch (const ConfigError&) {
      return std::nullopt;
    }
  }

  bool is_set(const std::string& name) const { return settings_.is_set(name); }

  // Adds the error of parameter `name`, with the place that set it.
  void add(const std::string& name, const std::string& problem) {
    const auto given = settings_.given(*find_parameter(name));
    const std::string source = given.empty() ? "default" : given.front().layer->source;
    const std::string path = given.empty() ? name : given.front().setting->path;
    problems_.push_back(source + ": \"" + path + "\": " + problem);
  }

  void check_names() {
    for (const Layer* layer : settings_.layers()) {
      for (const Setting& setting : layer->settings) {
        if (find_parameter(setting.name) != nullptr) continue;
        const std::string where = layer->source + ": \"" + printable(setting.path, 100) + "\": ";
        problems_.push_back(
            where +
            (is_undocumented_key(setting.name)
                 ? "an undocumented key of some SMP 1.x scripts, which has no meaning here. "
                   "Remove it."
                 : "unknown parameter. Did you mean \"" + nearest_parameter(setting.name) + "\"?"));
      }
    }
  }

  void check_values() {
    for (const Parameter& parameter : schema()) {
      const auto given = settings_.given(parameter);
      if (given.empty()) continue;
      const Setting& setting = *given.front().setting;
      auto problem = value_problem(parameter, setting.name, setting.value, setting.text);
      if (!problem) problem = availability_problem(parameter, setting.value);
      if (problem) add(parameter.name, *problem);
    }
  }

  void check_aliases() {
    for (const Layer* layer : settings_.layers()) {
      const Setting* name = nullptr;
      const Setting* alias = nullptr;
      for (const Setting& setting : layer->settings) {
        if (setting.name == "partitions") name = &setting;
        if (setting.name == "pipeline_parallel_degree") alias = &setting;
      }
      if (name == nullptr && alias == nullptr) continue;
      if (name != nullptr && alias != nullptr && name->text != alias->text) {
        problems_.push_back(layer->source + ": \"" + alias->path +
                            "\": another name of \"partitions\": expected " +
                            printable(name->text, 100) + ", as there, got " +
                            printable(alias->text, 100) + ". Give one of the two.");
      }
      break;  // weaker sources are not in effect
    }
  }

  void check_partition_rules() {
    const auto partitions = if_valid<int64_t>("partitions");
    const auto default_partition = if_valid<int64_t>("default_partition");
    if (if_valid<bool>("auto_partition") == false && !is_set("default_partition")) {
      add("auto_partition",
          "default_partition must be supplied if auto_partition is set to False!");
    }
    if (if_valid<bool>("load_partition") == true && !is_set("partition_file")) {
      add("load_partition", "needs \"partition_file\", the file to load. Give its path.");
    }
    if (if_valid<std::string>("activation_checkpointing") == "auto" &&
        if_valid<double>("memory_limit_mb") == 0.0) {
      add("activation_checkpointing",
          "'auto' needs \"memory_limit_mb\", the limit to keep. Set it.");
    }
    check_schedule_rules();
    if (partitions && default_partition && *default_partition >= *partitions) {
      add("default_partition",
          c10::str("default_partition must be less than the number of partitions! "
                   "(got ",
                   *default_partition, " with ", *partitions, " partitions)"));
    }
  }

  void check_schedule_rules() {
    const auto pipeline = if_valid<std::string>("pipeline").value_or("");
    if (pipeline == "file" && !is_set("schedule_file")) {
      add("pipeline", "'file' needs \"schedule_file\", the schedule to load. Give its path.");
    }
    if (pipeline != "file" && is_set("schedule_file")) {
      add("schedule_file",
          "is loaded with \"pipeline\": \"file\" only. Set that, "
          "or leave the file out.");
    }
    const int64_t stages = if_valid<int64_t>("virtual_stages").value_or(0);
    const bool v_shaped = pipeline == "zbv" || pipeline == "dualpipe_v";
    const bool single = pipeline == "1f1b" || pipeline == "eager_1f1b" || pipeline == "zb_h1" ||
                        pipeline == "zb_h2";
    if ((v_shaped && stages > 0 && stages != 2) || (single && stages > 1)) {
      add("virtual_stages", c10::str("the schedule '", pipeline, "' needs ",
                                     v_shaped ? "two" : "one", " for each rank, got ", stages,
                                     ". Leave it out, or choose another \"pipeline\"."));
    }
  }

  void check_data_parallel_rules() {
    for (const Parameter& parameter : schema()) {
      if (parameter.needs.empty() || !is_set(parameter.name)) continue;
      if (if_valid<bool>(parameter.needs) == false) {
        add(parameter.name,
            "`" + parameter.name + "` needs `" + parameter.needs + "` to be set as well");
      }
    }
    const bool ddp = if_valid<bool>("ddp").value_or(true);
    if (ddp && is_set("ddp") && if_valid<bool>("horovod") == true) {
      add("horovod", "'ddp' and 'horovod' cannot be simultaneously enabled.");
    }
    const auto tensor = if_valid<int64_t>("tensor_parallel_degree");
    if (tensor && *tensor > 1 && !ddp) {
      add("tensor_parallel_degree", "`tensor_parallel_degree` > 1 needs `ddp` to be set as well");
    }
    if (if_valid<bool>("shard_optimizer_state") == true && !ddp) {
      add("shard_optimizer_state", "`shard_optimizer_state` needs `ddp` to be set as well");
    }
    const auto sharded = if_valid<int64_t>("sharded_data_parallel_degree");
    if (!sharded || *sharded <= 1) return;
    const auto refuse = [&](const std::string& text) {
      add("sharded_data_parallel_degree", c10::str("a degree of ", *sharded, " needs ", text));
    };
    if (if_valid<bool>("shard_optimizer_state") == true) {
      refuse("\"shard_optimizer_state\" to be false, got true.");
    }
    if (if_valid<bool>("gradient_accumulation_fusion") == true) {
      refuse("\"gradient_accumulation_fusion\" to be false, got true.");
    }
  }

  void check_precision_rules() {
    if (if_valid<bool>("bf16") == true && if_valid<bool>("fp16") == true) {
      add("bf16", "FP16 and BF16 cannot be simultaneously enabled.");
    }
    if (if_valid<bool>("fp16_params") == true && if_valid<bool>("fp16") == false) {
      add("fp16_params",
          "needs \"fp16\" to be true, which gives optimizers masters of float32, too. For float16 "
          "without masters leave both out, and make the modules under smp::model_creation with "
          "dtype(torch::kHalf).");
    }
  }

  const Settings& settings_;
  std::vector<std::string> problems_;
};

}  // namespace

std::vector<std::string> Settings::problems() const { return Rules(*this).problems(); }

}  // namespace smp::core
