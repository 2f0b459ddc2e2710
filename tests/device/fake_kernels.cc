// SPDX-License-Identifier: Apache-2.0
// The operators of the fake device: tasks of its streams, which run the CPU's kernels.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/StringUtil.h>
#include <c10/util/accumulate.h>
#include <torch/library.h>

#include <algorithm>

#include "graph/device_graph.h"
#include "graph/stack_tensors.h"
#include "tests/device/fake_machine.h"

namespace smp::testing {
namespace {

using torch::jit::Stack;

const c10::DispatchKeySet kKey(c10::DispatchKey::PrivateUse1);

/// Under deterministic algorithms CUDA fills new memory by a kernel, which is part of a graph that
/// is captured. Nothing is filled elsewhere: results of kernels that run at once would be lost.
at::Tensor filled_if_deterministic(at::Tensor tensor) {
  const at::Context& context = at::globalContext();
  const FakeLock lock(FakeMachine::get().mutex);
  if (context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory() &&
      FakeMachine::get().is_captured(current_fake_stream(tensor.device().index()))) {
    at::native::fill_empty_deterministic_(tensor);
  }
  return tensor;
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return filled_if_deterministic(at::detail::empty_generic(size, c10::GetAllocator(kFakeType), kKey,
                                                           dtype.value_or(at::kFloat), format));
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return filled_if_deterministic(at::detail::empty_strided_generic(
      size, stride, c10::GetAllocator(kFakeType), kKey, dtype.value_or(at::kFloat)));
}

/// While it lives, operators of this thread go to the kernels of their tensors' devices, whatever
/// else the thread does: records a history, casts, is traced.
class OnlyKernels {
 private:
  const c10::impl::ForceDispatchKeyGuard guard_{
      c10::default_included_set.remove(c10::DispatchKey::ADInplaceOrView),
      c10::default_excluded_set | c10::autograd_dispatch_keyset_with_ADInplaceOrView};
};

/// The tensor's memory as the CPU's; not kept alive, as a device does not. A kernel may give it
/// another size meanwhile, and so other memory.
at::Tensor as_cpu(const at::Tensor& tensor) {
  const at::Tensor result = at::for_blob(for_kernels(tensor.const_data_ptr()), tensor.sizes())
                                .strides(tensor.strides())
                                .options(at::TensorOptions(tensor.scalar_type()))
                                .allocator(c10::GetAllocator(at::kCPU))
                                .resizeable_storage()
                                .make_tensor();
  result._set_conj(tensor.is_conj());
  result._set_neg(tensor.is_neg());
  return result;
}

bool is_fake(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kFakeType;
}

Access access_of(const at::Tensor& tensor, bool writes) {
  const auto* begin = static_cast<const char*>(tensor.const_data_ptr());
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return {begin, begin + (last + 1) * static_cast<int64_t>(tensor.itemsize()), writes};
}

void add_access(const at::Tensor& tensor, bool writes, std::vector<Access>& accesses) {
  if (is_fake(tensor) && tensor.numel() > 0) accesses.push_back(access_of(tensor, writes));
}

/// Whether this thread runs an operator on the CPU, whose copies are none of the device's.
thread_local bool in_fallback = false;

void note_copy(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const at::Tensor& there = from.is_cpu() ? to : from;
  FakeMachine::get().note_host(
      there.device().index(),
      c10::str("copies ", from.scalar_type(), " ", from.sizes(), " to the ",
               to.is_cpu() ? "host" : "device", non_blocking ? "" : ", waits"));
}

/// Whether a device can copy this by itself: bytes that follow each other.
bool is_plain_copy(const at::Tensor& from, const at::Tensor& to) {
  return from.strides() == to.strides() && from.is_non_overlapping_and_dense() &&
         from.scalar_type() == to.scalar_type() && !from.is_conj() && !from.is_neg();
}

Task copy_task(const at::Tensor& from, const at::Tensor& to) {
  Task task{"a copy", {}, [source = as_cpu(from), target = as_cpu(to)] {
              const OnlyKernels guard;
              target.copy_(source);
            }};
  add_access(from, false, task.accesses);
  add_access(to, true, task.accesses);
  return task;
}

/// On the stream of the source, for which that of the target waits, and the other way round.
void copy_between_devices(const at::Tensor& from, const at::Tensor& to) {
  FakeMachine& machine = FakeMachine::get();
  const StreamKey source = current_fake_stream(from.device().index());
  const StreamKey target = current_fake_stream(to.device().index());
  FakeEvent* event = nullptr;
  const auto wait = [&](StreamKey waiting, StreamKey waited) {
    machine.record(event, waited);
    machine.block(*event, waiting);
  };
  wait(source, target);
  machine.give(source, copy_task(from, to));
  wait(target, source);
  delete event;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  FakeMachine& machine = FakeMachine::get();
  const FakeLock lock(machine.mutex);
  if (in_fallback) {
    copy_task(from, to).run();
    return to;
  }
  if (!from.is_cpu() && !to.is_cpu() && from.device() != to.device()) {
    copy_between_devices(from, to);
    return to;
  }
  const at::Device device = from.is_cpu() ? to.device() : from.device();
  const StreamKey stream = current_fake_stream(device.index());
  const bool is_on_device = from.device() == to.device();
  if (!is_on_device) {
    note_copy(from, to, non_blocking);
    TORCH_CHECK(!non_blocking || is_plain_copy(from, to),
                "a copy that is not waited for needs the host to arrange elements: from strides ",
                from.strides(), " to ", to.strides());
  }
  if (non_blocking) {
    machine.note(c10::str(FakeMachine::name(stream), to.is_cpu()     ? " copies to the host"
                                                     : from.is_cpu() ? " copies to the device"
                                                                     : " copies on the device"));
  }
  machine.give(stream, copy_task(from, to));
  if (!is_on_device) machine.use_pinned((from.is_cpu() ? from : to).const_data_ptr(), stream);
  if (!non_blocking && !is_on_device) machine.synchronize(stream);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

/// A kernel of its own: that of the CPU would be run by `run_now`, which resizes its result.
const at::Tensor& resize_fake(const at::Tensor& tensor, at::IntArrayRef size,
                              std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(tensor.device());
  FakeMachine& machine = FakeMachine::get();
  const FakeLock lock(machine.mutex);
  if (tensor.storage().nbytes() > 0) {
    machine.run_all(current_fake_stream(tensor.device().index()));
    grow(*tensor.storage().unsafeGetStorageImpl(),
         (tensor.storage_offset() + c10::multiply_integers(size)) * tensor.element_size());
  }
  return at::native::resize_(tensor, size, format);
}

/// Those after which CUDA's kernels have the host wait, since it needs a value or a size.
bool gives_host_a_value(const std::string& op) {
  static const std::set<std::string> ops = {
      "aten::_local_scalar_dense", "aten::equal",    "aten::nonzero",
      "aten::masked_select",       "aten::_unique2", "aten::unique_consecutive"};
  return ops.count(op) > 0;
}

bool is_mutated(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

/// The call of a random operator that this thread captures, in its graph; -1: none.
thread_local int captured_draw = -1;

/// An operator and its arguments, on the device.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack& stack)
      : op_(op), stack_(stack), count_(op.schema().arguments().size()) {
    for (size_t i = 0; i < count_; ++i) {
      graph::map_tensors(argument(i), [&](const at::Tensor& tensor) {
        if (!is_fake(tensor)) return tensor;
        device_ = device_.value_or(tensor.device());
        add_access(tensor, is_mutated(op.schema().arguments()[i]), accesses_);
        return tensor;
      });
    }
  }

  /// Gives the operator to the stream, as soon as the sizes of its results are known.
  void run() {
    const bool is_late = (may_be_late() || may_be_captured()) && infer();
    if (is_late) {
      give();
    } else {
      run_now();
    }
  }

 private:
  const c10::IValue& argument(size_t i) const { return torch::jit::peek(stack_, i, count_); }

  bool gives_tensors() const {
    const auto is_tensor = [](const c10::Argument& result) {
      const c10::Type& type = *result.type();
      const bool is_view = result.alias_info() != nullptr && !result.alias_info()->isWrite();
      return !is_view && (type.isSubtypeOf(*c10::TensorType::get()) ||
                          type.isSubtypeOf(*c10::ListType::ofTensors()));
    };
    const auto& results = op_.schema().returns();
    return std::all_of(results.begin(), results.end(), is_tensor);
  }

  /// Operators that draw numbers have to do so in the program's order, and ones that read a value
  /// wait for it.
  bool may_be_late() const {
    return device_ && !is_waited_for() && !op_.hasTag(at::Tag::nondeterministic_seeded) &&
           gives_tensors() && op_.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta);
  }

  bool may_be_captured() const {
    const FakeLock lock(FakeMachine::get().mutex);
    return device_ && FakeMachine::get().is_captured(stream()) && !is_waited_for() &&
           gives_tensors();
  }

  /// Indices that are masks are counted first.
  bool is_waited_for() const {
    if (gives_host_a_value(name())) return true;
    if (name().find("index") == std::string::npos) return false;
    const auto tensors = graph::tensors_in(stack_, count_);
    return std::any_of(tensors.begin() + 1, tensors.end(), [&](const at::Tensor& tensor) {
      return tensor.defined() && tensor.scalar_type() == at::kBool &&
             tensors[0].scalar_type() != at::kBool;
    });
  }

  const std::string& name() const { return op_.operator_name().name; }

  /// Finds the shapes of the results. False where libtorch has no rule for them.
  bool infer() {
    const OnlyKernels guard;
    if (infer_dropout() || infer_on(at::kMeta)) return true;
    // Where the shapes follow from shapes, zeros show them, too.
    const bool draws = op_.hasTag(at::Tag::nondeterministic_seeded);
    return may_be_captured() && !draws && infer_on(at::kCPU);
  }

  bool infer_on(at::Device device) {
    shapes_.clear();
    for (size_t i = 0; i < count_; ++i) {
      if (argument(i).isDevice()) return false;
      shapes_.push_back(graph::map_tensors(argument(i), [&](const at::Tensor& tensor) {
        if (!is_fake(tensor)) return tensor;
        const auto options = tensor.options().device(device);
        const at::Tensor shape = at::empty_strided(tensor.sizes(), tensor.strides(), options);
        return device.is_cpu() ? shape.zero_() : shape;
      }));
    }
    const Stack arguments = shapes_;
    try {
      op_.callBoxed(&shapes_);
    } catch (const c10::Error&) {
      return false;  // the CPU's kernel says why
    }
    resize_as(arguments);
    return true;
  }

  /// For which libtorch has no rule.
  bool infer_dropout() {
    if (name().rfind("aten::native_dropout", 0) != 0) return false;
    const at::Tensor like = at::empty_like(argument(0).toTensor(), at::kMeta);
    shapes_.emplace_back(like);
    if (name() == "aten::native_dropout") shapes_.emplace_back(at::empty_like(like, at::kBool));
    return true;
  }

  /// Gives written tensors the sizes that they have on `shapes`.
  void resize_as(const Stack& shapes) {
    for (size_t i = 0; i < count_; ++i) {
      if (!argument(i).isTensor() || !is_fake(argument(i).toTensor())) continue;
      const at::Tensor& tensor = argument(i).toTensor();
      const at::Tensor& shape = shapes[i].toTensor();
      if (tensor.sizes() == shape.sizes() && tensor.strides() == shape.strides()) continue;
      resize_fake(tensor, shape.sizes(), std::nullopt);
      tensor.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes(), shape.strides());
      add_access(tensor, true, accesses_);
    }
  }

