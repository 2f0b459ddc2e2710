// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace smp::graph {

/// Puts an autograd engine in place of libtorch's default one, once in a process. It differs in
/// that a backward pass is announced to the thread's interceptor (`announce_backward`) before it
/// begins, which may answer it, and that tensors are saved as the thread's `SavedTensorScope` says:
/// libtorch offers C++ no hooks for either, other than virtual functions of the engine.
void install_engine();

}  // namespace smp::graph
