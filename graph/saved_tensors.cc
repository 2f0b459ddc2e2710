#include "graph/saved_tensors.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <mutex>
#include <utility>

namespace smp::graph {
namespace {

using torch::autograd::Engine;
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

class KeepingEngine final : public Engine {
 public:
  KeepingEngine() = default;
  ~KeepingEngine() override { stop(); }

  /// Starts a thread for each device other than the CPU. An engine does so at its first backward,
  /// but only the first engine of a process: that one has to be done with it before.
  void start() {
    get_base_engine().initialize_device_threads_pool();
    start_device_threads();
  }

  std::unique_ptr<SavedVariableHooks> get_default_saved_variable_hooks() override {
    const auto& keeper = keeper_of_thread();
    return keeper == nullptr ? nullptr : std::make_unique<Hooks>(keeper);
  }
};

KeepingEngine& keeping_engine() {
  static KeepingEngine engine;
  return engine;
}

void install_keeping_engine() {
  keeping_engine().start();
  torch::autograd::set_default_engine_stub([]() -> Engine& { return keeping_engine(); });
}

}  // namespace

SavedTensorScope::SavedTensorScope(std::shared_ptr<SavedTensorKeeper> keeper)
    : outer_(std::exchange(keeper_of_thread(), std::move(keeper))) {
  static std::once_flag installed;
  std::call_once(installed, &install_keeping_engine);
}

bool SavedTensorScope::is_active() { return keeper_of_thread() != nullptr; }

SavedTensorScope::~SavedTensorScope() { keeper_of_thread() = std::move(outer_); }

}  // namespace smp::graph
