// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <any>
#include <map>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "smp/detail/returned.h"
#include "smp/detail/step_call.h"
#include "smp/detail/step_core.h"
#include "smp/step_options.h"

namespace smp {

/// A step function made by `step`. Copies share the same function.
template <class Function>
class Step {
 public:
  Step(Function function, StepOptions options)
      : function_(std::make_shared<Function>(std::move(function))),
        options_(std::move(options)),
        core_(std::make_shared<detail::StepCore>(options_)) {}

  /// Runs the function once per microbatch, pipelined over the ranks. Tensors in the arguments
  /// (also inside vectors, arrays, tuples, optionals and maps) are cut into microbatches along axis
  /// 0. Collective: all ranks call it, ranks of one pipeline with the same inputs.
  ///
  /// The function itself runs once per step on this rank, on tensors without data, to see which
  /// operators it calls (once per microbatch if an argument has `smp_slice`; seldomer if the
  /// configuration's `guard` says so); see docs/capture.md.
  /// An argument with `T smp_slice(int64_t microbatches, int64_t microbatch, int64_t axis) const`
  /// cuts itself; tensors inside it are constants of the microbatch.
  ///
  /// Returns the function's result with a `StepOutput` in place of every tensor and a list by
  /// microbatch in place of anything else. Throws what the function throws, `CaptureError` for
  /// what cannot be captured, `UsageError` for wrong inputs and `CommError` when a peer failed.
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    static_assert(!(detail::IsDataLoader<std::decay_t<Arguments>>::value || ...),
                  "a step function takes the tensors of a batch, not a DataLoader: loop over the "
                  "loader and pass batch.data and batch.target");
    using Raw = std::decay_t<std::invoke_result_t<Function&, detail::AsArgument<Arguments>&...>>;
    constexpr bool returns_nothing = std::is_void_v<Raw>;
    using Result = std::conditional_t<returns_nothing, detail::Nothing, Raw>;
    core_->check_positions(static_cast<int>(sizeof...(Arguments)));
    std::tuple<detail::AsArgument<Arguments>...> whole(std::forward<Arguments>(arguments)...);
    using Results = std::map<int, Result>;
    auto results = std::make_shared<Results>();
    const auto* last = std::any_cast<std::shared_ptr<Results>>(last_results_.get());
    detail::StepCall call = make_call<Result>(whole, *results);
    call.has_last_result = last != nullptr;
    const detail::StepResults outputs = core_->run(call);
    if (results->empty()) results = *last;  // the function did not run
    if (!core_->guards_every_step()) *last_results_ = results;
    if constexpr (!returns_nothing) return collect(*results, outputs);
  }

  /// How many microbatches a call runs.
  int64_t microbatches() const { return core_->microbatches(); }

  /// What this rank did in the last call, as text: the schedule; of each of its stages the
  /// parameters, inputs and constants that it reads, what it gets from other stages and gives to
  /// them, and where gradients go; and its actions in their order (docs/schedules.md). Empty before
  /// the first call.
  std::string program() const { return core_->program(); }

 private:
  template <class Result, class Whole>
  detail::StepCall make_call(const Whole& whole, std::map<int, Result>& results) {
    detail::StepCall call;
    add_arguments(call, whole, std::make_index_sequence<std::tuple_size_v<Whole>>());
    call.function = [this, &whole, &results](int microbatch,
                                             const std::vector<at::Tensor>& tensors) {
      Whole arguments =
          slice_objects(whole, microbatch, std::make_index_sequence<std::tuple_size_v<Whole>>());
      size_t next = 0;
      detail::for_each_tensor(arguments, [&](at::Tensor& tensor) { tensor = tensors[next++]; });
      std::vector<at::Tensor> returned;
      Result result = apply<Result>(arguments);
      detail::for_each_tensor(result, [&](at::Tensor& tensor) { returned.push_back(tensor); });
      results.insert_or_assign(microbatch, std::move(result));
      return returned;
    };
    return call;
  }

  template <class Result, class Whole>
  Result apply(Whole& arguments) {
    if constexpr (std::is_same_v<Result, detail::Nothing>) {
      std::apply(*function_, arguments);
      return {};
    } else {
      return std::apply(*function_, arguments);
    }
  }

  template <class Whole, size_t... I>
  void add_arguments([[maybe_unused]] detail::StepCall& call, [[maybe_unused]] const Whole& whole,
                     std::index_sequence<I...>) const {
    (add_argument(call, static_cast<int>(I), std::get<I>(whole)), ...);
  }

  template <class T>
  void add_argument(detail::StepCall& call, int position, const T& argument) const {
    if constexpr (detail::SlicesItself<T>::value) call.per_microbatch = true;
    const std::optional<int64_t> axis = axis_of(position);
    detail::for_each_tensor(argument, [&](const at::Tensor& tensor) {
      call.tensors.push_back(tensor);
      call.axes.push_back(axis);
    });
  }

  /// The axis along which an argument's tensors are cut, from the end if negative; nothing for
  /// those that every microbatch gets whole.
  std::optional<int64_t> axis_of(int position) const {
    const auto& whole = options_.non_split_inputs();
    if (std::find(whole.begin(), whole.end(), position) != whole.end()) return std::nullopt;
    const auto axis = options_.input_split_axes().find(position);
    return axis == options_.input_split_axes().end() ? 0 : axis->second;
  }

  template <class Whole, size_t... I>
  Whole slice_objects([[maybe_unused]] const Whole& whole, [[maybe_unused]] int microbatch,
                      std::index_sequence<I...>) const {
    return Whole{slice_object(std::get<I>(whole), static_cast<int>(I), microbatch)...};
  }

  template <class T>
  T slice_object(const T& argument, int position, int microbatch) const {
    if constexpr (detail::SlicesItself<T>::value) {
      const std::optional<int64_t> axis = axis_of(position);
      if (axis) return argument.smp_slice(microbatches(), microbatch, *axis);
    }
    return argument;
  }

  template <class Result>
  auto collect(const std::map<int, Result>& results, const detail::StepResults& outputs) const {
    // One run stands for all microbatches unless arguments slice themselves.
    std::vector<const Result*> by_microbatch;
    for (int m = 0; m < microbatches(); ++m) {
      const auto found = results.find(m);
      by_microbatch.push_back(found == results.end() ? &results.begin()->second : &found->second);
    }
    size_t next = 0;
    return detail::gather(by_microbatch, [&] { return outputs[next++]; });
  }

  std::shared_ptr<Function> function_;
  StepOptions options_;
  std::shared_ptr<detail::StepCore> core_;
  // What the function returned in the last guarded call, a map as in `operator()`.
  std::shared_ptr<std::any> last_results_ = std::make_shared<std::any>();
};

/// Makes a step function: `function` describes one training (or evaluation) step on one
/// microbatch and calls the models in it; if it trains it calls `model->backward(loss)` and returns
/// what the caller wants to see. As documented for SMP's `@smp.step`.
///
/// Example:
/// \code
///   auto train = smp::step([&](torch::Tensor x, torch::Tensor y) {
///     auto loss = torch::mse_loss(model(x), y);
///     model->backward(loss);
///     return loss;
///   });
///   optimizer.zero_grad();
///   auto loss = train(x, y).reduce_mean();
///   optimizer.step();
/// \endcode
template <class Function>
Step<std::decay_t<Function>> step(Function&& function, StepOptions options = {}) {
  return Step<std::decay_t<Function>>(std::forward<Function>(function), std::move(options));
}

}  // namespace smp
