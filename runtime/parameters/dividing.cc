// SPDX-License-Identifier: Apache-2.0
#include "runtime/parameters/dividing.h"

#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "core/check.h"
#include "core/log.h"
#include "graph/absent.h"
#include "graph/part.h"
#include "graph/recording.h"
#include "graph/storage.h"
#include "nn/parameter_sharding.h"
#include "nn/rewrite/attention_form.h"
#include "nn/rewrite/residual_sums.h"
#include "runtime/parameters/storage.h"
#include "runtime/parameters/whole.h"

namespace smp::runtime {
namespace {

/// Gives a tensor other sizes, without a look at its memory: contiguous, or with those strides.
void set_sizes(const at::Tensor& tensor, const std::vector<int64_t>& sizes,
               const std::vector<int64_t>& strides = {}) {
  c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  const bool allowed = impl.allow_tensor_metadata_change();
  impl.set_allow_tensor_metadata_change(true);
  if (strides.empty()) {
    impl.set_sizes_contiguous(sizes);
  } else {
    impl.set_sizes_and_strides(sizes, strides);
  }
  impl.set_allow_tensor_metadata_change(allowed);
}

/// Leaves a tensor this rank's part. Its memory lies in the same storage, under all that hold it;
/// a part of values that wait, which is returned, waits too.
at::Tensor keep_part(const ParameterTable::Entry& entry, const nn::ParameterSplit& split,
                     int rank) {
  const at::Tensor tensor = entry.tensor;
  const at::Tensor values = entry.values().detach();
  const at::Tensor part = has_data(values) ? split.part(values, rank) : at::Tensor();
  set_sizes(tensor, split.local_sizes());
  if (part.defined() && !entry.waiting.defined()) {
    graph::give_data(*tensor.storage().unsafeGetStorageImpl(),
                     *part.storage().unsafeGetStorageImpl());
  }
  if (tensor.grad().defined()) tensor.mutable_grad() = split.part(tensor.grad(), rank);
  forget_grad_accumulator(tensor);
  return entry.waiting.defined() ? part : at::Tensor();
}

/// Why this rank cannot use a parameter as the whole.
graph::AbsencePtr partness_of(const ParameterTable::Entry& entry) {
  return std::make_shared<graph::Absence>(graph::Absence{
      c10::str("parameter \"", entry.name, "\", which the ranks of a tensor-parallel group divide"),
      "Outside of steps go over its elements only. Call the module inside "
      "smp::step([&](torch::Tensor x) { return model(x); }), or as a plain module once "
      "model->cpu() has gathered it; model->state_dict() has copies of the wholes"});
}

using nn::rewrite::DividedGraph;
using nn::rewrite::DivideOptions;

/// Decides which parts of a graph may be divided, and reports those that were.
class Divider {
 public:
  Divider(Runtime& runtime, const graph::Graph& captured, const std::string& step_name)
      : runtime_(runtime), captured_(captured), step_name_(step_name) {
    options_.ranks = runtime.topology().tp_size();
    options_.estimate = true;  // runs that divided differently would add in another order
    options_.residual_streams = runtime.config().optimize() == "memory";
    const core::Axis over = runtime.topology().axis(CommGroup::kTp);
    for (const auto* entry : runtime.table().divided()) {
      if (entry->captured_whole)
        options_.fixed.emplace(entry->name, nn::split_of(entry->sharding, over));
    }
    for (const auto& entry : runtime.table().entries()) {
      const auto mark = entry.tensor_parallelism_mark();
      const bool by_module = entry.is_divided() && !entry.captured_whole;
      if (!mark || !mark->enabled || !entry.is_parameter() || by_module) continue;
      if (mark->options.changes_operators()) options_.options_of[entry.name] = mark->options;
    }
    if (!runtime.partitioned()) allow();
  }

