// SPDX-License-Identifier: Apache-2.0
#include "graph/region_run.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "core/check.h"
#include "core/node.h"
#include "graph/memory_layout.h"

namespace smp::graph {
namespace {

at::Tensor view_of(const at::Tensor& memory, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                   int64_t offset) {
  const at::NoGradGuard no_grad;
  return at::as_strided(memory, sizes, strides, offset);
}

/// The tensor without history. A leaf has none, and stays itself: autocast casts it once.
at::Tensor without_history(const at::Tensor& tensor, RegionInput::Kind kind) {
  if (kind == RegionInput::Kind::kCopy) return copy_as_laid_out(tensor);
  return tensor.requires_grad() && tensor.is_leaf() ? tensor : tensor.tensor_data();
}

}  // namespace

RegionInput::RegionInput(const at::Tensor& tensor, Kind kind)
    : kind_(kind),
      requires_grad_(tensor.requires_grad()),
      is_leaf_(tensor.is_leaf()),
      offset_(tensor.has_storage() ? tensor.storage_offset() : 0),
      span_(tensor.has_storage() ? span_of(tensor.sizes(), tensor.strides()) : 0),
      tensor_(without_history(tensor, kind)) {}

bool RegionInput::store(TensorStore& store) {
  if (kind_ == Kind::kOther || (requires_grad_ && is_leaf_) || span_ == 0) return false;
  if (stored_ == nullptr) {
    stored_ = store.put(tensor_);
    tensor_ = at::Tensor();
  }
  return true;
}

void RegionInput::prefetch() const {
  if (stored_ != nullptr) stored_->prefetch();
}

const at::Tensor& RegionInput::fetched() {
  if (!tensor_.defined()) tensor_ = stored_->get();
  return tensor_;
}

at::Tensor RegionInput::enter(std::vector<GradientSinkPtr>& sinks) {
  if (!requires_grad_ || is_leaf_) return fetched();
  sinks.push_back(core::make_node<GradientSink>());
  return graph::enter(fetched(), sinks.back());
}

at::Tensor RegionInput::view(c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset) {
  return view_of(fetched(), sizes, strides, offset - offset_ + fetched().storage_offset());
}

bool RegionInput::holds(c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset) const {
  return offset >= offset_ && offset + span_of(sizes, strides) <= offset_ + span_;
}

void SegmentProgram::apply(const Graph& graph, const Overrides& changes) {
  if (changes.empty()) return;
  auto all = std::make_shared<Overrides>(in_effect ? *in_effect : Overrides());
  for (const ConstantOverride& change : changes) {
    if (overridden.insert({change.operator_index, change.argument}).second) {
      const Operator& op = graph.operators[change.operator_index];
      captured.push_back(
          {change.operator_index, change.argument, op.arguments[change.argument].constant});
    }
    const auto same = std::find_if(all->begin(), all->end(), [&](const ConstantOverride& other) {
      return other.operator_index == change.operator_index && other.argument == change.argument;
    });
    if (same == all->end()) {
      all->push_back(change);
    } else {
      *same = change;
    }
  }
  in_effect = std::move(all);
  segment.apply(changes);
}

void SegmentProgram::use(const Overrides* overrides) {
  segment.apply(captured);
  if (overrides != nullptr) segment.apply(*overrides);
}

RegionRun::Saved::Saved(const at::Tensor& tensor)
    : dtype(tensor.scalar_type()),
      counter(torch::autograd::impl::version_counter(tensor)),
      version(counter.current_version()) {
  if (!tensor.has_storage()) {
    value = tensor.tensor_data();  // another kind than a dense one
    return;
  }
  sizes = tensor.sizes();
  strides = tensor.strides();
  offset = tensor.storage_offset();
  conjugate = tensor.is_conj();
  negative = tensor.is_neg();
  storage = tensor.storage().getWeakStorageImpl();
}

void RegionRun::Saved::keep_on(const at::Tensor& tensor) {
  const auto memory = storage.lock();
  if (memory == nullptr || memory.get() != tensor.storage().unsafeGetStorageImpl()) return;
  if (counter.current_version() != version || dtype != tensor.scalar_type()) return;
  keep(view_of(tensor.tensor_data(), sizes, strides, offset));
  torch::autograd::impl::set_version_counter(value, counter);
}

/// The memory may be that of a tensor that shows its conjugate, and this one does not.
void RegionRun::Saved::keep(const at::Tensor& view) {
  value = view;
  value._set_conj(conjugate);
  value._set_neg(negative);
}

/// is_alias_of() would look at the data, which may be away.
RegionRun::MemoryKey RegionRun::memory_of(const at::Tensor& tensor) {
  return {tensor.storage().unsafeGetStorageImpl(), tensor.scalar_type()};
}

void RegionRun::add_input(ValueId value, const at::Tensor& tensor,
                          std::shared_ptr<RegionInput> kept, bool unchanged) {
  // Held while the region runs, so that its address belongs to no other memory.
  if (unchanged && tensor.has_storage()) {
    unchanged_.try_emplace(memory_of(tensor), Memory{tensor.tensor_data(), kept});
  }
  inputs_.push_back({value, std::move(kept)});
}

size_t RegionRun::pack(const at::Tensor& tensor) {
  Saved saved(tensor);
  if (tensor.has_storage() && !saved.value.defined()) {
    const auto found = unchanged_.find(memory_of(tensor));
    if (found != unchanged_.end()) {
      saved.value = tensor.tensor_data();
      saved.input = found->second.kept;
    }
  }
  saved_.push_back(std::move(saved));
  return saved_.size() - 1;
}

void RegionRun::release(size_t number) noexcept {
  Saved& saved = saved_[number];
  saved.released = true;
  saved.value = at::Tensor();
  saved.input = nullptr;
}

std::vector<std::shared_ptr<RegionInput>> RegionRun::finish(
    const std::vector<at::Tensor>& kept_by_others, TensorStore* store) {
  unchanged_.clear();
  bool complete = true;
  for (Saved& saved : saved_) {
    for (const at::Tensor& tensor : kept_by_others) {
      if (saved.is_missing()) saved.keep_on(tensor);
    }
    complete = complete && !saved.is_missing();
  }
  if (complete) inputs_.clear();
  std::vector<std::shared_ptr<RegionInput>> stored;
  if (store != nullptr) move_to(*store, stored);
  return stored;
}

void RegionRun::move_to(TensorStore& store, std::vector<std::shared_ptr<RegionInput>>& stored) {
  const auto move = [&](const std::shared_ptr<RegionInput>& kept) {
    if (!kept->store(store)) return false;
    if (std::find(stored.begin(), stored.end(), kept) == stored.end()) stored.push_back(kept);
    return true;
  };
  for (const Input& input : inputs_) move(input.kept);
  for (Saved& saved : saved_) {
    // Tensors on the input's memory that lie elsewhere are kept there.
    const bool inside =
        saved.input != nullptr && saved.input->holds(saved.sizes, saved.strides, saved.offset);
    if (inside && move(saved.input)) saved.value = at::Tensor();
  }
}

at::Tensor RegionRun::unpack(size_t number) {
  Saved& saved = saved_[number];
  if (saved.is_missing()) run_again();
  if (!saved.value.defined()) {
    saved.keep(saved.input->view(saved.sizes, saved.strides, saved.offset));
    saved.version = static_cast<uint32_t>(saved.value._version());
  }
  SMP_CHECK_WITH(UsageError, saved.value._version() == saved.version, "a tensor of shape ",
                 saved.value.sizes(),
                 " that an operator in a region of activation checkpointing saved for its backward "
                 "was written in place afterwards. Replace the operator that writes it by one that "
                 "returns a new tensor");
  return saved.value;
}

/// Takes the tensors that the second run saves.
class RegionRun::SecondRun final : public SavedTensorKeeper {
 public:
  /// Thrown when nothing is missing any more.
  struct Complete {};

