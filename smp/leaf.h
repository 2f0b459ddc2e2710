// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <any>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "smp/detail/structure.h"
#include "smp/export.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace smp {

/// The writes in place that a leaf may do under no_grad, beside those to tensors of its own.
enum class LeafWrites {
  kBuffers,            ///< buffers of modules that are training
  kParameters,         ///< those, and its parameters, from values that all replicas have
  kParametersByBatch,  ///< those, from its arguments: refused where there are several replicas
};

namespace detail {

/// True for a tensor and for structures that hold nothing else, in numbers that do not depend on
/// data.
template <class T>
constexpr bool holds_only_tensors();

template <class... T>
constexpr bool hold_only_tensors(TypeList<T...>) {
  return (holds_only_tensors<T>() && ...);
}

template <class T>
constexpr bool holds_only_tensors() {
  constexpr Shape kShape = Parts<T>::kShape;
  if constexpr (kShape == Shape::kOpaque || kShape == Shape::kChoice) {
    return IsTensor<T>::value;
  } else {
    return hold_only_tensors(typename Parts<T>::Types{});
  }
}

/// A value without the content of its tensors: numbers that may change without a change of shapes,
/// and a text of all the rest.
class Description {
 public:
  template <class T>
  void add(const T& value) {
    if constexpr (IsTensor<T>::value) {
      rest_ << "tensor";
    } else if constexpr (std::is_enum_v<T>) {
      rest_ << static_cast<int64_t>(value);
    } else if constexpr (std::is_integral_v<T>) {
      rest_ << +value;
    } else if constexpr (std::is_floating_point_v<T>) {
      numbers_ << " " << value;
    } else if constexpr (std::is_convertible_v<const T&, std::string_view>) {
      rest_ << '"' << std::string_view(value) << '"';
    } else {
      add_parts(value);
    }
  }

  /// 17 digits tell any two doubles apart.
  Description() { numbers_.precision(17); }
  std::string numbers() const { return numbers_.str(); }
  std::string rest() const { return rest_.str(); }

 private:
  template <class T>
  void add_parts(const T& value) {
    constexpr Shape kShape = Parts<T>::kShape;
    if constexpr (kShape == Shape::kOpaque) {
      rest_ << "object";
    } else if constexpr (kShape == Shape::kMap) {
      rest_ << "{";
      Parts<T>::visit_items(value, [&](const auto& key, const auto& element) {
        add(key);
        rest_ << ": ";
        add_element(element);
      });
      rest_ << "}";
    } else {
      if constexpr (kShape == Shape::kChoice) rest_ << value.index();
      rest_ << (kShape == Shape::kSequence ? "[" : "(");
      Parts<T>::visit(value, [&](const auto& part) { add_element(part); });
      rest_ << (kShape == Shape::kSequence ? "]" : ")");
    }
  }

  template <class T>
  void add_element(const T& element) {
    add(element);
    rest_ << ", ";
  }

  std::ostringstream numbers_, rest_;
};

/// The result of a leaf's module: its tensors in order, and the rest without them.
struct LeafResult {
  std::vector<at::Tensor> tensors;
  std::any rest;
  std::string structure;  ///< equal for results that are alike
};

/// Calls the module with these tensors in place of the arguments'.
using RunLeaf = std::function<LeafResult(const std::vector<at::Tensor>& tensors)>;

/// True where a call of a leaf is recorded instead of made at once.
SMP_API bool records_leaves();

/// Records a call of `module` as one operator with these tensors as inputs. The values that
/// `arguments` describes belong to the call; `run` outlives the step, so it holds none of the
/// tensors. Returns the tensors of this call, and the rest of the result as it was when the call
/// was recorded.
SMP_API LeafResult call_leaf(torch::nn::Module& module, LeafWrites writes,
                             const Description& arguments, const std::vector<at::Tensor>& inputs,
                             RunLeaf run);

}  // namespace detail

/// A module to be called as one opaque node; see `leaf`. `M` is the module's holder (of
/// TORCH_MODULE) or a shared_ptr to it.
template <class M>
class Leaf {
 public:
  explicit Leaf(M module, LeafWrites writes = LeafWrites::kBuffers)
      : module_(std::move(module)), writes_(writes) {}

