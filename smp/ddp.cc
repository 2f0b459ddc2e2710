#include "smp/ddp.h"

#include "dp/program_defaults.h"
#include "runtime/model.h"
#include "runtime/runtime.h"

namespace smp::detail {
namespace {

using runtime::Runtime;

bool is_partitioned(const std::shared_ptr<torch::nn::Module>& module) {
  if (!Runtime::exists()) return false;
  for (const auto& model : Runtime::get().models()) {
    if (model->module_ptr() == module) return true;
  }
  return false;
}

}  // namespace

bool serve_data_parallelism() {
  dp::set_program_defaults({[] { return Runtime::get().world(); }, is_partitioned});
  return true;
}

}  // namespace smp::detail
