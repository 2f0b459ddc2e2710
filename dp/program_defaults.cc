#include "dp/program_defaults.h"

#include <utility>

#include "core/check.h"

namespace smp::dp {
namespace {

[[noreturn]] comm::CommunicatorPtr no_group() {
  smp::core::fail<UsageError>(
      "DistributedDataParallel was given no group of ranks; call smp::init() first, or pass "
      "DDPOptions().process_group(communicator)");
}

ProgramDefaults& defaults() {
  static ProgramDefaults value{no_group, [](const auto&) { return false; }};
  return value;
}

}  // namespace

void set_program_defaults(ProgramDefaults value) { defaults() = std::move(value); }

const ProgramDefaults& program_defaults() { return defaults(); }

}  // namespace smp::dp
