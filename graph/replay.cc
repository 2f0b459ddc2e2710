// SPDX-License-Identifier: Apache-2.0
#include "graph/replay.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <condition_variable>
#include <limits>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "core/check.h"
#include "core/node.h"
#include "graph/autograd_entry.h"
#include "graph/device_graph.h"
#include "graph/devices.h"
#include "graph/late_writes.h"
#include "graph/leaf.h"
#include "graph/memory_layout.h"
#include "graph/mode_scope.h"
#include "graph/operator_traits.h"
#include "graph/visit.h"
#include "graph/written_results.h"

namespace smp::graph {
namespace {

/// Says at which operator an error came. A device fails some time before it is noticed.
void add_place(c10::Error& error, std::string op) {
  const bool is_devices = dynamic_cast<const c10::AcceleratorError*>(&error) != nullptr;
  if (is_devices || current_device_has_failed()) {
    op = c10::str("noticed at ", op,
                  "; the device may have failed in an earlier operator. With "
                  "CUDA_LAUNCH_BLOCKING=1 each is waited for, and the one that fails is named");
  }
  error.add_context(std::move(op));
}

/// The form that the operator's results must have.
std::vector<std::optional<TensorMeta>> recorded_results(const Graph& graph, const Operator& op) {
  std::vector<std::optional<TensorMeta>> metas;
  for (ValueId id : op.results) {
    metas.push_back(id == kUndefined ? std::nullopt : std::optional(graph.values[id].meta));
  }
  return metas;
}

struct ByIdentity {
  bool operator()(const at::Tensor& a, const at::Tensor& b) const {
    return a.unsafeGetTensorImpl() < b.unsafeGetTensorImpl();
  }
};

int64_t itemsize(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.itemsize()); }

/// Bytes on a storage.
struct Range {
  int64_t begin = std::numeric_limits<int64_t>::max();
  int64_t end = 0;

  void add(const at::Tensor& tensor) {
    const int64_t first = tensor.storage_offset() * itemsize(tensor);
    begin = std::min(begin, first);
    end = std::max(end, first + span_of(tensor.sizes(), tensor.strides()) * itemsize(tensor));
  }
};

/// A copy of these bytes, which begin as far from a multiple of 64 bytes as they do.
at::Tensor copy_of(const at::Tensor& tensor, const Range& range) {
  const auto options = tensor.options().dtype(at::kByte).requires_grad(false);
  if (range.begin == range.end) return at::empty({0}, options);
  const at::Tensor bytes =
      at::empty({0}, options).set_(tensor.storage(), range.begin, {range.end - range.begin}, {1});
  return copy_as_laid_out(bytes);
}

/// `tensor` on other memory, whose first byte is that at `begin` of its storage.
at::Tensor moved(const at::Tensor& tensor, const at::Tensor& memory, int64_t begin) {
  at::Tensor result = tensor.variable_data();
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_allow_tensor_metadata_change(true);
  impl->set_storage_keep_dtype(memory.storage());
  const int64_t byte = tensor.storage_offset() * itemsize(tensor) - begin + memory.storage_offset();
  impl->set_storage_offset(byte / itemsize(tensor));
  return tensor.requires_grad() ? enter(result, core::make_node<GradientSink>()) : result;
}

/// Gives values memory of their own. Those that share some go on doing so.
void move_to_own_memory(const std::vector<ValueId>& values, Environment& environment) {
  const at::NoGradGuard no_grad;
  std::map<const c10::StorageImpl*, Range> ranges;
  const auto storage_of = [](const at::Tensor& tensor) {
    return tensor.storage().unsafeGetStorageImpl();
  };
  for (ValueId id : values) {
    const at::Tensor& tensor = environment[id];
    if (tensor.defined()) ranges[storage_of(tensor)].add(tensor);
  }
  std::map<const c10::StorageImpl*, at::Tensor> copies;
  std::map<at::Tensor, at::Tensor, ByIdentity> done;  // holds the tensors, so that none is new
  for (ValueId id : values) {
    at::Tensor& tensor = environment[id];
    if (!tensor.defined()) continue;
    const Range& range = ranges.at(storage_of(tensor));
    at::Tensor& copy = copies[storage_of(tensor)];
    if (!copy.defined()) copy = copy_of(tensor, range);
    at::Tensor& own = done[tensor];
    if (!own.defined()) own = moved(tensor, copy, range.begin);
    tensor = own;
  }
}

}  // namespace

