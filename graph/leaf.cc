// SPDX-License-Identifier: Apache-2.0
#include "graph/leaf.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/stack.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "core/check.h"
#include "core/node.h"
#include "graph/below_autograd.h"
#include "graph/memory_layout.h"
#include "graph/random.h"
#include "graph/saved_tensors.h"

namespace smp::graph {
namespace {

using Tensors = std::vector<at::Tensor>;

template <class... Parts>
[[noreturn]] void refuse(const LeafCall& call, const Parts&... parts) {
  core::fail<CaptureError>("leaf module \"", call.module, "\" ", parts...);
}

/// While it lives, history that is recorded on a module's own tensors leads where that of the
/// tensors which entered in their place leads. They stay leaves, so tensors saved for a backward
/// pass stay valid when the scope has ended.
class HistoryScope {
 public:
  HistoryScope(const Tensors& own, const Tensors& entered) {
    for (size_t i = 0; i < own.size(); ++i) {
      if (own[i].is_same(entered[i])) continue;
      if (own[i].requires_grad() || entered[i].requires_grad()) lead(own[i], entered[i]);
    }
  }
  ~HistoryScope() {
    for (const Saved& saved : saved_) {
      saved.tensor.set_requires_grad(saved.requires_grad);
      torch::autograd::impl::set_grad_accumulator(saved.tensor, saved.accumulator);
    }
  }
  HistoryScope(const HistoryScope&) = delete;
  HistoryScope& operator=(const HistoryScope&) = delete;

 private:
  struct Saved {
    at::Tensor tensor;
    bool requires_grad;
    core::WeakNodePtr accumulator;
  };

  void lead(const at::Tensor& own, const at::Tensor& entered) {
    saved_.push_back({own, own.requires_grad(),
                      core::WeakNodePtr(torch::autograd::impl::try_get_grad_accumulator(own))});
    own.set_requires_grad(entered.requires_grad());
    if (!entered.requires_grad()) return;
    const auto edge = torch::autograd::impl::gradient_edge(entered);
    SMP_INTERNAL_ASSERT(edge.input_nr == 0, "a parameter entered as output ", edge.input_nr);
    torch::autograd::impl::set_grad_accumulator(own, core::WeakNodePtr(edge.function));
  }

  std::vector<Saved> saved_;
};

/// The version counters of tensors, which in-place operators move on.
std::vector<int64_t> versions(const Tensors& tensors) {
  std::vector<int64_t> result;
  for (const at::Tensor& tensor : tensors) {
    const bool counted = tensor.defined() && !tensor.is_inference();
    result.push_back(counted ? tensor._version() : 0);
  }
  return result;
}

bool share_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.defined() && b.defined() && a.has_storage() && b.has_storage() &&
         a.storage().is_alias_of(b.storage());
}

void check_new_memory(const LeafCall& call, const Tensors& results, const Tensors& inputs) {
  for (size_t i = 0; i < results.size(); ++i) {
    if (!results[i].defined()) continue;
    if (results[i].layout() != at::kStrided) {
      refuse(call, "returns a tensor that is not dense. Convert it with to_dense()");
    }
    const auto check = [&](const Tensors& others, size_t count, const char* what) {
      for (size_t k = 0; k < count; ++k) {
        if (!share_memory(results[i], others[k])) continue;
        refuse(call, "returns as tensor ", i, " of its result one that shares memory with ", what,
               ". Return a copy: result.clone()");
      }
    };
    check(inputs, inputs.size(), "an input");
    check(call.state, call.state.size(), "a parameter or buffer");
    check(call.written, call.written.size(), "a buffer");
    check(results, i, "another one");
  }
}

/// Keeps the tensors that a leaf saves for the backward pass: of parameters that it writes a copy,
/// since the next microbatch writes them before.
class CopyingKeeper final : public SavedTensorKeeper {
 public:
  explicit CopyingKeeper(const Tensors& written) {
    for (const at::Tensor& tensor : written) {
      if (tensor.has_storage()) written_.insert(tensor.storage().unsafeGetStorageImpl());
    }
  }

  size_t pack(const at::Tensor& tensor) override {
    const bool copies =
        tensor.has_storage() && written_.count(tensor.storage().unsafeGetStorageImpl()) > 0;
    const at::Tensor kept = copies ? copy_as_laid_out(tensor) : tensor.detach();
    saved_[next_] = {kept, static_cast<int64_t>(kept._version())};
    return next_++;
  }

  at::Tensor unpack(size_t number) override {
    const Saved& saved = saved_.at(number);
    TORCH_CHECK(static_cast<int64_t>(saved.tensor._version()) == saved.version,
                "one of the variables needed for gradient computation has been modified by an "
                "inplace operation inside a leaf module");
    return saved.tensor;
  }

  void release(size_t number) noexcept override { saved_.erase(number); }

