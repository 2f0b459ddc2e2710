// SPDX-License-Identifier: Apache-2.0
#include "graph/engine.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>
#include <mutex>

#include "graph/intercept.h"
#include "graph/saved_tensors.h"

namespace smp::graph {
namespace {

using torch::autograd::Engine;

class WatchedEngine final : public Engine {
 public:
  WatchedEngine() = default;
  ~WatchedEngine() override { stop(); }

  /// Starts a thread for each device other than the CPU. An engine does so at its first backward,
  /// but only the first engine of a process: that one has to be done with it before.
  void start() {
    get_base_engine().initialize_device_threads_pool();
    start_device_threads();
  }

  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& gradients,
                                         bool keep_graph, bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    auto answer =
        announce_backward({roots, gradients, keep_graph, create_graph, accumulate_grad, outputs});
    if (answer) return *std::move(answer);
    return Engine::execute(roots, gradients, keep_graph, create_graph, accumulate_grad, outputs);
  }

  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    return hooks_of_saved_tensors();
  }
};

WatchedEngine& watched_engine() {
  static WatchedEngine engine;
  return engine;
}

}  // namespace

void install_engine() {
  static std::once_flag installed;
  std::call_once(installed, [] {
    watched_engine().start();
    torch::autograd::set_default_engine_stub([]() -> Engine& { return watched_engine(); });
  });
}

}  // namespace smp::graph