bool computes(const Graph& graph, int index, size_t number) {
  const Operator& op = graph.operators[index];
  const std::string name = op.name();
  if (has_trait(name, OperatorTrait::kLeavesUninitialised)) return false;
  if (has_trait(name, OperatorTrait::kReplacesStorage)) return false;
  const ValueId result = op.results[number];
  return graph.values[result].alias_set < 0 || writes_to(graph, op, result) ||
         !lies_on_argument(graph, op, result);
}

/// While it lives, libtorch's cache of autocast's casts keeps those of a run. The cache belongs to
/// the process, and other ranks may be threads of it: their runs have casts of other aliases
/// (`for_scope`), so all may go on at the same time, and the last one clears it. A leaf casts the
/// parameters of its module itself, and casts kept by another run would be old in the next step:
/// such a run has the cache alone.
class CastCacheScope {
 public:
  enum class Use { kShared, kAlone };

  /// Waits for the runs that it cannot share with.
  explicit CastCacheScope(Use use) : alone_(use == Use::kAlone) {
    Cache& cache = of_process();
    std::unique_lock lock(cache.mutex);
    const auto is_free = [&] { return !cache.alone && (!alone_ || cache.shared == 0); };
    cache.changed.wait(lock, is_free);
    if (alone_) {
      cache.alone = true;
      at::autocast::clear_cache();
    } else {
      ++cache.shared;
    }
  }
  ~CastCacheScope() {
    Cache& cache = of_process();
    const std::lock_guard lock(cache.mutex);
    if (alone_) {
      cache.alone = false;
    } else {
      --cache.shared;
    }
    if (cache.shared == 0) at::autocast::clear_cache();
    cache.changed.notify_all();
  }
  CastCacheScope(const CastCacheScope&) = delete;
  CastCacheScope& operator=(const CastCacheScope&) = delete;

 private:
  struct Cache {
    std::mutex mutex;
    std::condition_variable changed;
    int shared = 0;
    bool alone = false;
  };
  static Cache& of_process() {
    static Cache cache;
    return cache;
  }

  const bool alone_;
};

Segment::Segment(const GraphFacts& facts, const std::vector<int>& operators,
                 const std::vector<ValueId>& keep) {
  const Graph& graph = facts.graph;
  LateWrites late = facts.late_writes;
  std::unordered_map<ValueId, size_t> last_use;
  for (int index : operators) {
    const Operator& op = graph.operators[index];
    const auto use = [&](ValueId id) { last_use[id] = instructions_.size(); };
    for_each_argument(op, use);
    for_each_result(op, use);
    const int autocast_scope = facts.autocast_scopes[index];
    instructions_.push_back({op,
                             index,
                             autocast_scope,
                             {},
                             graph.makes_literal(op) ? op.results[0] : kUndefined,
                             recorded_results(graph, op),
                             is_leaf(op.handle),
                             has_written_results(op.handle),
                             {},
                             {}});
    Instruction& instruction = instructions_.back();
    for (ValueId id : facts.weights_to_cast[index]) {
      instruction.weights.emplace_back(id, graph.values[id].alias_set);
    }
    for (int alias_set : late.moved_by(op)) {
      const auto& moved = facts.aliases.set(alias_set).values;
      instruction.moves.insert(instruction.moves.end(), moved.begin(), moved.end());
    }
    casts_ |= autocast_scope >= 0;
    casts_in_leaf_ |= autocast_scope >= 0 && is_leaf(op.handle);
  }
  const std::unordered_set<ValueId> kept(keep.begin(), keep.end());
  for (const auto& [id, instruction] : last_use) {
    if (kept.count(id) == 0) instructions_[instruction].dead.push_back(id);
  }
}

Segment::Run::Run(Segment& segment, const ResultObserver* observer)
    : segment_(segment), observer_(observer) {
  if (!segment.casts_) return;
  using Use = CastCacheScope::Use;
  casts_ = std::make_unique<CastCacheScope>(segment.casts_in_leaf_ ? Use::kAlone : Use::kShared);
}