  /// Calls the module's `forward`. In a step function it is recorded as one operator and runs on
  /// the stage that holds the module's parameters; elsewhere it is called at once.
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    using Raw = decltype(module_->forward(std::forward<Arguments>(arguments)...));
    using Result = detail::AsArgument<Raw>;
    static_assert(detail::holds_only_tensors<Result>(),
                  "the forward of a leaf module returns a tensor, or tensors in vectors, tuples, "
                  "maps, optionals and structs with SMP_FIELDS. Anything else may depend on data, "
                  "which a step function does not see");
    if (!detail::records_leaves()) {
      return Result(module_->forward(std::forward<Arguments>(arguments)...));
    }
    return call<Result>(std::tuple<detail::AsArgument<Arguments>...>(
        detail::as_argument(std::forward<Arguments>(arguments))...));
  }

 private:
  template <class Result, class Whole>
  Result call(Whole whole) {
    detail::Description described;
    described.add(whole);
    const std::vector<at::Tensor> inputs = take_tensors(whole);
    const detail::LeafResult returned = detail::call_leaf(
        *module_, writes_, described, inputs,
        [module = module_, whole = std::move(whole)](const std::vector<at::Tensor>& tensors) {
          return run<Result>(module, whole, tensors);
        });
    Result result = std::any_cast<Result>(returned.rest);
    put_tensors(returned.tensors, result);
    return result;
  }

  template <class Result, class Whole>
  static detail::LeafResult run(M module, Whole arguments, const std::vector<at::Tensor>& tensors) {
    put_tensors(tensors, arguments);
    Result result = std::apply(
        [&](auto&... argument) -> Result { return module->forward(argument...); }, arguments);
    detail::Description described;
    described.add(result);
    std::vector<at::Tensor> results = take_tensors(result);
    return {std::move(results), std::move(result), described.rest()};
  }

  /// Leaves undefined tensors in their place.
  template <class Value>
  static std::vector<at::Tensor> take_tensors(Value& value) {
    std::vector<at::Tensor> tensors;
    detail::for_each_tensor(
        value, [&](at::Tensor& tensor) { tensors.push_back(std::exchange(tensor, at::Tensor())); });
    return tensors;
  }

  template <class Value>
  static void put_tensors(const std::vector<at::Tensor>& tensors, Value& value) {
    size_t next = 0;
    detail::for_each_tensor(value, [&](at::Tensor& tensor) { tensor = tensors[next++]; });
  }

  M module_;
  LeafWrites writes_;
};

/// Makes `module` a leaf for one call: inside `forward`, write `smp::leaf(moe)(x)` for `moe(x)`
/// where the module does something that a step cannot capture: control flow that depends on data,
/// reading a tensor on the host (`item`), routing, a custom `torch::autograd::Function`.
///
/// The module runs as it is, once per microbatch, on the stage that holds its parameters; all of
/// them lie on one stage. Outside of a step function the call is an ordinary one. Tensors in the
/// arguments (also inside the types that a step function looks into) are its inputs; the number and
/// the shapes of the tensors it returns may not depend on data. A floating point argument may
/// change from step to step; another integer, bool, enum or string makes another graph; other
/// objects are taken as they are at each step, and are not compared.
///
/// A module that changes its parameters in `forward` (a weight that is clamped or normalised under
/// no_grad, a codebook) says so by `writes`. The values that each microbatch's backward needs of
/// them are then copied. Such parameters are read by leaves only, and every replica writes its own.
///
/// Throws `CaptureError` where the module writes an input, or a parameter without saying so,
/// returns a tensor that shares memory with another one, or returns other shapes than were
/// recorded. See docs/capture.md.
///
/// Example:
/// \code
///   torch::Tensor forward(torch::Tensor x) { return head(x + smp::leaf(experts)(norm(x))); }
/// \endcode
template <class M>
Leaf<M> leaf(M module, LeafWrites writes = LeafWrites::kBuffers) {
  return Leaf<M>(std::move(module), writes);
}

}  // namespace smp
