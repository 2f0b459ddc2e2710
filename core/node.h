// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace smp::core {

using torch::autograd::Node;

/// libtorch 2.11 holds the nodes of autograd's graph by std::shared_ptr, 2.14 by
/// c10::intrusive_ptr.
inline constexpr bool kNodesAreShared =
    std::is_same_v<decltype(torch::autograd::Edge::function), std::shared_ptr<Node>>;

/// Holds a node of type T.
template <class T>
using NodePtrTo = std::conditional_t<kNodesAreShared, std::shared_ptr<T>, c10::intrusive_ptr<T>>;

using NodePtr = NodePtrTo<Node>;
using WeakNodePtr =
    std::conditional_t<kNodesAreShared, std::weak_ptr<Node>, c10::weak_intrusive_ptr<Node>>;

template <class T, class... Arguments>
NodePtrTo<T> make_node(Arguments&&... arguments) {
  if constexpr (kNodesAreShared) {
    return std::make_shared<T>(std::forward<Arguments>(arguments)...);
  } else {
    return c10::make_intrusive<T>(std::forward<Arguments>(arguments)...);
  }
}

}  // namespace smp::core
