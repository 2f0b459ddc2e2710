// SPDX-License-Identifier: Apache-2.0
#include "graph/recording.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <sstream>

#include "core/check.h"
#include "graph/content.h"
#include "graph/default_dtype.h"
#include "graph/random.h"
#include "graph/stack_tensors.h"
#include "graph/storage.h"

namespace smp::graph {
namespace {

/// The context of a deferred storage's (empty) data pointer.
struct Mark {
  std::shared_ptr<Recording> recording;
  int storage;
};

void drop_mark(void* mark) { delete static_cast<Mark*>(mark); }

const Mark* mark_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  const c10::DataPtr& data = tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  if (data.get_deleter() != &drop_mark) return nullptr;
  return static_cast<const Mark*>(data.get_context());
}

/// True if the tensor's elements fill all `nbytes` of its storage.
bool covers(const DeferredRef& ref, size_t nbytes) {
  return ref.offset == 0 && static_cast<size_t>(ref.meta.nbytes()) == nbytes &&
         tensor_on(c10::Storage(c10::Storage::use_byte_size_t(), 0, c10::DataPtr()), ref.meta, 0)
             .is_non_overlapping_and_dense();
}

void describe(std::ostream& out, const DeferredRef& ref) {
  if (ref.storage >= 0) {
    out << " #" << ref.storage << "+" << ref.offset << ":" << ref.meta.to_string();
  } else if (ref.known.defined()) {
    out << " constant " << TensorMeta::of(ref.known).to_string() << " " << hash_content(ref.known);
  } else {
    out << " undefined";
  }
}

void describe(std::ostream& out, const c10::IValue& constant) {
  if (constant.isGenerator()) {
    out << " generator " << hash_content(constant.toGenerator().get_state());
  } else if (!constant.isTensor() && !constant.isTensorList() && !constant.isOptionalTensorList()) {
    out << " " << constant_to_string(constant);
  }
}

/// Calls the operator with the random numbers and the default type that it was called with.
void call_again(const DeferredOperator& op, torch::jit::Stack& stack) {
  std::optional<DefaultDtypeScope> dtype;
  if (op.default_dtype && *op.default_dtype != c10::get_default_dtype_as_scalartype()) {
    dtype.emplace(*op.default_dtype);
  }
  if (op.state.defined()) {
    call_from_state(op.handle, stack, op.state);
  } else if (op.random) {
    SMP_CHECK_WITH(UsageError, op.has_seed, "operator ", op.handle.schema().name(),
                   " draws random numbers that are needed before the first step, and in the fast "
                   "mode of smp::model_creation they are keyed by a parameter's name, which is "
                   "known then. Leave out fast(true)");
    call_seeded(op.handle, stack, op.seed);
  } else {
    op.handle.callBoxed(stack);
  }
}

}  // namespace

std::pair<std::shared_ptr<Recording>, int> recording_of(const at::Tensor& tensor) {
  const Mark* mark = mark_of(tensor);
  if (mark == nullptr) return {nullptr, -1};
  return {mark->recording, mark->storage};
}

bool is_deferred(const at::Tensor& tensor) { return mark_of(tensor) != nullptr; }

size_t storage_bytes(const at::Tensor& tensor) {
  const auto [recording, storage] = recording_of(tensor);
  return recording ? recording->nbytes(storage) : tensor.storage().nbytes();
}

at::Tensor value_of(const at::Tensor& tensor) {
  const auto recording = recording_of(tensor).first;
  return recording ? recording->evaluate(tensor) : tensor;
}

std::pair<int, c10::Storage> Recording::add_storage(size_t nbytes) {
  const int index = static_cast<int>(storages_.size());
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, at::kCPU),
                       c10::GetCPUAllocator(), true);
  take_data(
      *storage.unsafeGetStorageImpl(),
      c10::DataPtr(nullptr, new Mark{shared_from_this(), index}, &drop_mark, at::kCPU),
      "[smp] the data of a tensor that was made under delayed parameter initialization was read "
      "or written, and it has none before the first step. Initialise parameters in the scope of "
      "smp::model_creation, load a checkpoint, or call smp::materialize(*module) first");
  storages_.push_back({nbytes, storage.getWeakStorageImpl(), {}});
  return {index, std::move(storage)};
}

