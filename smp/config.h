// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "smp/export.h"

namespace smp {

namespace core {
class Settings;
struct Distribution;
}  // namespace core

/// The value of a parameter. The empty state means "unset".
using ConfigValue = std::variant<std::monostate, bool, int64_t, double, std::string>;

/// The parameters of a training job: those of the program, a file and the environment, with
/// defaults for the rest. Every parameter is described in docs/configuration.md.
///
/// The environment wins over a file, and a file over the program, key by key, whatever the order of
/// the calls. Nothing is judged when it is set: `validate()` reports all mistakes together.
///
/// Example:
/// \code
///   smp::init(smp::Config::from_file("smp.json"));
///   smp::init(smp::Config().partitions(2).microbatches(4).ddp(true));
/// \endcode
class SMP_API Config {
 public:
  Config();

  /// Reads a JSON file: the parameters themselves, or the estimator's `distribution`
  /// ({"smdistributed": {"modelparallel": {"enabled": true, "parameters": {...}}}, "mpi": {...}}).
  /// Throws `ConfigError` when the file cannot be read, is not such JSON, or repeats a key.
  static Config from_file(const std::string& path);

  /// The same as `from_file`, from JSON text; errors call it `source_name`.
  static Config from_json(const std::string& text, const std::string& source_name);

  /// This configuration with the values of the environment variable `SM_HP_MP_PARAMETERS` (JSON)
  /// on top. Throws `ConfigError` when that is not JSON of the accepted form.
  Config merged_with_environment() const;

  /// Sets any parameter by name, as the program's value; unknown names are for `validate()`.
  Config& set(const std::string& name, ConfigValue value);

  /// The value in effect of any parameter, by name or alias; unset when it has none. Throws
  /// `ConfigError` when the name is unknown, or the value has a wrong type or range.
  ConfigValue get(const std::string& name) const;

  /// Whether the parameter was set by any source.
  bool is_set(const std::string& name) const;

  /// Where the value in effect comes from: "default", "program", the name of the file, or
  /// "SM_HP_MP_PARAMETERS".
  std::string source(const std::string& name) const;

  /// All mistakes, one text each with source and JSON path; empty when there are none.
  std::vector<std::string> problems() const;

  /// Throws `ConfigError` with all mistakes, one per line: unknown names, wrong types and ranges,
  /// parameters that contradict each other, and features that this version does not have.
  void validate() const;

  /// One line for each value that is not in effect because a stronger source says another.
  /// This and the next three throw `ConfigError` when a value has a wrong type or range.
  std::vector<std::string> overridden() const;

  /// The parameters in effect as one JSON object on one line, keys sorted. `from_json` takes it.
  std::string to_json() const;

  /// The parameters in effect, one per line with the source of each and the ones that it overrides.
  std::string to_string() const;

  /// The xxHash-64 of `to_json()`: equal on two ranks when the same parameters are in effect.
  uint64_t fingerprint() const;

  // A setter for each parameter, which sets the program's value and returns the configuration for
  // chaining, and a getter for the value in effect, which throws as `get` does.
  //
  // Generated from core/schema_table.cc, to the end of the list: bazel run //tools:config_files

  /// The number of pipeline partitions: each is run by one rank of a replica. The number of ranks
  /// must be a multiple of it. An integer from 1 to 1000000. Default: 1.
  Config& partitions(int64_t value) { return set("partitions", value); }
  int64_t partitions() const { return std::get<int64_t>(get("partitions")); }
  /// The same parameter by its other name.
  Config& pipeline_parallel_degree(int64_t value) { return set("pipeline_parallel_degree", value); }
  int64_t pipeline_parallel_degree() const {
    return std::get<int64_t>(get("pipeline_parallel_degree"));
  }

  /// Into how many microbatches a step splits its batch. A batch that is not divisible by it is
  /// split into the most of them that divide it. With 1 there is no pipelining. An integer from 1
  /// to 1000000. Default: 1.
  Config& microbatches(int64_t value) { return set("microbatches", value); }
  int64_t microbatches() const { return std::get<int64_t>(get("microbatches")); }