 private:
  struct Saved {
    at::Tensor tensor;
    int64_t version;
  };

  std::unordered_set<const c10::StorageImpl*> written_;
  std::unordered_map<size_t, Saved> saved_;
  size_t next_ = 0;
};

Tensors parameters_of(const LeafCall& call) {
  return {call.state.begin(), call.state.begin() + static_cast<int64_t>(call.parameters)};
}

Tensors call_function(LeafCall& call, const Tensors& inputs) {
  if (!call.writes_parameters) return call.function(call, inputs);
  const Tensors parameters = parameters_of(call);
  if (!call.on_zeros) LeafWritesScope::keep(parameters);
  const SavedTensorScope copies(std::make_shared<CopyingKeeper>(parameters));
  return call.function(call, inputs);
}

Tensors run(LeafCall& call, const Tensors& inputs, const Tensors& state) {
  const auto inputs_before = versions(inputs);
  const auto state_before = versions(call.state);
  Tensors results;
  {
    const HistoryScope history(call.state, state);
    results = call_function(call, inputs);
  }
  if (versions(inputs) != inputs_before) {
    refuse(call, "writes an input in place. Write into a copy: x = x.clone()");
  }
  auto state_after = versions(call.state);
  if (call.writes_parameters) {
    std::copy_n(state_before.begin(), call.parameters, state_after.begin());
  }
  // A rank that does not run the module has its first buffers, which it may be about to set.
  if (call.on_zeros) {
    std::copy(state_before.begin() + call.parameters, state_before.end(),
              state_after.begin() + call.parameters);
  }
  if (state_after != state_before) {
    refuse(
        call,
        "writes a parameter, or a buffer while its module is not training. Change parameters "
        "outside the step function, or call smp::leaf(module, smp::LeafWrites::kParameters), and "
        "buffers in training only");
  }
  check_new_memory(call, results, inputs);
  return results;
}

void kernel(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  torch::jit::drop(*stack, 1);  // `written`: the module has them
  const Tensors state = torch::jit::pop(*stack).toTensorVector();
  const Tensors inputs = torch::jit::pop(*stack).toTensorVector();
  torch::jit::drop(*stack, 1);  // `settings`: the function knows them
  const LeafCallPtr call = leaf_call(torch::jit::pop(*stack));
  stack->push_back(run(*call, inputs, state));
}

TORCH_LIBRARY(smp, m) {
  m.def(
      "leaf(Capsule call, str settings, Tensor[] inputs, Tensor[] state, Tensor(a!)[] written)"
      " -> Tensor[]",
      {at::Tag::nondeterministic_seeded});
  // Under every autograd key: the operators inside record their own histories.
  m.impl("leaf", torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd,
                                 torch::CppFunction::makeFromBoxedFunction<&kernel>()));
}

const c10::OperatorHandle& leaf_operator() {
  static const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow("smp::leaf", "");
  return handle;
}

torch::jit::Stack arguments_of(const LeafCallPtr& call, const Tensors& inputs) {
  return {c10::IValue::make_capsule(call), call->settings, inputs, call->state, call->written};
}

/// Gives tensors whose data is elsewhere zeros while it lives.
class ZeroDataScope {
 public:
  explicit ZeroDataScope(const Tensors& tensors) {
    for (const at::Tensor& tensor : tensors) {
      if (tensor.numel() == 0 || tensor.storage().nbytes() > 0) continue;
      const auto bytes = at::detail::computeStorageNbytes(
          tensor.sizes(), tensor.strides(), tensor.itemsize(), tensor.storage_offset());
      const auto options = at::TensorOptions(at::kByte).device(tensor.device());
      saved_.emplace_back(tensor, tensor.storage());
      tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(
          at::zeros({static_cast<int64_t>(bytes)}, options).storage());
    }
  }
  ~ZeroDataScope() {
    for (const auto& [tensor, storage] : saved_) {
      tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
    }
  }
  ZeroDataScope(const ZeroDataScope&) = delete;
  ZeroDataScope& operator=(const ZeroDataScope&) = delete;

 private:
  std::vector<std::pair<at::Tensor, at::Storage>> saved_;
};

/// Zeros of this shape; where a gradient is required, an inner node of a history.
at::Tensor zeros_of(const TensorMeta& meta) {
  const auto options = at::TensorOptions(meta.dtype).device(meta.device);
  at::Tensor zeros = at::empty_strided(meta.sizes, meta.strides, options).zero_();
  return meta.requires_grad ? at::alias(zeros.set_requires_grad(true)) : zeros;
}

}  // namespace

void LeafCall::keep_result(std::any result, std::string structure) {
  if (!result_.has_value()) {
    result_ = std::move(result);
    structure_ = std::move(structure);
    return;
  }
  if (structure == structure_) return;
  refuse(
      *this, "returned ", structure, " where ", structure_,
      " was recorded. How many tensors a leaf returns may not depend on data; return empty ones");
}

