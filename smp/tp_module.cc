// SPDX-License-Identifier: Apache-2.0
#include "smp/tp_module.h"

#include <c10/util/Type.h>

#include <map>
#include <mutex>

#include "core/check.h"
#include "smp/tensor_parallelism.h"

namespace smp::detail {
namespace {

struct Registered {
  std::type_index options;
  TpModuleMaker make;
};

/// The registry of all threads, since ranks may be threads of one process. To be read and changed
/// under `mutex`.
struct Registry {
  std::mutex mutex;
  std::map<std::type_index, Registered> of_module;
};

Registry& registry() {
  static Registry all;
  return all;
}

}  // namespace

void register_tp_module(std::type_index module, std::type_index options, TpModuleMaker make) {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  registry().of_module.insert_or_assign(module, Registered{options, std::move(make)});
}

TpModuleMaker tp_module_maker(std::type_index module, std::type_index options) {
  if (!TensorParallelismScope::current().value_or(false)) return nullptr;
  const std::lock_guard<std::mutex> lock(registry().mutex);
  const auto found = registry().of_module.find(module);
  if (found == registry().of_module.end()) return nullptr;
  SMP_CHECK_WITH(UsageError, found->second.options == options, "smp::make_module<",
                 c10::demangle(module.name()), ">: was given ", c10::demangle(options.name()),
                 ", and smp::tp_register_with_module registered what stands for it with ",
                 c10::demangle(found->second.options.name()), ". Use the same options for both");
  return found->second.make;
}

}  // namespace smp::detail
