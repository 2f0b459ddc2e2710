// SPDX-License-Identifier: Apache-2.0
#include "pipeline/stage_device_graphs.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <numeric>

#include "core/check.h"

namespace smp::pipeline {
namespace {

/// The tensor, on memory that it does not own.
at::Tensor borrowed(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  at::Tensor result = at::for_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes())
                          .strides(tensor.strides())
                          .options(tensor.options().requires_grad(false))
                          .target_device(tensor.device())
                          .make_tensor();
  result._set_conj(tensor.is_conj());
  result._set_neg(tensor.is_neg());
  return result;
}

bool lie_alike(const graph::MemoryLayout& a, const graph::MemoryLayout& b) {
  return a.sizes == b.sizes && a.strides == b.strides && a.options.dtype() == b.options.dtype() &&
         a.options.device() == b.options.device() && a.shift == b.shift &&
         a.conjugate == b.conjugate && a.negative == b.negative;
}

bool lie_alike(const std::vector<CapturedTensor>& a, const std::vector<CapturedTensor>& b) {
  return std::equal(
      a.begin(), a.end(), b.begin(), b.end(),
      [](const CapturedTensor& one, const CapturedTensor& other) { return one.lies_like(other); });
}

}  // namespace

CapturedTensor::CapturedTensor(const at::Tensor& like) {
  if (!like.defined()) return;
  if (like._is_zerotensor()) {
    tensor_ = like.detach();
  } else {
    layout_.emplace(like);
  }
}

CapturedTensor CapturedTensor::at(const at::Tensor& tensor) {
  CapturedTensor result(tensor);
  // The host's data is a constant of the device graph's.
  if (result.layout_) result.tensor_ = tensor.is_cpu() ? tensor.detach() : borrowed(tensor);
  return result;
}

at::Tensor CapturedTensor::allocate() {
  if (!layout_) return tensor_;
  at::Tensor memory = layout_->allocate();
  tensor_ = borrowed(memory);
  return memory;
}

bool CapturedTensor::lies_like(const CapturedTensor& other) const {
  if (layout_ && other.layout_) return lie_alike(*layout_, *other.layout_);
  return !layout_ && !other.layout_ && tensor_.defined() == other.tensor_.defined();
}

void CapturedTensor::write(const at::Tensor& tensor) const {
  if (!layout_) return;
  const at::NoGradGuard no_grad;
  layout_->flat(tensor_).copy_(layout_->flat(tensor));
}

at::Tensor CapturedTensor::copy() const {
  return layout_ ? graph::copy_as_laid_out(tensor_) : tensor_;
}

StageDeviceGraphs::StageDeviceGraphs(Stage& stage, int microbatches)
    : stage_(stage), server_(microbatches), is_stages_(microbatches) {
  forget_servers();
}

void StageDeviceGraphs::forget_servers() { std::iota(server_.begin(), server_.end(), 0); }

StageDeviceGraphs::Computation& StageDeviceGraphs::of(const Action& action) {
  return computations_.at({action.kind, server_[action.microbatch]});
}

bool StageDeviceGraphs::are_noted_alike(const Action& action, const Action& other) const {
  const Computation& a = computations_.at({action.kind, action.microbatch});
  const Computation& b = computations_.at({other.kind, other.microbatch});
  return lie_alike(a.inputs, b.inputs) &&
         std::equal(a.arriving.begin(), a.arriving.end(), b.arriving.begin(), b.arriving.end(),
                    [](const auto& one, const auto& other) { return lie_alike(one, other); });
}

/// Places of a computation's messages: of values, or of the gradients that go the other way.
std::vector<Message*> StageDeviceGraphs::messages(const Action& action, bool arriving) {
  std::vector<Message*> messages;
  if (action.kind == Action::Kind::kBackwardWeight) return messages;
  const StageProgram& program = stage_.program();
  const bool from_before = arriving != action.is_backward();
  for (int edge : program.own_edges) {
    if ((program.edges[edge].to == program.index) != from_before) continue;
    messages.push_back(&stage_.message(action.microbatch, edge, action.is_backward()));
  }
  return messages;
}

void StageDeviceGraphs::note(const Action& action, const Inputs& inputs) {
  Computation& computation = computations_[{action.kind, action.microbatch}];
  computation = {};
  if (!action.is_backward()) {
    inputs_.clear();
    input_count_ = inputs.size();
    for (const auto& input : stage_.program().inputs) {
      inputs_.push_back(input.position);
      computation.inputs.emplace_back(inputs[input.position]);
    }
  }
  for (const Message* message : arriving(action)) {
    computation.arriving.emplace_back(message->begin(), message->end());
  }
}

void StageDeviceGraphs::forget() {
  forget_servers();
  stage_.forget_casts();
  for (auto& [key, computation] : computations_) {
    Computation noted;
    noted.inputs = std::move(computation.inputs);
    noted.arriving = std::move(computation.arriving);
    computation = std::move(noted);
  }
}