  /// A result is an argument that is written, or new.
  Stack make_results() {
    Stack results;
    for (size_t i = 0; i < shapes_.size(); ++i) {
      const c10::AliasInfo* alias = op_.schema().returns()[i].alias_info();
      results.push_back(alias != nullptr ? written_argument(*alias) : new_result(shapes_[i]));
    }
    return results;
  }

  c10::IValue written_argument(const c10::AliasInfo& alias) const {
    for (size_t i = 0; i < count_; ++i) {
      const c10::AliasInfo* info = op_.schema().arguments()[i].alias_info();
      if (info != nullptr && info->beforeSets() == alias.beforeSets()) return argument(i);
    }
    TORCH_CHECK(false, name(), " returns what it was not given");
  }

  c10::IValue new_result(const c10::IValue& shape) {
    return graph::map_tensors(shape, [&](const at::Tensor& meta) {
      if (!meta.defined()) return meta;
      const at::Tensor result =
          at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(*device_));
      add_access(result, true, accesses_);
      return result;
    });
  }

  /// The arguments as the kernel is to read them: those on the CPU as they are now.
  Stack captured() const {
    Stack arguments;
    for (size_t i = 0; i < count_; ++i) {
      arguments.push_back(graph::map_tensors(argument(i), [](const at::Tensor& tensor) {
        if (is_fake(tensor)) return as_cpu(tensor);
        const bool is_constant =
            !tensor.defined() || tensor.unsafeGetTensorImpl()->is_wrapped_number();
        return is_constant ? tensor : tensor.detach().clone();
      }));
    }
    return arguments;
  }

