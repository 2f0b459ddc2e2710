#include "smp/step_core.h"

#include <ATen/ops/empty.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <sstream>
#include <unordered_set>

#include "graph/content.h"
#include "graph/kept.h"
#include "graph/replay.h"
#include "partitioner/cost.h"
#include "partitioner/order.h"
#include "smp/coalescing.h"
#include "smp/core/error.h"
#include "smp/core/log.h"
#include "smp/delayed.h"
#include "smp/first_difference.h"
#include "smp/model_core.h"
#include "smp/setup.h"

namespace smp {
namespace {

/// How many graphs a step function keeps: those used last.
constexpr size_t kGraphs = 64;

/// Sets one of the runtime's flags until the end of the block, also when that throws.
class FlagScope {
 public:
  explicit FlagScope(bool& flag, bool value = true) : flag_(flag) { flag_ = value; }
  ~FlagScope() { flag_ = false; }

 private:
  bool& flag_;
};

uint64_t hash_inputs(const std::vector<at::Tensor>& tensors) {
  uint64_t hash = 0;
  for (const at::Tensor& tensor : tensors) hash = graph::hash_content(tensor, hash);
  return hash;
}

/// The configuration's `guard` as a number: every how many steps; 0 for the first step only.
int64_t period_of(const std::string& guard) {
  if (guard == "every_step") return 1;
  return guard == "first_step" ? 0 : std::stoll(guard);
}

bool measures_times(const Config& config) {
  return !config.skip_tracing() && config.trace_execution_times();
}

std::vector<graph::TensorMeta> metas_of(const std::vector<at::Tensor>& tensors) {
  std::vector<graph::TensorMeta> metas;
  for (const at::Tensor& tensor : tensors) metas.push_back(graph::TensorMeta::of(tensor));
  return metas;
}

/// A graph as lines that errors can quote; each operator with its number and module.
std::string describe_graph(const graph::Graph& graph) {
  std::istringstream lines(graph.to_string());
  std::ostringstream out;
  size_t next = 0;
  for (std::string line; std::getline(lines, line);) {
    if (next < graph.operators.size() && line == graph.line(next)) {
      const auto& op = graph.operators[next];
      out << "operator " << next++ << " (" << op.name();
      if (!op.scope.empty()) out << ", in module \"" << op.scope << "\"";
      out << "): ";
    }
    out << line << "\n";
  }
  return out.str();
}

/// The first elements of a tensor and a hash of all.
std::string preview(const at::Tensor& tensor) {
  constexpr int64_t kShown = 4;
  const at::Tensor flat = tensor.detach().cpu().reshape({-1}).to(at::kDouble);
  std::ostringstream out;
  out << "[";
  for (int64_t i = 0; i < std::min(kShown, flat.numel()); ++i) {
    out << (i == 0 ? "" : ", ") << flat[i].item<double>();
  }
  out << (flat.numel() > kShown ? ", ...]" : "]") << " (hash " << graph::hash_content(tensor)
      << ")";
  return out.str();
}

/// The overrides of a run, one a line: equal where `describe_constants` is, and quick to make.
std::string describe_overrides(const std::vector<std::vector<graph::ConstantOverride>>& constants,
                               const std::vector<std::vector<graph::ContentOverride>>& contents) {
  std::ostringstream out;
  for (size_t m = 0; m < constants.size(); ++m) {
    for (const auto& change : constants[m]) {
      out << change.operator_index << " " << change.argument << " "
          << graph::constant_to_string(change.value) << "\n";
    }
    for (const auto& change : contents[m]) {
      out << change.value << " " << hash_inputs({change.content}) << "\n";
    }
  }
  return out.str();
}

/// All constants in effect in a microbatch, one a line, for error texts.
std::string describe_constants(const graph::Graph& graph,
                               const std::vector<graph::ConstantOverride>& constants,
                               const std::vector<graph::ContentOverride>& contents) {
  std::map<std::pair<int, int>, c10::IValue> changed;
  for (const auto& change : constants) {
    changed[{change.operator_index, change.argument}] = change.value;
  }
  std::map<graph::ValueId, at::Tensor> changed_contents;
  for (const auto& change : contents) changed_contents[change.value] = change.content;
  std::ostringstream out;
  for (size_t i = 0; i < graph.operators.size(); ++i) {
    const auto& op = graph.operators[i];
    const auto& schema = op.handle.schema();
    for (size_t a = 0; a < op.arguments.size(); ++a) {
      if (op.arguments[a].kind != graph::Argument::Kind::kConstant) continue;
      if (!graph::is_patchable(schema, a)) continue;
      const auto found = changed.find({static_cast<int>(i), static_cast<int>(a)});
      out << "argument \"" << schema.arguments()[a].name() << "\" of operator " << i << " ("
          << op.name() << ") is "
          << graph::constant_to_string(found == changed.end() ? op.arguments[a].constant
                                                              : found->second)
          << "\n";
    }
  }
  for (size_t id = 0; id < graph.values.size(); ++id) {
    const auto& value = graph.values[id];
    if (!value.content.defined()) continue;
    const auto found = changed_contents.find(static_cast<graph::ValueId>(id));
    const at::Tensor& content = found == changed_contents.end() ? value.content : found->second;
    out << graph::to_string(value.kind) << " tensor %" << id << " of " << value.meta.to_string()
        << " holds " << preview(content) << "\n";
  }
  return out.str();
}

}  // namespace

StepCore::StepCore(StepOptions options)
    : runtime_(Runtime::get_shared()),
      options_(std::move(options)),
      ordinal_(runtime_->next_step_ordinal()),
      name_(options_.name().empty() ? "step " + std::to_string(ordinal_) : options_.name()),
      guard_period_(period_of(runtime_->config().guard())) {
  SMP_CHECK_WITH(UsageError, options_.microbatches() >= 0, "step function \"", name_,
                 "\": microbatches must be positive, got ", options_.microbatches());
}

int64_t StepCore::microbatches() const {
  return options_.microbatches() > 0 ? options_.microbatches() : runtime_->config().microbatches();
}

StepResults StepCore::run(const StepCall& call) {
  SMP_CHECK_WITH(UsageError, !runtime_->in_step, "step function \"", name_,
                 "\" was called inside another step function; call them one after the other");
  try {
    return run_checked(call);
  } catch (const std::exception& error) {
    runtime_->fail(error.what());
    throw;
  }
}

StepResults StepCore::run_checked(const StepCall& call) {
  if (!runtime_->partitioned) prepare_models(*runtime_);
  check_inputs(call);
  auto inputs = split(call, microbatches());
  const Traced traced = guard_is_due(call, inputs[0]) ? guard(call, inputs) : *last_;
  agree(traced, call);
  const Prepared& prepared = prepare(traced, call, inputs);
  Program::Inputs step = inputs_of(prepared, call, traced, std::move(inputs));
  step.step_call = runtime_->step_calls[ordinal_]++;
  StepResults results = prepared.program->run(std::move(step));
  if (prepared.coalesced) results = separate_outputs(*prepared.coalesced, std::move(results));
  if (traced.found->trains()) {
    ++runtime_->training_steps;
    for (const auto& model : runtime_->models()) model->run_post_step_hooks();
  }
  return results;
}

/// The inputs and constants of a step, for the microbatches that run.
Program::Inputs StepCore::inputs_of(const Prepared& prepared, const StepCall& call, Traced traced,
                                    std::vector<std::vector<at::Tensor>> inputs) const {
  Program::Inputs step;
  step.tensors = std::move(inputs);
  step.constants = std::move(traced.constants);
  step.contents = std::move(traced.contents);
  step.step_ordinal = ordinal_;
  step.detach_outputs = options_.detach_outputs();
  if (prepared.coalesced) {
    step.tensors = split(call, microbatches() / prepared.coalesced->factor);
    for (auto& list : step.constants) list = prepared.coalesced->constants(list);
    for (auto& list : step.contents) list = prepared.coalesced->contents(list);
  }
  return step;
}

/// Depends on the configuration, the number of the call and the inputs' shapes only, so that all
/// ranks decide the same.
bool StepCore::guard_is_due(const StepCall& call, const std::vector<at::Tensor>& inputs) const {
  if (!last_ || !call.has_last_result || call.per_microbatch) return true;
  const auto number = static_cast<int64_t>(runtime_->step_calls[ordinal_]);
  if (guard_period_ > 0 && number % guard_period_ == 0) return true;
  return metas_of(inputs) != last_inputs_;
}

/// Runs the user's function.
StepCore::Traced StepCore::guard(const StepCall& call,
                                 const std::vector<std::vector<at::Tensor>>& inputs) {
  const FlagScope in_step(runtime_->in_step);
  Traced traced = trace(call, inputs);
  if (!guards_every_step()) {
    last_ = traced;
    last_inputs_ = metas_of(inputs[0]);
  }
  return traced;
}

void StepCore::check_inputs(const StepCall& call) const {
  at::Device device = at::kCPU;
  for (const auto& entry : runtime_->table().entries()) {
    device = entry.tensor.device();
    break;
  }
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    SMP_CHECK_WITH(UsageError, call.tensors[i].defined(), "step function \"", name_,
                   "\": input tensor ", i, " is undefined");
    SMP_CHECK_WITH(UsageError, call.tensors[i].device() == device, "step function \"", name_,
                   "\": input tensor ", i, " is on device ", call.tensors[i].device(),
                   ", the model is on ", device, ". Move the input there: x.to(device)");
  }
}

