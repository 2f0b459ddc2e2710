// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

/// smp_train: trains an exported program. docs/smp_train.md describes its computations.
namespace smp::tools::train {

/// How a file of samples is read.
enum class Format { kSafetensors, kTokens, kIdx };

struct DataOptions {
  Format format = Format::kSafetensors;
  std::string token_type = "uint16";  ///< type of kTokens
  int64_t sequence = 0;               ///< tokens of a sample of kTokens
  bool shift = false;                 ///< kTokens: targets are the next tokens
};

enum class LossKind { kOutput, kCrossEntropy, kMse, kBceWithLogits, kL1 };

struct LossOptions {
  LossKind kind = LossKind::kCrossEntropy;
  int64_t ignore_index = -100;
  int64_t class_axis = -1;
};

struct OptimizerOptions {
  std::string name = "adamw";
  double lr = 1e-3;
  std::optional<double> weight_decay;  ///< unset: the optimizer's, 0.01 for AdamW and 0 for others
  std::pair<double, double> betas{0.9, 0.999};
  double eps = 1e-8;
  double momentum = 0;
  bool decay_all = false;  ///< also parameters with fewer than two dimensions
  double clip = 0;         ///< largest global norm of the gradients; 0: any
};

struct ScheduleOptions {
  std::string shape = "constant";
  int64_t warmup = 0;     ///< updates
  int64_t steps = 0;      ///< at which it ends
  double final_rate = 0;  ///< rate at the end, as a fraction of `lr`
};

struct Options {
  std::string model;
  std::string eval_model;
  std::string data;
  std::string labels;  ///< labels of kIdx
  std::string eval_data;
  std::string eval_labels;
  DataOptions reading;
  std::vector<std::string> inputs{"input"};  ///< tensors of the data, or ARGUMENT=TENSOR
  std::string target = "target";
  std::string output;  ///< key or number of the result; empty: the result is the tensor
  LossOptions loss;
  OptimizerOptions optimizer;
  ScheduleOptions schedule;
  int64_t steps = 0;
  int64_t batch_size = 0;  ///< samples of a step, of all replicas
  uint64_t seed = 1;
  int64_t eval_every = 0;  ///< steps; 0: only at the end
  int64_t save_every = 0;
  int64_t keep = 2;  ///< checkpoints
  std::string folder;
  bool json = false;
  int64_t log_every = 10;
  int threads = 1;
  std::string device = "cpu";
  std::string config;
};

/// Reads the command line. Returns the exit status if the program shall stop here, after `--help`
/// or a usage error, which it has printed.
std::optional<int> parse_command_line(int argc, char** argv, Options& options);

}  // namespace smp::tools::train