Segment::Run::~Run() {
  segment_.aliases_.clear();
  segment_.stack_.clear();  // an operator that threw has left its arguments there
}

void Segment::Run::part(size_t first, size_t last, Environment& environment, const RandomKey& key) {
  for (size_t i = first; i < last; ++i) {
    const Instruction& instruction = segment_.instructions_[i];
    if (!instruction.moves.empty()) move_to_own_memory(instruction.moves, environment);
    execute(instruction, environment, key);
    for (ValueId id : instruction.dead) environment[id] = at::Tensor();
  }
}

void Segment::Run::execute(const Instruction& instruction, Environment& environment,
                           const RandomKey& key) {
  segment_.execute(instruction, environment, key);
  if (observer_ == nullptr || instruction.literal != kUndefined) return;
  for (size_t i = 0; i < instruction.op.results.size(); ++i) {
    const ValueId id = instruction.op.results[i];
    if (id == kUndefined || !environment[id].defined()) continue;
    (*observer_)(instruction.operator_index, i, environment[id]);
  }
}

void Segment::run(Environment& environment, const RandomKey& key) {
  Run(*this).part(0, size(), environment, key);
}

void Segment::run_one(size_t index, Environment& environment, const RandomKey& key) {
  std::optional<CastCacheScope> cache;
  const Instruction& instruction = instructions_[index];
  using Use = CastCacheScope::Use;
  if (instruction.autocast_scope >= 0) {
    cache.emplace(instruction.is_leaf ? Use::kAlone : Use::kShared);
  }
  const auto forget = c10::make_scope_exit([this] { aliases_.clear(); });
  execute(instruction, environment, key);
}

void Segment::execute(const Instruction& instruction, Environment& environment,
                      const RandomKey& key) {
  if (instruction.literal != kUndefined) return;  // its content is in the environment
  std::optional<ModeScope> mode;
  if (!instruction.op.mode.runs_like(ExecutionMode::current())) mode.emplace(instruction.op.mode);
  stack_.clear();
  push_arguments(instruction, environment);
  const auto call = [&] {
    std::optional<WeightCasts::Scope> casts;
    if (!instruction.weights.empty() && casts_of_weights_.are_shared()) {
      casts.emplace(casts_of_weights_, weights_of(instruction, environment));
    }
    if (instruction.op.random_ordinal >= 0) {
      call_keyed(instruction.op.handle, stack_, key, instruction.op.random_ordinal);
    } else {
      instruction.op.handle.callBoxed(stack_);
    }
  };
  try {
    if (instruction.has_written_results) {
      call_for_results(instruction.op.handle, stack_, call);
    } else {
      call();
    }
  } catch (c10::Error& error) {
    add_place(error, text_of(instruction));
    throw;
  }
  if (instruction.is_leaf) {
    check_leaf_results(*leaf_call(instruction.op.arguments[0].constant), instruction.recorded,
                       stack_.back().toTensorVector());
  }
  pop_results(instruction, environment);
}

/// Autocast casts a leaf once until its cache is cleared, as it is at the end of each scope. So in
/// each another alias of it is used, with the same end of its gradients. A view whose base
/// was given a history after it passes for a leaf, too, but autocast casts it anew.
at::Tensor Segment::for_scope(int autocast_scope, const at::Tensor& tensor) {
  if (autocast_scope < 0 || !tensor.requires_grad() || !tensor.is_leaf() || tensor.is_view()) {
    return tensor;
  }
  ScopeAlias& alias = aliases_[{autocast_scope, tensor.unsafeGetTensorImpl()}];
  if (!alias.tensor.defined()) {
    alias.of = tensor;
    alias.tensor = tensor.variable_data().set_requires_grad(true);
    alias.end = torch::autograd::impl::grad_accumulator(tensor);
    torch::autograd::impl::set_grad_accumulator(alias.tensor, core::WeakNodePtr(alias.end));
  }
  return alias.tensor;
}

/// Those that the operator got as arguments.
WeightCasts::Scope::Weights Segment::weights_of(const Instruction& instruction,
                                                const Environment& environment) {
  WeightCasts::Scope::Weights weights;
  for (const auto& [id, alias_set] : instruction.weights) {
    const at::Tensor weight = for_scope(instruction.autocast_scope, environment[id]);
    weights.push_back({weight.unsafeGetTensorImpl(), alias_set});
  }
  return weights;
}

