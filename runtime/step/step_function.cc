// SPDX-License-Identifier: Apache-2.0
#include "runtime/step/step_function.h"

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/deterministic.h"
#include "core/log.h"
#include "core/status.h"
#include "graph/alias_analysis.h"
#include "graph/coalesce.h"
#include "graph/live_results.h"
#include "graph/random.h"
#include "graph/replay.h"
#include "graph/shapes.h"
#include "graph/tracer.h"
#include "partitioner/cost.h"
#include "runtime/model.h"
#include "runtime/parameters/buffer_restorer.h"
#include "runtime/parameters/delayed.h"
#include "runtime/parameters/dividing.h"
#include "runtime/parameters/placement.h"
#include "runtime/parameters/whole.h"
#include "runtime/runtime.h"
#include "runtime/save/job_notes.h"
#include "runtime/step/agreement.h"
#include "runtime/step/batch_exchange.h"
#include "runtime/step/leaf_writes.h"
#include "runtime/step/measuring.h"
#include "runtime/step/microbatches.h"
#include "runtime/step/placing.h"
#include "runtime/step/preparing.h"
#include "runtime/step_value.h"
#include "runtime/update/update_watch.h"

namespace smp::runtime {
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

/// The configuration's `guard` as a number: every how many steps; 0 for the first step only.
int64_t period_of(const std::string& guard) {
  if (guard == "every_step" || guard == "every_microbatch") return 1;
  return guard == "first_step" ? 0 : std::stoll(guard);
}

const StepOptions& checked(const StepOptions& options) {
  SMP_CHECK_WITH(UsageError, options.microbatches() >= 0,
                 "StepOptions().microbatches must be positive, got ", options.microbatches());
  return options;
}

}  // namespace

StepFunction::StepFunction(StepOptions options)
    : runtime_(Runtime::get_shared()),
      options_(std::move(options)),
      name_(runtime_->progress.step_functions.add(checked(options_).name())),
      stream_(stream_of(name_)),
      guard_period_(period_of(runtime_->config().guard())),
      guards_every_microbatch_(runtime_->config().guard() == "every_microbatch") {}

StepFunction::~StepFunction() { runtime_->progress.step_functions.remove(name_); }

int64_t StepFunction::microbatches() const {
  return options_.microbatches() > 0 ? options_.microbatches() : runtime_->config().microbatches();
}

int64_t StepFunction::count_microbatches(const StepCall& call) const {
  return runtime::count_microbatches(call, microbatches(), microbatch_unit());
}

/// Divides the microbatches of each batch that trains: the gradient shards of a replica have as
/// many each, as far as the number that is asked for allows it.
int64_t StepFunction::microbatch_unit() const {
  const int64_t batches = runtime_->batches();
  const int64_t shards = std::gcd<int64_t>(microbatches() * batches, runtime_->shards_of_replica());
  return shards / std::gcd(shards, batches);
}

void StepFunction::check_positions(int count) const {
  const auto check = [&](int position, const char* option) {
    SMP_CHECK_WITH(UsageError, position >= 0 && position < count, "step function \"", name_,
                   "\": StepOptions().", option, " names argument ", position,
                   ", but the function is called with ", count, ". Arguments are counted from 0");
  };
  for (int position : options_.non_split_inputs()) check(position, "non_split_inputs");
  for (const auto& [position, axis] : options_.input_split_axes()) {
    check(position, "input_split_axes");
  }
}

StepResults StepFunction::run(const StepCall& call) {
  SMP_CHECK_WITH(UsageError, !runtime_->current_step.is_running, "step function \"", name_,
                 "\" was called inside another step function; call them one after the other");
  const auto number = runtime_->progress.step_functions.calls(name_) + 1;
  const core::CallScope here(c10::str("call ", number, " of step function \"", name_, "\""),
                             name_ + "()", core::kAnyStep);
  core::Status& status = *runtime_->status();
  const int64_t before = runtime_->progress.training_steps;
  status.set_step(before + 1);
  try {
    StepResults results = core::explaining_what_is_not_deterministic([&] {
      StepResults outputs = run_checked(call);
      mark_parts(*runtime_);
      const bool trained = runtime_->progress.training_steps > before;
      for (const auto& model : runtime_->models()) {
        if (trained) model->run_post_step_hooks();
      }
      return outputs;
    });
    status.set_step(runtime_->progress.training_steps);
    return results;
  } catch (const std::exception& error) {
    runtime_->fail(error);
    throw;
  }
}

