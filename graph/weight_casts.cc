// SPDX-License-Identifier: Apache-2.0
#include "graph/weight_casts.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_to_copy.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "graph/below_autograd.h"

namespace smp::graph {
namespace {

thread_local const WeightCasts::Scope* current = nullptr;

bool is_cast(const c10::OperatorHandle& op) {
  static const c10::OperatorHandle cast =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::_to_copy", "");
  return op == cast;
}

/// Whether autocast is off on this thread for the tensor's device, as it is in its own calls.
bool excludes_autocast(const at::TensorImpl& tensor) {
  return c10::impl::tls_is_dispatch_key_excluded(
      at::autocast::get_autocast_dispatch_key_from_device_type(tensor.device_type()));
}

at::Tensor cast_of(const at::Tensor& weight, at::ScalarType type) {
  const c10::impl::ExcludeDispatchKeyGuard own(kBelowAutograd);
  return at::_to_copy(weight, at::TensorOptions().dtype(type));
}

/// The type that a call of `_to_copy` asks for, if it asks for nothing else.
std::optional<at::ScalarType> type_alone(const torch::jit::Stack& stack, size_t count) {
  constexpr size_t kType = 1, kNonBlocking = 5;
  for (size_t i = kType + 1; i < count; ++i) {
    if (i != kNonBlocking && !torch::jit::peek(stack, i, count).isNone()) return std::nullopt;
  }
  const c10::IValue& type = torch::jit::peek(stack, kType, count);
  return type.isNone() ? std::nullopt : std::optional(type.toScalarType());
}

}  // namespace

/// Looks at the operators below autograd.
struct CastGiver {
  static bool see(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
    return current != nullptr && current->replace(op, stack);
  }
  static inline const bool kSees = see_below_autograd(&see);
};

WeightCasts::Scope::Scope(WeightCasts& casts, Weights weights)
    : casts_(casts),
      weights_(std::move(weights)),
      was_excluded_(excludes_autocast(*weights_.front().tensor)),
      previous_(current),
      include_(kBelowAutograd) {
  current = this;
}

WeightCasts::Scope::~Scope() { current = previous_; }

/// Autocast turns itself off before it casts the arguments.
bool WeightCasts::Scope::replace(const c10::OperatorHandle& op, torch::jit::Stack& stack) const {
  if (was_excluded_ || !is_cast(op)) return false;
  const size_t count = op.schema().arguments().size();
  const at::Tensor weight = torch::jit::peek(stack, 0, count).toTensor();
  const auto found = std::find_if(weights_.begin(), weights_.end(), [&](const Weight& argument) {
    return argument.tensor == weight.unsafeGetTensorImpl();
  });
  if (found == weights_.end()) return false;
  if (!excludes_autocast(*found->tensor) || c10::InferenceMode::is_enabled()) return false;
  const auto type = type_alone(stack, count);
  const at::Tensor cast = type ? casts_.of(weight, found->memory, *type) : at::Tensor();
  if (!cast.defined()) return false;
  torch::jit::drop(stack, count);
  stack.emplace_back(cast.variable_data());
  return true;
}

/// The cast; undefined if the operator has to make one for itself.
at::Tensor WeightCasts::of(const at::Tensor& weight, int memory, at::ScalarType type) {
  if (use_ == Use::kNothing || !weight.is_non_overlapping_and_dense() || weight.is_neg()) return {};
  const Key key(memory, weight.storage_offset(), at::DimVector(weight.sizes()),
                at::DimVector(weight.strides()), type);
  auto found = casts_.find(key);
  if (use_ == Use::kStep && found == casts_.end()) {
    found =
        casts_.emplace(key, Cast{weight.device(), weight.variable_data(), cast_of(weight, type)})
            .first;
  }
  if (found == casts_.end()) return {};
  Cast& cast = found->second;
  if (use_ == Use::kReserves && !cast.weight.defined()) cast.weight = weight.variable_data();
  // A view of a parameter may be received for each microbatch.
  const bool is_same = cast.weight.defined() && cast.weight.is_alias_of(weight);
  return is_same ? cast.tensor : at::Tensor();
}

int64_t WeightCasts::bytes() const {
  int64_t bytes = 0;
  for (const auto& [key, cast] : casts_) {
    if (cast.tensor.defined()) bytes += static_cast<int64_t>(cast.tensor.nbytes());
  }
  return bytes;
}

void WeightCasts::begin_step() {
  if (use_ == Use::kReserves || use_ == Use::kKept) {
    use_ = Use::kKept;
    write_all();
    return;
  }
  casts_.clear();
  use_ = Use::kStep;
}

void WeightCasts::end_step() {
  if (use_ == Use::kStep) forget();
}

void WeightCasts::reserve() {
  forget();
  use_ = Use::kReserves;
  for (auto& [key, cast] : casts_) {
    const auto& [memory, offset, sizes, strides, type] = key;
    cast.tensor = at::empty_strided(sizes, strides, at::device(cast.device).dtype(type));
  }
}

void WeightCasts::forget() {
  use_ = Use::kNothing;
  for (auto& [key, cast] : casts_) cast = {cast.device, {}, {}};
}

void WeightCasts::write_all() {
  std::vector<at::Tensor> tensors, weights;
  for (auto& [key, cast] : casts_) {
    if (cast.weight.defined()) {
      tensors.push_back(cast.tensor);
      weights.push_back(cast.weight);
    } else {
      cast.tensor.reset();  // no graph reads it
    }
  }
  const at::NoGradGuard no_grad;
  if (!tensors.empty()) at::_foreach_copy_(tensors, weights);
}

}  // namespace smp::graph