  /// The values of `pipeline`.
  enum class Pipeline {
    kSimple,
    kInterleaved,
    k1f1b,
    kEager1f1b,
    kInterleaved1f1b,
    kBreadthFirst,
    kZbH1,
    kZbH2,
    kZbv,
    kDualpipeV,
    kList,
    kAuto,
    kFile,
    kOnlyForward
  };
  /// The schedule (docs/schedules.md). `simple` runs all forwards before the first backward;
  /// `interleaved` gives a backward priority as soon as one is ready; `1f1b`, `eager_1f1b`, `zb_h1`
  /// and `zb_h2` keep fewer microbatches or fill idle time with split backwards;
  /// `interleaved_1f1b`, `breadth_first`, `zbv` and `dualpipe_v` give each rank several stages
  /// (`virtual_stages`); `list` builds one from the predicted costs; `auto` takes the shortest by
  /// prediction, then by measurement in the first steps; `file` loads it from `schedule_file`. All
  /// give the same bits. A step function without `backward` only runs forwards; with
  /// `_only_forward` one that has a `backward` is an error. Default: "interleaved".
  Config& pipeline(Pipeline value) { return choose("pipeline", static_cast<size_t>(value)); }
  Config& pipeline(std::string value) { return set("pipeline", std::move(value)); }
  std::string pipeline() const { return std::get<std::string>(get("pipeline")); }

  /// How many stages each rank has, for schedules that visit a rank several times:
  /// `interleaved_1f1b`, `breadth_first` and, with two, `zbv` and `dualpipe_v`; any other schedule
  /// may have them too. More stages shorten the time in which ranks wait for the first microbatch,
  /// and send more. 0 means two for these four and one for the others. An integer from 0 to 1000.
  /// Default: 0.
  Config& virtual_stages(int64_t value) { return set("virtual_stages", value); }
  int64_t virtual_stages() const { return std::get<int64_t>(get("virtual_stages")); }

  /// The schedule of `"pipeline": "file"`: CSV, JSON or the text that is printed (see
  /// docs/schedules.md). Unset by default.
  Config& schedule_file(std::string value) { return set("schedule_file", std::move(value)); }
  std::optional<std::string> schedule_file() const {
    return get_if_set<std::string>("schedule_file");
  }

  /// An HTML page: world rank 0 writes there when each rank did which action in three training
  /// steps (the third to the fifth of the first step function that trains), and beside it, with the
  /// ending .json, a trace for Perfetto (see docs/performance.md). Unset by default.
  Config& timeline(std::string value) { return set("timeline", std::move(value)); }
  std::optional<std::string> timeline() const { return get_if_set<std::string>("timeline"); }

  /// How many microbatches may be in flight at once on a rank. Fewer need less memory. An integer
  /// from 1 to 1000000. Default: partitions + 2.
  Config& active_microbatches(int64_t value) { return set("active_microbatches", value); }
  int64_t active_microbatches() const { return std::get<int64_t>(get("active_microbatches")); }

  /// In SMP 1.x: serve requests in the same order on all data-parallel ranks. Here every schedule
  /// is a fixed program, so both values mean the same. Default: false.
  Config& deterministic_server(bool value) { return set("deterministic_server", value); }
  bool deterministic_server() const { return std::get<bool>(get("deterministic_server")); }

  /// The values of `input_source`.
  enum class InputSource { kAll, kFirst };
  /// The ranks that supply the inputs of a step: `all` ranks of a pipeline pass the same batch
  /// (checked), or only the `first` does, as in SMP 1.x, and the others pass dummies of the same
  /// shapes and types, whose contents do not count; its tensors are sent to them. Default: "all".
  Config& input_source(InputSource value) {
    return choose("input_source", static_cast<size_t>(value));
  }
  Config& input_source(std::string value) { return set("input_source", std::move(value)); }
  std::string input_source() const { return std::get<std::string>(get("input_source")); }

