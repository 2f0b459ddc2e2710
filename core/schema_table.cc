// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "core/settings.h"

namespace smp::core {
namespace {

// Builds one row; each method adds an exception to the rule.
class Row {
 public:
  Row(std::string name, ParameterType type, ConfigValue default_value, std::string doc) {
    row_.name = std::move(name);
    row_.type = type;
    row_.default_value = std::move(default_value);
    row_.doc = std::move(doc);
  }
  Row alias(std::string name) { return with(&Parameter::alias, std::move(name)); }
  Row default_text(std::string text) { return with(&Parameter::default_text, std::move(text)); }
  Row default_from(std::function<ConfigValue(const Settings&)> rule, std::string text) {
    return default_text(std::move(text)).with(&Parameter::default_rule, std::move(rule));
  }
  Row at_least(double minimum) { return with(&Parameter::minimum, minimum); }
  Row at_most(double maximum) { return with(&Parameter::maximum, maximum); }
  Row own_maximum(double maximum) { return at_most(maximum).with(&Parameter::own_maximum, true); }
  Row above(double minimum) { return at_least(minimum).with(&Parameter::exclusive_minimum, true); }
  Row values(std::vector<std::string> all) { return with(&Parameter::values, std::move(all)); }
  Row or_integer(double minimum) { return at_least(minimum).with(&Parameter::or_integer, true); }
  Row needs(std::string name) { return with(&Parameter::needs, std::move(name)); }
  Row error(std::string text) { return with(&Parameter::error, std::move(text)); }
  Row tensorflow_only() { return with(&Parameter::tensorflow_only, true); }

  operator Parameter() const { return row_; }  // NOLINT(google-explicit-constructor)

 private:
  template <class Member, class T>
  Row with(Member member, T value) {
    row_.*member = std::move(value);
    return *this;
  }

