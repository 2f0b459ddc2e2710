// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/DimVector.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <map>
#include <tuple>

namespace smp::graph {

/// The lower-precision copies of weights that autocast makes. In a step each is made once, and all
/// microbatches read it, in second runs as well; libtorch's own cache ends with a microbatch. Only
/// the memory is shared: each cast has a history of its own, as without it, so gradients are cast
/// and added as without it.
///
/// Nothing writes the weights during a step. Belongs to one thread at a time.
class WeightCasts {
 public:
  /// While it lives, casts of some tensors by autocast on this thread are those of `casts`. For the
  /// call of one operator, which gets the tensors as arguments, casts none itself, and writes no
  /// cast (`weights_to_cast`).
  class Scope {
   public:
    struct Weight {
      const at::TensorImpl* tensor;
      int memory;  ///< its memory's alias set, the same in each step
    };
    using Weights = c10::SmallVector<Weight, 2>;

    Scope(WeightCasts& casts, Weights weights);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    friend struct CastGiver;
    bool replace(const c10::OperatorHandle& op, torch::jit::Stack& stack) const;

    WeightCasts& casts_;
    const Weights weights_;
    const bool was_excluded_;  // autocast of the weights' device, before the call
    const Scope* const previous_;
    const c10::impl::IncludeDispatchKeyGuard include_;
  };

  bool are_shared() const { return use_ != Use::kNothing; }
  /// Those of the step.
  int64_t bytes() const;

  /// From now on casts are shared.
  void begin_step();
  /// From now on they are not, and those of the step are gone.
  void end_step();

  /// For device graphs, which read a cast in each step where it lay when they were captured. Before
  /// the capture, whose memory other work of theirs overwrites: gives memory to the casts of the
  /// last step that shared some. Until the next step no operator writes it, from then on
  /// `begin_step` does. The graphs make other casts themselves.
  void reserve();
  /// Ends that. The memory is free.
  void forget();

 private:
  enum class Use { kNothing, kStep, kReserves, kKept };
  /// The weight's alias set, its place and layout there, and the type of the cast.
  using Key = std::tuple<int, int64_t, at::DimVector, at::DimVector, at::ScalarType>;
  /// Without tensors it is one of an earlier step.
  struct Cast {
    c10::Device device;
    at::Tensor weight;  // undefined until the cast is read
    at::Tensor tensor;
  };

  at::Tensor of(const at::Tensor& weight, int memory, at::ScalarType type);
  void write_all();

  Use use_ = Use::kNothing;
  std::map<Key, Cast> casts_;
};

}  // namespace smp::graph
