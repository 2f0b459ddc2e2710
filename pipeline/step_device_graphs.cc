// SPDX-License-Identifier: Apache-2.0
#include "pipeline/step_device_graphs.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "core/check.h"
#include "core/log.h"
#include "graph/device_graph.h"

namespace smp::pipeline {

StepDeviceGraphs::StepDeviceGraphs(at::Device device, const std::vector<Action>& actions,
                                   int microbatches, bool required)
    : device_(device), actions_(actions), microbatches_(microbatches), required_(required) {
  if (!graph::has_device_graphs(device)) {
    report(c10::str("device ", device, " has none",
                    device.is_cuda() ? " in this build: build for CUDA (docs/cuda.md)" : ""));
  }
}

StepDeviceGraphs::~StepDeviceGraphs() { wait_for_launches(); }

/// The states of a device graph's generators go with it, and their memory is not of the stream on
/// which launches read them, so nothing else waits for that.
void StepDeviceGraphs::wait_for_launches() {
  if (!launched_on_) return;
  try {
    c10::impl::VirtualGuardImpl(device_.type()).synchronizeStream(*launched_on_);
  } catch (const c10::Error&) {
    // The device has failed, and reads nothing any more.
  }
  launched_on_.reset();
}

void StepDeviceGraphs::add_stage(Stage& stage) {
  if (!graph::has_device_graphs(device_)) return;
  if (const core::Refusal refusal = stage.why_no_device_graphs()) {
    report(c10::str("stage ", stage.index(), ": ", *refusal));
    return;
  }
  graphs_.try_emplace(stage.index(), stage, microbatches_);
}

/// A reason against device graphs holds ever after.
void StepDeviceGraphs::give_up(const std::string& reason) {
  forget_graphs();
  graphs_.clear();
  report(reason);
}

void StepDeviceGraphs::report(const std::string& reason) {
  SMP_CHECK_WITH(UsageError, !required_,
                 "\"cuda_graphs\": \"on\", but not all that this rank "
                 "computes can be captured: ",
                 reason, ". Set it to \"auto\" to run that operator by operator");
  core::log_warning("\"cuda_graphs\": runs operator by operator: " + reason);
}

void StepDeviceGraphs::begin_step(const core::Refusal& refusal) {
  if (graphs_.empty()) return;
  is_noted_ |= use_ == Use::kNotes;
  use_ = Use::kNothing;
  if (refusal) {
    give_up(*refusal);
    return;
  }
  if (is_captured_ && !are_valid()) forget_graphs();
  if (is_noted_ && !is_captured_) {
    if (const core::Refusal why_not_captured = capture()) give_up(*why_not_captured);
  }
  use_ = is_captured_ ? Use::kLaunches : Use::kNotes;
  if (is_captured_) launched_on_ = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
}

bool StepDeviceGraphs::are_valid() const {
  return std::all_of(graphs_.begin(), graphs_.end(),
                     [](const auto& entry) { return entry.second.are_valid(); });
}

void StepDeviceGraphs::forget_graphs() {
  wait_for_launches();
  for (auto& [stage, graphs] : graphs_) graphs.forget();
  is_captured_ = false;
}

/// Returns why that was not possible. Without those that fail nothing is captured: others would
/// have the memory that theirs leaves.
core::Refusal StepDeviceGraphs::capture() {
  for (const bool again : {false, true}) {
    try {
      capture_all();
      return std::nullopt;
    } catch (const c10::Error& error) {
      for (auto& [index, graphs] : graphs_) graphs.stage().forget_microbatches();
      forget_graphs();
      const bool lacks_memory = dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr;
      if (again || !lacks_memory) return error.what_without_backtrace();
    }
    // libtorch keeps the memory that the first step has freed. Not before: to give it back may wait
    // for other devices of the process, and so for other ranks.
    c10::getDeviceAllocator(device_.type())->emptyCache();
  }
  return std::nullopt;
}

/// The computations of stages that are captured, from where no forward waits for its backward to
/// the next such point.
std::vector<StepDeviceGraphs::Block> StepDeviceGraphs::blocks() const {
  Block all;
  std::copy_if(
      actions_.begin(), actions_.end(), std::back_inserter(all),
      [&](const Action& action) { return action.is_compute() && graphs_.count(action.stage) > 0; });
  const auto key_of = [](const Action& action) {
    return std::make_pair(action.stage, action.microbatch);
  };
  std::map<std::pair<int, int>, int> left;  // computations by stage and microbatch
  for (const Action& action : all) ++left[key_of(action)];
  std::set<std::pair<int, int>> waiting;
  std::vector<Block> blocks;
  for (const Action& action : all) {
    if (waiting.empty()) blocks.emplace_back();
    blocks.back().push_back(action);
    waiting.insert(key_of(action));
    if (--left[key_of(action)] == 0) waiting.erase(key_of(action));
  }
  return blocks;
}

/// Whether the device graphs of one do for the other: the same computations of inputs that lie
/// alike.
bool StepDeviceGraphs::serves(const Block& captured, const Block& block) const {
  const auto is_alike = [&](const Action& a, const Action& b) {
    return a.kind == b.kind && a.stage == b.stage &&
           a.microbatch - captured.front().microbatch == b.microbatch - block.front().microbatch &&
           graphs_.at(a.stage).are_noted_alike(a, b);
  };
  return std::equal(captured.begin(), captured.end(), block.begin(), block.end(), is_alike);
}

/// Captures each block, or has an earlier one serve it. Returns how many device graphs there are.
size_t StepDeviceGraphs::capture(const std::vector<Block>& blocks) {
  graph::DeviceGraphCapture capture(device_);
  std::vector<const Block*> captured;
  size_t graphs = 0;
  for (const Block& block : blocks) {
    const auto server = std::find_if(captured.begin(), captured.end(),
                                     [&](const Block* other) { return serves(*other, block); });
    for (size_t i = 0; i < block.size(); ++i) {
      StageDeviceGraphs& stage = graphs_.at(block[i].stage);
      if (server == captured.end()) {
        stage.capture(block[i], capture);
        ++graphs;
      } else {
        stage.serve(block[i].microbatch, (**server)[i].microbatch);
      }
    }
    if (server == captured.end()) captured.push_back(&block);
  }
  return graphs;
}

void StepDeviceGraphs::capture_all() {
  for (auto& [index, graphs] : graphs_) {
    graphs.stage().forget_leaves();
    graphs.stage().reserve_casts();
  }
  const std::vector<Block> blocks = this->blocks();
  const size_t graphs = capture(blocks);
  for (auto& [index, graphs] : graphs_) graphs.stage().forget_leaves();
  is_captured_ = true;
  size_t computations = 0;
  for (const Block& block : blocks) computations += block.size();
  core::log_info(c10::str("\"cuda_graphs\": ", computations, " computations of ", graphs_.size(),
                          graphs_.size() == 1 ? " stage" : " stages", " are captured in ", graphs,
                          graphs == 1 ? " graph" : " graphs"));
}

bool StepDeviceGraphs::forward(const Action& action, const std::vector<at::Tensor>& inputs,
                               const graph::RandomKey& key, StepResults& results) {
  const auto graphs = graphs_.find(action.stage);
  if (graphs == graphs_.end()) return false;
  if (use_ == Use::kNotes) graphs->second.note(action, inputs);
  if (use_ != Use::kLaunches) return false;
  if (graphs->second.forward(action, inputs, key, results)) return true;
  if (said_.insert(action.stage).second) {
    core::log_warning(
        c10::str("\"cuda_graphs\": stage ", action.stage,
                 " runs a microbatch operator by operator: what it gets begins "
                 "elsewhere between two multiples of 64 bytes than in the first step. "
                 "This is said once"));
  }
  return false;
}

bool StepDeviceGraphs::backward(const Action& action, const graph::RandomKey& key,
                                GradientSums& sums) {
  const auto graphs = graphs_.find(action.stage);
  if (graphs == graphs_.end()) return false;
  if (use_ == Use::kNotes) graphs->second.note(action, {});
  return use_ == Use::kLaunches && graphs->second.backward(action, key, sums);
}

}  // namespace smp::pipeline
