// SPDX-License-Identifier: Apache-2.0
#include "smp/ddp.h"

#include <algorithm>

#include "core/check.h"
#include "dp/data_parallel_core.h"
#include "runtime/model.h"
#include "runtime/runtime.h"

namespace smp {
namespace {

using runtime::Runtime;

bool is_partitioned(const std::shared_ptr<torch::nn::Module>& module) {
  if (!Runtime::exists()) return false;
  const auto models = Runtime::get().models();
  return std::any_of(models.begin(), models.end(),
                     [&](const auto& model) { return model->module_ptr() == module; });
}

}  // namespace

NoSync::NoSync(std::shared_ptr<dp::DataParallelCore> core)
    : core_(std::move(core)), before_(core_->synchronizes()) {
  core_->set_synchronizes(false);
}

NoSync::~NoSync() { core_->set_synchronizes(before_); }

namespace detail {

DataParallel::DataParallel(std::shared_ptr<torch::nn::Module> module, const DDPOptions& options) {
  SMP_CHECK_WITH(UsageError, module != nullptr,
                 "DistributedDataParallel was given an empty module holder; construct the module "
                 "first");
  SMP_CHECK_WITH(UsageError, !is_partitioned(module),
                 "DistributedDataParallel was given a module that a DistributedModel holds, which "
                 "reduces gradients over its replicas itself. Use one or the other");
  core_ = std::make_shared<dp::DataParallelCore>(std::move(module), options);
}

NoSync DataParallel::no_sync() { return NoSync(core_); }

Join DataParallel::join(const JoinOptions& options) { return Join(core_, options); }

void DataParallel::register_comm_hook(CommHook hook) {
  core_->reducer().register_comm_hook(std::move(hook));
}

std::vector<std::vector<std::string>> DataParallel::buckets() const {
  return core_->reducer().buckets();
}

bool DataParallel::begin_forward() { return core_->begin_forward(); }

void DataParallel::end_forward(const std::vector<at::Tensor>& outputs) {
  core_->end_forward(outputs);
}

}  // namespace detail
}  // namespace smp