  /// The values of `numerics`.
  enum class Numerics { kExact, kFast };
  /// `exact`: losses, gradients and weights equal those of a single process bit for bit. `fast`
  /// allows other rounding, and other random numbers for a sample, never other mathematics: where
  /// the samples of a batch are independent, several microbatches may run as one (see
  /// docs/schedules.md), and on GPUs NCCL reduces in an order of its own (see docs/cuda.md).
  /// Default: "exact".
  Config& numerics(Numerics value) { return choose("numerics", static_cast<size_t>(value)); }
  Config& numerics(std::string value) { return set("numerics", std::move(value)); }
  std::string numerics() const { return std::get<std::string>(get("numerics")); }

  /// The values of `cuda_graphs`.
  enum class CudaGraphs { kAuto, kOn, kOff };
  /// Whether a stage's computations on a GPU are captured as CUDA graphs in the second step, and
  /// launched as a whole from then on, with the same bits. `auto`: a computation that cannot be
  /// captured runs operator by operator, and a line of log says why. `on`: that is an error (see
  /// docs/cuda.md). Default: "off".
  Config& cuda_graphs(CudaGraphs value) {
    return choose("cuda_graphs", static_cast<size_t>(value));
  }
  Config& cuda_graphs(std::string value) { return set("cuda_graphs", std::move(value)); }
  std::string cuda_graphs() const { return std::get<std::string>(get("cuda_graphs")); }

  /// Take kernels that give the same bits in each run on a GPU: libtorch's deterministic algorithms
  /// and cuDNN's, and a workspace with which cuBLAS repeats its sums. An operator that has no such
  /// kernel is an error that names it. Some kernels are slower (see docs/cuda.md). Default: false.
  Config& deterministic(bool value) { return set("deterministic", value); }
  bool deterministic() const { return std::get<bool>(get("deterministic")); }

  /// Add the gradients of weights of linear layers to the gradient buffer inside the matrix
  /// product, instead of making each and adding it: saves memory and a pass over it, and rounds
  /// differently (see docs/architecture.md, Numerics). Default: false.
  Config& gradient_accumulation_fusion(bool value) {
    return set("gradient_accumulation_fusion", value);
  }
  bool gradient_accumulation_fusion() const {
    return std::get<bool>(get("gradient_accumulation_fusion"));
  }

  /// The values of `guard`.
  enum class Guard { kEveryStep, kFirstStep, kEveryMicrobatch };
  /// In which steps a step function runs again, on tensors without data, to compare it with the
  /// capture: in `every_step`, in the `first_step` only, or in every N-th; or once for each
  /// microbatch (`every_microbatch`), whose numbers and tensors made from host data may then
  /// differ, as in SMP 1.x. A step without guard replays the last guarded one: it has none of the
  /// function's side effects, and sees no change of its numbers (a loss weight), of `train()` or
  /// `eval()`, and of its results besides tensors. Inputs of other shapes, and arguments with
  /// `smp_slice`, are guarded always. Default: "every_step".
  Config& guard(Guard value) { return choose("guard", static_cast<size_t>(value)); }
  Config& guard(std::string value) { return set("guard", std::move(value)); }
  Config& guard(int64_t value) { return set("guard", value); }
  std::string guard() const { return std::get<std::string>(get("guard")); }

  /// Into how many shards the microbatches of a step are grouped when gradients are summed; this
  /// fixes the order of the sum, and so the bits of the result, whatever the number of ranks. 0
  /// means the number of replicas. An integer from 0 to 1000000. Default: 0.
  Config& gradient_shards(int64_t value) { return set("gradient_shards", value); }
  int64_t gradient_shards() const { return std::get<int64_t>(get("gradient_shards")); }

  /// The seed of the random operators inside steps. -1 takes the seed of world rank 0's default
  /// generator at the first step, which `torch::manual_seed` sets. An integer >= -1. Default: -1.
  Config& seed(int64_t value) { return set("seed", value); }
  int64_t seed() const { return std::get<int64_t>(get("seed")); }

  /// Let the partitioner assign operators to partitions; partition scopes are kept. `false` leaves
  /// it to partition scopes in the program and to `default_partition`. Default: true.
  Config& auto_partition(bool value) { return set("auto_partition", value); }
  bool auto_partition() const { return std::get<bool>(get("auto_partition")); }

