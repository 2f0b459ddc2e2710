// SPDX-License-Identifier: Apache-2.0
#include "dp/sharded_parameters.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "dp/bucket_layout.h"
#include "dp/comm_errors.h"
#include "graph/storage.h"

namespace smp::dp {
namespace {

void free_data(const at::Tensor& parameter) {
  graph::take_data(*parameter.storage().unsafeGetStorageImpl(),
                   c10::DataPtr(nullptr, parameter.device()),
                   "[smp] the data of a parameter that sharded data parallelism has divided over "
                   "ranks was read or written outside of a step. Use model->state_dict() for "
                   "copies of all, or gather the model with model->cpu()");
}

/// The first `numel` elements of a tensor's memory, in their order.
at::Tensor memory_of(const at::Tensor& tensor, int64_t numel) {
  return at::empty({0}, tensor.options()).set_(tensor.storage(), 0, {numel}, {1});
}

at::TensorOptions plain(const at::Tensor& parameter) {
  return parameter.options().requires_grad(false);
}

/// Waits for a move of a parameter. Errors say which.
void wait_for(const WorkPtr& work, const std::string& name) {
  const auto where = [&] {
    return c10::str(" [while sharded data parallelism gathered parameter \"", name, "\"]");
  };
  with_where_in_errors(where, [&] { work->wait(); });
}

}  // namespace

bool ShardedParameters::is_divisible(const at::Tensor& parameter) {
  return parameter.numel() > 0 && parameter.is_non_overlapping_and_dense() &&
         parameter.storage_offset() == 0 && parameter.storage().nbytes() == parameter.nbytes();
}

size_t ShardedParameters::add(const at::Tensor& parameter, const std::string& name) {
  SMP_INTERNAL_ASSERT(is_divisible(parameter), "parameter \"", name, "\" cannot be divided");
  at::NoGradGuard no_grad;
  const size_t index = ParameterPieces::add(parameter, name);
  const auto [begin, end] = owned(index, group()->rank());
  Entry& entry = entries_.emplace_back();
  entry.padded = at::zeros({range(index).length}, plain(parameter));
  entry.shard = entry.padded.narrow(0, 0, end - begin).detach();
  entry.shard.copy_(memory_of(parameter.detach(), parameter.numel()).slice(0, begin, end));
  entry.shard.set_requires_grad(parameter.requires_grad());
  if (begin < end) own_[index] = entry.shard;
  free_data(parameter);
  return index;
}

void ShardedParameters::gather(size_t index) {
  Entry& entry = entries_[index];
  if (entry.users++ > 0) return;
  live_ += numel(index);
  peak_live_ = std::max(peak_live_, live_);
  at::NoGradGuard no_grad;
  const int64_t padded = group()->size() * range(index).length;
  const at::Tensor fresh = at::empty({padded}, plain(parameter(index)));
  const at::Tensor data = parameter(index).detach();
  graph::give_data(*data.storage().unsafeGetStorageImpl(), *fresh.storage().unsafeGetStorageImpl());
  entry.work = group()->async().all_gather(as_real(memory_of(data, padded)), as_real(entry.padded));
}

void ShardedParameters::wait(size_t index) {
  Entry& entry = entries_[index];
  SMP_INTERNAL_ASSERT(entry.users > 0, "parameter \"", name(index), "\" was not gathered");
  if (const auto work = std::exchange(entry.work, nullptr)) wait_for(work, name(index));
}

void ShardedParameters::release(size_t index) {
  SMP_INTERNAL_ASSERT(is_live(index), "parameter \"", name(index),
                      "\" is not there to be released");
  if (--entries_[index].users == 0) free(index);
}

void ShardedParameters::free(size_t index) {
  if (const auto work = std::exchange(entries_[index].work, nullptr)) {
    wait_for(work, name(index));
  }
  free_data(parameter(index));
  live_ -= numel(index);
}

void ShardedParameters::lend() {
  for (size_t i = 0; i < size(); ++i) {
    if (!is_live(i)) gather(i);
  }
  for (size_t i = 0; i < size(); ++i) wait(i);
}

void ShardedParameters::take_back() {
  for (size_t i = 0; i < size(); ++i) {
    if (std::exchange(entries_[i].users, 0) > 0) free(i);
  }
}

}  // namespace smp::dp