  explicit SecondRun(RegionRun& region) : region_(region) {}

  size_t pack(const at::Tensor& tensor) override {
    region_.take(count_, tensor);
    return count_++;
  }
  at::Tensor unpack(size_t) override {
    SMP_INTERNAL_ASSERT(false, "a backward went through the second run of a region");
  }
  void release(size_t) noexcept override {}

 private:
  RegionRun& region_;
  size_t count_ = 0;
};

void RegionRun::run_again() {
  missing_ = static_cast<size_t>(std::count_if(
      saved_.begin(), saved_.end(), [](const Saved& saved) { return saved.is_missing(); }));
  Environment environment(program_->values);
  std::vector<GradientSinkPtr> sinks;
  for (const Input& input : inputs_) environment[input.value] = input.kept->enter(sinks);
  inputs_.clear();
  const at::AutoGradMode grad(true);  // operators set the modes they were recorded in
  const SavedTensorScope scope(std::make_shared<SecondRun>(*this));
  program_->use(constants_.get());
  const auto restore = c10::make_scope_exit([&] { program_->use(program_->in_effect.get()); });
  try {
    Segment::Run(program_->segment).part(first_, last_, environment, key_);
  } catch (const SecondRun::Complete&) {
  }
  SMP_INTERNAL_ASSERT(missing_ == 0, "the second run of a region saved ", missing_,
                      " tensors less than the first");
}

void RegionRun::take(size_t number, const at::Tensor& tensor) {
  SMP_INTERNAL_ASSERT(number < saved_.size(), "the second run of a region saved more than ",
                      saved_.size(), " tensors");
  Saved& saved = saved_[number];
  if (!saved.is_missing()) return;
  SMP_INTERNAL_ASSERT(tensor.sizes() == saved.sizes && tensor.scalar_type() == saved.dtype,
                      "the second run of a region saved ", tensor.scalar_type(), tensor.sizes(),
                      " where the first saved ", saved.dtype, c10::IntArrayRef(saved.sizes));
  saved.value = tensor.tensor_data();
  saved.version = torch::autograd::impl::version_counter(tensor).current_version();
  if (--missing_ == 0 && early_end_) throw SecondRun::Complete();
}

}  // namespace smp::graph