  /// The partition of operators outside every partition scope. Required when `auto_partition` is
  /// false; must be less than `partitions`. An integer from 0 to 1000000. Default: 0.
  Config& default_partition(int64_t value) { return set("default_partition", value); }
  int64_t default_partition() const { return std::get<int64_t>(get("default_partition")); }

  /// The values of `optimize`.
  enum class Optimize { kMemory, kSpeed };
  /// Whether tensor-parallel ranks save memory or time between divided layers. With `memory` each
  /// has its part of the samples or positions of activations, with `speed` all of them, for less
  /// communication (see docs/tensor_parallelism.md). Transformers of `smp::nn` have an option of
  /// their own, which wins. SMP 1.x takes the default of `memory_weight` from it, too. Default:
  /// "memory".
  Config& optimize(Optimize value) { return choose("optimize", static_cast<size_t>(value)); }
  Config& optimize(std::string value) { return set("optimize", std::move(value)); }
  std::string optimize() const { return std::get<std::string>(get("optimize")); }

  /// How much memory counts in the automatic partition: 0.0 balances compute time only, so that the
  /// predicted step is the shortest that keeps `memory_limit_mb`; 1.0 balances memory only. In SMP
  /// 1.x the default is 0.8, or 0.2 with `"optimize": "speed"`. A number from 0 to 1. Default: 0.0.
  Config& memory_weight(double value) { return set("memory_weight", value); }
  double memory_weight() const { return std::get<double>(get("memory_weight")); }

  /// How many MiB a rank may use for its parameters, gradients, optimizer state and the activations
  /// of the microbatches in flight, by the partitioner's reckoning. If no partition keeps it, the
  /// error says which limit would do. 0: no limit on the CPU; on devices nine tenths of their
  /// memory, divided by the ranks that share one, with a warning instead of the error. A number
  /// from 0 to 1000000000. Default: 0.0.
  Config& memory_limit_mb(double value) { return set("memory_limit_mb", value); }
  double memory_limit_mb() const { return std::get<double>(get("memory_limit_mb")); }

  /// Bytes of optimizer state for each byte of a trained parameter, for `memory_limit_mb`: 2 for
  /// Adam, 1 for SGD with momentum, 0 for plain SGD; with `shard_optimizer_state` divided by the
  /// number of replicas. Unless it is set, the state is that of the program's
  /// `DistributedOptimizer`s, as far as they are made before the first step, with the masters of
  /// half precision. A number from 0 to 1000. Default: 2.0.
  Config& optimizer_state_factor(double value) { return set("optimizer_state_factor", value); }
  double optimizer_state_factor() const { return std::get<double>(get("optimizer_state_factor")); }

  /// Load the partition of the first step from `partition_file` instead of computing it. Default:
  /// false.
  Config& load_partition(bool value) { return set("load_partition", value); }
  bool load_partition() const { return std::get<bool>(get("load_partition")); }

  /// A JSON file. World rank 0 saves the partition of the first step there, and `load_partition`
  /// reads it. Without `load_partition` a partition that is there already is kept as long as no
  /// other is clearly better (5 %). Unset by default.
  Config& partition_file(std::string value) { return set("partition_file", std::move(value)); }
  std::optional<std::string> partition_file() const {
    return get_if_set<std::string>("partition_file");
  }

  /// The file to which world rank 0 writes the graph of the first step, with its costs, for
  /// `tools/smp_plan`. Unset by default.
  Config& graph_file(std::string value) { return set("graph_file", std::move(value)); }
  std::optional<std::string> graph_file() const { return get_if_set<std::string>("graph_file"); }

  /// Measure in the first step how long each operator takes, forward and backward: the least of up
  /// to three runs, within about two seconds more. `false` estimates the times from the bytes and
  /// operations of operators (`cost_model`). (In SMP 1.x the default is `false`.) Default: true.
  Config& trace_execution_times(bool value) { return set("trace_execution_times", value); }
  bool trace_execution_times() const { return std::get<bool>(get("trace_execution_times")); }