  void give() {
    const OnlyKernels guard;
    const c10::DeviceGuard device(*device_);
    Stack results = make_results(), targets;
    for (size_t i = 0; i < results.size(); ++i) {
      targets.push_back(graph::map_tensors(results[i], [](const at::Tensor& tensor) {
        return tensor.defined() ? as_cpu(tensor) : tensor;
      }));
    }
    const auto kernel = [op = op_, arguments = captured(), targets] {
      const OnlyKernels guard;
      Stack made = arguments;  // returned references are to those
      op.callBoxed(&made);
      for (size_t i = 0; i < targets.size(); ++i) fill(targets[i], made[i]);
    };
    const FakeLock lock(FakeMachine::get().mutex);
    const bool draws = op_.hasTag(at::Tag::nondeterministic_seeded);
    FakeMachine::get().give(stream(), {name(), accesses_, kernel, draws ? captured_draw : -1});
    torch::jit::drop(stack_, count_);
    for (c10::IValue& result : results) stack_.push_back(std::move(result));
  }

  static void fill(const c10::IValue& target, const c10::IValue& result) {
    const std::vector<at::Tensor> to = graph::tensors_in({target}, 1);
    const std::vector<at::Tensor> from = graph::tensors_in({result}, 1);
    for (size_t i = 0; i < to.size(); ++i) {
      const bool is_there =
          !to[i].defined() || to[i].const_data_ptr() == from.at(i).const_data_ptr();
      if (!is_there) to[i].copy_(from[i]);
    }
  }