  std::shared_ptr<Division> preview() const {
    auto division = std::make_shared<Division>();
    division->refusal = nn::rewrite::why_none_divided(captured_, options_);
    if (!division->refusal) division->made = nn::rewrite::divide(captured_, options_);
    return division;
  }

  /// Null: nothing is divided.
  std::shared_ptr<const DividedGraph> settle(const std::shared_ptr<Division>& division) {
    DividedGraph& divided = division->made;
    for (auto& decision : divided.decisions) {
      const auto refusal = refusals_.find(decision.name);
      if (refusal != refusals_.end()) {
        std::tie(decision.why_whole, decision.skipped) = refusal->second;
      }
    }
    check_options(divided);
    check_alike(divided);
    if (!runtime_.partitioned()) {
      check_strict(divided, division->refusal);
      report(divided, division->refusal);
    }
    if (division->graph() == nullptr) return nullptr;
    return {division, &divided};
  }

 private:
  /// Finds the parameters that may be divided by their marks and kinds. A mark is the user's
  /// choice.
  void allow() {
    const auto& entries = runtime_.table().entries();
    options_.insist = std::any_of(entries.begin(), entries.end(), [](const auto& entry) {
      const auto mark = entry.tensor_parallelism_mark();
      return mark && mark->enabled;
    });
    const bool all = !options_.insist && runtime_.config().tensor_parallelism() == "auto" &&
                     !runtime_.table().any_divided();
    for (const auto& entry : entries) {
      const auto mark = entry.tensor_parallelism_mark();
      const bool may = (mark ? mark->enabled : all) && !entry.is_divided();
      if (!may || !entry.is_parameter()) continue;
      const bool keeps_table =
          mark && !mark->options.distribute_embedding() && is_table(entry.name);
      if (keeps_table) {
        refusals_[entry.name] = {"it is a table of embeddings, and distribute_embedding is false",
                                 false};
      } else if (!is_fit(entry)) {
        refusals_[entry.name] = {"its memory is shared with another tensor, or has gaps", true};
      } else {
        options_.allowed.insert(entry.name);
      }
    }
  }

  static std::string module_of(const graph::Operator& op) {
    return op.scope.empty() ? "" : " in or after module \"" + op.scope + "\"";
  }

  /// Whether a parameter is looked up as a table of embeddings.
  bool is_table(const std::string& name) const {
    return std::any_of(captured_.operators.begin(), captured_.operators.end(),
                       [&](const graph::Operator& op) {
                         return op.handle.operator_name().name == "aten::embedding" &&
                                captured_.values[op.arguments[0].values[0]].name == name;
                       });
  }

  /// Options that the user set on operators must not be lost.
  void check_options(const DividedGraph& divided) const {
    if (options_.options_of.empty()) return;
    check_attention(divided);
    check_residuals(divided);
  }

  template <class Test>
  bool any_says(const Test& test) const {
    return std::any_of(options_.options_of.begin(), options_.options_of.end(),
                       [&](const auto& of_parameter) { return test(of_parameter.second); });
  }

  void check_attention(const DividedGraph& divided) const {
    const auto forms = nn::rewrite::attention_forms(captured_, options_.options_of);
    bool any = !any_says([](const auto& options) { return options.changes_attention(); });
    for (size_t i = 0; i < forms.size(); ++i) {
      if (forms[i].is_as_captured()) continue;
      any = true;
      SMP_CHECK_WITH(
          UsageError, divided.computed_otherwise.count(i) > 0, "step function \"", step_name_,
          "\": attention in or after module \"", captured_.operators[i].scope,
          "\" cannot be computed as the options of smp::tensor_parallelism say, since it is not "
          "divided among the ",
          options_.ranks,
          " ranks: its heads and samples are no multiple of "
          "them, or there are fewer heads of keys than of queries, or attention_in_fp32 is under "
          "autocast, or use_alibi finds no [N, heads, S, channels]. Leave out attention_in_fp32, "
          "query_key_layer_scaling, use_alibi and flash_attention there");
    }
    SMP_CHECK_WITH(UsageError, any || runtime_.partitioned(), "step function \"", step_name_,
                   "\": smp::tensor_parallelism was given options of attention "
                   "(attention_in_fp32, query_key_layer_scaling, use_alibi or flash_attention), "
                   "but nothing that was made with them calls scaled_dot_product_attention. "
                   "Modules of smp::nn have these options themselves; others have to call that "
                   "function");
  }