  /// The costs of calls, bytes, floating point operations and messages in the partitioner, where
  /// the model itself is not measured: `auto` takes those of a core, or of the GPU by its
  /// properties, `measured` measures the device and the links between ranks in the first step, the
  /// name of a GPU (`h100`) is that one's data sheet, and anything else is a JSON file (see
  /// docs/partitioning.md). Default: "auto".
  Config& cost_model(std::string value) { return set("cost_model", std::move(value)); }
  std::string cost_model() const { return std::get<std::string>(get("cost_model")); }

  /// Measure in the first step also the memory that operators keep for the backward beside their
  /// arguments and results, such as masks and casts. Default: false.
  Config& trace_memory_usage(bool value) { return set("trace_memory_usage", value); }
  bool trace_memory_usage() const { return std::get<bool>(get("trace_memory_usage")); }

  /// Run nothing to measure the model: estimate times and memory from shapes. Default: false.
  Config& skip_tracing(bool value) { return set("skip_tracing", value); }
  bool skip_tracing() const { return std::get<bool>(get("skip_tracing")); }

  /// Models constructed under `smp::model_creation` get their parameters only where they are
  /// needed, after the partition. Default: true.
  Config& delayed_parameter_initialization(bool value) {
    return set("delayed_parameter_initialization", value);
  }
  bool delayed_parameter_initialization() const {
    return std::get<bool>(get("delayed_parameter_initialization"));
  }

  /// The values of `placement_strategy`.
  enum class PlacementStrategy { kCluster, kSpread, kDPT, kDTP, kPDT, kPTD, kTDP, kTPD };
  /// How ranks are placed. The letters are the digits of a rank in mixed radix: D replica, P
  /// partition, T tensor-parallel rank; the right-most letter varies fastest. `cluster` is `DPT`:
  /// the partitions of a replica are neighbours. `spread` is `TPD`: the replicas are. Default:
  /// "cluster".
  Config& placement_strategy(PlacementStrategy value) {
    return choose("placement_strategy", static_cast<size_t>(value));
  }
  Config& placement_strategy(std::string value) {
    return set("placement_strategy", std::move(value));
  }
  std::string placement_strategy() const {
    return std::get<std::string>(get("placement_strategy"));
  }

  /// Hybrid of pipeline and data parallelism: more ranks than `partitions` train several replicas,
  /// whose gradients are averaged. Default: false.
  Config& ddp(bool value) { return set("ddp", value); }
  bool ddp() const { return std::get<bool>(get("ddp")); }

  /// The TCP port on which processes that MPI does not start meet, of the host `MASTER_ADDR`, where
  /// rank 0 opens it. 0 and unset mean `MASTER_PORT`, or the launcher's own. No effect under
  /// `mpirun` and `srun`, which have brought them together. An integer from 0 to 65535. Unset by
  /// default.
  Config& ddp_port(int64_t value) { return set("ddp_port", value); }
  std::optional<int64_t> ddp_port() const { return get_if_set<int64_t>("ddp_port"); }

  /// The values of `ddp_dist_backend`.
  enum class DdpDistBackend { kAuto, kNccl };
  /// How tensors of GPUs go from rank to rank: `auto` takes NCCL where each rank of a group has a
  /// GPU of its own in a build for CUDA, otherwise shared memory of GPUs or of the host; with
  /// `nccl` anything else is an error (see docs/cuda.md). Default: "auto".
  Config& ddp_dist_backend(DdpDistBackend value) {
    return choose("ddp_dist_backend", static_cast<size_t>(value));
  }
  Config& ddp_dist_backend(std::string value) { return set("ddp_dist_backend", std::move(value)); }
  std::string ddp_dist_backend() const { return std::get<std::string>(get("ddp_dist_backend")); }

  /// The size in MiB of the buckets in which gradients are reduced over replicas. A number > 0 and
  /// <= 1000000000. Default: 25.0.
  Config& bucket_cap_mb(double value) { return set("bucket_cap_mb", value); }
  double bucket_cap_mb() const { return std::get<double>(get("bucket_cap_mb")); }