DeferredRef Recording::ref(const at::Tensor& tensor, int64_t copied_bytes) {
  DeferredRef ref;
  if (const Mark* mark = mark_of(tensor)) {
    ref.storage = mark->storage;
    ref.meta = TensorMeta::of(tensor);
    ref.offset = tensor.storage_offset();
    return ref;
  }
  ref.known = tensor;
  if (!tensor.defined()) return ref;
  // The caller may go on changing it. A view that expands is copied without being expanded.
  const auto bytes = static_cast<int64_t>(tensor.storage().nbytes());
  if (bytes <= copied_bytes) {
    const at::NoGradGuard no_grad;
    const at::Tensor whole = tensor_on(tensor.storage(), {{bytes}, {1}, at::kByte}, 0);
    ref.known = tensor_on(whole.clone().storage(), TensorMeta::of(tensor), tensor.storage_offset());
    stay_wrapped_number(tensor, ref.known);
  }
  ref.version = ref.known._version();
  return ref;
}

/// The operators that the storage's content depends on, in program order.
std::vector<int> Recording::history(int storage) const {
  std::set<int> needed = {storage};
  std::vector<int> result;
  for (int i = static_cast<int>(operators_.size()) - 1; i >= 0; --i) {
    const DeferredOperator& op = operators_[i];
    const bool concerned = std::any_of(op.writes.begin(), op.writes.end(),
                                       [&](int written) { return needed.count(written) > 0; });
    if (!concerned) continue;
    result.push_back(i);
    for (const DeferredRef& ref : op.refs) {
      if (ref.storage >= 0) needed.insert(ref.storage);
    }
  }
  std::reverse(result.begin(), result.end());
  return result;
}

/// Runs the storage's history and the settings since. Memory that only led to it is freed as soon
/// as no operator needs it any more.
c10::Storage Recording::make(int storage) const {
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard unrecorded(c10::DispatchKey::DeferredInit);
  const StorageInfo& info = storages_[storage];
  Storages storages;
  if (!info.sources.empty() && covers(info.sources.front().first, info.nbytes)) {
    storages[storage] =
        at::empty({static_cast<int64_t>(info.nbytes)}, at::TensorOptions(at::kByte)).storage();
  } else {
    const std::vector<int> operators = history(storage);
    std::map<int, int> last_use = {{storage, static_cast<int>(operators_.size())}};
    for (int i : operators) {
      for (const DeferredRef& ref : operators_[i].refs) {
        last_use[ref.storage] = std::max(last_use[ref.storage], i);
      }
    }
    for (int i : operators) {
      replay(operators_[i], storages);
      for (auto it = storages.begin(); it != storages.end();) {
        it = last_use[it->first] <= i ? storages.erase(it) : std::next(it);
      }
    }
  }
  const c10::Storage made = storages.at(storage);
  for (const auto& [place, source] : info.sources) {
    tensor_on(made, place.meta, place.offset).copy_(source());
  }
  return made;
}

void Recording::replay(const DeferredOperator& op, Storages& storages) const {
  size_t next = 0;
  const auto tensor_of = [&](const at::Tensor&) {
    const DeferredRef& ref = op.refs[next++];
    if (ref.storage >= 0) return tensor_on(storages.at(ref.storage), ref.meta, ref.offset);
    SMP_CHECK_WITH(UsageError, !ref.known.defined() || ref.known._version() == ref.version,
                   "a tensor of shape ", ref.known.sizes(),
                   " was used to initialise a parameter under delayed parameter initialization "
                   "and changed before the first step, which needs it. Pass a clone");
    return ref.known;
  };
  torch::jit::Stack stack;
  for (const c10::IValue& argument : op.arguments) {
    if (argument.isGenerator()) {
      stack.push_back(argument.toGenerator().clone());
    } else {
      stack.push_back(map_tensors(argument, tensor_of));
    }
  }
  call_again(op, stack);
  const std::vector<at::Tensor> results = tensors_in(stack, stack.size());
  for (const auto& [result, storage] : op.makes) {
    const c10::Storage& made = results[result].storage();
    SMP_INTERNAL_ASSERT(made.nbytes() == storages_[storage].nbytes, "operator ",
                        op.handle.schema().name(), " made ", made.nbytes(),
                        " bytes, and was recorded with ", storages_[storage].nbytes);
    storages[storage] = made;
  }
}

