// SPDX-License-Identifier: Apache-2.0
#include "graph/part.h"

#include <ATen/ExpandUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/string_view.h>

#include <algorithm>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/check.h"
#include "graph/below_autograd.h"
#include "graph/content.h"
#include "graph/operator_traits.h"
#include "graph/stack_tensors.h"

namespace smp::graph {
namespace {

/// The mark that a part, and every copy of its metadata, carries.
struct PartMark final : c10::BackendMeta {
  explicit PartMark(AbsencePtr given) : absence(std::move(given)) {}
  const AbsencePtr absence;
};

const PartMark* part_mark(const at::Tensor& tensor) {
  return dynamic_cast<const PartMark*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
}

/// Whether an operator asks a tensor for no more than its type or device (`new_zeros`). Results of
/// `empty_like` are parts: `2 - part` begins as one.
bool makes_another(const std::string& name) {
  return c10::starts_with(name, "aten::new_") || has_trait(name, OperatorTrait::kReadsMetadata);
}

/// A call of an operator with a part among its arguments.
class PartCall {
 public:
  PartCall(const c10::OperatorHandle& op, const std::vector<at::Tensor>& tensors)
      : op_(op), name_(op.schema().name()) {
    for (const at::Tensor& tensor : tensors) {
      if (!tensor.defined()) continue;
      if (is_part(tensor)) {
        parts_.push_back(tensor);
      } else if (!is_wrapped_number(tensor)) {
        others_.push_back(tensor);
      }
    }
  }

  void check() const {
    if (others_.empty() || moves_elements()) return;
    const at::Tensor& part = parts_.front();
    const bool fits = goes_by_element() &&
                      std::all_of(others_.begin(), others_.end(), [&](const at::Tensor& other) {
                        return at::is_expandable_to(other.sizes(), sizes());
                      });
    const auto& absence = *part_mark(part)->absence;
    SMP_CHECK_WITH(UsageError, fits, "operator ", name_, " needs all of ", absence.what,
                   ": this rank has a part of these numbers, ", part.sizes(), ". ", absence.remedy);
  }

  /// Views are parts, and what has a number for each of the part's; norms and sums are not.
  void mark(const at::Tensor& result) const {
    const at::Tensor& part = parts_.front();
    if (!result.defined() || is_part(result)) return;
    const bool by_element = result.dim() > 0 && result.numel() >= part.numel();
    if (is_seen(result) || by_element) become_part(result, part_mark(part)->absence);
  }

 private:
  /// Whether it only puts elements beside each other, in memory or on ranks, or goes over lists of
  /// tensors one by one.
  bool moves_elements() const {
    static const std::unordered_set<std::string> kSideBySide = {"aten::cat", "aten::stack"};
    return kSideBySide.count(name_) > 0 || c10::starts_with(name_, "aten::_foreach_") ||
           c10::starts_with(name_, "aten::_fused_") || c10::starts_with(name_, "c10d::");
  }

  bool goes_by_element() const {
    static const std::unordered_set<std::string> kUntagged = {
        "aten::allclose", "aten::copy_",       "aten::equal",
        "aten::isclose",  "aten::masked_fill", "aten::masked_fill_"};
    return op_.hasTag(at::Tag::pointwise) || kUntagged.count(name_) > 0;
  }

  /// Those to which the parts expand.
  at::DimVector sizes() const {
    at::DimVector sizes(parts_.front().sizes());
    for (const at::Tensor& part : parts_) sizes = at::infer_size_dimvector(sizes, part.sizes());
    return sizes;
  }

  const c10::OperatorHandle& op_;
  const std::string& name_;
  std::vector<at::Tensor> parts_, others_;
};

bool writes(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
  const size_t count = schema.arguments().size();
  return !written_arguments(schema, [&](size_t i) -> const c10::IValue& {
            return torch::jit::peek(stack, i, count);
          }).empty();
}

bool see_parts(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const auto& schema = op.schema();
  const auto tensors = tensors_in(stack, schema.arguments().size());
  const bool any_part = std::any_of(tensors.begin(), tensors.end(), is_part);
  // Absent ones see to parts that are beside them, as to all tensors that this rank has.
  if (!any_part || std::any_of(tensors.begin(), tensors.end(), is_absent)) return false;
  if (makes_another(schema.name())) return false;
  const PartCall call(op, tensors);
  call.check();
  if (writes(schema, stack)) return false;
  const c10::impl::ExcludeDispatchKeyGuard own(kBelowAutograd);
  const at::AutoDispatchBelowADInplaceOrView below;
  op.callBoxed(stack);
  for (const at::Tensor& result : tensors_in(stack, schema.returns().size())) call.mark(result);
  return true;
}

const bool sees_parts = see_below_autograd(&see_parts);

}  // namespace

void become_part(const at::Tensor& tensor, AbsencePtr absence) {
  tensor.unsafeGetTensorImpl()->set_backend_meta(c10::make_intrusive<PartMark>(std::move(absence)));
  set_seen(tensor, true);
}

bool is_part(const at::Tensor& tensor) { return is_seen(tensor) && part_mark(tensor) != nullptr; }

void hide_part(const at::Tensor& part) { set_seen(part, false); }

bool stay_part(const at::Tensor& tensor) {
  const bool was = part_mark(tensor) != nullptr;
  if (was) set_seen(tensor, true);
  return was;
}

}  // namespace smp::graph