  /// Let the C library of a rank keep the memory that a step frees for the next step, and align
  /// tensors so that they can use all of it again. No effect with another allocator, or where the
  /// environment tunes it (`MALLOC_...`). Default: true.
  Config& keep_freed_memory(bool value) { return set("keep_freed_memory", value); }
  bool keep_freed_memory() const { return std::get<bool>(get("keep_freed_memory")); }

  /// After how many seconds a blocking wait for another rank is an error. A number > 0 and <=
  /// 1000000000. Default: 300.0.
  Config& timeout_seconds(double value) { return set("timeout_seconds", value); }
  double timeout_seconds() const { return std::get<double>(get("timeout_seconds")); }

  /// After how many seconds a blocking wait for another rank is worth a warning, with the actions
  /// of all ranks of the host and the chain of waits to its cause (see docs/recovery.md). 0 for
  /// none. A number from 0 to 1000000000. Default: 60.0.
  Config& stall_seconds(double value) { return set("stall_seconds", value); }
  double stall_seconds() const { return std::get<double>(get("stall_seconds")); }

  /// Compare the calls of all ranks before every collective, so that ranks that call different ones
  /// get an error that says which rank called what, instead of a wait that never ends (see
  /// docs/collectives.md). Ranks of one host always do; between hosts it costs messages. The
  /// environment variable `SMP_COMM_CHECK=1` does the same. Default: false.
  Config& check_collectives(bool value) { return set("check_collectives", value); }
  bool check_collectives() const { return std::get<bool>(get("check_collectives")); }

  /// Every how many steps of training one microbatch of one stage runs again, on another rank where
  /// there is one, and replicas compare their weights (see docs/recovery.md). Other bits are an
  /// error on all ranks before gradients are handed out. 0: never. An integer from 0 to
  /// 1000000000000000. Default: 0.
  Config& replay_check(int64_t value) { return set("replay_check", value); }
  int64_t replay_check() const { return std::get<int64_t>(get("replay_check")); }

  /// The values of `recovery`.
  enum class Recovery { kOff, kRestart, kShrink };
  /// The fate of a job in which a rank has failed (see docs/recovery.md): with `restart` all ranks
  /// are started again, at once, and go on from the copy that `smp::keep_copy` has left in memory;
  /// with `shrink` fewer ranks are, in a layout that computes the same. By `smprun`, which then
  /// needs no `--restarts`; `restart` also by torchrun. Default: "off".
  Config& recovery(Recovery value) { return choose("recovery", static_cast<size_t>(value)); }
  Config& recovery(std::string value) { return set("recovery", std::move(value)); }
  std::string recovery() const { return std::get<std::string>(get("recovery")); }

  /// The number of calls of `smp::keep_copy` of which one keeps a copy. 0: as many as it takes for
  /// copies to need 3 % of the time at most, as measured. An integer from 0 to 1000000000000000.
  /// Default: 0.
  Config& recovery_interval(int64_t value) { return set("recovery_interval", value); }
  int64_t recovery_interval() const { return std::get<int64_t>(get("recovery_interval")); }

  /// How many seconds a job that gets SIGTERM has to stop by itself, where it can go on later:
  /// `smp::stop_requested()` then is true on all ranks, and the program saves a checkpoint and ends
  /// (see docs/recovery.md). 0: SIGTERM ends it at once. A number from 0 to 1000000000. Default:
  /// 0.0.
  Config& preempt_seconds(double value) { return set("preempt_seconds", value); }
  double preempt_seconds() const { return std::get<double>(get("preempt_seconds")); }

  /// A folder into which each rank writes hashes of its operators' results in every step, and of
  /// the gradients of parameters: `smp_diff` compares two of them (see docs/recovery.md). Takes
  /// time and room on the disk. Unset by default.
  Config& record_hashes(std::string value) { return set("record_hashes", std::move(value)); }
  std::optional<std::string> record_hashes() const {
    return get_if_set<std::string>("record_hashes");
  }