at::Tensor Recording::evaluate(const at::Tensor& tensor) const {
  return tensor_on(make(mark_of(tensor)->storage), TensorMeta::of(tensor), tensor.storage_offset());
}

void Recording::materialize(const at::Tensor& tensor) { materialize(mark_of(tensor)->storage); }

void Recording::materialize(int storage) {
  const auto alive = storages_[storage].storage.lock();
  if (!alive) return;
  const auto keep = shared_from_this();  // the storage's mark may hold the last reference
  const c10::Storage made = make(storage);
  give_data(*alive, *made.unsafeGetStorageImpl());
}

void Recording::materialize_all(const std::vector<at::Tensor>& except) {
  const auto keep = shared_from_this();
  std::set<int> left_out;
  for (const at::Tensor& tensor : except) {
    const auto [recording, storage] = recording_of(tensor);
    if (recording.get() == this) left_out.insert(storage);
  }
  for (size_t i = 0; i < storages_.size(); ++i) {
    if (left_out.count(static_cast<int>(i)) > 0) continue;
    const auto alive = storages_[i].storage.lock();
    if (alive && alive->_mutable_data_ptr_no_checks().get_deleter() == &drop_mark) {
      materialize(static_cast<int>(i));
    }
  }
}

bool Recording::is_made_by(const std::shared_ptr<const void>& maker) {
  const std::lock_guard<std::mutex> lock(maker_mutex_);
  if (maker_.expired()) maker_ = maker;
  return maker_.lock() == maker;
}

void Recording::set_source(const at::Tensor& tensor, Source source) {
  StorageInfo& info = storages_[mark_of(tensor)->storage];
  DeferredRef place = ref(tensor, 0);
  if (covers(place, info.nbytes)) info.sources.clear();
  info.sources.emplace_back(std::move(place), std::move(source));
}

void Recording::assign_seeds(const std::vector<std::pair<std::string, at::Tensor>>& named,
                             uint64_t seed) {
  const auto assign = [&](DeferredOperator& op, const std::string& name, uint64_t ordinal) {
    op.seed = stream_seed({XXH64(name.data(), name.size(), seed)}, ordinal);
    op.has_seed = true;
  };
  for (const auto& [name, tensor] : named) {
    const auto [recording, storage] = recording_of(tensor);
    if (recording.get() != this) continue;
    uint64_t ordinal = 0;
    for (int i : history(storage)) {
      DeferredOperator& op = operators_[i];
      if (!op.random || op.state.defined()) continue;
      if (!op.has_seed) assign(op, name, ordinal);
      ++ordinal;
    }
  }
  // Operators on which no named tensor depends, such as a table that is a plain member.
  uint64_t ordinal = 0;
  for (DeferredOperator& op : operators_) {
    if (op.random && !op.state.defined() && !op.has_seed) assign(op, "", ordinal++);
  }
}

std::string Recording::describe() const {
  std::ostringstream out;
  for (const DeferredOperator& op : operators_) {
    out << op.handle.schema().name();
    for (const c10::IValue& argument : op.arguments) graph::describe(out, argument);
    for (const DeferredRef& ref : op.refs) graph::describe(out, ref);
    for (const auto& [result, storage] : op.makes) out << " -> #" << storage;
    if (op.random) out << (op.state.defined() ? " drawn" : " fast");
    out << "\n";
  }
  for (const StorageInfo& info : storages_) {
    for (const auto& [place, source] : info.sources) {
      out << "loaded";
      graph::describe(out, place);
      out << "\n";
    }
  }
  return out.str();
}

std::string Recording::states() const {
  std::string bytes;
  for (const DeferredOperator& op : operators_) {
    if (!op.state.defined()) continue;
    bytes.append(static_cast<const char*>(op.state.const_data_ptr()), op.state.nbytes());
  }
  return bytes;
}

void Recording::set_states(const std::string& bytes) {
  size_t position = 0;
  for (DeferredOperator& op : operators_) {
    if (!op.state.defined()) continue;
    const size_t size = op.state.nbytes();
    SMP_INTERNAL_ASSERT(position + size <= bytes.size(), "too few states of the generator");
    std::memcpy(op.state.mutable_data_ptr(), bytes.data() + position, size);
    position += size;
  }
  SMP_INTERNAL_ASSERT(position == bytes.size(), "too many states of the generator");
}

}  // namespace smp::graph