void Segment::push_arguments(const Instruction& instruction, const Environment& environment) {
  const auto tensor = [&](ValueId id) {
    return id == kUndefined ? at::Tensor() : for_scope(instruction.autocast_scope, environment[id]);
  };
  for (const Argument& argument : instruction.op.arguments) {
    stack_.push_back(to_ivalue(argument, tensor));
  }
}

/// "operator 3 (aten::add), in or after module "net.fc"", for errors.
std::string Segment::text_of(const Instruction& instruction) {
  const std::string module =
      instruction.op.scope.empty() ? "" : ", in or after module \"" + instruction.op.scope + "\"";
  return c10::str("operator ", instruction.operator_index, " (",
                  instruction.op.handle.schema().name(), ")", module);
}

/// The program's use of a size or a type is part of the graph, so they must be those recorded.
void Segment::check_result(const Instruction& instruction, size_t index,
                           const at::Tensor& result) const {
  const auto& recorded = instruction.recorded[index];
  if (!recorded || !result.defined()) return;
  const bool same_sizes = result.sizes() == c10::IntArrayRef(recorded->sizes);
  if (same_sizes && result.scalar_type() == recorded->dtype) return;
  core::fail<CaptureError>(
      text_of(instruction), " gave a result of ", result.scalar_type(), result.sizes(),
      ", and was recorded with one of ", recorded->dtype, c10::IntArrayRef(recorded->sizes),
      same_sizes ? ": its result type is not the one that all after it was planned for. Give it "
                   "arguments of one type (x.to(dtype)), or make the module that calls it a leaf: "
                   "smp::leaf(module)(x)"
                 : ": its result shape depends on data. Use an operator whose result has a fixed "
                   "shape (torch::where with three arguments, a mask that multiplies), or make the "
                   "module that calls it a leaf: smp::leaf(module)(x)");
}

void Segment::pop_results(const Instruction& instruction, Environment& environment) {
  size_t next = 0;
  const auto store = [&](at::Tensor tensor) {
    SMP_INTERNAL_ASSERT(next < instruction.op.results.size(), "operator ",
                        instruction.op.handle.schema().name(), " returned more tensors than the ",
                        instruction.op.results.size(), " that were recorded");
    check_result(instruction, next, tensor);
    const ValueId id = instruction.op.results[next++];
    if (id != kUndefined) environment[id] = std::move(tensor);
  };
  for (c10::IValue& value : stack_) {
    if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) store(tensor);
    } else {
      store(std::move(value).toTensor());
    }
  }
  SMP_INTERNAL_ASSERT(next == instruction.op.results.size(), "operator ",
                      instruction.op.handle.schema().name(), " returned ", next, " tensors where ",
                      instruction.op.results.size(), " were recorded");
  stack_.clear();
}

void Segment::apply(const std::vector<ConstantOverride>& changes) {
  for (const ConstantOverride& change : changes) {
    const auto found =
        std::lower_bound(instructions_.begin(), instructions_.end(), change.operator_index,
                         [](const Instruction& instruction, int index) {
                           return instruction.operator_index < index;
                         });
    if (found != instructions_.end() && found->operator_index == change.operator_index) {
      found->op.arguments[change.argument].constant = change.value;
    }
  }
}

at::Tensor aligned(const at::Tensor& tensor) {
  constexpr uintptr_t kAlignment = 64;
  if (tensor.numel() == 0) return tensor;
  const auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  if (address % kAlignment == 0) return tensor;
  return copy_to(tensor.device(), tensor);
}

at::Tensor copy_to(at::Device device, const at::Tensor& tensor) {
  at::NoGradGuard no_grad;
  const at::Tensor compact = without_expansion(tensor);
  at::Tensor copy =
      at::empty_strided(compact.sizes(), compact.strides(), tensor.options().device(device));
  copy.copy_(compact);
  // No view: those made without gradients may not be written where gradients are on.
  at::Tensor result = copy.as_strided(tensor.sizes(), tensor.strides()).variable_data();
  return result.requires_grad_(tensor.requires_grad());
}

}  // namespace smp::graph