  /// The values of `activation_checkpointing`.
  enum class ActivationCheckpointing { kModules, kAuto };
  /// The modules that run again in the backward pass instead of being kept for it (see
  /// docs/memory.md): the `modules` for which the program calls
  /// `smp::set_activation_checkpointing`, or these and those that `auto` adds, so that no rank is
  /// predicted to need more than `memory_limit_mb`. Default: "modules".
  Config& activation_checkpointing(ActivationCheckpointing value) {
    return choose("activation_checkpointing", static_cast<size_t>(value));
  }
  Config& activation_checkpointing(std::string value) {
    return set("activation_checkpointing", std::move(value));
  }
  std::string activation_checkpointing() const {
    return std::get<std::string>(get("activation_checkpointing"));
  }

  /// Move the tensors that checkpointed modules keep for the backward pass out of the way: from a
  /// device to the host's memory, and from the host to a file in `offload_directory`. No effect
  /// without activation checkpointing. Default: false.
  Config& offload_activations(bool value) { return set("offload_activations", value); }
  bool offload_activations() const { return std::get<bool>(get("offload_activations")); }

  /// How many pipeline tasks (forwards and backwards of a rank) ahead of a backward its offloaded
  /// activations are fetched back. Values needed within as many are not offloaded. An integer from
  /// 1 to 1000000. Default: 4.
  Config& activation_loading_horizon(int64_t value) {
    return set("activation_loading_horizon", value);
  }
  int64_t activation_loading_horizon() const {
    return std::get<int64_t>(get("activation_loading_horizon"));
  }

  /// A directory on a local disk for offloaded activations. The files there have no names, so
  /// nothing stays behind. Unset by default.
  Config& offload_directory(std::string value) {
    return set("offload_directory", std::move(value));
  }
  std::optional<std::string> offload_directory() const {
    return get_if_set<std::string>("offload_directory");
  }

  /// Divide the optimizer's state and its work over the replicas instead of repeating them (see
  /// docs/memory.md). Needs `ddp`; no effect with one replica. Default: false.
  Config& shard_optimizer_state(bool value) { return set("shard_optimizer_state", value); }
  bool shard_optimizer_state() const { return std::get<bool>(get("shard_optimizer_state")); }

  /// Give models parameters of float16, and optimizers master weights of float32 (see
  /// docs/precision.md). Steps whose gradients are not finite are skipped. Not together with
  /// `bf16`. Default: false.
  Config& fp16(bool value) { return set("fp16", value); }
  bool fp16() const { return std::get<bool>(get("fp16")); }

  /// Allowed with `fp16` only, which gives all parameters float16. (In SMP 1.x it gives float16 to
  /// those of distributed modules, without masters, and is older than `fp16`.) Default: false.
  Config& fp16_params(bool value) { return set("fp16_params", value); }
  bool fp16_params() const { return std::get<bool>(get("fp16_params")); }

  /// Give models parameters of bfloat16, and optimizers master weights of float32 (see
  /// docs/precision.md). Not together with `fp16`. (In SMP 1.x it needs
  /// `sharded_data_parallel_degree` > 1.) Default: false.
  Config& bf16(bool value) { return set("bf16", value); }
  bool bf16() const { return std::get<bool>(get("bf16")); }

  /// Among how many ranks layers are divided (see docs/tensor_parallelism.md). More than 1 needs
  /// `ddp`. An integer from 1 to 1000000. Default: 1.
  Config& tensor_parallel_degree(int64_t value) { return set("tensor_parallel_degree", value); }
  int64_t tensor_parallel_degree() const {
    return std::get<int64_t>(get("tensor_parallel_degree"));
  }

  /// The ranks of a tensor-parallel group are given one batch, shared out by `smp::rdp_rank()`,
  /// instead of one each, by `smp::dp_rank()`. Default: false.
  Config& prescaled_batch(bool value) { return set("prescaled_batch", value); }
  bool prescaled_batch() const { return std::get<bool>(get("prescaled_batch")); }