std::vector<std::vector<at::Tensor>> StepCore::split(const StepCall& call, int64_t count) const {
  std::vector<std::vector<at::Tensor>> result(count);
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    const at::Tensor tensor = call.tensors[i];
    int64_t axis = call.axes[i].value_or(0);
    const bool whole = !call.axes[i].has_value();
    int64_t size = 0;
    if (!whole) {
      SMP_CHECK_WITH(UsageError, axis < tensor.dim() && axis >= -tensor.dim(), "step function \"",
                     name_, "\": input tensor ", i, " of shape ", tensor.sizes(), " has no axis ",
                     axis,
                     " to cut into microbatches. Name its argument in "
                     "StepOptions().non_split_inputs({...}) to give every microbatch the whole");
      if (axis < 0) axis += tensor.dim();
      SMP_CHECK_WITH(UsageError, tensor.size(axis) > 0 && tensor.size(axis) % count == 0,
                     "step function \"", name_, "\": input tensor ", i, " of shape ",
                     tensor.sizes(), " cannot be cut into ", count, " microbatches: the batch (",
                     tensor.size(axis), " on axis ", axis, ") is not divisible by ", count,
                     ". Choose a divisible batch size, drop the last incomplete batch (drop_last), "
                     "or set StepOptions().microbatches(n)");
      size = tensor.size(axis) / count;
    }
    for (int64_t m = 0; m < count; ++m) {
      result[m].push_back(graph::aligned(whole ? tensor : tensor.narrow(axis, m * size, size)));
    }
  }
  return result;
}

