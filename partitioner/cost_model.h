// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "graph/device_properties.h"

namespace smp::partitioner {

/// The cost of bringing tensors from one rank to another: packing on one side, the message,
/// unpacking on the other. The defaults are rounded from measurements on a host of two cores with
/// Open MPI over shared memory (1 MiB: 9.4 GB/s; a copy on each side: 5 GB/s).
struct Link {
  double message_us = 20;      ///< a message, whatever is in it
  double tensor_us = 5;        ///< a tensor in a message that is sent anyway ...
  double bytes_per_us = 3000;  ///< ... besides its bytes

  double of_tensor(int64_t bytes) const {
    return tensor_us + static_cast<double>(bytes) / bytes_per_us;
  }
  bool operator==(const Link& other) const;
};

/// The cost of running an operator that was not measured. The defaults are those of a core.
struct Compute {
  double call_us = 1;           ///< calling it
  double bytes_per_us = 5000;   ///< moving arguments and results
  double flops_per_us = 40000;  ///< floating point operations of matrix products and the like ...
  double half_flops_per_us = 40000;  ///< ... in types of two bytes

  bool operator==(const Compute& other) const;
};

/// The costs of computing and sending, from which plans and schedules are predicted as far as
/// nothing was measured in the model itself.
struct CostModel {
  Compute compute;
  /// One for all ranks of a pipeline, or one for each two neighbours: 0 and 1, 1 and 2, ...
  std::vector<Link> links = {Link()};

  /// Between any two ranks: as the slowest on the way. Throws `ConfigError` where that is unknown.
  const Link& between(int rank, int other) const;
  /// The slowest, by the time of 1 MiB.
  const Link& slowest() const;
  bool operator==(const CostModel& other) const;

  /// The model of a GPU by its name ("h100", see `gpu_names`): from its data sheet, at the fraction
  /// of it that an A100 achieves, and from PCI Express between two of them. Nothing for another
  /// name.
  static std::optional<CostModel> of_gpu(const std::string& name);
  /// The same by a GPU's own numbers: nothing if one is missing.
  static std::optional<CostModel> of_gpu(const graph::DeviceProperties& properties);
  /// The default of a device: for the CPU that of a core, else by the device's own numbers,
  /// and the model of an A100 where it says nothing.
  static CostModel of_device(c10::Device device);
};

/// Those that `CostModel::of_gpu` knows.
std::vector<std::string> gpu_names();

/// The JSON form, which names the fields above:
///
///     {"compute": {"call_us": 1, ...}, "links": [{"message_us": 20, ...}]}
std::string to_json(const CostModel& costs);

/// Fields that are left out keep their defaults. Throws `ConfigError` with `source_name` for text
/// that is no such JSON: a field that there is not, or a number that is not above 0.
CostModel cost_model_from_json(const std::string& text, const std::string& source_name);

}  // namespace smp::partitioner