  StreamKey stream() const { return current_fake_stream(device_->index()); }

  /// After the earlier tasks of its stream. The host does not know of it, unless it waits in the
  /// operator.
  void run_now() {
    FakeMachine& machine = FakeMachine::get();
    const c10::OptionalDeviceGuard guard(device_);
    if (device_) begin_now(machine);
    const bool before = std::exchange(in_fallback, true);
    const auto restore = c10::make_scope_exit([&] { in_fallback = before; });
    give_generator();
    at::native::cpu_fallback(op_, &stack_);
  }

  /// Operators that draw on the device draw from the device's generator, unless it is given another
  /// one.
  void give_generator() {
    for (size_t i = 0; device_ && i < count_; ++i) {
      c10::IValue& value = torch::jit::peek(stack_, i, count_);
      if (!value.isNone() || op_.schema().arguments()[i].name() != "generator") continue;
      value = at::globalContext().defaultGenerator(*device_);
    }
  }

  void begin_now(FakeMachine& machine) {
    const FakeLock lock(machine.mutex);
    machine.give(stream(), {name(), accesses_, [] {}});
    if (!is_waited_for()) {
      machine.run_all(stream());
      return;
    }
    machine.synchronize(stream());
    const at::Tensor& first = argument(0).toTensor();
    machine.note_host(device_->index(), c10::str("waits in ", name(), " of ", first.scalar_type(),
                                                 " ", first.sizes()));
  }

  const c10::OperatorHandle& op_;
  Stack& stack_;
  const size_t count_;
  std::optional<at::Device> device_;
  std::vector<Access> accesses_;
  Stack shapes_;
};

void run(const c10::OperatorHandle& op, Stack* stack) { Call(op, *stack).run(); }

/// A graph of the device. Random operators run when it is launched, behind the earlier work of its
/// stream.
class FakeGraph final : public graph::DeviceGraph {
 public:
  explicit FakeGraph(std::shared_ptr<FakePool> pool) : pool_(std::move(pool)) {}
  ~FakeGraph() override {
    if (uses_pool_) release_pool();
  }