graph::TraceResult StepCore::trace_one(const StepCall& call, int microbatch,
                                       const std::vector<at::Tensor>& inputs, bool execute) {
  graph::TraceOptions options;
  options.step_name = name_;
  options.table = &runtime_->table();
  options.execute = execute;
  options.random = {runtime_->seed, static_cast<uint64_t>(ordinal_), runtime_->step_calls[ordinal_],
                    0};
  // The newest first: it is the likeliest.
  for (auto it = graphs_.rbegin(); !execute && it != graphs_.rend(); ++it) {
    options.candidates.push_back(it->get());
  }
  const FlagScope tracing(runtime_->tracing, execute);
  graph::Tracer tracer(std::move(options));
  return tracer.run(inputs, [&](const std::vector<at::Tensor>& tensors) {
    return call.function(microbatch, tensors);
  });
}

StepCore::Traced StepCore::trace(const StepCall& call,
                                 const std::vector<std::vector<at::Tensor>>& inputs) {
  Traced traced;
  graph::TraceResult first;
  if (!runtime_->partitioned && !has_delayed(*runtime_)) {
    // Every rank still holds the whole model: this run computes, on copies of the inputs.
    const BufferRestorer restorer(*runtime_);
    std::vector<at::Tensor> copies;
    for (const at::Tensor& input : inputs[0]) copies.push_back(input.clone());
    first = trace_one(call, 0, copies, true);
  } else {
    first = trace_one(call, 0, inputs[0], false);
  }
  traced.is_new = first.match == nullptr;
  if (traced.is_new) {
    if (!first.difference.empty()) {
      log_debug("step function \"" + name_ + "\" took another way: " + first.difference);
    }
    graph::give_data_to_constants(*first.recorded, first.kept);
    graphs_.push_back(std::move(first.recorded));
    forget_oldest();
    traced.checksums = std::move(first.checksums);
  }
  const graph::Graph* matched = traced.is_new ? graphs_.back().get() : first.match;
  traced.found = use(matched);
  traced.constants.push_back(std::move(first.constants));
  traced.contents.push_back(std::move(first.contents));
  for (size_t m = 1; call.per_microbatch && m < inputs.size(); ++m) {
    auto next = trace_one(call, static_cast<int>(m), inputs[m], false);
    SMP_CHECK_WITH(CaptureError, next.match == matched, "step function \"", name_,
                   "\" calls other operators on microbatch ", m, " than on microbatch 0: ",
                   next.difference,
                   ". Objects that slice themselves (smp_slice) must lead all microbatches the "
                   "same way");
    traced.constants.push_back(std::move(next.constants));
    traced.contents.push_back(std::move(next.contents));
  }
  return traced;
}