  void check_residuals(const DividedGraph& divided) const {
    const auto sums = nn::rewrite::residual_sums(captured_, options_.options_of);
    bool any = !any_says([](const auto& options) { return options.fp32_residual_addition(); });
    for (size_t i = 0; i < sums.size(); ++i) {
      if (!sums[i]) continue;
      any = true;
      SMP_CHECK_WITH(
          UsageError, !divided.parameters.empty(), "step function \"", step_name_,
          "\": the residual sum", module_of(captured_.operators[i]),
          " cannot be kept in float32, as fp32_residual_addition of smp::tensor_parallelism says, "
          "since no parameter is divided among the ",
          options_.ranks,
          " ranks. Leave out fp32_residual_addition there, or choose sizes that can be divided");
    }
    SMP_CHECK_WITH(UsageError, any || runtime_.partitioned(), "step function \"", step_name_,
                   "\": smp::tensor_parallelism was given fp32_residual_addition, but nothing "
                   "that was made with it adds to a value of half precision what products of "
                   "matrices made of it (x + f(x), not in place). Modules of smp::nn have this "
                   "option themselves; in float32 there is nothing to widen");
  }

  /// Whether a part can take the place of the whole in its memory.
  bool is_fit(const ParameterTable::Entry& entry) const {
    const at::Tensor& tensor = entry.tensor;
    return tensor.is_contiguous() && tensor.storage_offset() == 0 &&
           graph::storage_bytes(entry.values()) == tensor.nbytes() &&
           !entry.shares_storage_in(runtime_.table());
  }

  void check_alike(const DividedGraph& divided) const {
    const auto group = runtime_.partitioned() ? runtime_.group(CommGroup::kMp) : runtime_.world();
    const auto all = comm::all_gather_bytes(*group, std::to_string(divided.graph.fingerprint()));
    for (const std::string& other : all) {
      SMP_CHECK_WITH(UsageError, other == all[0], "step function \"", step_name_,
                     "\": the ranks would divide layers differently. Mark the same modules for "
                     "tensor parallelism on every rank");
    }
  }

  void check_strict(const DividedGraph& divided, const core::Refusal& refusal) const {
    if (!runtime_.config().strict_tensor_parallelism()) return;
    std::string skipped = options_.insist && refusal ? "\n  all: " + *refusal : "";
    for (const auto& decision : divided.decisions) {
      if (decision.skipped) skipped += "\n  " + decision.name + ": " + *decision.why_whole;
    }
    SMP_CHECK_WITH(UsageError, skipped.empty(),
                   "with \"strict_tensor_parallelism\", parameters of marked modules cannot be "
                   "divided among ",
                   options_.ranks, " ranks:", skipped,
                   "\nTake the mark from these modules, change their sizes or the "
                   "tensor_parallel_degree, or set \"strict_tensor_parallelism\" to false");
  }

  /// Keeps the report, which names every parameter.
  void report(const DividedGraph& divided, const core::Refusal& refusal) {
    std::string& text = runtime_.first_step.tensor_parallelism_report;
    text = c10::str("Tensor parallelism among ", options_.ranks, " ranks.\n");
    for (const auto* entry : runtime_.table().divided()) {
      text += c10::str("  ", entry->name, ": ", entry->sharding.to_string(), ", by its module\n");
    }
    if (!refusal) {
      text += nn::rewrite::report(divided);
    } else if (!runtime_.table().any_divided()) {
      text += c10::str("Nothing is divided by rewriting what was captured: ", *refusal, ".\n");
    }
    text += others(divided);
    const bool any = !divided.parameters.empty() || runtime_.table().any_divided();
    if (runtime_.rank() != 0) return;
    any ? core::log_info(text)
        : core::log_warning(
              "no layer is divided, so the ranks of a tensor-parallel group compute the "
              "same. " +
              text);
  }

