// SPDX-License-Identifier: Apache-2.0
#include "graph/deferred.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DefaultDtype.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "core/check.h"
#include "graph/content.h"
#include "graph/intercept.h"
#include "graph/operator_traits.h"
#include "graph/random.h"
#include "graph/recording.h"
#include "graph/shapes.h"
#include "graph/stack_tensors.h"

namespace smp::graph {
namespace {

/// The recording of this thread's tensors, as long as some of them have no data.
std::weak_ptr<Recording>& latest_recording() {
  thread_local std::weak_ptr<Recording> recording;
  return recording;
}

std::shared_ptr<Recording> continue_recording() {
  auto recording = latest_recording().lock();
  if (!recording) {
    recording = std::make_shared<Recording>();
    latest_recording() = recording;
  }
  return recording;
}

/// A tensor on the meta device with the tensor's place in a storage of the same size.
at::Tensor shape_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  const auto elements = static_cast<int64_t>(storage_bytes(tensor) / tensor.element_size());
  const at::Tensor shape = make_shape_tensor({{elements}, {1}, tensor.scalar_type()});
  c10::TensorImpl* impl = shape.unsafeGetTensorImpl();
  impl->set_allow_tensor_metadata_change(true);
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  stay_wrapped_number(tensor, shape);
  return shape;
}

/// False if an argument names another device.
bool stays_on_cpu(const c10::FunctionSchema& schema, const torch::jit::Stack& arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (schema.arguments()[i].name() != "device" || !arguments[i].isDevice()) continue;
    if (!arguments[i].toDevice().is_cpu()) return false;
  }
  return true;
}

/// False for tensors that a recording cannot describe: sparse tensors, lazy conjugates.
bool is_plain(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor.is_conj() && !tensor.is_neg();
}

bool same_storage(const at::Tensor& a, const at::Tensor& b) {
  return a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl();
}

}  // namespace

class DeferredScope::Impl : public OperatorInterceptor {
 public:
  explicit Impl(DeferredOptions options)
      : options_(options), recording_(continue_recording()), scope_(*this) {}

  void call(const c10::OperatorHandle& op, torch::jit::Stack& stack) override;

 private:
  /// A tensor among the arguments of a call.
  struct CallTensor {
    at::Tensor given;  // may be undefined
    bool is_written;   // the operator writes it
    bool is_deferred;
    at::Tensor stand_in;  // on which the operator was called instead
  };
  /// An operator call: its arguments, taken from the stack, and the tensors among them, in order.
  struct Call {
    const c10::OperatorHandle& op;
    torch::jit::Stack arguments;
    std::vector<CallTensor> tensors;
  };

  Call take_call(const c10::OperatorHandle& op, torch::jit::Stack& stack) const;
  bool must_run(const Call& call) const;
  bool is_small(Call& call) const;
  void run_now(const Call& call, torch::jit::Stack& stack) const;
  template <class StandIn>
  void push_stand_ins(Call& call, torch::jit::Stack& stack, const StandIn& stand_in) const;
  void call_for_shapes(Call& call, torch::jit::Stack& stack) const;
  void note_dtype(const Call& call, const torch::jit::Stack& results,
                  DeferredOperator& recorded) const;
  void record(Call& call, torch::jit::Stack& stack);
  void run_random(Call& call, DeferredOperator& recorded, torch::jit::Stack& stack) const;
  at::Tensor record_result(const Call& call, const at::Tensor& result, int position,
                           DeferredOperator& recorded);
  void check_supported(const Call& call) const;

  DeferredOptions options_;
  std::shared_ptr<Recording> recording_;
  InterceptScope scope_;
};

DeferredScope::DeferredScope(DeferredOptions options) : impl_(std::make_unique<Impl>(options)) {}
DeferredScope::~DeferredScope() = default;

void DeferredScope::Impl::call(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  Call call = take_call(op, stack);
  torch::jit::Stack results;
  if (must_run(call) || is_small(call)) {
    run_now(call, results);
  } else {
    check_supported(call);
    record(call, results);
  }
  for (c10::IValue& result : results) stack.push_back(std::move(result));
}

DeferredScope::Impl::Call DeferredScope::Impl::take_call(const c10::OperatorHandle& op,
                                                         torch::jit::Stack& stack) const {
  const size_t count = op.schema().arguments().size();
  Call call{op, {stack.end() - static_cast<std::ptrdiff_t>(count), stack.end()}, {}};
  torch::jit::drop(stack, count);
  const auto written = written_arguments(
      op.schema(), [&](size_t i) -> const c10::IValue& { return call.arguments[i]; });
  for (size_t i = 0; i < count; ++i) {
    const bool is_written = std::find(written.begin(), written.end(), i) != written.end();
    map_tensors(call.arguments[i], [&](const at::Tensor& tensor) {
      call.tensors.push_back({tensor, is_written, is_deferred(tensor), {}});
      return tensor;
    });
  }
  return call;
}