void StageDeviceGraphs::capture(const Action& action, graph::DeviceGraphCapture& capture) {
  Computation& computation = of(action);
  std::vector<at::Tensor> held;  // until the device graph is complete, or it would use their memory
  const bool may_draw = !action.is_backward() || stage_.runs_again();
  computation.work =
      capture.capture(may_draw ? stage_.program().random_ordinals() : std::vector<int>(),
                      [&] { run(action, enter(action, computation), computation, held); });
  addresses_ = stage_.addresses();
}

/// Gives inputs memory. Before the device graph has any, since it is written before that runs.
StageDeviceGraphs::Inputs StageDeviceGraphs::enter(const Action& action, Computation& computation) {
  Inputs inputs(input_count_);
  for (size_t i = 0; i < computation.inputs.size(); ++i) {
    inputs[inputs_[i]] = computation.inputs[i].allocate();
  }
  const auto messages = arriving(action);
  for (size_t i = 0; i < messages.size(); ++i) {
    messages[i]->clear();
    for (CapturedTensor& tensor : computation.arriving[i]) {
      messages[i]->push_back(tensor.allocate());
    }
  }
  return inputs;
}

/// Has the stage compute, and notes where its results lie.
void StageDeviceGraphs::run(const Action& action, const Inputs& inputs, Computation& computation,
                            std::vector<at::Tensor>& held) {
  const auto keep = [&held](const at::Tensor& tensor) {
    held.push_back(tensor);
    return CapturedTensor::at(tensor);
  };
  StepResults results;
  results.keeps_losses = true;
  Gradients gradients;
  if (action.is_backward()) {
    gradients = stage_.backward(action, nullptr);
  } else {
    stage_.forward(action.microbatch, inputs, {}, results);
  }
  for (const auto& loss : results.losses) computation.losses.push_back(keep(loss.value));
  for (const auto& output : results.outputs) {
    computation.outputs.emplace_back(output.position, keep(output.value));
  }
  for (const auto& [parameter, gradient] : gradients) {
    computation.gradients.emplace_back(parameter, keep(gradient));
  }
  for (Message* message : leaving(action)) {
    computation.leaving.emplace_back();
    for (const at::Tensor& tensor : *message) computation.leaving.back().push_back(keep(tensor));
    message->clear();
  }
}

bool StageDeviceGraphs::enters_as_noted(const Action& action, const Inputs& inputs) {
  const Computation& computation = of(action);
  const auto is_same = [](const CapturedTensor& noted, const at::Tensor& tensor) {
    return noted.lies_like(CapturedTensor(tensor));
  };
  for (size_t i = 0; i < computation.inputs.size(); ++i) {
    if (!is_same(computation.inputs[i], inputs[inputs_[i]])) return false;
  }
  const auto messages = arriving(action);
  for (size_t i = 0; i < messages.size(); ++i) {
    const CapturedMessage& noted = computation.arriving[i];
    const bool all = messages[i]->size() == noted.size() &&
                     std::equal(noted.begin(), noted.end(), messages[i]->begin(), is_same);
    if (!all) return false;
  }
  return true;
}

/// Copies the inputs, gives the device its graph, and puts the results into the messages.
void StageDeviceGraphs::launch(const Action& action, const Inputs& inputs,
                               const graph::RandomKey& key) {
  const Computation& computation = of(action);
  for (size_t i = 0; i < computation.inputs.size(); ++i) {
    computation.inputs[i].write(inputs[inputs_[i]]);
  }
  const auto messages = arriving(action);
  for (size_t i = 0; i < messages.size(); ++i) {
    for (size_t k = 0; k < messages[i]->size(); ++k) {
      computation.arriving[i][k].write((*messages[i])[k]);
    }
    messages[i]->clear();
  }
  computation.work.launch(key);
  const auto given = leaving(action);
  for (size_t i = 0; i < given.size(); ++i) {
    for (const CapturedTensor& tensor : computation.leaving[i]) given[i]->push_back(tensor.copy());
  }
}

bool StageDeviceGraphs::forward(const Action& action, const Inputs& inputs,
                                const graph::RandomKey& key, StepResults& results) {
  const int microbatch = action.microbatch;
  const bool is_stages = !enters_as_noted(action, inputs);
  is_stages_[microbatch] = is_stages;
  if (is_stages) return false;
  launch(action, inputs, key);
  const Computation& computation = of(action);
  if (results.keeps_losses) {
    for (const CapturedTensor& tensor : computation.losses) {
      results.losses.push_back({microbatch, tensor.copy()});
    }
  }
  for (const auto& [position, tensor] : computation.outputs) {
    results.outputs.push_back({position, microbatch, tensor.copy()});
  }
  return true;
}

bool StageDeviceGraphs::backward(const Action& action, const graph::RandomKey& key,
                                 GradientSums& sums) {
  if (is_stages_[action.microbatch]) return false;
  // Tensors of other strides have another captured graph, and so another program.
  SMP_INTERNAL_ASSERT(enters_as_noted(action, {}), "stage ", action.stage,
                      " got gradients that do not lie as when its backward was captured");
  launch(action, {}, key);
  Gradients gradients;
  for (const auto& [parameter, tensor] : of(action).gradients) {
    gradients.emplace_back(parameter, tensor.get());
  }
  if (!gradients.empty()) sums.add(action.microbatch, gradients);
  return true;
}

}  // namespace smp::pipeline