  Parameter row_;
};

Row boolean(std::string name, bool default_value, std::string doc) {
  return Row(std::move(name), ParameterType::kBool, default_value, std::move(doc));
}

Row integer(std::string name, ConfigValue default_value, std::string doc) {
  return Row(std::move(name), ParameterType::kInt, std::move(default_value), std::move(doc));
}

Row number(std::string name, ConfigValue default_value, std::string doc) {
  return Row(std::move(name), ParameterType::kNumber, std::move(default_value), std::move(doc));
}

Row text(std::string name, ConfigValue default_value, std::string doc) {
  return Row(std::move(name), ParameterType::kString, std::move(default_value), std::move(doc));
}

// Counts are added to and multiplied as `int`: the number of stages of all ranks must fit into one.
constexpr double kMostRanks = 1e6;
constexpr double kMostMicrobatches = 1e6;
constexpr double kMostStagesOfARank = 1000;
constexpr double kMostElements = 1e15;
constexpr double kMostSteps = 1e15;
constexpr double kMostMiB = 1e9;
// 30 years, which a clock can add to the time of day in nanoseconds.
constexpr double kMostSeconds = 1e9;

// A number of things, with the error that SMP documents.
Row count(std::string name, ConfigValue default_value, double most, std::string doc) {
  return integer(std::move(name), std::move(default_value), std::move(doc))
      .at_least(1)
      .own_maximum(most)
      .error("The number of {key} must be a positive integer.");
}

std::vector<Parameter> pipeline_rows() {
  return {
      count("partitions", int64_t{1}, kMostRanks,
            "The number of pipeline partitions: each is run by one rank of a replica. The number "
            "of ranks must be a multiple of it.")
          .alias("pipeline_parallel_degree"),
      count("microbatches", int64_t{1}, kMostMicrobatches,
            "Into how many microbatches a step splits its batch. A batch that is not divisible by "
            "it is split into the most of them that divide it. With 1 there is no pipelining."),
      text(
          "pipeline", "interleaved",
          "The schedule (docs/schedules.md). `simple` runs all forwards before the first backward; "
          "`interleaved` gives a backward priority as soon as one is ready; `1f1b`, `eager_1f1b`, "
          "`zb_h1` and `zb_h2` keep fewer microbatches or fill idle time with split backwards; "
          "`interleaved_1f1b`, `breadth_first`, `zbv` and `dualpipe_v` give each rank several "
          "stages (`virtual_stages`); `list` builds one from the predicted costs; `auto` takes the "
          "shortest by prediction, then by measurement in the first steps; `file` loads it from "
          "`schedule_file`. All give the same bits. A step function without `backward` only runs "
          "forwards; with `_only_forward` one that has a `backward` is an error.")
          .values({"simple", "interleaved", "1f1b", "eager_1f1b", "interleaved_1f1b",
                   "breadth_first", "zb_h1", "zb_h2", "zbv", "dualpipe_v", "list", "auto", "file",
                   "_only_forward"}),
      integer("virtual_stages", int64_t{0},
              "How many stages each rank has, for schedules that visit a rank several times: "
              "`interleaved_1f1b`, `breadth_first` and, with two, `zbv` and `dualpipe_v`; any "
              "other schedule may have them too. More stages shorten the time in which ranks wait "
              "for the first microbatch, and send more. 0 means two for these four and one for the "
              "others.")
          .at_least(0)
          .at_most(kMostStagesOfARank),
      text("schedule_file", {},
           "The schedule of `\"pipeline\": \"file\"`: CSV, JSON or the text that is printed (see "
           "docs/schedules.md)."),
      text("timeline", {},
           "An HTML page: world rank 0 writes there when each rank did which action in three "
           "training steps (the third to the fifth of the first step function that trains), and "
           "beside it, with the ending .json, a trace for Perfetto (see docs/performance.md)."),
      count("active_microbatches", {}, kMostMicrobatches,
            "How many microbatches may be in flight at once on a rank. Fewer need less memory.")
          .default_from(
              [](const Settings& settings) {
                return std::get<int64_t>(settings.get("partitions")) + 2;
              },
              "partitions + 2"),
      boolean("deterministic_server", false,
              "In SMP 1.x: serve requests in the same order on all data-parallel ranks. Here every "
              "schedule is a fixed program, so both values mean the same."),
  };
}

std::vector<Parameter> step_rows() {
  return {
      text("input_source", "all",
           "The ranks that supply the inputs of a step: `all` ranks of a pipeline pass the same "
           "batch (checked), or only the `first` does, as in SMP 1.x, and the others pass dummies "
           "of the same shapes and types, whose contents do not count; its tensors are sent to "
           "them.")
          .values({"all", "first"}),
      text(
          "numerics", "exact",
          "`exact`: losses, gradients and weights equal those of a single process bit for bit. "
          "`fast` allows other rounding, and other random numbers for a sample, never other "
          "mathematics: where the samples of a batch are independent, several microbatches may run "
          "as one (see docs/schedules.md), and on GPUs NCCL reduces in an order of its own (see "
          "docs/cuda.md).")
          .values({"exact", "fast"}),
      text(
          "cuda_graphs", "off",
          "Whether a stage's computations on a GPU are captured as CUDA graphs in the second step, "
          "and launched as a whole from then on, with the same bits. `auto`: a computation that "
          "cannot be captured runs operator by operator, and a line of log says why. `on`: that is "
          "an error (see docs/cuda.md).")
          .values({"auto", "on", "off"}),
      boolean("deterministic", false,
              "Take kernels that give the same bits in each run on a GPU: libtorch's deterministic "
              "algorithms and cuDNN's, and a workspace with which cuBLAS repeats its sums. An "
              "operator that has no such kernel is an error that names it. Some kernels are slower "
              "(see docs/cuda.md)."),
      boolean("gradient_accumulation_fusion", false,
              "Add the gradients of weights of linear layers to the gradient buffer inside the "
              "matrix product, instead of making each and adding it: saves memory and a pass over "
              "it, and rounds differently (see docs/architecture.md, Numerics)."),
      text("guard", "every_step",
           "In which steps a step function runs again, on tensors without data, to compare it with "
           "the capture: in `every_step`, in the `first_step` only, or in every N-th; or once for "
           "each microbatch (`every_microbatch`), whose numbers and tensors made from host data "
           "may then differ, as in SMP 1.x. A step without guard replays the last guarded one: it "
           "has none of the function's side effects, and sees no change of its numbers (a loss "
           "weight), of `train()` or `eval()`, and of its results besides tensors. Inputs of other "
           "shapes, and arguments with `smp_slice`, are guarded always.")
          .values({"every_step", "first_step", "every_microbatch"})
          .or_integer(1)
          .error("{key} must be 'every_step', 'first_step', 'every_microbatch' or a positive "
                 "integer."),
      integer("gradient_shards", int64_t{0},
              "Into how many shards the microbatches of a step are grouped when gradients are "
              "summed; this fixes the order of the sum, and so the bits of the result, whatever "
              "the number of ranks. 0 means the number of replicas.")
          .at_least(0)
          .at_most(kMostMicrobatches),
      integer("seed", int64_t{-1},
              "The seed of the random operators inside steps. -1 takes the seed of world rank 0's "
              "default generator at the first step, which `torch::manual_seed` sets.")
          .at_least(-1),
  };
}

std::vector<Parameter> partition_rows() {
  return {
      boolean("auto_partition", true,
              "Let the partitioner assign operators to partitions; partition scopes are kept. "
              "`false` leaves it to partition scopes in the program and to `default_partition`."),
      integer("default_partition", int64_t{0},
              "The partition of operators outside every partition scope. Required when "
              "`auto_partition` is false; must be less than `partitions`.")
          .at_least(0)
          .at_most(kMostRanks),
      text(
          "optimize", "memory",
          "Whether tensor-parallel ranks save memory or time between divided layers. With `memory` "
          "each has its part of the samples or positions of activations, with `speed` all of "
          "them, for less communication (see docs/tensor_parallelism.md). Transformers of "
          "`smp::nn` have an option of their own, which wins. SMP 1.x takes the default of "
          "`memory_weight` from it, too.")
          .values({"memory", "speed"}),
      number(
          "memory_weight", 0.0,
          "How much memory counts in the automatic partition: 0.0 balances compute time only, "
          "so that the predicted step is the shortest that keeps `memory_limit_mb`; 1.0 balances "
          "memory only. In SMP 1.x the default is 0.8, or 0.2 with `\"optimize\": \"speed\"`.")
          .at_least(0)
          .at_most(1)
          .error("{key} must be between 0.0 and 1.0!"),
      number("memory_limit_mb", 0.0,
             "How many MiB a rank may use for its parameters, gradients, optimizer state and the "
             "activations of the microbatches in flight, by the partitioner's reckoning. If no "
             "partition keeps it, the error says which limit would do. 0: no limit on the CPU; on "
             "devices nine tenths of their memory, divided by the ranks that share one, with a "
             "warning instead of the error.")
          .at_least(0)
          .at_most(kMostMiB),
      number(
          "optimizer_state_factor", 2.0,
          "Bytes of optimizer state for each byte of a trained parameter, for `memory_limit_mb`: 2 "
          "for Adam, 1 for SGD with momentum, 0 for plain SGD; with `shard_optimizer_state` "
          "divided by the number of replicas. Unless it is set, the state is that of the "
          "program's `DistributedOptimizer`s, as far as they are made before the first step, "
          "with the masters of half precision.")
          .at_least(0)
          .at_most(1000),
      boolean(
          "load_partition", false,
          "Load the partition of the first step from `partition_file` instead of computing it."),
      text("partition_file", {},
           "A JSON file. World rank 0 saves the partition of the first step there, and "
           "`load_partition` reads it. Without `load_partition` a partition that is there already "
           "is kept as long as no other is clearly better (5 %).")
          .default_text("unset")
          .error("'{key}' must be a str."),
      text("graph_file", {},
           "The file to which world rank 0 writes the graph of the first step, with its costs, for "
           "`tools/smp_plan`.")
          .default_text("unset")
          .error("'{key}' must be a str."),
      boolean("trace_execution_times", true,
              "Measure in the first step how long each operator takes, forward and backward: the "
              "least of up to three runs, within about two seconds more. `false` estimates the "
              "times from the bytes and operations of operators (`cost_model`). (In SMP 1.x the "
              "default is `false`.)"),
      text(
          "cost_model", "auto",
          "The costs of calls, bytes, floating point operations and messages in the partitioner, "
          "where the model itself is not measured: `auto` takes those of a core, or of the GPU by "
          "its properties, `measured` measures the device and the links between ranks in the first "
          "step, the name of a GPU (`h100`) is that one's data sheet, and anything else is a JSON "
          "file (see docs/partitioning.md)."),
      boolean("trace_memory_usage", false,
              "Measure in the first step also the memory that operators keep for the backward "
              "beside their arguments and results, such as masks and casts."),
      boolean("skip_tracing", false,
              "Run nothing to measure the model: estimate times and memory from shapes."),
      boolean("delayed_parameter_initialization", true,
              "Models constructed under `smp::model_creation` get their parameters only where they "
              "are needed, after the partition."),
  };
}

std::vector<Parameter> rank_rows() {
  return {
      text(
          "placement_strategy", "cluster",
          "How ranks are placed. The letters are the digits of a rank in mixed radix: D replica, P "
          "partition, T tensor-parallel rank; the right-most letter varies fastest. `cluster` is "
          "`DPT`: the partitions of a replica are neighbours. `spread` is `TPD`: the replicas are.")
          .values({"cluster", "spread", "DPT", "DTP", "PDT", "PTD", "TDP", "TPD"}),
      boolean("ddp", false,
              "Hybrid of pipeline and data parallelism: more ranks than `partitions` train several "
              "replicas, whose gradients are averaged."),
      integer("ddp_port", {},
              "The TCP port on which processes that MPI does not start meet, of the host "
              "`MASTER_ADDR`, where rank 0 opens it. 0 and unset mean `MASTER_PORT`, or the "
              "launcher's own. No effect under `mpirun` and `srun`, which have brought them "
              "together.")
          .default_text("unset")
          .at_least(0)
          .at_most(65535)
          .needs("ddp")
          .error("Invalid port number {value}."),
      text("ddp_dist_backend", "auto",
           "How tensors of GPUs go from rank to rank: `auto` takes NCCL where each rank of a group "
           "has a GPU of its own in a build for CUDA, otherwise shared memory of GPUs or of the "
           "host; with `nccl` anything else is an error (see docs/cuda.md).")
          .values({"auto", "nccl"})
          .needs("ddp"),
      number("bucket_cap_mb", 25.0,
             "The size in MiB of the buckets in which gradients are reduced over replicas.")
          .above(0)
          .at_most(kMostMiB),
      boolean(
          "keep_freed_memory", true,
          "Let the C library of a rank keep the memory that a step frees for the next step, and "
          "align tensors so that they can use all of it again. No effect with another allocator, "
          "or where the environment tunes it (`MALLOC_...`)."),
  };
}

std::vector<Parameter> failure_rows() {
  return {
      number("timeout_seconds", 300.0,
             "After how many seconds a blocking wait for another rank is an error.")
          .above(0)
          .at_most(kMostSeconds),
      number("stall_seconds", 60.0,
             "After how many seconds a blocking wait for another rank is worth a warning, with the "
             "actions of all ranks of the host and the chain of waits to its cause (see "
             "docs/recovery.md). 0 for none.")
          .at_least(0)
          .at_most(kMostSeconds),
      boolean(
          "check_collectives", false,
          "Compare the calls of all ranks before every collective, so that ranks that call "
          "different ones get an error that says which rank called what, instead of a wait that "
          "never ends (see docs/collectives.md). Ranks of one host always do; between hosts it "
          "costs messages. The environment variable `SMP_COMM_CHECK=1` does the same."),
      integer("replay_check", int64_t{0},
              "Every how many steps of training one microbatch of one stage runs again, on another "
              "rank where there is one, and replicas compare their weights (see "
              "docs/recovery.md). Other bits are an error on all ranks before gradients are "
              "handed out. 0: never.")
          .at_least(0)
          .at_most(kMostSteps),
      text("recovery", "off",
           "The fate of a job in which a rank has failed (see docs/recovery.md): with `restart` "
           "all ranks are started again, at once, and go on from the copy that `smp::keep_copy` "
           "has left in memory; with `shrink` fewer ranks are, in a layout that computes the same. "
           "By `smprun`, which then needs no `--restarts`; `restart` also by torchrun.")
          .values({"off", "restart", "shrink"}),
      integer("recovery_interval", int64_t{0},
              "The number of calls of `smp::keep_copy` of which one keeps a copy. 0: as many as it "
              "takes for copies to need 3 % of the time at most, as measured.")
          .at_least(0)
          .at_most(kMostSteps),
      number("preempt_seconds", 0.0,
             "How many seconds a job that gets SIGTERM has to stop by itself, where it can go on "
             "later: `smp::stop_requested()` then is true on all ranks, and the program saves a "
             "checkpoint and ends (see docs/recovery.md). 0: SIGTERM ends it at once.")
          .at_least(0)
          .at_most(kMostSeconds),
      text("record_hashes", {},
           "A folder into which each rank writes hashes of its operators' results in every step, "
           "and of the gradients of parameters: `smp_diff` compares two of them (see "
           "docs/recovery.md). Takes time and room on the disk."),
  };
}

std::vector<Parameter> memory_rows() {
  return {
      text("activation_checkpointing", "modules",
           "The modules that run again in the backward pass instead of being kept for it (see "
           "docs/memory.md): the `modules` for which the program calls "
           "`smp::set_activation_checkpointing`, or these and those that `auto` adds, so that no "
           "rank is predicted to need more than `memory_limit_mb`.")
          .values({"modules", "auto"}),
      boolean("offload_activations", false,
              "Move the tensors that checkpointed modules keep for the backward pass out of the "
              "way: from a device to the host's memory, and from the host to a file in "
              "`offload_directory`. No effect without activation checkpointing."),
      integer("activation_loading_horizon", int64_t{4},
              "How many pipeline tasks (forwards and backwards of a rank) ahead of a backward its "
              "offloaded activations are fetched back. Values needed within as many are not "
              "offloaded.")
          .at_least(1)
          .at_most(kMostMicrobatches),
      text("offload_directory", {},
           "A directory on a local disk for offloaded activations. The files there have no names, "
           "so nothing stays behind.")
          .default_text("the directory for temporary files")
          .error("'{key}' must be a str."),
      boolean("shard_optimizer_state", false,
              "Divide the optimizer's state and its work over the replicas instead of repeating "
              "them (see docs/memory.md). Needs `ddp`; no effect with one replica."),
  };
}

std::vector<Parameter> precision_rows() {
  return {
      boolean("fp16", false,
              "Give models parameters of float16, and optimizers master weights of float32 (see "
              "docs/precision.md). Steps whose gradients are not finite are skipped. Not together "
              "with `bf16`."),
      boolean(
          "fp16_params", false,
          "Allowed with `fp16` only, which gives all parameters float16. (In SMP 1.x it gives "
          "float16 to those of distributed modules, without masters, and is older than `fp16`.)"),
      boolean("bf16", false,
              "Give models parameters of bfloat16, and optimizers master weights of float32 (see "
              "docs/precision.md). Not together with `fp16`. (In SMP 1.x it needs "
              "`sharded_data_parallel_degree` > 1.)"),
  };
}

std::vector<Parameter> tensor_and_sharding_rows() {
  return {
      integer("tensor_parallel_degree", int64_t{1},
              "Among how many ranks layers are divided (see docs/tensor_parallelism.md). More than "
              "1 needs `ddp`.")
          .at_least(1)
          .at_most(kMostRanks),
      boolean("prescaled_batch", false,
              "The ranks of a tensor-parallel group are given one batch, shared out by "
              "`smp::rdp_rank()`, instead of one each, by `smp::dp_rank()`."),
      text("tensor_parallelism", "auto",
           "Which modules of the program may be divided by rewriting the captured graph: the "
           "`marked` ones, made under `smp::tensor_parallelism` or given to "
           "`smp::set_tensor_parallelism`, or, with `auto`, all if none is marked and none is a "
           "distributed module of `smp::nn`.")
          .values({"auto", "marked"}),
      boolean("strict_tensor_parallelism", false,
              "A marked weight that cannot be divided is an error (norms and biases may stay "
              "whole); otherwise the report says so."),
      integer("sharded_data_parallel_degree", int64_t{1},
              "Over how many replicas parameters, gradients and optimizer state are sharded (see "
              "docs/memory.md); a divisor of their number. More than 1 goes with neither "
              "`shard_optimizer_state` nor `gradient_accumulation_fusion`.")
          .at_least(1)
          .at_most(kMostRanks),
      integer("sdp_reduce_bucket_size", int64_t{500000000},
              "The size of sharded gradient buckets, in elements.")
          .at_least(1)
          .at_most(kMostElements),
      integer("sdp_param_persistence_threshold", int64_t{1000000},
              "Parameters with fewer elements than this stay on every rank.")
          .at_least(0)
          .at_most(kMostElements),
      integer("sdp_max_live_parameters", int64_t{1000000000},
              "How many elements of sharded parameters are whole at one time, unless one unit of "
              "a stage reads more.")
          .at_least(1)
          .at_most(kMostElements),
      boolean("sdp_hierarchical_allgather", true,
              "Gather parameters within and across hosts apart. Accepted for SMP's configurations "
              "and without effect: collectives find their way by themselves (see "
              "docs/collectives.md)."),
      number("sdp_gradient_clipping", 1.0,
             "The L2 norm over all parameters to which `optimizer.step()` clips gradients, with "
             "sharded data parallelism. Always on, as in SMP 1.x, and the first step says so in "
             "the log; a norm that no gradients have, such as 1e9, leaves them as they are.")
          .above(0),
  };
}

std::vector<Parameter> tensorflow_rows() {
  return {
      boolean("contiguous", true, "Each partition is a connected part of the TensorFlow graph.")
          .tensorflow_only(),
      boolean("horovod", false, "Data parallelism by Horovod.").tensorflow_only(),
  };
}

std::vector<Parameter> make_schema() {
  std::vector<Parameter> all;
  const std::vector<std::pair<std::string, std::vector<Parameter>>> groups = {
      {"Pipelines", pipeline_rows()},
      {"Steps and numerics", step_rows()},
      {"Partitions of the model", partition_rows()},
      {"Ranks and replicas", rank_rows()},
      {"Waits, failures and checks", failure_rows()},
      {"Memory", memory_rows()},
      {"Half precision", precision_rows()},
      {"Divided layers and parameters", tensor_and_sharding_rows()},
      {"TensorFlow only", tensorflow_rows()},
  };
  for (const auto& [group, rows] : groups) {
    for (const Parameter& row : rows) {
      all.push_back(row);
      all.back().group = group;
    }
  }
  return all;
}

}  // namespace

const std::vector<Parameter>& schema() {
  static const std::vector<Parameter> rows = make_schema();
  return rows;
}

}  // namespace smp::core
