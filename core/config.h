#pragma once

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>
#include <vector>

#include "core/schema.h"

namespace smp {

struct Distribution;

/// A setter for the program's value, which returns the configuration for chaining, and a getter
/// for the value in effect. The getter throws `ConfigError` when that has a wrong type or range.
#define SMP_CONFIG_ARG(T, name) \
  Config& name(T value);        \
  T name() const

/// The parameters of a training job: what the program, a file and the environment say, with
/// defaults for the rest. Every parameter is described in docs/configuration.md.
///
/// The environment wins over a file, and a file over the program, key by key, whatever the order
/// of the calls. Nothing is judged when it is set: `validate()` reports all mistakes together.
///
/// Example:
/// \code
///   smp::init(smp::Config::from_file("smp.json"));
///   smp::init(smp::Config().partitions(2).microbatches(4).ddp(true));
/// \endcode
class Config {
 public:
  Config() = default;

  /// Reads a JSON file: the parameters themselves, or the estimator's `distribution`
  /// ({"smdistributed": {"modelparallel": {"enabled": true, "parameters": {...}}}, "mpi": {...}}).
  /// Throws `ConfigError` when the file cannot be read, is not such JSON, or repeats a key.
  static Config from_file(const std::string& path);

  /// As `from_file`, from JSON text; errors call it `source_name`.
  static Config from_json(const std::string& text, const std::string& source_name);

  /// This configuration with the values of the environment variable `SM_HP_MP_PARAMETERS` (JSON)
  /// on top. Throws `ConfigError` when that is not JSON of the accepted form.
  Config merged_with_environment() const;

  /// Sets any parameter by name, as the program's value; unknown names are for `validate()`.
  Config& set(const std::string& name, Value value);

  /// The value in effect of any parameter, by name or alias; unset when it has none. Throws
  /// `ConfigError` when the name is unknown, or the value has a wrong type or range.
  Value get(const std::string& name) const;

  /// Whether the parameter was set by any source.
  bool is_set(const std::string& name) const;

  /// Where the value in effect comes from: "default", "program", the name of the file, or
  /// "SM_HP_MP_PARAMETERS".
  std::string source(const std::string& name) const;

  /// The number of pipeline partitions, also called `pipeline_parallel_degree`.
  SMP_CONFIG_ARG(int64_t, partitions);
  SMP_CONFIG_ARG(int64_t, pipeline_parallel_degree);
  /// The number of microbatches in a step.
  SMP_CONFIG_ARG(int64_t, microbatches);
  /// The schedule by its name (docs/schedules.md), "file" or "auto".
  SMP_CONFIG_ARG(std::string, pipeline);
  /// How many stages each rank has, for schedules that visit a rank several times; 0: two for
  /// these, one for the others.
  SMP_CONFIG_ARG(int64_t, virtual_stages);
  /// How many microbatches may be in flight on a rank; by default partitions + 2.
  SMP_CONFIG_ARG(int64_t, active_microbatches);
  /// Accepted both ways: execution is always deterministic.
  SMP_CONFIG_ARG(bool, deterministic_server);
  /// Who supplies the inputs of a step: "all".
  SMP_CONFIG_ARG(std::string, input_source);
  /// The guarantee on rounding: "exact".
  SMP_CONFIG_ARG(std::string, numerics);
  /// Whether gradients of linear layers are summed inside the matrix product.
  SMP_CONFIG_ARG(bool, gradient_accumulation_fusion);
  /// When step functions are guarded: "every_step", "first_step" or every N-th, "N".
  SMP_CONFIG_ARG(std::string, guard);
  /// Into how many shards microbatches are grouped in gradient sums; 0: the number of replicas.
  SMP_CONFIG_ARG(int64_t, gradient_shards);
  /// The seed of random operators; -1: from the default generator of world rank 0.
  SMP_CONFIG_ARG(int64_t, seed);
  /// Whether the partitioner assigns operators to partitions.
  SMP_CONFIG_ARG(bool, auto_partition);
  /// The partition of what no partition scope covers.
  SMP_CONFIG_ARG(int64_t, default_partition);
  /// What to favour: "memory" or "speed".
  SMP_CONFIG_ARG(std::string, optimize);
  /// How much memory counts in the automatic partition, from 0 to 1.
  SMP_CONFIG_ARG(double, memory_weight);
  /// MiB that a rank may use, for the automatic partition; 0: any.
  SMP_CONFIG_ARG(double, memory_limit_mb);
  /// What runs again in the backward pass: "modules", those that the program says, or "auto".
  SMP_CONFIG_ARG(std::string, activation_checkpointing);
  /// Whether what checkpointed modules keep is moved to the host's memory or to a disk.
  SMP_CONFIG_ARG(bool, offload_activations);
  /// How many computations ahead of a backward it is fetched back.
  SMP_CONFIG_ARG(int64_t, activation_loading_horizon);
  /// Bytes of optimizer state for each byte of a parameter, for `memory_limit_mb`.
  SMP_CONFIG_ARG(double, optimizer_state_factor);
  /// Whether the partition is loaded from `partition_file`.
  SMP_CONFIG_ARG(bool, load_partition);
  /// Whether the first step measures the times of operators, and what they keep for backward.
  SMP_CONFIG_ARG(bool, trace_execution_times);
  SMP_CONFIG_ARG(bool, trace_memory_usage);
  /// Whether the first step measures nothing.
  SMP_CONFIG_ARG(bool, skip_tracing);
  /// Whether `model_creation` delays making parameters until the model is partitioned.
  SMP_CONFIG_ARG(bool, delayed_parameter_initialization);
  /// "cluster", "spread" or a permutation of D, P and T.
  SMP_CONFIG_ARG(std::string, placement_strategy);
  /// Whether there may be several replicas.
  SMP_CONFIG_ARG(bool, ddp);
  /// The transport of data parallelism: "auto".
  SMP_CONFIG_ARG(std::string, ddp_dist_backend);
  /// Whether parameters are of float16, or of bfloat16.
  SMP_CONFIG_ARG(bool, fp16);
  SMP_CONFIG_ARG(bool, bf16);
  /// Whether replicas divide the optimizer's state among them.
  SMP_CONFIG_ARG(bool, shard_optimizer_state);
  /// The size of gradient buckets, in MiB.
  SMP_CONFIG_ARG(double, bucket_cap_mb);
  /// Whether the C library keeps what a step frees.
  SMP_CONFIG_ARG(bool, keep_freed_memory);
  /// How long a blocking wait may take, in seconds.
  SMP_CONFIG_ARG(double, timeout_seconds);
  /// Whether ranks compare their calls before every collective, between hosts too.
  SMP_CONFIG_ARG(bool, check_collectives);
  /// Among how many ranks layers are divided; 1: not.
  SMP_CONFIG_ARG(int64_t, tensor_parallel_degree);
  /// Whether the ranks of a tensor-parallel group are given one batch, not one each.
  SMP_CONFIG_ARG(bool, prescaled_batch);
  /// Which modules of the user may be divided: "auto" or "marked".
  SMP_CONFIG_ARG(std::string, tensor_parallelism);
  /// Whether a marked module that cannot be divided is an error.
  SMP_CONFIG_ARG(bool, strict_tensor_parallelism);
  /// Over how many replicas parameters, gradients and optimizer state are sharded; 1: not.
  SMP_CONFIG_ARG(int64_t, sharded_data_parallel_degree);
  /// The size of sharded gradient buckets, in elements.
  SMP_CONFIG_ARG(int64_t, sdp_reduce_bucket_size);
  /// Parameters with fewer elements are not sharded.
  SMP_CONFIG_ARG(int64_t, sdp_param_persistence_threshold);
  /// How many elements of sharded parameters may be there when more are gathered ahead.
  SMP_CONFIG_ARG(int64_t, sdp_max_live_parameters);
  /// Accepted, without effect.
  SMP_CONFIG_ARG(bool, sdp_hierarchical_allgather);
  /// The L2 norm to which gradients are clipped with sharded data parallelism.
  SMP_CONFIG_ARG(double, sdp_gradient_clipping);

