// SPDX-License-Identifier: Apache-2.0
#include "graph/weight_fusion.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/eq.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include <set>
#include <utility>

#include "graph/visit.h"

namespace smp::graph {
namespace {

using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::variable_list;
namespace generated = torch::autograd::generated;

using Product = std::function<void()>;
using Buffer = std::function<at::Tensor()>;
/// From the gradient of a function's result, the product that adds the gradient of the weight to
/// the buffer. Reads the function's saved tensors, and so is called before they are freed.
using Formula = std::function<Product(const at::Tensor& gradient)>;

/// `x` times the weight, or times its transpose.
Product add_product(const at::Tensor& x, const at::Tensor& gradient, bool transposed,
                    const Buffer& buffer, const at::Scalar& alpha) {
  return [=] {
    transposed ? buffer().addmm_(gradient.t(), x, 1, alpha)
               : buffer().addmm_(x.t(), gradient, 1, alpha);
  };
}

/// The gradients of the rows that `indices` name; none for the row of the padding.
Product add_rows(const at::Tensor& indices, const at::Tensor& gradient, int64_t padding,
                 const Buffer& buffer) {
  return [=] {
    const at::Tensor rows = indices.reshape({-1});
    at::Tensor gradients = gradient.reshape({-1, gradient.size(-1)});
    if (padding >= 0) gradients = gradients.masked_fill(at::eq(rows, padding).unsqueeze(1), 0);
    buffer().index_add_(0, rows, gradients);
  };
}

/// Null for functions that are not fused. `node` outlives the formula.
Formula formula(Node* node, size_t argument, bool transposed, const Buffer& buffer) {
  if (auto* addmm = dynamic_cast<generated::AddmmBackward0*>(node); addmm && argument == 2) {
    return [=](const at::Tensor& gradient) {
      return add_product(addmm->mat1_.unpack(), gradient, transposed, buffer, addmm->alpha);
    };
  }
  if (auto* mm = dynamic_cast<generated::MmBackward0*>(node); mm && argument == 1) {
    return [=](const at::Tensor& gradient) {
      return add_product(mm->self_.unpack(), gradient, transposed, buffer, 1);
    };
  }
  auto* embedding = dynamic_cast<generated::EmbeddingBackward0*>(node);
  if (embedding && !transposed && !embedding->sparse && !embedding->scale_grad_by_freq) {
    return [=](const at::Tensor& gradient) {
      return add_rows(embedding->indices_.unpack(), gradient, embedding->padding_idx.expect_int(),
                      buffer);
    };
  }
  return nullptr;
}

/// Belongs to the function that it is called before.
class ProductHook final : public torch::autograd::FunctionPreHook {
 public:
  ProductHook(Formula formula, std::shared_ptr<std::vector<Product>> deferred)
      : formula_(std::move(formula)), deferred_(std::move(deferred)) {}

  variable_list operator()(const variable_list& gradients) override {
    // The second part of a divided backward may come by again.
    if (formula_ == nullptr || !gradients[0].defined()) return gradients;
    Product product = formula_(gradients[0]);
    formula_ = nullptr;
    deferred_ ? deferred_->push_back(std::move(product)) : product();
    return gradients;
  }

 private:
  Formula formula_;
  const std::shared_ptr<std::vector<Product>> deferred_;
};

}  // namespace

std::vector<int> uses_of_storages(const Graph& graph) {
  std::vector<int> uses(graph.alias_sets);
  for (const Operator& op : graph.operators) {
    std::set<int> read, made;
    for_each_argument(op, [&](ValueId id) { read.insert(graph.values[id].alias_set); });
    for_each_result(op, [&](ValueId id) { made.insert(graph.values[id].alias_set); });
    for (const int set : read) uses[set] += made.count(set) == 0 ? 1 : 0;
  }
  return uses;
}

WeightFusion::WeightFusion(const std::vector<Edge>& starts,
                           const std::vector<WeightBuffer>& weights, bool defer)
    : deferred_(defer ? std::make_shared<Products>() : nullptr) {
  ska::flat_hash_map<const Node*, Buffer> buffers;
  for (const WeightBuffer& weight : weights) buffers[weight.weight.get()] = weight.buffer;
  ska::flat_hash_set<const Node*> seen;
  std::vector<Node*> open;
  const auto enter = [&](const Edge& edge) {
    if (edge.is_valid() && seen.insert(edge.function.get()).second) {
      open.push_back(edge.function.get());
    }
  };
  for (const Edge& start : starts) enter(start);
  while (!open.empty()) {
    Node* node = open.back();
    open.pop_back();
    for (size_t i = 0; i < node->num_outputs(); ++i) {
      Edge& edge = node->next_edges()[i];
      if (!edge.is_valid()) continue;
      const Node* target = edge.function.get();
      const bool transposed = dynamic_cast<const generated::TBackward0*>(target) != nullptr;
      if (transposed) target = target->next_edge(0).function.get();
      const auto buffer = buffers.find(target);
      Formula fused =
          buffer == buffers.end() ? nullptr : formula(node, i, transposed, buffer->second);
      if (fused == nullptr) {
        enter(edge);
        continue;
      }
      node->add_pre_hook(std::make_unique<ProductHook>(std::move(fused), deferred_));
      edge = Edge();
      ++products_;
    }
  }
}

void WeightFusion::run() {
  if (!deferred_) return;
  at::NoGradGuard no_grad;
  for (const Product& product : *deferred_) product();
  deferred_->clear();
}

}  // namespace smp::graph