void LeafCall::keep_result_of(const LeafCall& recorded) {
  result_ = recorded.result_;
  structure_ = recorded.structure_;
}

namespace {

thread_local LeafWritesScope* writes_scope = nullptr;

}  // namespace

LeafWritesScope::LeafWritesScope() : outer_(std::exchange(writes_scope, this)) {}

LeafWritesScope::~LeafWritesScope() { writes_scope = outer_; }

void LeafWritesScope::keep(const std::vector<at::Tensor>& parameters) {
  if (writes_scope == nullptr) return;
  for (const at::Tensor& parameter : parameters) writes_scope->contents_.keep(parameter);
}

bool is_leaf(const c10::OperatorHandle& op) { return op == leaf_operator(); }

LeafCallPtr leaf_call(const c10::IValue& capsule) {
  return c10::static_intrusive_pointer_cast<LeafCall>(capsule.toCapsule());
}

Tensors call_leaf(const LeafCallPtr& call, const Tensors& inputs) {
  torch::jit::Stack stack = arguments_of(call, inputs);
  leaf_operator().callBoxed(stack);
  return stack.back().toTensorVector();
}

Tensors run_leaf_on_zeros(const LeafCallPtr& call,
                          const std::vector<std::optional<TensorMeta>>& inputs) {
  const UnseenScope absent_state(call->state), absent_written(call->written);
  const ZeroDataScope state(call->state);
  const ContentScope written(call->written);
  const ContentScope read({call->state.begin() + call->parameters, call->state.end()});
  call->on_zeros = true;
  const auto end = c10::make_scope_exit([&] { call->on_zeros = false; });
  Tensors zeros;
  for (const auto& meta : inputs) zeros.push_back(meta ? zeros_of(*meta) : at::Tensor());
  torch::jit::Stack stack = arguments_of(call, zeros);
  try {
    call_seeded(leaf_operator(), stack, 0);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    const auto* of_torch = dynamic_cast<const c10::Error*>(&error);
    refuse(*call,
           "failed on zeros. A step that takes a new way is recorded on shapes, so a leaf has to "
           "run once on inputs (and parameters of other ranks) of the right shapes that hold "
           "zeros, to show the shapes of its result. It threw: ",
           of_torch == nullptr ? error.what() : core::text_without_prefix(*of_torch));
  }
  return stack.back().toTensorVector();
}

void check_leaf_results(const LeafCall& call,
                        const std::vector<std::optional<TensorMeta>>& recorded,
                        const Tensors& results) {
  SMP_INTERNAL_ASSERT(results.size() == recorded.size(), "a leaf returned ", results.size(),
                      " tensors where ", recorded.size(), " were recorded");
  const auto text = [](const std::optional<TensorMeta>& meta) {
    return meta ? meta->to_string() : std::string("an undefined tensor");
  };
  for (size_t i = 0; i < results.size(); ++i) {
    std::optional<TensorMeta> got;
    if (results[i].defined()) got = TensorMeta::of(results[i]);
    const bool same =
        got.has_value() == recorded[i].has_value() &&
        (!got || (got->sizes == recorded[i]->sizes && got->dtype == recorded[i]->dtype));
    if (same) continue;
    refuse(call, "returned ", text(got), " as tensor ", i, " of its result where ",
           text(recorded[i]),
           " was recorded. The shape of what a leaf returns may not depend on data or on a number "
           "that changes; pad it, or do in the leaf what needs it");
  }
}

Tensors undeclared_parameters(const LeafCall& call, const Tensors& entered,
                              const Tensors& results) {
  std::unordered_set<const at::TensorImpl*> declared;
  for (const at::Tensor& tensor : call.state) declared.insert(tensor.unsafeGetTensorImpl());
  Tensors found;
  std::unordered_set<const torch::autograd::Node*> seen;
  std::vector<const torch::autograd::Node*> open;
  const auto visit = [&](const core::NodePtr& node) {
    if (node != nullptr && seen.insert(node.get()).second) open.push_back(node.get());
  };
  for (const at::Tensor& tensor : entered) {
    if (!tensor.defined() || !tensor.requires_grad()) continue;
    seen.insert(torch::autograd::impl::gradient_edge(tensor).function.get());
  }
  for (const at::Tensor& result : results) {
    if (result.defined() && result.requires_grad()) {
      visit(torch::autograd::impl::gradient_edge(result).function);
    }
  }
  while (!open.empty()) {
    const auto* node = open.back();
    open.pop_back();
    for (const auto& edge : node->next_edges()) visit(edge.function);
    const auto* end = dynamic_cast<const torch::autograd::AccumulateGrad*>(node);
    if (end != nullptr && declared.count(end->variable.unsafeGetTensorImpl()) == 0) {
      found.push_back(end->variable);
    }
  }
  return found;
}

}  // namespace smp::graph
