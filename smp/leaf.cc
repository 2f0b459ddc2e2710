#include "smp/leaf.h"

#include <torch/nn/module.h>

#include <unordered_set>

namespace smp::detail {
namespace {

/// Adds the defined tensors that are not in the list yet.
void add_new(const std::vector<at::Tensor>& tensors, std::vector<at::Tensor>& list) {
  std::unordered_set<const at::TensorImpl*> known;
  for (const at::Tensor& tensor : list) known.insert(tensor.unsafeGetTensorImpl());
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() && known.insert(tensor.unsafeGetTensorImpl()).second) {
      list.push_back(tensor);
    }
  }
}

}  // namespace

graph::LeafCallPtr make_leaf_call(torch::nn::Module& module) {
  auto call = c10::make_intrusive<graph::LeafCall>();
  call->module = module.name();
  add_new(module.parameters(), call->state);
  // A normalisation that is training updates its running statistics.
  for (const auto& part : module.modules()) {
    add_new(part->buffers(/*recurse=*/false), part->is_training() ? call->written : call->state);
  }
  return call;
}

}  // namespace smp::detail
