// SPDX-License-Identifier: Apache-2.0
#include "graph/absent.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorOptions.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <optional>
#include <unordered_set>
#include <utility>

#include "core/check.h"
#include "graph/below_autograd.h"
#include "graph/content.h"
#include "graph/graph.h"
#include "graph/operator_traits.h"
#include "graph/random.h"
#include "graph/shapes.h"
#include "graph/stack_tensors.h"
#include "graph/storage.h"

namespace smp::graph {
namespace {

/// The mark that an absent tensor, and every copy of its metadata, carries.
struct Mark final : c10::BackendMeta {
  Mark(AbsencePtr given, bool is_computed) : absence(std::move(given)), computed(is_computed) {}

  bool ignores_writes() const { return computed || absence->ignores_writes; }

  const AbsencePtr absence;
  const bool computed;  // from the names of `absence`
};

using MarkPtr = c10::intrusive_ptr<c10::BackendMeta>;

MarkPtr mark_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->get_backend_meta_intrusive_ptr();
}

const Mark& content_of(const MarkPtr& mark) { return static_cast<const Mark&>(*mark); }

std::string name_of(const Mark& mark) {
  return (mark.computed ? "what was computed from " : "") + mark.absence->what;
}

/// Takes the memory of a storage away. Reading its data by pointer throws the mark's error.
void take_data_of(c10::StorageImpl& storage, const Mark& mark) {
  take_data(
      storage, c10::DataPtr(nullptr, storage.device()),
      c10::str("[smp] the data of ", name_of(mark),
               ", which this rank does not have, was read or written. ", mark.absence->remedy));
}

c10::Storage storage_for(const Mark& mark, at::Device device) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, device),
                       /*allocator=*/nullptr, /*resizable=*/false);
  take_data_of(*storage.unsafeGetStorageImpl(), mark);
  return storage;
}

void set_mark(const at::Tensor& tensor, MarkPtr mark) {
  tensor.unsafeGetTensorImpl()->set_backend_meta(std::move(mark));
  set_seen(tensor, true);
}

at::Tensor make(const TensorMeta& meta, MarkPtr mark, c10::Storage storage) {
  const at::Tensor tensor = tensor_on(std::move(storage), meta);
  set_mark(tensor, std::move(mark));
  return tensor;
}

/// The alias sets of a tensor, or of the tensors in a list.
const std::unordered_set<c10::Symbol>& sets_of(const c10::AliasInfo& alias) {
  const auto& contained = alias.containedTypes();
  return contained.empty() ? alias.beforeSets() : contained.front().beforeSets();
}