StepResults StepFunction::run_checked(const StepCall& given) {
  const OwnUse parameters(*runtime_);
  check_pieces_unwritten(*runtime_);
  runtime_->progress.step_functions.check_resumed(name_);
  if (!runtime_->partitioned()) prepare_models(*runtime_);
  check_inputs(given);
  Batches batches =
      exchange(with_step_values(runtime_->step_inputs, runtime_->device(), from_source(given)));
  const StepCall& call = batches.front();
  std::vector<std::vector<at::Tensor>> inputs = split(batches, call.microbatches);
  const Traced traced = guard_is_due(call, inputs[0]) ? guard(call, inputs) : *last_;
  agree(traced, batches);
  check_written_inputs(given, *traced.found);
  if (traced.found->trains()) check_shards(call, microbatch_unit(), name_);
  const Prepared& prepared = prepare(traced, call, inputs);
  StepProgram::Inputs step = inputs_of(prepared, batches, traced, std::move(inputs));
  step.step_call = runtime_->progress.step_functions.count_call(name_);
  last_program_ = prepared.program;
  StepResults results = last_program_->run(std::move(step));
  results = prepared.map.outputs(std::move(results));
  results = own_outputs(std::move(results), call.microbatches);
  runtime_->update_watch->after_step(name_, *traced.found);
  if (traced.found->trains()) {
    ++runtime_->progress.training_steps;
    note_training_step(*runtime_);
  }
  return results;
}

/// Adds the tensors of the rank that supplies them.
StepCall StepFunction::from_source(StepCall call) const {
  if (runtime_->config().input_source() == "first") {
    call.tensors = take_first_batch(*runtime_->group(CommGroup::kPp), call.tensors, name_);
  }
  return call;
}

StepFunction::Batches StepFunction::exchange(StepCall call) const {
  if (runtime_->batches() == 1) return {std::move(call)};
  SMP_CHECK_WITH(
      UsageError, !runs_each_microbatch(call), "step function \"", name_, "\": ",
      call.per_microbatch ? "an argument slices itself (smp_slice)"
                          : "it draws for each microbatch (\"guard\")",
      ", so the ranks of a tensor-parallel group cannot be given each other's. Give them "
      "one batch and set \"prescaled_batch\": true");
  Batches batches;
  for (auto& tensors : exchange_batches(*runtime_->group(CommGroup::kTp), call.tensors, name_)) {
    batches.push_back(call);
    batches.back().tensors = std::move(tensors);
  }
  return batches;
}

/// Outputs of the microbatches of this rank's own batch.
StepResults StepFunction::own_outputs(StepResults outputs, int64_t microbatches) const {
  if (runtime_->batches() == 1) return outputs;
  const int64_t first = runtime_->rank_in(CommGroup::kTp) * microbatches;
  for (auto& of_output : outputs) {
    of_output = {of_output.begin() + first, of_output.begin() + first + microbatches};
  }
  return outputs;
}

/// Puts the batches that lie in host memory on this rank's device, as far as its stages read them.
/// Returns whether there were any.
bool StepFunction::move_in(Batches& batches, const StepProgram& program) const {
  bool moved = false;
  for (StepCall& batch : batches) {
    for (size_t i = 0; i < batch.tensors.size(); ++i) {
      at::Tensor& tensor = batch.tensors[i];
      if (tensor.device() == runtime_->device() || !program.reads_input(i)) continue;
      tensor = graph::copy_to(runtime_->device(), tensor);
      moved = true;
    }
  }
  return moved;
}

