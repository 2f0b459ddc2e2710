// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <any>
#include <initializer_list>
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
#include "smp/whole.h"

namespace smp {

namespace detail {

/// Whether a step function finds all tensors in an argument. Does not compile if it may not: it
/// would give the whole batch to every microbatch.
template <class T>
constexpr bool finds_tensors_of_argument() {
  constexpr bool is_known = IsWhole<T>::value || !content_of<AsArgument<T>>().unknown;
  static_assert(
      is_known,
      "an argument of a step function is of a class in which tensors may be that are not "
      "found, so that they would not be cut into microbatches. Inside of the class, list "
      "its fields: SMP_FIELDS(x, y); or say that it holds none: template <> inline "
      "constexpr bool smp::holds_no_tensors<T> = true; or give every microbatch the whole "
      "of the argument: smp::whole(argument). Of a pointer or reference pass the object");
  return is_known;
}

/// The same for a result, in which tensors that are not found would have no data.
template <class T>
constexpr bool finds_tensors_of_result() {
  constexpr bool is_known = !content_of<T>().unknown && !content_of<T>().slices;
  static_assert(
      is_known,
      "the result of a step function is of a class in which tensors may be that are not "
      "found, so that they would have no data. Inside of the class, list its fields: "
      "SMP_FIELDS(loss, logits); or say that it holds none: template <> inline constexpr "
      "bool smp::holds_no_tensors<T> = true. Of a pointer or reference return the object");
  return is_known;
}

}  // namespace detail

/// A step function made by `step`. Copies share the same function.
template <class Function>
class Step {
 public:
  Step(Function function, StepOptions options)
      : function_(std::make_shared<Function>(std::move(function))),
        options_(std::move(options)),
        core_(std::make_shared<detail::StepCore>(options_)) {}

  /// Runs the function once per microbatch, pipelined over the ranks. Tensors in the arguments are
  /// cut into microbatches along axis 0: also those inside of containers, tuples, optionals,
  /// variants, shared pointers, `torch::data::Example`s, `c10::IValue`s and structs with
  /// `SMP_FIELDS`, in any nesting. Undefined ones stay undefined, and an argument given by
  /// `smp::whole` is not cut. Numbers, strings and other values without tensors are passed as they
  /// are; a class that may have some and does not say where does not compile. All microbatches have
  /// as many samples: a batch that `microbatches()` does not divide is cut into the next smaller
  /// number that does. Collective: all ranks call it, ranks of one pipeline with the same inputs.
  ///
  /// The function itself runs once per step on this rank, on tensors without data, to see which
  /// operators it calls; see docs/capture.md. (It runs once per microbatch if an argument has
  /// `smp_slice`, less often if the configuration's `guard` says so.) An argument with `T
  /// smp_slice(int64_t microbatches, int64_t microbatch, int64_t axis) const` cuts itself; tensors
  /// inside it are constants of the microbatch.
  ///
  /// Returns the function's result with a `StepOutput` in place of every tensor and a list by
  /// microbatch in place of anything else; a struct with `SMP_FIELDS` becomes a tuple of its
  /// fields. Throws the function's exceptions, `CaptureError` for code that cannot be captured,
  /// `UsageError` for wrong inputs and `CommError` when a peer failed.
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    if constexpr (can_take<Arguments...>()) {
      using Raw = std::decay_t<std::invoke_result_t<Function&, detail::AsArgument<Arguments>&...>>;
      return call<std::conditional_t<std::is_void_v<Raw>, detail::Nothing, Raw>>(
          std::tuple<detail::AsArgument<Arguments>...>(
              detail::as_argument(std::forward<Arguments>(arguments))...),
          {detail::IsWhole<std::decay_t<Arguments>>::value...});
    }
  }

  /// How many microbatches a call runs: fewer where the batch is not divisible by them.
  int64_t microbatches() const { return core_->microbatches(); }

  /// The work of this rank in the last call, as text: the schedule; for each of its stages the
  /// parameters, inputs and constants that it reads, the values that it exchanges with other
  /// stages, and where gradients go; and its actions in their order (docs/schedules.md). Empty
  /// before the first call.
  std::string program() const { return core_->program(); }

 private:
  /// Whether the function can be called with such arguments. Does not compile if it cannot.
  template <class... Arguments>
  static constexpr bool can_take() {
    constexpr bool no_loader = !(detail::IsDataLoader<std::decay_t<Arguments>>::value || ...);
    static_assert(no_loader,
                  "a step function takes the tensors of a batch, not a DataLoader: loop over the "
                  "loader and pass each batch");
    if constexpr (no_loader) {
      if constexpr ((detail::finds_tensors_of_argument<std::decay_t<Arguments>>() && ...)) {
        constexpr bool fits = std::is_invocable_v<Function&, detail::AsArgument<Arguments>&...>;
        static_assert(fits,
                      "the arguments of this call do not fit the parameters of the step function: "
                      "look at how many there are, and at their types, in its order");
        return fits;
      }
    }
    return false;
  }