/// True if the operator's effect is needed now: it gives the host a value or a shape, or changes a
/// tensor that has data. Also for all that is not about strided tensors of the CPU.
bool DeferredScope::Impl::must_run(const Call& call) const {
  if (returns_host_value(call.op.schema())) return true;
  if (call.op.hasTag(at::Tag::dynamic_output_shape)) return true;
  bool writes_known = false, writes_deferred = false, foreign = false, any_deferred = false;
  for (const CallTensor& tensor : call.tensors) {
    if (!tensor.given.defined()) continue;
    writes_known |= tensor.is_written && !tensor.is_deferred;
    writes_deferred |= tensor.is_written && tensor.is_deferred;
    any_deferred |= tensor.is_deferred;
    foreign |= !is_plain(tensor.given) || !tensor.given.is_cpu();
  }
  SMP_CHECK_WITH(UsageError, !writes_known || !writes_deferred, "operator ",
                 call.op.schema().name(),
                 " writes a tensor that has data and one that has not, under delayed parameter "
                 "initialization. Set eager_bytes of smp::ModelCreationOptions to 0, or leave the "
                 "call out of the scope");
  return writes_known ||
         (!any_deferred && (foreign || !stays_on_cpu(call.op.schema(), call.arguments)));
}

/// True if no argument is deferred and the new memory of all results is small.
bool DeferredScope::Impl::is_small(Call& call) const {
  for (const CallTensor& tensor : call.tensors) {
    if (tensor.is_deferred) return false;
  }
  torch::jit::Stack stack;
  try {
    call_for_shapes(call, stack);
  } catch (const c10::Error&) {
    return true;  // a mistake in the call, or not about dense tensors: the call itself decides
  }
  int64_t bytes = 0;
  for (const at::Tensor& result : tensors_in(stack, stack.size())) {
    if (!result.defined()) continue;
    if (!is_plain(result)) return true;
    const bool view =
        std::any_of(call.tensors.begin(), call.tensors.end(), [&](const CallTensor& argument) {
          return argument.stand_in.defined() && same_storage(argument.stand_in, result);
        });
    if (!view) bytes += static_cast<int64_t>(result.storage().nbytes());
  }
  return bytes <= options_.eager_bytes();
}

/// Calls the operator as it is, on the values of deferred arguments.
void DeferredScope::Impl::run_now(const Call& call, torch::jit::Stack& stack) const {
  const bool metadata = has_trait(call.op.schema().name(), OperatorTrait::kReadsMetadata) ||
                        call.op.schema().name() == "aten::_has_compatible_shallow_copy_type";
  for (const c10::IValue& argument : call.arguments) {
    stack.push_back(metadata ? argument : map_tensors(argument, &value_of));
  }
  call.op.callBoxed(stack);
}

/// Puts the arguments on the stack, with `stand_in(CallTensor)` in place of each tensor.
template <class StandIn>
void DeferredScope::Impl::push_stand_ins(Call& call, torch::jit::Stack& stack,
                                         const StandIn& stand_in) const {
  auto next = call.tensors.begin();
  for (const c10::IValue& argument : call.arguments) {
    stack.push_back(map_tensors(argument, [&](const at::Tensor&) {
      next->stand_in = stand_in(*next);
      return next++->stand_in;
    }));
  }
}

/// Calls the operator on shapes, which are on the meta device.
void DeferredScope::Impl::call_for_shapes(Call& call, torch::jit::Stack& stack) const {
  push_stand_ins(call, stack, [](const CallTensor& tensor) { return shape_of(tensor.given); });
  const bool meta = call.tensors.empty() ||
                    std::any_of(call.tensors.begin(), call.tensors.end(), [](const auto& tensor) {
                      return tensor.stand_in.defined() && tensor.stand_in.is_meta();
                    });
  const auto& schema = call.op.schema();
  for (size_t i = 0; i < call.arguments.size(); ++i) {
    const bool given = call.arguments[i].isDevice() || !has_tensor_argument(schema);
    if (meta && schema.arguments()[i].name() == "device" && given) {
      stack[i] = c10::Device(at::kMeta);
    }
  }
  call_on_shapes(call.op, stack);
}

void DeferredScope::Impl::check_supported(const Call& call) const {
  const std::string& name = call.op.schema().name();
  SMP_CHECK_WITH(UsageError, !has_trait(name, OperatorTrait::kReplacesStorage), "operator ", name,
                 " replaces the storage of a tensor, which delayed parameter initialization cannot "
                 "record. Make a new tensor instead");
  SMP_CHECK_WITH(UsageError, stays_on_cpu(call.op.schema(), call.arguments), "operator ", name,
                 " moves a tensor without data to another device. Construct models on the CPU "
                 "under delayed parameter initialization");
  for (const CallTensor& tensor : call.tensors) {
    SMP_CHECK_WITH(UsageError, !tensor.given.defined() || is_plain(tensor.given), "operator ", name,
                   " uses a tensor that is not dense, or a lazy conjugate, together with one "
                   "without data, under delayed parameter initialization. Convert it with "
                   "to_dense() or resolve_conj()");
  }
  SMP_CHECK_WITH(UsageError, !at::autocast::is_autocast_enabled(at::kCPU), "operator ", name,
                 " was called with autocast on, under delayed parameter initialization. Construct "
                 "models without autocast");
}