  /// The port of data parallelism, if given.
  Config& ddp_port(int64_t port);
  std::optional<int64_t> ddp_port() const;

  /// The file for the graph of the first step (see docs/planning.md), if given.
  Config& graph_file(const std::string& path);
  std::optional<std::string> graph_file() const;

  /// Where the partition of the first step is saved to and loaded from, if given.
  Config& partition_file(const std::string& path);
  std::optional<std::string> partition_file() const;

  /// The schedule of `"pipeline": "file"`, if given.
  Config& schedule_file(const std::string& path);
  std::optional<std::string> schedule_file() const;

  /// The directory for activations that are moved to a disk, if given.
  Config& offload_directory(const std::string& path);
  std::optional<std::string> offload_directory() const;

  /// The page to which some training steps are drawn (docs/timeline.md), if given.
  Config& timeline(const std::string& path);
  std::optional<std::string> timeline() const;

  /// All mistakes, one text each with source and JSON path; empty when there are none.
  std::vector<std::string> problems() const;

  /// Throws `ConfigError` with all mistakes, one per line: unknown names, wrong types and ranges,
  /// parameters that contradict each other, and features that this version does not have.
  void validate() const;

  /// The parameters in effect as one JSON object on one line, keys sorted. `from_json` takes it.
  /// This and the next two throw `ConfigError` when a value has a wrong type or range.
  std::string to_json() const;

  /// The parameters in effect, one per line with the source of each and what it overrides.
  std::string to_string() const;

  /// The xxHash-64 of `to_json()`: equal on two ranks when the same parameters are in effect.
  uint64_t fingerprint() const;

 private:
  friend struct Distribution;

  struct Setting {
    std::string name;  // as given: the parameter's name, its alias, or unknown
    std::string path;  // where in the source, for messages
    Value value;
  };
  struct Layer {
    std::string source;
    std::vector<Setting> settings;
  };
  struct InEffect {
    Value value;  // unset when there is none
    std::string source = "default";
    std::string path;
    std::string name;
  };

  static const Setting* find(const Layer& layer, const Parameter& parameter);
  std::vector<const Layer*> layers() const;  // strongest first
  InEffect in_effect(const Parameter& parameter) const;
  Value default_of(const Parameter& parameter) const;
  std::vector<const Parameter*> shown() const;
  std::string overridden(const Parameter& parameter) const;

  template <class T>
  T as(const char* name) const;
  template <class T>
  std::optional<T> if_valid(const std::string& name) const;

  void check_names(std::vector<std::string>& problems) const;
  void check_values(std::vector<std::string>& problems) const;
  void check_schedule_rules(std::vector<std::string>& problems) const;
  void check_data_parallel_rules(std::vector<std::string>& problems) const;
  void check_tensor_parallel_rules(int64_t degree, std::vector<std::string>& problems) const;
  void check_partition_rules(std::vector<std::string>& problems) const;
  void check_precision_rules(std::vector<std::string>& problems) const;
  std::string at(const std::string& name, const std::string& text) const;

  Layer environment_;
  Layer file_;
  Layer program_{"program", {}};
};

#undef SMP_CONFIG_ARG

/// Prints `config.to_string()`.
std::ostream& operator<<(std::ostream& out, const Config& config);

}  // namespace smp
