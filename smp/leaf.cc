// SPDX-License-Identifier: Apache-2.0
#include "smp/leaf.h"

#include <torch/nn/module.h>

#include <unordered_set>
#include <utility>

#include "graph/intercept.h"
#include "graph/leaf.h"

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

/// A call of the module, without the arguments.
graph::LeafCallPtr make_leaf_call(torch::nn::Module& module, LeafWrites writes) {
  auto call = c10::make_intrusive<graph::LeafCall>();
  call->module = module.name();
  add_new(module.parameters(), call->state);
  call->parameters = call->state.size();
  call->writes_parameters = writes != LeafWrites::kBuffers;
  call->writes_by_batch = writes == LeafWrites::kParametersByBatch;
  if (call->writes_parameters) call->written = call->state;
  // A normalisation that is training updates its running statistics.
  for (const auto& part : module.modules()) {
    add_new(part->buffers(/*recurse=*/false), part->is_training() ? call->written : call->state);
  }
  return call;
}

}  // namespace

bool records_leaves() { return graph::intercepting(); }

LeafResult call_leaf(torch::nn::Module& module, LeafWrites writes, const Description& arguments,
                     const std::vector<at::Tensor>& inputs, RunLeaf run) {
  const graph::LeafCallPtr call = make_leaf_call(module, writes);
  call->settings = arguments.rest();
  call->numbers = arguments.numbers();
  call->function = [run = std::move(run)](graph::LeafCall& self,
                                          const std::vector<at::Tensor>& tensors) {
    LeafResult result = run(tensors);
    self.keep_result(std::move(result.rest), std::move(result.structure));
    return std::move(result.tensors);
  };
  std::vector<at::Tensor> results = graph::call_leaf(call, inputs);
  return {std::move(results), call->result(), ""};
}

}  // namespace smp::detail