  void begin(size_t) override {
    calls_.clear();
    const FakeLock lock(machine().mutex);
    TORCH_CHECK(!pool_->is_over, "memory of graphs is captured into after its last graph is gone");
    stream_ = current_fake_stream(current_fake_index());
    machine().begin_capture(stream_, pool_);
    ++pool_->uses;
    uses_pool_ = true;
  }
  bool end() override {
    const FakeLock lock(machine().mutex);
    tasks_ = machine().end_capture(stream_);
    return std::any_of(tasks_.begin(), tasks_.end(),
                       [](const Task& task) { return task.name != kRelease; });
  }
  void abandon() noexcept override {
    if (!uses_pool_) return;  // it did not begin
    end();
    release_pool();
  }

  void call_random(const c10::OperatorHandle& op, Stack& stack, size_t seed) override {
    captured_draw = static_cast<int>(calls_.size());
    calls_.push_back(seed);
    const auto restore = c10::make_scope_exit([] { captured_draw = -1; });
    op.callBoxed(stack);
  }

  void launch(const std::vector<uint64_t>& seeds) override {
    const StreamKey stream = current_fake_stream(stream_.first);
    std::vector<at::Tensor> states;  // states of generators, by call
    for (size_t seed : calls_) {
      states.push_back(at::detail::createCPUGenerator(seeds.at(seed)).get_state());
    }
    for (const Task& task : tasks_) {
      if (task.random_call < 0) {
        const FakeLock lock(machine().mutex);
        machine().give(stream, task);
      } else {
        draw(stream, task, states.at(task.random_call));
      }
    }
    const FakeLock lock(machine().mutex);
    machine().launches += 1;
  }

 private:
  static FakeMachine& machine() { return FakeMachine::get(); }

  void release_pool() noexcept {
    const FakeLock lock(machine().mutex);
    uses_pool_ = false;
    pool_->is_over = --pool_->uses == 0;
  }

  static void draw(StreamKey stream, const Task& task, at::Tensor& state) {
    {
      const FakeLock lock(machine().mutex);
      machine().give(stream, {task.name, task.accesses, [] {}});
      machine().run_all(stream);
    }
    const auto lock = graph::lock_generators();
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    const at::Tensor own = generator.get_state();
    generator.set_state(state);
    task.run();
    state = generator.get_state();
    generator.set_state(own);
  }

  const std::shared_ptr<FakePool> pool_;
  bool uses_pool_ = false;
  StreamKey stream_;
  std::vector<Task> tasks_;
  std::vector<size_t> calls_;  // seeds of the calls of random operators
};

/// A stream outside the pool, as CUDA's graphs have one.
c10::Stream own_stream(at::Device device) {
  FakeMachine& machine = FakeMachine::get();
  const FakeLock lock(machine.mutex);
  return c10::Stream(c10::Stream::UNSAFE, device, machine.new_stream(device.index()).second);
}

class FakeGraphPool final : public graph::DeviceGraphPool {
 public:
  explicit FakeGraphPool(at::Device device) : stream_(own_stream(device)) {}

  c10::Stream stream() const override { return stream_; }
  std::unique_ptr<graph::DeviceGraph> make_graph() override {
    return std::make_unique<FakeGraph>(pool_);
  }

 private:
  const c10::Stream stream_;
  const std::shared_ptr<FakePool> pool_ = std::make_shared<FakePool>();
};

const bool kernels_registered = [] {
  graph::register_device_graphs(
      kFakeType, [](at::Device device) { return std::make_shared<FakeGraphPool>(device); });
  return true;
}();

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("resize_", &resize_fake);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  // One kernel for a list. By default libtorch has a device do it tensor by tensor.
  for (const char* op :
       {"_foreach_add.List", "_foreach_add_.List", "_foreach_add_.Scalar",
        "_foreach_addcdiv_.Scalar", "_foreach_addcmul.Scalar", "_foreach_addcmul_.Scalar",
        "_foreach_copy_", "_foreach_div.Scalar", "_foreach_div_.Scalar", "_foreach_maximum_.List",
        "_foreach_mul_.Scalar", "_foreach_sqrt", "_foreach_sqrt_"}) {
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&run>());
  }
}

/// The copy changes signs.
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>());
}

}  // namespace
}  // namespace smp::testing