/// Notes the types that the call took from libtorch's default type, which may be another one when
/// it is made again: a factory's, or that of results from integers.
void DeferredScope::Impl::note_dtype(const Call& call, const torch::jit::Stack& results,
                                     DeferredOperator& recorded) const {
  const auto& schema = recorded.handle.schema();
  if (has_tensor_argument(schema)) {
    const bool integers =
        std::any_of(call.tensors.begin(), call.tensors.end(), [](const CallTensor& tensor) {
          return tensor.given.defined() && c10::isIntegralType(tensor.given.scalar_type(), true);
        });
    if (integers) recorded.default_dtype = c10::get_default_dtype_as_scalartype();
    return;
  }
  for (size_t i = 0; i < recorded.arguments.size(); ++i) {
    if (schema.arguments()[i].name() != "dtype" || !recorded.arguments[i].isNone()) continue;
    recorded.arguments[i] = results.at(0).toTensor().scalar_type();
  }
}

void DeferredScope::Impl::record(Call& call, torch::jit::Stack& stack) {
  DeferredOperator recorded(call.op);
  recorded.random = is_random(call.op);
  for (const CallTensor& tensor : call.tensors) {
    recorded.refs.push_back(recording_->ref(tensor.given, options_.eager_bytes()));
    if (tensor.is_written) recorded.writes.push_back(recorded.refs.back().storage);
  }
  for (const c10::IValue& argument : call.arguments) {
    if (argument.isGenerator()) {
      recorded.random = false;  // it draws from this generator, and not from the default one
      recorded.arguments.push_back(argument.toGenerator().clone());
    } else {
      recorded.arguments.push_back(map_tensors(argument, [](const auto&) { return at::Tensor(); }));
    }
  }
  if (is_random(call.op) && !(options_.fast() && recorded.random)) {
    run_random(call, recorded, stack);
  } else {
    call_for_shapes(call, stack);
  }
  note_dtype(call, stack, recorded);
  int position = 0;
  for (c10::IValue& value : stack) {
    value = map_tensors(value, [&](const at::Tensor& result) {
      return record_result(call, result, position++, recorded);
    });
  }
  recording_->add(std::move(recorded));
}

/// Draws the operator's numbers from the generator, on memory that is freed at once.
void DeferredScope::Impl::run_random(Call& call, DeferredOperator& recorded,
                                     torch::jit::Stack& stack) const {
  push_stand_ins(call, stack, [](const CallTensor& tensor) {
    if (!tensor.is_deferred || !tensor.is_written) return value_of(tensor.given);
    const at::Tensor& given = tensor.given;
    return at::empty_strided(given.sizes(), given.strides(), given.options()).zero_();
  });
  if (recorded.random) {
    recorded.state = call_noting_state(call.op, stack);
  } else {
    call.op.callBoxed(stack);
  }
}

/// The tensor that the caller gets for a result of the call on stand-ins: an argument itself, a
/// view of one, or a new one.
at::Tensor DeferredScope::Impl::record_result(const Call& call, const at::Tensor& result,
                                              int position, DeferredOperator& recorded) {
  if (!result.defined()) return result;
  SMP_CHECK_WITH(UsageError, is_plain(result), "operator ", call.op.schema().name(),
                 " makes a tensor that is not dense, or a lazy conjugate, which delayed parameter "
                 "initialization cannot record. Make it outside of the scope");
  TensorMeta meta = TensorMeta::of(result);
  meta.device = at::kCPU;
  for (const auto& [argument, is_written, is_deferred, stand_in] : call.tensors) {
    if (!stand_in.defined() || !stand_in.is_same(result)) continue;
    if (result.sizes() != argument.sizes() || result.strides() != argument.strides()) {
      // An operator such as `t_`.
      argument.unsafeGetTensorImpl()->set_sizes_and_strides(meta.sizes, meta.strides,
                                                            result.storage_offset());
    }
    return argument;
  }
  for (const CallTensor& argument : call.tensors) {
    if (!argument.stand_in.defined() || !same_storage(argument.stand_in, result)) continue;
    return tensor_on(argument.given.storage(), meta, result.storage_offset());
  }
  auto [index, storage] = recording_->add_storage(result.storage().nbytes());
  recorded.writes.push_back(index);
  recorded.makes.emplace_back(position, index);
  return tensor_on(std::move(storage), meta, result.storage_offset());
}

}  // namespace smp::graph
