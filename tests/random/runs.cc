// SPDX-License-Identifier: Apache-2.0
#include "tests/random/runs.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/isfinite.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <numeric>
#include <sstream>

#include "comm/channel_pool.h"
#include "comm/threads/run_ranks.h"
#include "comm/threads/thread_world.h"
#include "core/check.h"
#include "dp/step_gradients.h"
#include "graph/keyed_random.h"
#include "graph/memory_layout.h"
#include "graph/random.h"
#include "graph/tracer.h"
#include "pipeline/executor.h"
#include "pipeline/stage.h"
#include "pipeline/verifier.h"

namespace smp::random_programs {
namespace {

std::string name_of(const char* what, size_t index, int microbatch, int step) {
  return c10::str(what, " ", index, " of microbatch ", microbatch, " of step ", step);
}

graph::RandomKey key_of(const Trial& trial, int step, int microbatch) {
  return {trial.seed, 0, static_cast<uint64_t>(step), static_cast<uint64_t>(microbatch)};
}

/// A copy with the same strides, so that it shows the values with which the run would go on.
at::Tensor snapshot(const at::Tensor& tensor) { return tensor.detach().clone(); }

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.contiguous(), y = b.contiguous();
  // Tensors without elements have no memory, which memcmp must not be given.
  return x.nbytes() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  if (same_bytes(a, b)) return true;
  if (!at::isFloatingType(a.scalar_type())) return false;
  const at::Tensor nan = a.isnan().logical_and(b.isnan());
  return same_bytes(a.masked_fill(nan, 0), b.masked_fill(nan, 0));
}

Tensors copies_of(const Tensors& tensors) {
  Tensors copies;
  for (const at::Tensor& tensor : tensors) {
    copies.push_back(tensor.defined() ? graph::copy_as_laid_out(tensor) : tensor);
  }
  return copies;
}

/// Adds a microbatch's gradients to the sums of the step.
void add_gradient(Outcome& outcome, const std::string& name, const at::Tensor& gradient) {
  at::Tensor& sum = outcome[name];
  sum = sum.defined() ? sum + gradient : gradient.clone();
}

std::string gradient_name(const std::string& parameter, int step) {
  return c10::str("gradient of ", parameter, " in step ", step);
}

void keep_buffers(const graph::TensorTable& table,
                  const std::function<bool(const std::string&)>& keep, int step, Outcome& outcome) {
  for (const auto& entry : table.entries()) {
    if (entry.kind != graph::ValueKind::kBuffer || !keep(entry.name)) continue;
    outcome[c10::str("buffer ", entry.name, " after step ", step)] = snapshot(entry.tensor);
  }
}

/// Takes the gradients of a microbatch out. Buffers go on without the history that they got.
void finish_microbatch(const graph::TensorTable& table, int step, Outcome& outcome) {
  for (const auto& entry : table.entries()) {
    at::Tensor tensor = entry.tensor;
    if (entry.kind == graph::ValueKind::kBuffer) {
      tensor.detach_();
    } else if (tensor.grad().defined()) {
      add_gradient(outcome, gradient_name(entry.name, step), tensor.grad());
      tensor.mutable_grad() = at::Tensor();
    }
  }
}

/// The inputs among a program's leaves.
Tensors inputs_of(const Program& program, const Tensors& leaves) {
  Tensors inputs;
  for (size_t i = 0; i < leaves.size(); ++i) {
    if (program.leaves[i].kind == Leaf::Kind::kInput) inputs.push_back(leaves[i]);
  }
  return inputs;
}

/// Runs a tracer over the program on its first microbatch.
graph::TraceResult trace(const Program& program, const Trial& trial, bool execute,
                         std::vector<const graph::Graph*> candidates) {
  const State state(program);
  graph::TraceOptions options;
  options.step_name = c10::str("program ", program.seed);
  options.table = &state.table();
  options.execute = execute;
  options.random = key_of(trial, 0, 0);
  options.candidates = std::move(candidates);
  graph::Tracer tracer(std::move(options));
  Tensors leaves = state.leaves(0, 0);
  const Tensors inputs = inputs_of(program, leaves);
  return tracer.run(inputs, [&](const Tensors& passed) {
    size_t next = 0;
    for (size_t i = 0; i < leaves.size(); ++i) {
      if (program.leaves[i].kind == Leaf::Kind::kInput) leaves[i] = passed[next++];
    }
    return random_programs::execute(
        program, leaves, [&](const Tensors& roots, const Tensors& gradients) {
          const bool all_ones = std::none_of(gradients.begin(), gradients.end(),
                                             [](const auto& one) { return one.defined(); });
          tracer.backward(roots, all_ones ? Tensors() : gradients);
        });
  });
}

int ranks_of(const partitioner::Plan& plan) {
  return 1 + *std::max_element(plan.rank_of_stage.begin(), plan.rank_of_stage.end());
}

pipeline::ScheduleOptions options_of(const Trial& trial, const partitioner::Plan& plan) {
  return pipeline::ScheduleOptions(plan.stages(), trial.microbatches)
      .ranks(ranks_of(plan))
      .rank_of_stage(plan.rank_of_stage)
      .active_microbatches(trial.active_microbatches);
}

/// Adds gradients to an outcome, where a program's go to the sums of its replicas.
class OutcomeGradients final : public dp::StepGradients {
 public:
  /// Indices are those of the values of `graph`.
  OutcomeGradients(const graph::Graph& graph, int microbatches, Outcome& outcome)
      : StepGradients({all_of(graph)}, std::vector<std::string>(graph.values.size()),
                      comm::make_thread_world(1).front(), options_for(microbatches), {}),
        graph_(graph),
        outcome_(outcome) {}