/// The inputs and constants of a step, for the microbatches that run; moves batches in.
StepProgram::Inputs StepFunction::inputs_of(const Prepared& prepared, Batches& batches,
                                            Traced traced,
                                            std::vector<std::vector<at::Tensor>> inputs) const {
  StepProgram::Inputs step;
  const int64_t factor = prepared.map.factor;
  const bool moved = move_in(batches, *prepared.program);
  const int64_t count = batches.front().microbatches / factor;
  step.tensors = moved || factor > 1 ? split(batches, count) : std::move(inputs);
  for (const auto& list : traced.constants) step.constants.push_back(prepared.map.constants(list));
  for (const auto& list : traced.contents) step.contents.push_back(prepared.map.contents(list));
  step.random_stream = stream_;
  step.name = name_;
  return step;
}

/// Depends on the configuration, the number of the call and the inputs' shapes only, so that all
/// ranks decide the same.
bool StepFunction::guard_is_due(const StepCall& call, const std::vector<at::Tensor>& inputs) const {
  if (!last_ || !call.has_last_result || runs_each_microbatch(call)) return true;
  const auto number = static_cast<int64_t>(runtime_->progress.step_functions.calls(name_));
  if (guard_period_ > 0 && number % guard_period_ == 0) return true;
  // Rules for several microbatches are checked for as many as there are.
  if (call.microbatches > last_microbatches_) return true;
  return metas_of(inputs) != last_inputs_ || call.places != last_places_;
}

/// Runs the user's function.
StepFunction::Traced StepFunction::guard(const StepCall& call,
                                         const std::vector<std::vector<at::Tensor>>& inputs) {
  const FlagScope in_step(runtime_->current_step.is_running);
  Traced traced = trace(call, inputs);
  if (!guards_every_step()) {
    last_ = traced;
    last_inputs_ = metas_of(inputs[0]);
    last_places_ = call.places;
    last_microbatches_ = call.microbatches;
  }
  return traced;
}

/// Each argument is a tensor of its own in a microbatch, so a write to one would not be seen in
/// another one on the same memory.
void StepFunction::check_written_inputs(const StepCall& call, const graph::Graph& graph) const {
  const auto& tensors = call.tensors;
  std::optional<graph::AliasAnalysis> aliases;  // few steps need one
  for (size_t i = 0; i < tensors.size(); ++i) {
    for (size_t j = 0; j < tensors.size(); ++j) {
      if (i == j || !tensors[i].is_alias_of(tensors[j])) continue;
      if (!aliases) aliases.emplace(graph);
      SMP_CHECK_WITH(UsageError, !aliases->of(static_cast<graph::ValueId>(i)).is_written(),
                     "step function \"", name_, "\": input tensor ", call.places[i],
                     ", which it writes in place, shares memory with input tensor ", call.places[j],
                     ", which would not see that. Pass x.clone() for one of them, or make a new "
                     "tensor: y = x * 2 instead of x.mul_(2)");
    }
  }
}

void StepFunction::check_inputs(const StepCall& call) const {
  const at::Device device = runtime_->device();
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    const at::Tensor& tensor = call.tensors[i];
    SMP_CHECK_WITH(UsageError, tensor.layout() == at::kStrided && !tensor.is_nested(),
                   "step function \"", name_, "\": input tensor ", call.places[i],
                   " has the layout ", tensor.is_nested() ? at::Layout::Jagged : tensor.layout(),
                   ", which is neither cut into microbatches nor sent between ranks. Pass "
                   "x.to_dense(), or its indices and values as tensors of their own");
    const at::Device lies_on = tensor.device();
    SMP_CHECK_WITH(UsageError, lies_on == device || lies_on.is_cpu(), "step function \"", name_,
                   "\": input tensor ", call.places[i], " is on device ", lies_on,
                   ", and this rank computes on ", device,
                   ". Leave the input on the CPU, or move it there: x.to(smp::device())");
  }
  if (microbatches() > 1) check_one_batch(call);
}

/// Tensors that are cut along axis 0, as all are unless the program says otherwise, are of one
/// batch.
void StepFunction::check_one_batch(const StepCall& call) const {
  std::optional<size_t> first;
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    const detail::Cut& cut = call.cuts[i];
    if (!cut.axis || cut.is_named || call.tensors[i].dim() == 0) continue;
    if (!first) first = i;
    const at::Tensor &a = call.tensors[*first], &b = call.tensors[i];
    SMP_CHECK_WITH(UsageError, a.size(0) == b.size(0), "step function \"", name_,
                   "\": input tensor ", call.places[*first], " of shape ", a.sizes(), " has ",
                   a.size(0), " samples on axis 0, and input tensor ", call.places[i], " of shape ",
                   b.sizes(), " has ", b.size(0), ". Both are cut into ", microbatches(),
                   " microbatches, so they must be of one batch. Pass a tensor that is none by "
                   "smp::whole(x), which gives each microbatch the whole of it, or name the axis, "
                   "to have it cut all the same: StepOptions().input_split_axes({{argument, 0}})");
  }
}

