// SPDX-License-Identifier: Apache-2.0
#include "graph/below_autograd.h"

#include <torch/library.h>

#include <algorithm>
#include <iterator>
#include <vector>

namespace smp::graph {
namespace {

// A tensor keeps its identity when its keys change, and libtorch has no call for that. See
// storage.cc on why this is legal.
c10::DispatchKeySet& keys_of(c10::TensorImpl& tensor);

template <c10::DispatchKeySet c10::TensorImpl::*keys>
struct Keys {
  friend c10::DispatchKeySet& keys_of(c10::TensorImpl& tensor) { return tensor.*keys; }
};

template struct Keys<&c10::TensorImpl::key_set_>;

std::vector<BelowAutograd>& observers() {
  static std::vector<BelowAutograd> all;
  return all;
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  for (const BelowAutograd see : observers()) {
    if (see(op, *stack)) return;
  }
  const c10::DispatchKeySet below(c10::DispatchKeySet::FULL_AFTER, kBelowAutograd);
  op.redispatchBoxed(keys & below, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, Fake, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

bool see_below_autograd(BelowAutograd see) {
  observers().push_back(see);
  return true;
}

void set_seen(const at::Tensor& tensor, bool seen) {
  c10::DispatchKeySet& keys = keys_of(*tensor.unsafeGetTensorImpl());
  keys = seen ? keys.add(kBelowAutograd) : keys.remove(kBelowAutograd);
}

bool is_seen(const at::Tensor& tensor) {
  return tensor.defined() && tensor.unsafeGetTensorImpl()->key_set().has(kBelowAutograd);
}

UnseenScope::UnseenScope(const std::vector<at::Tensor>& tensors) {
  std::copy_if(tensors.begin(), tensors.end(), std::back_inserter(seen_), is_seen);
  for (const at::Tensor& tensor : seen_) set_seen(tensor, false);
}

UnseenScope::~UnseenScope() {
  for (const at::Tensor& tensor : seen_) set_seen(tensor, true);
}

}  // namespace smp::graph