  void begin(int step) { step_ = step; }

 private:
  static std::vector<size_t> all_of(const graph::Graph& graph) {
    std::vector<size_t> values(graph.values.size());
    std::iota(values.begin(), values.end(), 0);
    return values;
  }

  static dp::StepGradientOptions options_for(int microbatches) {
    dp::StepGradientOptions options;
    options.microbatches = microbatches;
    options.overlapping = false;
    return options;
  }

  void accumulate(int /*shard*/, size_t index, at::Tensor gradient, bool /*first*/,
                  core::TensorUpdates& /*updates*/) override {
    add_gradient(outcome_, gradient_name(graph_.values[index].name, step_), gradient);
  }
  // Nothing is reduced: the outcome has the gradients already.
  Reduced reduced(size_t /*index*/) override { return {at::zeros({}), at::kFloat, true}; }
  void publish(size_t /*index*/, const at::Tensor& /*mean*/,
               core::TensorUpdates& /*updates*/) override {}

  const graph::Graph& graph_;
  Outcome& outcome_;
  int step_ = 0;
};

/// One rank's part of a run, and its results.
class Rank {
 public:
  Rank(const Program& program, const Trial& trial, const graph::Graph& graph,
       const partitioner::Plan& plan, comm::CommunicatorPtr pipeline)
      : program_(program),
        trial_(trial),
        graph_(graph),
        plan_(plan),
        rank_(pipeline->rank()),
        state_(program),
        edges_(pipeline::edges_of(graph, plan)),
        partitioned_(graph, plan, edges_),
        gradients_(graph, trial.microbatches, outcome_) {
    std::vector<pipeline::GradientSums::Place> places;
    for (size_t i = 0; i < graph.values.size(); ++i) places.push_back({&gradients_, i});
    sums_ = pipeline::GradientSums({&gradients_}, std::move(places), trial.microbatches,
                                   /*fuses=*/false);
    executor_ = std::make_unique<pipeline::Executor>(make_schedule(edges_), partitioned_, setup_,
                                                     std::make_shared<comm::ChannelPool>(pipeline),
                                                     /*ahead=*/1);
  }

  void run(int step) {
    pipeline::Executor::Step run;
    std::vector<Tensors> expected;  // the caller's inputs stay as they are
    for (int m = 0; m < trial_.microbatches; ++m) {
      run.microbatches.push_back(
          {inputs_of(program_, state_.leaves(step, m)), key_of(trial_, step, m), {}, {}});
      expected.push_back(inputs_of(program_, state_.leaves(step, m)));
    }
    gradients_.begin(step);
    for (const auto& output : executor_->run(run).outputs) {
      outcome_[name_of("output", output.position, output.microbatch, step)] =
          snapshot(output.value);
    }
    for (int m = 0; m < trial_.microbatches; ++m) {
      for (size_t i = 0; i < expected[m].size(); ++i) {
        const at::Tensor& input = run.microbatches[m].inputs[i];
        if (same_bits(input, expected[m][i])) continue;
        outcome_[name_of("changed input", i, m, step)] = snapshot(input);
      }
    }
    keep_buffers(
        state_.table(),
        [&](const std::string& name) {
          const auto owner = plan_.owner.find(name);
          return rank_ == (owner == plan_.owner.end() ? 0 : plan_.rank_of_stage[owner->second]);
        },
        step, outcome_);
  }

