// SPDX-License-Identifier: Apache-2.0
#include "graph/split_backward.h"

#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/tensor.h>

#include <map>
#include <set>
#include <string>
#include <utility>

namespace smp::graph {
namespace {

using torch::autograd::Edge;
using torch::autograd::Node;

/// Functions that compute the gradient of each argument by a formula of its own. (The last one is
/// nn's operator smp::tp_gathered_linear.)
bool is_divisible(const Node& node) {
  static const std::set<std::string> names = {"AddBackward0",
                                              "AddmmBackward0",
                                              "BaddbmmBackward0",
                                              "BmmBackward0",
                                              "CatBackward0",
                                              "DivBackward0",
                                              "ConvolutionBackward0",
                                              "MmBackward0",
                                              "MulBackward0",
                                              "MvBackward0",
                                              "NativeLayerNormBackward0",
                                              "StackBackward0",
                                              "SubBackward0",
                                              "WhereBackward0",
                                              "torch::autograd::CppNode<smp::nn::GatheredLinear>"};
  return names.count(node.name()) > 0;
}

/// Whether libtorch can be asked for a part of a function's gradients. The function of a write
/// through a view has an edge to the memory in place of its operator's edge to the view, and
/// libtorch asserts that it has both or none. A list operator makes all functions before it writes:
/// if several views give memory its first history, only the first has none of the two, the others
/// have one.
bool may_run_in_part(const Node& node) {
  const auto* write = dynamic_cast<const torch::autograd::CopySlices*>(&node);
  if (write == nullptr || write->fn == nullptr) return true;
  return write->next_edge(0).is_valid() == write->fn->next_edge(0).is_valid();
}

/// The nodes reached from the starts of a backward pass, and how to divide it.
class Division {
 public:
  Division(const std::vector<Edge>& starts, const std::vector<GradientSinkPtr>& inputs) {
    for (const auto& input : inputs) leads_to_input_[input.get()] = true;
    for (const Edge& start : starts) {
      if (start.is_valid()) visit(start.function.get());
    }
    for (Node* node : order_) find_divided(node);
    sound_ = is_sound();
  }

  bool leads_to_input(const Node* node) const {
    const auto found = leads_to_input_.find(node);
    return found != leads_to_input_.end() && found->second;
  }
  /// Whether the first part computes the gradient of a function that only weights are behind.
  bool is_early(const Node* node) const { return early_.count(node) > 0; }

  /// Functions that lead to inputs and, by a formula of their own, to weights.
  const std::vector<Node*>& divided() const { return divided_; }
  /// Functions that lead to inputs and do all of their work in the first part.
  std::vector<Node*> finished() const {
    std::vector<Node*> result;
    const ska::flat_hash_set<const Node*> going_on(divided_.begin(), divided_.end());
    for (Node* node : order_) {
      if (leads_to_input(node) && going_on.count(node) == 0) result.push_back(node);
    }
    return result;
  }
  /// From functions that cannot be divided, to weights; each target once.
  const std::vector<Edge>& early() const { return early_edges_; }
  /// False if the sum of a gradient would be divided between the parts, or the first cannot run.
  bool sound() const { return sound_; }

 private:
  /// In depth first order, since an autograd graph may be deep: each node after those that it leads
  /// to.
  void visit(Node* start) {
    std::vector<std::pair<Node*, size_t>> open;
    const auto enter = [&](Node* node) {
      if (!seen_.insert(node).second) return;
      open.emplace_back(node, 0);
    };
    enter(start);
    while (!open.empty()) {
      auto& [node, next] = open.back();
      if (next < node->num_outputs()) {
        Node* target = node->next_edge(next++).function.get();
        if (target != nullptr) enter(target);
        continue;
      }
      bool leads = leads_to_input(node);
      for (const Edge& edge : node->next_edges()) leads |= leads_to_input(edge.function.get());
      leads_to_input_[node] = leads;
      order_.push_back(node);
      open.pop_back();
    }
  }

  void find_divided(Node* node) {
    if (!leads_to_input(node)) return;
    bool divided = false;
    const bool divisible = is_divisible(*node);
    for (const Edge& edge : node->next_edges()) {
      if (!edge.is_valid() || leads_to_input(edge.function.get())) continue;
      divided |= divisible;
      if (divisible) continue;
      early_.insert(edge.function.get());
      if (known_.emplace(edge.function.get(), edge.input_nr).second) early_edges_.push_back(edge);
    }
    if (divided) divided_.push_back(node);
  }

  /// Whether the first part can run, and the gradients that the second part sends to a function do
  /// not meet those that the first part sent.
  bool is_sound() const {
    for (const Node* node : order_) {
      if (leads_to_input(node) && !may_run_in_part(*node)) return false;
      if (leads_to_input(node) && !is_divisible(*node)) continue;
      for (const Edge& edge : node->next_edges()) {
        if (edge.is_valid() && is_early(edge.function.get())) return false;
      }
    }
    return true;
  }