/// Makes a graph the one used last.
std::shared_ptr<graph::Graph> StepCore::use(const graph::Graph* graph) {
  const auto found = std::find_if(graphs_.begin(), graphs_.end(),
                                  [&](const auto& known) { return known.get() == graph; });
  std::rotate(found, found + 1, graphs_.end());
  return graphs_.back();
}

/// A function that takes a new way at every step must not fill the memory. All ranks forget the
/// same graphs, since they see the same steps.
void StepCore::forget_oldest() {
  if (graphs_.size() <= kGraphs) return;
  const graph::Graph* oldest = graphs_.front().get();
  fingerprints_.erase(oldest);
  for (auto it = programs_.begin(); it != programs_.end();) {
    it = it->first.first == oldest ? programs_.erase(it) : std::next(it);
  }
  graphs_.erase(graphs_.begin());
}

/// Hashing a graph prints it, which is too slow for every step.
const std::array<uint64_t, 2>& StepCore::fingerprints(const graph::Graph& graph) {
  const auto [it, is_new] = fingerprints_.try_emplace(&graph);
  if (is_new) it->second = {graph.fingerprint(), graph.constants_fingerprint()};
  return it->second;
}

/// Throws on all ranks of the pipeline unless they run the same graph with the same constants on
/// the same inputs.
void StepCore::agree(const Traced& traced, const StepCall& call) {
  const auto pipeline = runtime_->group(CommGroup::kPp);
  if (pipeline->size() == 1) return;
  const std::string overrides = describe_overrides(traced.constants, traced.contents);
  const auto& recorded = fingerprints(*traced.found);
  const std::array<uint64_t, 4> mine = {recorded[0], recorded[1],
                                        XXH64(overrides.data(), overrides.size(), 0),
                                        hash_inputs(call.tensors)};
  const auto all = comm::all_gather_bytes(
      *pipeline, std::string(reinterpret_cast<const char*>(mine.data()), sizeof(mine)));
  size_t other = 0;
  while (other < all.size() && all[other] == all[0]) ++other;
  if (other == all.size()) return;
  std::array<uint64_t, 4> first, second;
  std::copy_n(all[0].data(), sizeof(first), reinterpret_cast<char*>(first.data()));
  std::copy_n(all[other].data(), sizeof(second), reinterpret_cast<char*>(second.data()));
  std::string text;
  if (first[0] != second[0]) {
    text = describe_graph(*traced.found);
  } else {
    for (size_t m = 0; m < traced.constants.size(); ++m) {
      text += describe_constants(*traced.found, traced.constants[m], traced.contents[m]);
    }
  }
  const auto texts = comm::all_gather_bytes(*pipeline, text);
  const auto [a, b] = first_difference(texts[0], texts[other]);
  const auto ranks = c10::str("pp rank 0 and pp rank ", other, " of one pipeline");
  SMP_CHECK_WITH(UsageError, first[0] == second[0], "step function \"", name_,
                 "\" calls other operators on ", ranks, ". The first difference: pp rank 0 has \"",
                 a, "\", pp rank ", other, " has \"", b,
                 "\". All ranks of a pipeline must take the same way through the function: what it "
                 "branches on must not depend on the rank");
  SMP_CHECK_WITH(UsageError, first[1] == second[1] && first[2] == second[2], "step function \"",
                 name_, "\" has other constants on ", ranks, ". First difference: \"", a,
                 "\" against \"", b,
                 "\". Numbers such as a loss weight must be the same on all ranks of a pipeline");
  detail::fail<UsageError>("step function \"", name_, "\" was given different batches on ", ranks,
                           ". All ranks of a pipeline must pass the same inputs; shard data by "
                           "smp::dp_rank() and smp::dp_size(), not by smp::rank()");
}