  const Outcome& outcome() const { return outcome_; }

 private:
  pipeline::Schedule make_schedule(const std::vector<pipeline::Edge>& edges) const {
    const auto stage_edges = pipeline::stage_edges(edges);
    const auto options = options_of(trial_, plan_)
                             .edges(stage_edges)
                             .backward_of_stage(pipeline::backward_of_stage(graph_, plan_, edges));
    auto schedule =
        pipeline::lower(schedule_of(trial_, graph_, plan_).generate(options), stage_edges);
    pipeline::verify(schedule, stage_edges, pipeline::VerifyOptions().credit(trial_.microbatches));
    return schedule;
  }

  const Program& program_;
  const Trial& trial_;
  const graph::Graph& graph_;
  const partitioner::Plan& plan_;
  const int rank_;
  State state_;
  const std::vector<pipeline::Edge> edges_;
  const pipeline::PartitionedGraph partitioned_;
  Outcome outcome_;
  OutcomeGradients gradients_;
  pipeline::GradientSums sums_;
  const pipeline::Executor::Setup setup_{state_.table(), &sums_};
  std::unique_ptr<pipeline::Executor> executor_;
};

}  // namespace

Trial Trial::of(uint64_t seed) {
  Random random(seed * 31 + 7);
  Trial trial;
  trial.seed = seed;
  trial.microbatches = 1 + static_cast<int>(random.below(3));
  trial.steps = random.chance(25) ? 2 : 1;
  trial.schedule = static_cast<uint64_t>(random.below(1'000'000));
  trial.active_microbatches = 1 + static_cast<int>(random.below(4));
  trial.shapes_only = random.chance(50);
  trial.numbers_change = random.chance(30);
  trial.leaves = random.chance(20);
  return trial;
}

std::string difference(const Outcome& got, const Outcome& expected) {
  for (const auto& [name, tensor] : expected) {
    const auto found = got.find(name);
    if (found == got.end()) return name + " is missing";
    if (same_bits(found->second, tensor)) continue;
    std::ostringstream out;
    out << name << " is\n" << found->second << "\nexpected\n" << tensor;
    if (found->second.sizes() == tensor.sizes()) {
      out << "\ndifference\n" << found->second.to(at::kDouble) - tensor.to(at::kDouble);
    }
    return out.str();
  }
  for (const auto& [name, tensor] : got) {
    if (expected.count(name) == 0) return "there is a " + name;
  }
  return "";
}

bool has_non_finite(const Outcome& outcome) {
  return std::any_of(outcome.begin(), outcome.end(), [](const auto& item) {
    const at::Tensor& tensor = item.second;
    return !at::isIntegralType(tensor.scalar_type(), true) &&
           !at::isfinite(tensor).all().item().toBool();
  });
}

State::State(const Program& program) : program_(program) {
  for (size_t i = 0; i < program.leaves.size(); ++i) {
    const Leaf& leaf = program.leaves[i];
    at::Tensor tensor;
    if (leaf.tied_to >= 0) {
      tensor = kept_[leaf.tied_to];
    } else if (leaf.kind != Leaf::Kind::kInput) {
      tensor = make_leaf(program, i, 0, 0);
    }
    kept_.push_back(tensor);
    if (leaf.kind == Leaf::Kind::kParameter) {
      table_.add(graph::ValueKind::kParameter, leaf.name, tensor);
    } else if (leaf.kind == Leaf::Kind::kBuffer) {
      table_.add(graph::ValueKind::kBuffer, leaf.name, tensor);
    }
  }
}

Tensors State::leaves(int step, int microbatch) const {
  Tensors leaves = kept_;
  for (size_t i = 0; i < leaves.size(); ++i) {
    if (!leaves[i].defined()) leaves[i] = make_leaf(program_, i, step, microbatch);
  }
  return leaves;
}