  /// The values of `tensor_parallelism`.
  enum class TensorParallelism { kAuto, kMarked };
  /// Which modules of the program may be divided by rewriting the captured graph: the `marked`
  /// ones, made under `smp::tensor_parallelism` or given to `smp::set_tensor_parallelism`, or, with
  /// `auto`, all if none is marked and none is a distributed module of `smp::nn`. Default: "auto".
  Config& tensor_parallelism(TensorParallelism value) {
    return choose("tensor_parallelism", static_cast<size_t>(value));
  }
  Config& tensor_parallelism(std::string value) {
    return set("tensor_parallelism", std::move(value));
  }
  std::string tensor_parallelism() const {
    return std::get<std::string>(get("tensor_parallelism"));
  }

  /// A marked weight that cannot be divided is an error (norms and biases may stay whole);
  /// otherwise the report says so. Default: false.
  Config& strict_tensor_parallelism(bool value) { return set("strict_tensor_parallelism", value); }
  bool strict_tensor_parallelism() const {
    return std::get<bool>(get("strict_tensor_parallelism"));
  }

  /// Over how many replicas parameters, gradients and optimizer state are sharded (see
  /// docs/memory.md); a divisor of their number. More than 1 goes with neither
  /// `shard_optimizer_state` nor `gradient_accumulation_fusion`. An integer from 1 to 1000000.
  /// Default: 1.
  Config& sharded_data_parallel_degree(int64_t value) {
    return set("sharded_data_parallel_degree", value);
  }
  int64_t sharded_data_parallel_degree() const {
    return std::get<int64_t>(get("sharded_data_parallel_degree"));
  }

  /// The size of sharded gradient buckets, in elements. An integer from 1 to 1000000000000000.
  /// Default: 500000000.
  Config& sdp_reduce_bucket_size(int64_t value) { return set("sdp_reduce_bucket_size", value); }
  int64_t sdp_reduce_bucket_size() const {
    return std::get<int64_t>(get("sdp_reduce_bucket_size"));
  }

  /// Parameters with fewer elements than this stay on every rank. An integer from 0 to
  /// 1000000000000000. Default: 1000000.
  Config& sdp_param_persistence_threshold(int64_t value) {
    return set("sdp_param_persistence_threshold", value);
  }
  int64_t sdp_param_persistence_threshold() const {
    return std::get<int64_t>(get("sdp_param_persistence_threshold"));
  }

  /// How many elements of sharded parameters are whole at one time, unless one unit of a stage
  /// reads more. An integer from 1 to 1000000000000000. Default: 1000000000.
  Config& sdp_max_live_parameters(int64_t value) { return set("sdp_max_live_parameters", value); }
  int64_t sdp_max_live_parameters() const {
    return std::get<int64_t>(get("sdp_max_live_parameters"));
  }

  /// Gather parameters within and across hosts apart. Accepted for SMP's configurations and without
  /// effect: collectives find their way by themselves (see docs/collectives.md). Default: true.
  Config& sdp_hierarchical_allgather(bool value) {
    return set("sdp_hierarchical_allgather", value);
  }
  bool sdp_hierarchical_allgather() const {
    return std::get<bool>(get("sdp_hierarchical_allgather"));
  }

  /// The L2 norm over all parameters to which `optimizer.step()` clips gradients, with sharded data
  /// parallelism. Always on, as in SMP 1.x, and the first step says so in the log; a norm that no
  /// gradients have, such as 1e9, leaves them as they are. A number > 0. Default: 1.0.
  Config& sdp_gradient_clipping(double value) { return set("sdp_gradient_clipping", value); }
  double sdp_gradient_clipping() const { return std::get<double>(get("sdp_gradient_clipping")); }

  // End of the generated list.

 private:
  friend struct core::Distribution;

  explicit Config(std::shared_ptr<const core::Settings> settings);

  /// Sets a parameter to the `index`-th of the strings that it takes.
  Config& choose(const char* name, size_t index);

  template <class T>
  std::optional<T> get_if_set(const char* name) const {
    if (!is_set(name)) return std::nullopt;
    return std::get<T>(get(name));
  }

  std::shared_ptr<const core::Settings> settings_;  // shared by copies; `set` makes another
};

/// Prints `config.to_string()`.
SMP_API std::ostream& operator<<(std::ostream& out, const Config& config);

}  // namespace smp