  /// Parameters that the first graph does not read.
  std::string others(const DividedGraph& divided) const {
    std::set<std::string> known;
    for (const auto& decision : divided.decisions) known.insert(decision.name);
    std::string text;
    for (const auto& entry : runtime_.table().entries()) {
      const bool is_other =
          entry.is_parameter() && known.count(entry.name) == 0 && !entry.is_divided();
      if (!is_other || known.empty()) continue;
      text += c10::str("  ", entry.name, ": whole: no operator of the first step uses it\n");
    }
    return text;
  }

  Runtime& runtime_;
  const graph::Graph& captured_;
  const std::string& step_name_;
  DivideOptions options_;
  // Why parameters that might be divided stay whole, and `ParameterDecision::skipped` of them.
  std::map<std::string, std::pair<std::string, bool>> refusals_;
};

/// Options of operators are followed where layers are divided.
void check_no_options(const Runtime& runtime) {
  for (const auto& entry : runtime.table().entries()) {
    const auto mark = entry.tensor_parallelism_mark();
    SMP_CHECK_WITH(UsageError, !mark || !mark->enabled || !mark->options.changes_operators(),
                   "parameter \"", entry.name,
                   "\" was made with options of operators "
                   "(attention_in_fp32, query_key_layer_scaling, use_alibi, "
                   "fp32_residual_addition or flash_attention of smp::tensor_parallelism), which "
                   "only layers that ranks divide can follow. Set \"tensor_parallel_degree\", or "
                   "mark with smp::tensor_parallelism("
                   "smp::tp_size() > 1, options)");
  }
}

/// All ranks compute whole values, each for itself: on processors they stay alike only if the same
/// kernels add in the same order.
void check_same_kernels(Runtime& runtime) {
  const auto& entries = runtime.table().entries();
  const bool on_processors = std::any_of(entries.begin(), entries.end(), [](const auto& entry) {
    return entry.is_parameter() && entry.tensor.is_cpu();
  });
  if (!on_processors) return;
  const std::string mine =
      c10::str(at::get_num_threads(), " threads and CPU capability ", at::get_cpu_capability());
  const auto all = comm::all_gather_bytes(*runtime.group(CommGroup::kTp), mine);
  for (size_t r = 0; r < all.size(); ++r) {
    SMP_CHECK_WITH(UsageError, all[r] == all[0],
                   "the ranks of a tensor-parallel group would round differently what all of them "
                   "compute: tp rank 0 computes with ",
                   all[0], ", tp rank ", r, " with ", all[r],
                   ". On all of them, set one number of threads (OMP_NUM_THREADS, "
                   "at::set_num_threads) and one ATEN_CPU_CAPABILITY");
  }
}

}  // namespace

std::shared_ptr<Division> preview_division(Runtime& runtime, const graph::Graph& captured,
                                           const std::string& step_name) {
  if (!runtime.is_tensor_parallel()) return nullptr;
  return Divider(runtime, captured, step_name).preview();
}

std::shared_ptr<const DividedGraph> divide_graph(Runtime& runtime, const graph::Graph& captured,
                                                 const std::string& step_name,
                                                 std::shared_ptr<Division> preview) {
  if (!runtime.is_tensor_parallel()) {
    if (!runtime.partitioned()) check_no_options(runtime);
    return nullptr;
  }
  if (!runtime.partitioned()) check_same_kernels(runtime);
  Divider divider(runtime, captured, step_name);
  return divider.settle(preview ? preview : divider.preview());
}

void divide_parameter(Runtime& runtime, const ParameterTable::Entry& entry,
                      const nn::ParameterSplit& split) {
  at::NoGradGuard no_grad;
  at::Tensor waiting = keep_part(entry, split, runtime.rank_in(CommGroup::kTp));
  if (entry.waiting.defined()) runtime.table().set_waiting(entry.name, std::move(waiting));
  runtime.table().divide(entry.name, split, runtime.topology().axis(CommGroup::kTp),
                         /*captured_whole=*/true);
}

SetAside::SetAside(const at::Tensor& shown)
    : tensor(shown), sizes(shown.sizes().vec()), strides(shown.strides().vec()) {
  if (!has_data(tensor)) return;
  data = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), size_t{0},
                                               c10::DataPtr(nullptr, tensor.device()),
                                               /*allocator=*/nullptr, /*resizable=*/false);
  graph::give_data(*data, *tensor.storage().unsafeGetStorageImpl());
}