Outcome run_eager(const Program& program, const Trial& trial) {
  const State state(program);
  Outcome outcome;
  for (int step = 0; step < trial.steps; ++step) {
    for (int m = 0; m < trial.microbatches; ++m) {
      const Tensors leaves = state.leaves(step, m);
      const graph::KeyedRandomScope keyed(key_of(trial, step, m));
      const Tensors outputs =
          execute(program, leaves, [](const Tensors& roots, const Tensors& gradients) {
            // Copies are given: a parameter's gradient may lie on the very tensor that was given,
            // and change when the program writes that.
            torch::autograd::backward(roots, copies_of(gradients));
          });
      for (size_t i = 0; i < outputs.size(); ++i) {
        // Throws where libtorch does not tell the history: of views made without gradients whose
        // base was written with them. A pipeline has to ask.
        if (outputs[i].defined()) outputs[i].grad_fn();
        outcome[name_of("output", i, m, step)] = snapshot(outputs[i]);
      }
      finish_microbatch(state.table(), step, outcome);
    }
    keep_buffers(
        state.table(), [](const std::string&) { return true; }, step, outcome);
  }
  return outcome;
}

std::unique_ptr<graph::Graph> capture(const Program& program, const Trial& trial) {
  if (!trial.numbers_change && !trial.leaves) {
    return trace(program, trial, !trial.shapes_only, {}).recorded;
  }
  Random random(trial.seed * 17 + 3);
  Program before = program;
  if (trial.numbers_change) before = with_other_numbers(std::move(before), random);
  if (trial.leaves) before = with_one_more(std::move(before), random);
  std::unique_ptr<graph::Graph> known;
  try {
    known = trace(before, trial, !trial.shapes_only, {}).recorded;
  } catch (const CaptureError&) {
    // Dropout of 0 returns its argument, so the program may write a parameter now ...
  } catch (const c10::Error&) {
    // ... or call operators that eager libtorch cannot run.
  }
  if (known == nullptr) return trace(program, trial, !trial.shapes_only, {}).recorded;
  graph::TraceResult found = trace(program, trial, /*execute=*/false, {known.get()});
  if (found.match == nullptr) return std::move(found.recorded);
  for (const auto& change : found.constants) {
    known->operators[change.operator_index].arguments[change.argument].constant = change.value;
  }
  for (const auto& change : found.contents) known->values[change.value].content = change.content;
  return known;
}

std::string guard(const Program& program, const Trial& trial, const graph::Graph& graph) {
  const auto result = trace(program, trial, /*execute=*/false, {&graph});
  if (result.match == nullptr) return "the guard: " + result.difference;
  for (const auto& change : result.constants) {
    return c10::str("the guard: another constant in operator ", change.operator_index);
  }
  for (const auto& change : result.contents) {
    return c10::str("the guard: %", change.value, " holds\n", change.content, "\nrecorded was\n",
                    graph.values[change.value].content);
  }
  return "";
}

void merge(Outcome& all, const Outcome& of_a_rank) {
  for (const auto& [name, tensor] : of_a_rank) {
    const auto [known, is_new] = all.emplace(name, tensor);
    if (!is_new && !same_bits(tensor, known->second)) all[name + " on another rank"] = tensor;
  }
}

const pipeline::ScheduleKind& schedule_of(const Trial& trial, const graph::Graph& graph,
                                          const partitioner::Plan& plan) {
  const auto options = options_of(trial, plan);
  std::vector<const pipeline::ScheduleKind*> fitting;
  for (const auto& kind : pipeline::schedule_kinds()) {
    const bool fits = kind.trains == graph.trains() && !kind.why_misplaced(options);
    if (fits) fitting.push_back(&kind);
  }
  return *fitting[trial.schedule % fitting.size()];
}

Outcome run_pipeline(const Program& program, const Trial& trial, const graph::Graph& graph,
                     const partitioner::Plan& plan) {
  Outcome outcome;
  std::mutex mutex;
  comm::run_ranks(ranks_of(plan), [&](const comm::CommunicatorPtr& pipeline) {
    at::set_num_threads(1);
    Rank rank(program, trial, graph, plan, pipeline);
    for (int step = 0; step < trial.steps; ++step) rank.run(step);
    const std::lock_guard<std::mutex> lock(mutex);
    merge(outcome, rank.outcome());
  });
  return outcome;
}

}  // namespace smp::random_programs