std::vector<std::vector<at::Tensor>> StepFunction::split(const Batches& batches,
                                                         int64_t count) const {
  std::vector<std::vector<at::Tensor>> result;
  for (const StepCall& batch : batches) {
    for (auto& microbatch : cut_microbatches(batch, count, name_)) {
      result.push_back(std::move(microbatch));
    }
  }
  return result;
}

graph::TraceResult StepFunction::trace_one(const StepCall& call, int microbatch,
                                           const std::vector<at::Tensor>& inputs, bool execute) {
  graph::TraceOptions options;
  options.step_name = name_;
  options.table = &runtime_->table().tensors();
  options.wholes = &runtime_->step_inputs.wholes;
  options.why_no_constant = [&](const at::Tensor& tensor) {
    return why_no_constant(call, runtime_->step_inputs, tensor);
  };
  options.execute = execute;
  options.random = random_key();
  // The newest first: it is the likeliest.
  for (auto it = graphs_.rbegin(); !execute && it != graphs_.rend(); ++it) {
    options.candidates.push_back(it->get());
  }
  std::vector<at::Tensor> shown = inputs;
  for (at::Tensor& input : shown) {
    if (input.device() == runtime_->device()) continue;
    auto meta = graph::TensorMeta::of(input);
    meta.device = runtime_->device();
    input = graph::make_placeholder(meta, name_);
  }
  const WholeShapes whole_shapes(runtime_->table());
  const FlagScope tracing(runtime_->current_step.is_captured, execute);
  runtime_->current_step.microbatches = static_cast<int>(microbatches_run(call));
  graph::Tracer tracer(std::move(options));
  // The first run of the function tells, since guards have no time for it. Ranks that are threads
  // have one default generator, which another may seed.
  std::optional<graph::SeedWatch> seeds;
  if (graphs_.empty() && runtime_->is_alone_in_process()) seeds.emplace();
  auto result = tracer.run(shown, [&](const std::vector<at::Tensor>& tensors) {
    return call.function(microbatch, tensors);
  });
  SMP_CHECK_WITH(CaptureError, !seeds || !seeds->was_seeded(), "step function \"", name_,
                 "\" calls torch::manual_seed, which its random operators do not heed: each draws "
                 "from a stream of its own (docs/capture.md, \"Random numbers\"). Call it outside "
                 "of the step function, or set \"seed\"; for the same numbers in each microbatch "
                 "draw them outside and pass them by smp::whole");
  return result;
}

/// Whether this rank can run the whole model: in the first step, where it has all parameters on its
/// device.
bool StepFunction::captures_on_data() const {
  const ParameterTable& table = runtime_->table();
  return !runtime_->partitioned() && !has_delayed(table) && !has_waiting(table);
}