  template <class Result, class Tuple>
  auto call(const Tuple& whole, std::initializer_list<bool> go_whole) {
    if constexpr (detail::finds_tensors_of_result<Result>()) {
      core_->check_positions(static_cast<int>(std::tuple_size_v<Tuple>));
      using Results = std::map<int, Result>;
      auto results = std::make_shared<Results>();
      const auto* last = std::any_cast<std::shared_ptr<Results>>(last_results_.get());
      detail::StepCall call = make_call<Result>(whole, axes(go_whole), *results);
      call.has_last_result = last != nullptr;
      const detail::StepResults outputs = core_->run(call);
      if (results->empty()) results = *last;  // the function did not run
      if (!core_->guards_every_step()) *last_results_ = results;
      if constexpr (!std::is_same_v<Result, detail::Nothing>) {
        return collect(*results, outputs, call.microbatches);
      }
    }
  }

  template <class Result, class Tuple>
  detail::StepCall make_call(const Tuple& whole, std::vector<detail::Cut> cuts,
                             std::map<int, Result>& results) {
    detail::StepCall call;
    for_each_argument(whole, cuts, [&, place = 0](const auto& argument, const auto& cut) mutable {
      add_argument(call, argument, cut, place);
    });
    call.microbatches = core_->count_microbatches(call);
    call.function = [this, &whole, cuts, &results, count = call.microbatches](
                        int microbatch, const std::vector<at::Tensor>& tensors) {
      Tuple arguments = whole;
      for_each_argument(arguments, cuts, [&](auto& argument, const auto& cut) {
        slice_object(argument, cut, count, microbatch);
      });
      size_t next = 0;
      detail::for_each_tensor(arguments, [&](at::Tensor& tensor) {
        if (tensor.defined()) tensor = tensors[next++];
      });
      std::vector<at::Tensor> returned;
      Result result = apply<Result>(arguments);
      detail::for_each_tensor(std::as_const(result),
                              [&](const at::Tensor& tensor) { returned.push_back(tensor); });
      results.insert_or_assign(microbatch, std::move(result));
      return returned;
    };
    return call;
  }

  template <class Result, class Tuple>
  Result apply(Tuple& arguments) {
    if constexpr (std::is_same_v<Result, detail::Nothing>) {
      std::apply(*function_, arguments);
      return {};
    } else {
      return std::apply(*function_, arguments);
    }
  }

  /// Calls `visit(argument, how it is cut)`.
  template <class Tuple, class Visit>
  static void for_each_argument(Tuple& arguments, const std::vector<detail::Cut>& cuts,
                                Visit visit) {
    [[maybe_unused]] auto cut = cuts.begin();
    std::apply([&](auto&... argument) { (visit(argument, *cut++), ...); }, arguments);
  }

  template <class T>
  void add_argument(detail::StepCall& call, const T& argument, const detail::Cut& cut,
                    int& place) const {
    call.per_microbatch |= detail::content_of<T>().slices;
    detail::for_each_tensor(argument, [&](const at::Tensor& tensor) {
      if (tensor.defined()) {
        call.tensors.push_back(tensor);
        call.cuts.push_back(cut);
        call.places.push_back(place);
      }
      ++place;
    });
  }

  /// How the arguments are cut, of which some have been given by `smp::whole`.
  std::vector<detail::Cut> axes(std::initializer_list<bool> go_whole) const {
    std::vector<detail::Cut> cuts;
    for (const bool goes_whole : go_whole) {
      const auto position = static_cast<int>(cuts.size());
      const auto& whole = options_.non_split_inputs();
      const bool is_named = std::find(whole.begin(), whole.end(), position) != whole.end();
      const auto axis = options_.input_split_axes().find(position);
      if (goes_whole || is_named) {
        cuts.push_back({std::nullopt, true});
      } else if (axis != options_.input_split_axes().end()) {
        cuts.push_back({axis->second, true});
      } else {
        cuts.push_back({0, false});
      }
    }
    return cuts;
  }

  template <class T>
  void slice_object(T& argument, const detail::Cut& cut, int64_t count, int microbatch) const {
    if (!cut.axis) return;
    detail::for_each_slice(argument, [&](auto& object) {
      object = std::as_const(object).smp_slice(count, microbatch, *cut.axis);
    });
  }

  template <class Result>
  auto collect(const std::map<int, Result>& results, const detail::StepResults& outputs,
               int64_t count) const {
    // One run stands for all microbatches unless arguments slice themselves.
    std::vector<const Result*> by_microbatch;
    for (int m = 0; m < count; ++m) {
      const auto found = results.find(m);
      by_microbatch.push_back(found == results.end() ? &results.begin()->second : &found->second);
    }
    size_t next = 0;
    return detail::gather(by_microbatch, [&] { return outputs[next++]; });
  }

  std::shared_ptr<Function> function_;
  StepOptions options_;
  std::shared_ptr<detail::StepCore> core_;
  // Values that the function returned in the last guarded call, a map as in `operator()`.
  std::shared_ptr<std::any> last_results_ = std::make_shared<std::any>();
};

/// Makes a step function: `function` describes one training (or evaluation) step on one microbatch
/// and calls the models in it. It calls `model->backward(loss)` if it trains, and returns the
/// values for the caller. The counterpart of SMP's `@smp.step`.
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
