#pragma once

#include <functional>
#include <memory>

#include "comm/communicator.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace smp::dp {

/// What a program's runtime tells this folder, which does not know it: `smp::init` sets it.
struct ProgramDefaults {
  /// All ranks of the program; throws `UsageError` before `smp::init`.
  std::function<comm::CommunicatorPtr()> group;
  /// Whether a `DistributedModel` holds the module.
  std::function<bool(const std::shared_ptr<torch::nn::Module>&)> is_partitioned;
};

/// Called once, before ranks start to wrap models.
void set_program_defaults(ProgramDefaults defaults);

/// Those that were set; without a runtime, a group that throws and no partitioned models.
const ProgramDefaults& program_defaults();

}  // namespace smp::dp