void SetAside::restore() const {
  set_sizes(tensor, sizes, strides);
  if (data) graph::give_data(*tensor.storage().unsafeGetStorageImpl(), *data);
}

LentWholes::LentWholes(Runtime& runtime) {
  at::NoGradGuard no_grad;
  runtime.rank_alone();
  for (const auto& entry : runtime.table().entries()) {
    const at::Tensor& tensor = entry.tensor;
    if (!entry.is_divided() || !has_data(tensor)) continue;
    const at::Tensor whole = join(runtime, entry.part(), tensor, tensor.options());
    lent_.push_back({SetAside(tensor), tensor.grad()});
    set_sizes(tensor, entry.sharding.sizes);
    graph::give_data(*tensor.storage().unsafeGetStorageImpl(),
                     *whole.storage().unsafeGetStorageImpl());
    tensor.mutable_grad().reset();
    forget_grad_accumulator(tensor);
  }
}

void LentWholes::take_back() {
  for (const auto& [part, gradient] : std::exchange(lent_, {})) {
    part.tensor.mutable_grad().reset();
    part.restore();
    part.tensor.mutable_grad() = gradient;
    forget_grad_accumulator(part.tensor);
  }
}

void mark_parts(const Runtime& runtime) {
  for (const auto& entry : runtime.table().entries()) {
    const at::Tensor& tensor = entry.tensor;
    if (!entry.captured_whole || graph::is_absent(tensor) || graph::stay_part(tensor)) continue;
    graph::become_part(tensor, partness_of(entry));
  }
}

OwnUse::OwnUse(Runtime& runtime) : runtime_(runtime) {
  if (const auto lent = std::exchange(runtime.lent, nullptr)) {
    lent->take_back();
    mark_parts(runtime);
  }
  for (const auto& entry : runtime.table().entries()) {
    if (graph::is_part(entry.tensor)) parts_.push_back(entry.tensor);
  }
  for (const at::Tensor& part : parts_) graph::hide_part(part);
}

OwnUse::~OwnUse() {
  if (runtime_.lent) return;
  for (const at::Tensor& part : parts_) graph::stay_part(part);
}

OwnUse begin_outside_step(Runtime& runtime, const char* call) {
  SMP_CHECK_WITH(UsageError, !runtime.current_step.is_running, call,
                 " was called inside a step function; call it before or after the step");
  return OwnUse(runtime);
}

WholeShapes::WholeShapes(const ParameterTable& table) {
  for (const auto& entry : table.entries()) {
    if (!entry.captured_whole) continue;
    parts_.emplace_back(entry.tensor);
    if (parts_.back().data) hide_data(*entry.tensor.storage().unsafeGetStorageImpl());
    set_sizes(entry.tensor, entry.sharding.sizes);
  }
}

WholeShapes::~WholeShapes() {
  for (const SetAside& part : parts_) part.restore();
}

}  // namespace smp::runtime