StepFunction::Traced StepFunction::trace(const StepCall& call,
                                         const std::vector<std::vector<at::Tensor>>& inputs) {
  Traced traced;
  graph::TraceResult first;
  if (captures_on_data()) {
    // Every rank still holds the whole model: this run computes, on copies of the inputs.
    const BufferRestorer restorer(runtime_->table());
    std::vector<at::Tensor> copies;
    for (const at::Tensor& input : inputs[0]) {
      copies.push_back(graph::copy_to(runtime_->device(), input));
    }
    first = trace_one(call, 0, copies, true);
  } else {
    first = trace_one(call, 0, inputs[0], false);
  }
  traced.is_new = first.match == nullptr;
  const bool leaves_results = graph::leaves_results(first);
  if (traced.is_new) {
    if (!first.difference.empty()) {
      core::log_debug("step function \"" + name_ + "\" took another way: " + first.difference);
    }
    check_leaf_writes(runtime_->config(), runtime_->replicas()->size(), *first.recorded, name_);
    keep_constants(first);
    graphs_.push_back(std::move(first.recorded));
    forget_oldest();
    traced.checksums = std::move(first.checksums);
  }
  const graph::Graph* matched = traced.is_new ? graphs_.back().get() : first.match;
  traced.found = use(matched);
  traced.constants.push_back(std::move(first.constants));
  traced.contents.push_back(std::move(first.contents));
  if (leaves_results && !runs_each_microbatch(call)) check_no_state(call, inputs);
  for (size_t m = 1; runs_each_microbatch(call) && m < inputs.size(); ++m) {
    auto next = trace_one(call, static_cast<int>(m), inputs[m], false);
    SMP_CHECK_WITH(
        CaptureError, next.match == matched, "step function \"", name_,
        "\" calls other operators on microbatch ", m, " than on microbatch 0: ", next.difference,
        ". Between microbatches numbers and contents may differ, by an object that "
        "slices itself (smp_slice) or with \"guard\": \"every_microbatch\", but all take "
        "the same way");
    traced.constants.push_back(std::move(next.constants));
    traced.contents.push_back(std::move(next.contents));
  }
  return traced;
}

/// Runs the function for the other microbatches, too, on shapes: they would read in one process the
/// tensors that the run for the first has left in members, which have no data. Throws where they
/// do.
void StepFunction::check_no_state(const StepCall& call,
                                  const std::vector<std::vector<at::Tensor>>& inputs) {
  for (size_t m = 1; m < inputs.size(); ++m) {
    const auto run = trace_one(call, no_microbatch(), inputs[m], false);
    if (run.recorded) keep_constants(run);
  }
}

/// Tensors that the function has made of constants and kept stay as they are, for all microbatches.
void StepFunction::keep_constants(const graph::TraceResult& run) {
  graph::give_data_to_constants(*run.recorded, run.kept);
  for (const graph::LiveResult& kept : run.kept) {
    auto storage = kept.storage.lock();
    const bool has_data = storage && storage->nbytes() > 0;
    if (has_data) runtime_->step_inputs.wholes.add(c10::Storage(std::move(storage)));
  }
}

/// Makes a graph the one used last.
std::shared_ptr<graph::Graph> StepFunction::use(const graph::Graph* graph) {
  const auto found = std::find_if(graphs_.begin(), graphs_.end(),
                                  [&](const auto& known) { return known.get() == graph; });
  std::rotate(found, found + 1, graphs_.end());
  return graphs_.back();
}

/// A function that takes a new way at every step must not fill the memory. All ranks forget the
/// same graphs, since they see the same steps.
void StepFunction::forget_oldest() {
  if (graphs_.size() <= kGraphs) return;
  const graph::Graph* oldest = graphs_.front().get();
  fingerprints_.erase(oldest);
  for (auto it = programs_.begin(); it != programs_.end();) {
    it = it->first.first == oldest ? programs_.erase(it) : std::next(it);
  }
  graphs_.erase(graphs_.begin());
}

/// Throws on all ranks of the pipeline and its tensor-parallel groups unless they are about to run
/// the same; on all replicas, too, where they have to.
void StepFunction::agree(const Traced& traced, const Batches& batches) {
  const auto fingerprints = fingerprints_.try_emplace(traced.found.get(), *traced.found).first;
  std::vector<at::Tensor> inputs;
  for (const StepCall& batch : batches) {
    inputs.insert(inputs.end(), batch.tensors.begin(), batch.tensors.end());
  }
  const std::string note = runtime_->update_watch->before_step();
  const StepTrace step = {
      name_,  *traced.found, fingerprints->second,        traced.constants, traced.contents,
      inputs, note,          batches.front().microbatches};
  const bool one_batch = runtime_->is_tensor_parallel() && runtime_->batches() == 1;
  const AgreeingRanks who = {
      runtime_->is_tensor_parallel() ? "mp rank" : "pp rank",
      one_batch ? "smp::rdp_rank() and smp::rdp_size()" : "smp::dp_rank() and smp::dp_size()"};
  const auto notes = check_agreement(*runtime_->group(CommGroup::kMp), step, who);
  runtime_->update_watch->compare(notes, who.name);
  if (runtime_->config().sharded_data_parallel_degree() > 1) {
    check_same_operators(*runtime_->replicas(), step);
  }
}