  ska::flat_hash_map<const Node*, bool> leads_to_input_;
  ska::flat_hash_set<const Node*> seen_;
  ska::flat_hash_set<const Node*> early_;
  std::vector<Node*> order_;
  std::vector<Node*> divided_;
  std::vector<Edge> early_edges_;
  std::set<std::pair<const Node*, uint32_t>> known_;  // functions and inputs of `early_edges_`
  bool sound_ = true;
};

}  // namespace

SplitBackward::SplitBackward(const std::vector<Edge>& starts,
                             const std::vector<at::Tensor>& gradients,
                             const std::vector<GradientSinkPtr>& inputs) {
  const Division division(starts, inputs);
  if (!division.sound()) {
    run_backward(starts, gradients);
    return;
  }
  std::vector<Edge> first;
  std::vector<at::Tensor> first_gradients;
  for (size_t i = 0; i < starts.size(); ++i) {
    if (!starts[i].is_valid() || !gradients[i].defined()) continue;
    const Node* node = starts[i].function.get();
    const bool now = division.leads_to_input(node) || division.is_early(node);
    (now ? first : starts_).push_back(starts[i]);
    (now ? first_gradients : gradients_).push_back(gradients[i]);
  }
  if (first.empty()) return;

  // The gradients asked of the engine: the inputs' gradients, those that divided functions are
  // given, and those that functions that cannot be divided send to weights.
  std::vector<Edge> wanted;
  for (const auto& input : inputs) wanted.emplace_back(input, 0);
  for (Node* node : division.divided()) {
    for (uint32_t i = 0; i < node->num_inputs(); ++i) wanted.emplace_back(node->getptr(), i);
  }
  wanted.insert(wanted.end(), division.early().begin(), division.early().end());
  // The engine keeps the graph for the second part; tensors that it does not need are released
  // below.
  auto found = torch::autograd::Engine::get_default_engine().execute(
      first, first_gradients, /*keep_graph=*/true, /*create_graph=*/false,
      /*accumulate_grad=*/false, wanted);
  for (size_t i = 0; i < inputs.size(); ++i) inputs[i]->gradient = dense(std::move(found[i]));
  for (size_t i = inputs.size(); i < wanted.size(); ++i) {
    if (!found[i].defined()) continue;
    starts_.push_back(wanted[i]);
    gradients_.push_back(dense(std::move(found[i])));
  }
  // Cutting the edges alone would free nothing: a tensor that a divided function has saved refers
  // to the function that made it.
  for (Node* node : division.finished()) node->release_variables();
  for (Node* node : division.divided()) {
    for (Edge& edge : node->next_edges()) {
      if (division.leads_to_input(edge.function.get())) edge = Edge();
    }
  }
}

void SplitBackward::run_weights() {
  run_backward(starts_, gradients_);
  starts_.clear();
  gradients_.clear();
}

/// The operators that record the functions of `is_divisible`.
const std::vector<size_t>* saved_arguments_if_divisible(const Operator& op) {
  static const std::map<std::string, std::vector<size_t>> saved = {
      {"aten::add", {}},
      {"aten::addmm", {1, 2}},
      {"aten::baddbmm", {1, 2}},
      {"aten::bmm", {0, 1}},
      {"aten::cat", {}},
      {"aten::conv1d", {0, 1}},
      {"aten::conv2d", {0, 1}},
      {"aten::conv3d", {0, 1}},
      {"aten::conv_transpose1d", {0, 1}},
      {"aten::conv_transpose2d", {0, 1}},
      {"aten::conv_transpose3d", {0, 1}},
      {"aten::convolution", {0, 1}},
      {"aten::div", {0, 1}},
      {"aten::einsum", {1}},
      {"aten::layer_norm", {0, 2}},
      {"aten::linear", {0, 1}},
      {"aten::matmul", {0, 1}},
      {"aten::mm", {0, 1}},
      {"aten::mul", {0, 1}},
      {"aten::mv", {0, 1}},
      {"aten::native_layer_norm", {0, 2}},
      {"aten::rms_norm", {0, 2}},  // a product with something as large as its input
      {"aten::stack", {}},
      {"aten::sub", {}},
      {"aten::where", {0}},
      {"smp::tp_gathered_linear", {0, 1}}};
  std::string name = op.handle.schema().name();
  if (name.back() == '_') name.pop_back();  // in place
  const auto found = saved.find(name);
  return found == saved.end() ? nullptr : &found->second;
}

int64_t SplitBackward::kept_bytes() const {
  int64_t bytes = 0;
  for (const at::Tensor& gradient : gradients_) bytes += static_cast<int64_t>(gradient.nbytes());
  return bytes;
}

}  // namespace smp::graph
