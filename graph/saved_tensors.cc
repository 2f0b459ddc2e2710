// SPDX-License-Identifier: Apache-2.0
#include "graph/saved_tensors.h"

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <utility>

#include "graph/engine.h"

namespace smp::graph {
namespace {

using torch::autograd::SavedVariableHooks;

std::shared_ptr<SavedTensorKeeper>& keeper_of_thread() {
  static thread_local std::shared_ptr<SavedTensorKeeper> keeper;
  return keeper;
}

/// One saved tensor.
class Hooks final : public SavedVariableHooks {
 public:
  explicit Hooks(std::shared_ptr<SavedTensorKeeper> keeper) : keeper_(std::move(keeper)) {}
  ~Hooks() override {
    if (packed_) keeper_->release(number_);
  }

  void call_pack_hook(const at::Tensor& tensor) override {
    number_ = keeper_->pack(tensor);
    packed_ = true;
  }
  at::Tensor call_unpack_hook() override { return keeper_->unpack(number_); }

 private:
  std::shared_ptr<SavedTensorKeeper> keeper_;
  size_t number_ = 0;
  bool packed_ = false;
};

}  // namespace

SavedTensorScope::SavedTensorScope(std::shared_ptr<SavedTensorKeeper> keeper)
    : outer_(std::exchange(keeper_of_thread(), std::move(keeper))) {
  install_engine();
}

std::unique_ptr<SavedVariableHooks> hooks_of_saved_tensors() {
  const auto& keeper = keeper_of_thread();
  return keeper == nullptr ? nullptr : std::make_unique<Hooks>(keeper);
}

SavedTensorScope::~SavedTensorScope() { keeper_of_thread() = std::move(outer_); }

}  // namespace smp::graph