/// A call of an operator that was given an absent tensor.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : op_(op),
        schema_(op.schema()),
        stack_(stack),
        arguments_(stack.end() - static_cast<int64_t>(schema_.arguments().size()), stack.end()) {
    for (const at::Tensor& tensor : tensors_in(arguments_, arguments_.size())) {
      if (!first_.defined() && is_absent(tensor)) first_ = tensor;
    }
  }

  bool concerns_absent() const { return first_.defined(); }

  void run() {
    const auto written = written_arguments(
        schema_, [this](size_t i) -> const c10::IValue& { return arguments_[i]; });
    if (written.empty()) {
      replace_by(computed());
      return;
    }
    for (size_t argument : written) check_written(arguments_[argument]);
    follow();
    replace_by(written_results());
  }

 private:
  /// Operators may write only tensors that are on this rank: absent ones are another's to write.
  void check_written(const c10::IValue& argument) const {
    map_tensors(argument, [this](const at::Tensor& tensor) {
      if (!tensor.defined()) return tensor;
      if (!is_absent(tensor)) refuse(first_);
      if (!content_of(mark_of(tensor)).ignores_writes()) refuse(tensor);
      return tensor;
    });
    if (has_trait(schema_.name(), OperatorTrait::kReplacesStorage)) refuse(first_);
  }

  /// Does the operator's side effects other than writing on this rank.
  void follow() const {
    if (is_random(op_)) {
      torch::jit::Stack stack = filled();
      op_.callBoxed(stack);
    } else if (op_.hasTag(at::Tag::inplace_view)) {
      torch::jit::Stack stack = shapes();
      const auto before = tensors_in(arguments_, arguments_.size());
      const auto after = tensors_in(stack, stack.size());
      call_on_shapes(op_, stack, first_.device());
      for (size_t i = 0; i < before.size(); ++i) {
        if (!is_absent(before[i])) continue;
        TensorMeta meta = TensorMeta::of(after[i]);
        meta.requires_grad = before[i].requires_grad();
        follow_in_place(before[i], meta);
      }
    }
  }

  /// The arguments that the operator returns.
  torch::jit::Stack written_results() const {
    torch::jit::Stack results;
    for (const auto& returned : schema_.returns()) {
      const auto argument = aliased_by(returned);
      if (!argument) refuse(first_);
      results.push_back(arguments_[*argument]);
    }
    return results;
  }

  /// Absent results, or ones that follow from shapes alone.
  torch::jit::Stack computed() const {
    const bool reads_shapes = has_trait(schema_.name(), OperatorTrait::kReadsMetadata);
    if (!reads_shapes) check_stays_absent();
    torch::jit::Stack results;
    if (is_random(op_)) {
      results = filled();
      op_.callBoxed(results);
    } else {
      results = shapes();
      call_on_shapes(op_, results, first_.device());
    }
    for (size_t i = 0; i < results.size(); ++i) {
      const at::Tensor base = base_of(schema_.returns()[i]);
      results[i] = map_tensors(results[i], [&](const at::Tensor& tensor) {
        return tensor.defined() ? absent(tensor, base) : tensor;
      });
    }
    return results;
  }

  void check_stays_absent() const {
    if (returns_host_value(schema_) || op_.hasTag(at::Tag::dynamic_output_shape) ||
        op_.hasTag(at::Tag::data_dependent_output)) {
      refuse(first_);
    }
    if (op_.hasTag(at::Tag::pointwise)) return;
    for (const at::Tensor& tensor : tensors_in(arguments_, arguments_.size())) {
      const bool is_own = tensor.defined() && !is_absent(tensor);
      if (is_own && !is_wrapped_number(tensor)) refuse(first_);
    }
  }

  [[noreturn]] void refuse(const at::Tensor& absent) const {
    const MarkPtr mark = mark_of(absent);
    const Mark& content = content_of(mark);
    core::fail<UsageError>("operator ", schema_.name(), " needs ", name_of(content),
                           ": this rank does not have these numbers. ", content.absence->remedy);
  }

  /// The argument whose memory a result shares by the schema.
  std::optional<size_t> aliased_by(const c10::Argument& returned) const {
    if (returned.alias_info() == nullptr) return std::nullopt;
    for (size_t i = 0; i < schema_.arguments().size(); ++i) {
      const auto* alias = schema_.arguments()[i].alias_info();
      if (alias != nullptr && sets_of(*alias) == sets_of(*returned.alias_info())) return i;
    }
    return std::nullopt;
  }

  /// The absent tensor of which a result is a view; undefined for other results.
  at::Tensor base_of(const c10::Argument& returned) const {
    const auto argument = aliased_by(returned);
    if (!argument || !arguments_[*argument].isTensor()) return {};
    const at::Tensor base = arguments_[*argument].toTensor();
    return is_absent(base) ? base : at::Tensor();
  }

  /// The tensor that stands for a result with this shape.
  at::Tensor absent(const at::Tensor& shape, const at::Tensor& base) const {
    if (!shape.has_storage()) refuse(first_);  // sparse
    TensorMeta meta = TensorMeta::of(shape);
    meta.device = device();
    if (base.defined()) return make(meta, mark_of(base), base.storage());
    const MarkPtr mark = computed_mark();
    return make(meta, mark, storage_for(content_of(mark), meta.device));
  }

  /// The device of results: where the operator is told to put them, else where the absent tensor
  /// lies.
  at::Device device() const {
    for (const c10::IValue& argument : arguments_) {
      if (argument.isDevice()) return argument.toDevice();
    }
    return first_.device();
  }

  MarkPtr computed_mark() const {
    const MarkPtr mark = mark_of(first_);
    if (content_of(mark).computed) return mark;
    return c10::make_intrusive<Mark>(content_of(mark).absence, true);
  }

  /// The arguments as shapes.
  torch::jit::Stack shapes() const {
    return mapped(at::kMeta, [](const at::Tensor& tensor) {
      TensorMeta meta = TensorMeta::of(tensor);
      meta.requires_grad = false;
      return make_shape_tensor(meta);
    });
  }

  /// The arguments with zeros for absent tensors.
  torch::jit::Stack filled() const {
    return mapped(device(), [](const at::Tensor& tensor) {
      if (!is_absent(tensor)) return tensor;
      TensorMeta meta = TensorMeta::of(tensor);
      meta.requires_grad = false;
      return make_filled(meta, tensor.device(), 0);
    });
  }

  torch::jit::Stack mapped(at::Device device, const TensorMap& map) const {
    torch::jit::Stack stack;
    for (const c10::IValue& argument : arguments_) {
      if (argument.isDevice()) {
        stack.emplace_back(device);
        continue;
      }
      stack.push_back(map_tensors(argument, [&](const at::Tensor& tensor) {
        if (!tensor.defined()) return tensor;
        at::Tensor mapped = map(tensor);
        stay_wrapped_number(tensor, mapped);
        return mapped;
      }));
    }
    return stack;
  }

  void replace_by(torch::jit::Stack results) {
    torch::jit::drop(stack_, arguments_.size());
    std::move(results.begin(), results.end(), std::back_inserter(stack_));
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack& stack_;
  const torch::jit::Stack arguments_;
  at::Tensor first_;  // the first of those that are absent
};

bool see(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  Call call(op, stack);
  if (!call.concerns_absent()) return false;
  const c10::impl::ExcludeDispatchKeyGuard own(kBelowAutograd);
  call.run();
  return true;
}

const bool sees = see_below_autograd(&see);

}  // namespace

at::Tensor make_absent_like(const at::Tensor& like, AbsencePtr absence,
                            std::optional<at::ScalarType> type) {
  const MarkPtr mark = c10::make_intrusive<Mark>(std::move(absence), false);
  TensorMeta meta = TensorMeta::of(like);
  meta.dtype = type.value_or(meta.dtype);
  return make(meta, mark, storage_for(content_of(mark), like.device()));
}

void become_absent(const at::Tensor& tensor, AbsencePtr absence) {
  set_mark(tensor, c10::make_intrusive<Mark>(std::move(absence), false));
}

void release_as_absent(const at::Tensor& tensor, AbsencePtr absence) {
  become_absent(tensor, std::move(absence));
  take_data_of(*tensor.storage().unsafeGetStorageImpl(), content_of(mark_of(tensor)));
}

void become_present(const at::Tensor& tensor) {
  if (!is_absent(tensor)) return;
  set_seen(tensor, false);
  tensor.unsafeGetTensorImpl()->set_backend_meta(nullptr);
}

bool is_absent(const at::Tensor& tensor) {
  return is_seen(tensor) && dynamic_cast<const Mark*>(mark_of(tensor).get()) != nullptr;
}

}  // namespace smp::graph