/// The key of the random streams of the first microbatch in the next call.
graph::RandomKey StepFunction::random_key() const {
  return {*runtime_->progress.seed, stream_, runtime_->progress.step_functions.calls(name_), 0};
}

/// Captures the function on the samples of several microbatches, if they may run as one.
CoalescingChoice StepFunction::coalesce(const Traced& traced, const StepCall& call, bool measured) {
  const FlagScope in_step(runtime_->current_step.is_running);
  CoalescingRequest request{
      name_, *traced.found, call.microbatches, measured, runs_each_microbatch(call), {}, {}, {}};
  request.key = random_key();
  request.inputs = [&](int64_t count) { return cut_microbatches(call, count, name_)[0]; };
  request.capture = [&](const std::vector<at::Tensor>& inputs) {
    return trace_one(call, no_microbatch(), inputs, false);
  };
  return choose_coalescing(*runtime_, request);
}

StepFunction::Prepared& StepFunction::prepare(const Traced& traced, const StepCall& call,
                                              const std::vector<std::vector<at::Tensor>>& inputs) {
  Prepared& prepared = programs_[{traced.found.get(), microbatches_run(call)}];
  if (prepared.program != nullptr) return prepared;
  SMP_CHECK_WITH(
      UsageError, !traced.found->trains() || runtime_->config().pipeline() != "_only_forward",
      "step function \"", name_,
      "\" calls model->backward, and \"pipeline\": \"_only_forward\" runs forwards only. "
      "Leave out backward, or choose a schedule that has it (\"interleaved\")");
  const bool is_fewer = call.microbatches < microbatches();
  if (is_fewer && runtime_->rank() == 0 && told_.insert(call.microbatches).second) {
    core::log_info(c10::str("step function \"", name_, "\" cuts a batch into ", call.microbatches,
                            " microbatches: ", microbatches(), " do not divide it"));
  }
  const bool first = !runtime_->partitioned();
  if (first) check_same_first_step(*runtime_, *traced.found, call.microbatches, name_);
  bool measured = false;
  if (captures_on_data()) {
    measured = measure_costs_once(*runtime_, *traced.found, inputs[0], random_key(),
                                  traced.checksums, name_);
    runtime_->first_step.measured = traced.found;
  } else {
    partitioner::estimate_costs(*traced.found, runtime_->first_step.measured.get(),
                                runtime_->first_step.costs.compute);
  }
  const auto [coalesced, division] = coalesce(traced, call, measured);
  std::shared_ptr<const graph::Graph> runs = traced.found;
  if (coalesced) runs = {coalesced, &coalesced->graph};
  graph::GraphMap map = coalesced ? coalesced->map : graph::GraphMap::in_order(*runs);
  const auto divided = divide_graph(*runtime_, *runs, name_, division);
  if (divided) {
    runs = {divided, &divided->graph};
    map = graph::compose(map, divided->map);
  }
  const auto count = static_cast<int>(microbatches_run(call) / map.factor);
  if (first) save_first_graph(*runtime_, *runs);
  // The guard compares with the graph as captured; the steps run it in the plan's order.
  auto planned = make_plan(*runtime_, runs, count);
  if (divided) nn::rewrite::check_layouts(*divided, *planned.graph);
  if (first) {
    apply_first_plan(*runtime_, planned, count, divided ? divided->parameters : Splits());
  }
  const graph::AliasAnalysis aliases(*runs);
  for (const auto& memory : aliases.sets()) {
    for (graph::ValueId id : memory.values) {
      const graph::Value& value = runs->values[id];
      const bool writes = memory.is_written() && value.kind == graph::ValueKind::kBuffer;
      if (writes) runtime_->table().set_written(value.name);
    }
  }
  prepared.map = graph::compose(map, graph::GraphMap::in_order(*runs, planned.plan.order));
  prepared.program = std::make_shared<StepProgram>(runtime_, std::move(planned), count, !first,
                                                   options_, map.factor);
  return prepared;
}

}  // namespace smp::runtime
