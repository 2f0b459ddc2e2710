// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "smp/config.h"

namespace smp::core {

/// The environment variable that carries the parameters, as JSON, to every rank.
constexpr const char* kParametersVariable = "SM_HP_MP_PARAMETERS";

/// How the estimator's `distribution` trains: a model divided among ranks, or one on each.
enum class Strategy { kModelParallel, kDataParallel };

/// The content of a configuration file: the parameters, and how to start the ranks. A file is the
/// bare object of parameters, or the `distribution` argument of the SageMaker estimator as JSON.
struct Distribution {
  Strategy strategy = Strategy::kModelParallel;
  /// Without settings where the strategy is data parallelism, which has no parameters.
  Config config;
  /// The object of parameters as it was given, on one line; empty if there is none.
  std::string parameters_json;
  /// mpi.processes_per_host, if given.
  std::optional<int64_t> processes_per_host;
  /// mpi.custom_mpi_options, or dataparallel.custom_mpi_options.
  std::string custom_mpi_options;

  /// Reads a file. Where `parameters` is a string it is the path of another file with the
  /// parameters, relative to this file. Throws `ConfigError`.
  static Distribution from_file(const std::string& path);

  /// Does the same as `from_file`, from text, which errors call `source_name`; paths in it are
  /// relative to the working directory.
  static Distribution from_json(const std::string& text, const std::string& source_name);

 private:
  void read(const std::string& text, const std::string& source_name, const std::string& folder);
};

}  // namespace smp::core