/// Captures the function on the samples of several microbatches, if they may run as one.
std::shared_ptr<const graph::Coalesced> StepCore::coalesce(const Traced& traced,
                                                           const StepCall& call, bool measured) {
  const FlagScope in_step(runtime_->in_step);
  CoalescingRequest request{
      name_, *traced.found, microbatches(), measured, call.per_microbatch, {}, {}, {}};
  request.key = {runtime_->seed, static_cast<uint64_t>(ordinal_), runtime_->step_calls[ordinal_],
                 0};
  request.inputs = [&](int64_t count) { return split(call, count)[0]; };
  request.capture = [&](const std::vector<at::Tensor>& inputs) {
    // A number that no microbatch has: what the function returns is not the user's.
    return trace_one(call, static_cast<int>(microbatches()), inputs, false);
  };
  return choose_coalescing(*runtime_, request);
}

StepCore::Prepared& StepCore::prepare(const Traced& traced, const StepCall& call,
                                      const std::vector<std::vector<at::Tensor>>& inputs) {
  Prepared& prepared = programs_[{traced.found.get(), microbatches()}];
  if (prepared.program != nullptr) return prepared;
  const bool first = !runtime_->partitioned;
  const bool measured = first && !has_delayed(*runtime_);
  if (measured) {
    const graph::RandomKey key{runtime_->seed, static_cast<uint64_t>(ordinal_),
                               runtime_->step_calls[ordinal_], 0};
    measure_costs_once(*runtime_, *traced.found, inputs[0], key, traced.checksums, name_);
    runtime_->measured = traced.found;
  } else {
    partitioner::estimate_costs(*traced.found, runtime_->measured.get());
  }
  prepared.coalesced = coalesce(traced, call, measured && measures_times(runtime_->config()));
  std::shared_ptr<const graph::Graph> runs = traced.found;
  if (prepared.coalesced) runs = {prepared.coalesced, &prepared.coalesced->graph};
  const int64_t factor = prepared.coalesced ? prepared.coalesced->factor : 1;
  const auto count = static_cast<int>(microbatches() / factor);
  if (first) save_first_graph(*runtime_, *runs);
  // The guard compares with the graph as captured; the steps run it in the plan's order.
  auto planned = make_plan(*runtime_, runs, count);
  if (first) apply_first_plan(*runtime_, planned, count);
  std::unordered_set<int> written;
  for (const auto& op : runs->operators) written.insert(op.writes.begin(), op.writes.end());
  for (const auto& value : runs->values) {
    if (value.kind == graph::ValueKind::kBuffer && written.count(value.alias_set) > 0) {
      runtime_->written_buffers.insert(value.name);
    }
  }
  prepared.program =
      std::make_unique<Program>(runtime_, std::move(planned), count, !first, factor);
  return prepared;
}

}  // namespace smp
