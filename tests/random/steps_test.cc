// SPDX-License-Identifier: Apache-2.0
// Random programs as step functions, by the public interface: over stages and replicas, in every
// schedule, and with other numbers, shapes, modes or instructions in the steps between. Against
// plain libtorch, microbatch by microbatch.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "partitioner/cuts.h"
#include "pipeline/generators.h"
#include "smp/smp.h"
#include "tests/random/check.h"
#include "tests/random/generator.h"
#include "tests/random/runs.h"
#include "tests/smp/oracle.h"

namespace smp::random_programs {
namespace {

constexpr const char* kName = "program";  // name of the step function

/// Holds the tensors of a program and runs it, or another one on the same tensors.
class Holder : public torch::nn::Module {
 public:
  /// `owner`, if there is one, has the parameters; buffers are the module's own.
  explicit Holder(const Program& program, const Holder* owner = nullptr) {
    for (size_t i = 0; i < program.leaves.size(); ++i) {
      const Leaf& leaf = program.leaves[i];
      const bool parameter = leaf.kind == Leaf::Kind::kParameter;
      torch::Tensor tensor;
      if (parameter && owner != nullptr) {
        tensor = owner->leaves_[i];
      } else if (leaf.tied_to >= 0) {
        tensor = leaves_[leaf.tied_to];
      } else if (leaf.kind != Leaf::Kind::kInput) {
        tensor = make_leaf(program, i, 0, 0);
      }
      if (parameter) register_parameter(leaf.name, tensor, tensor.requires_grad());
      if (leaf.kind == Leaf::Kind::kBuffer) register_buffer(leaf.name, tensor);
      leaves_.push_back(tensor);
    }
  }

  Tensors forward(const Program& program, const Tensors& inputs, const Backward& backward) const {
    Tensors leaves = leaves_;
    size_t next = 0;
    for (torch::Tensor& leaf : leaves) {
      if (!leaf.defined()) leaf = inputs[next++];
    }
    return execute(program, leaves, backward);
  }

  /// Says of the constants, whatever their sizes, that each microbatch gets the whole of them.
  void declare_constants() const {
    for (const torch::Tensor& leaf : leaves_) whole(leaf);
  }

 private:
  Tensors leaves_;  // undefined for inputs
};

/// How a program is trained.
struct Training {
  uint64_t seed = 0;
  int stages = 1, replicas = 1, microbatches = 1;
  std::string pipeline, placement;
  bool updates = false;        // an optimizer updates the parameters after each step
  std::vector<Program> steps;  // on the same leaves, but for the sizes of inputs
};

constexpr double kLearningRate = 0.05;

std::string output_name(size_t index, int microbatch, size_t step) {
  return c10::str("output ", index, " of microbatch ", microbatch, " of step ", step);
}

std::string gradient_name(const std::string& parameter, size_t step) {
  return c10::str("gradient of ", parameter, " after step ", step);
}

std::string parameter_name(const std::string& parameter, size_t step) {
  return c10::str("parameter ", parameter, " after step ", step);
}

std::string buffer_name(const std::string& buffer, int replica, size_t step) {
  return c10::str("buffer ", buffer, " of replica ", replica, " after step ", step);
}

Tensors inputs_of(const Program& program, size_t step, int microbatch) {
  Tensors inputs;
  for (size_t i = 0; i < program.leaves.size(); ++i) {
    if (program.leaves[i].kind != Leaf::Kind::kInput) continue;
    inputs.push_back(make_leaf(program, i, static_cast<int>(step), microbatch));
  }
  return inputs;
}

/// The inputs of `count` microbatches from `first` on, each as one tensor.
Tensors batch_of(const Program& program, size_t step, int first, int count) {
  std::vector<Tensors> parts;
  for (int m = first; m < first + count; ++m) parts.push_back(inputs_of(program, step, m));
  Tensors batch;
  for (size_t i = 0; i < parts[0].size(); ++i) {
    Tensors of_input;
    for (const Tensors& part : parts) of_input.push_back(part[i]);
    batch.push_back(torch::cat(of_input));
  }
  return batch;
}

Tensors copies_of(const Tensors& tensors) {
  Tensors copies;
  for (const torch::Tensor& tensor : tensors) {
    copies.push_back(tensor.defined() ? tensor.detach().clone() : tensor);
  }
  return copies;
}

/// A step of plain libtorch: outputs, and buffers of each replica.
void run_plain_step(const Training& training, size_t step,
                    const std::vector<std::shared_ptr<Holder>>& replicas, Outcome& outcome) {
  const Program& program = training.steps[step];
  const Tensors parameters = testing::unique_parameters(*replicas[0]);
  testing::plain_microbatches(
      parameters, training.replicas, training.microbatches, [&](int microbatch) {
        const Holder& module = *replicas[microbatch / training.microbatches];
        const Tensors inputs = inputs_of(program, step, microbatch);
        const KeyedRandom random(training.seed, kName, step, microbatch);
        const Tensors outputs =
            module.forward(program, inputs, [](const Tensors& roots, const Tensors& gradients) {
              torch::autograd::backward(roots, copies_of(gradients));
            });
        for (size_t i = 0; i < outputs.size(); ++i) {
          outputs[i].grad_fn();  // throws where libtorch cannot tell the history
          outcome[output_name(i, microbatch, step)] = outputs[i].detach().clone();
        }
        for (torch::Tensor& buffer : module.buffers()) buffer.detach_();
      });
  for (const auto& item : replicas[0]->named_parameters()) {
    if (!item.value().grad().defined()) continue;
    outcome[gradient_name(item.key(), step)] = item.value().grad().clone();
  }
  for (int r = 0; r < training.replicas; ++r) {
    for (const auto& item : replicas[r]->named_buffers()) {
      outcome[buffer_name(item.key(), r, step)] = item.value().clone();
    }
  }
}

/// Updates the parameters, if the training does, and notes them.
void update_plain(const Training& training, size_t step, const Holder& module,
                  torch::optim::SGD& optimizer, Outcome& outcome) {
  if (training.updates) {
    optimizer.step();
    optimizer.zero_grad();
  }
  for (const auto& item : module.named_parameters()) {
    outcome[parameter_name(item.key(), step)] = item.value().detach().clone();
  }
}

Outcome run_plain(const Training& training) {
  std::vector<std::shared_ptr<Holder>> replicas;
  for (int r = 0; r < training.replicas; ++r) {
    replicas.push_back(
        std::make_shared<Holder>(training.steps[0], r == 0 ? nullptr : replicas[0].get()));
  }
  torch::optim::SGD optimizer(testing::unique_parameters(*replicas[0]), kLearningRate);
  Outcome outcome;
  for (size_t step = 0; step < training.steps.size(); ++step) {
    run_plain_step(training, step, replicas, outcome);
    update_plain(training, step, *replicas[0], optimizer, outcome);
  }
  return outcome;
}

/// Notes the state of a rank after a step.
void note_state(const ModelCore& model, const Holder& module, size_t step, Outcome& outcome) {
  const auto state = model.state_dict();
  for (const auto& item : module.named_parameters()) {
    outcome[parameter_name(item.key(), step)] = state[item.key()].clone();
  }
  for (const auto& item : module.named_buffers()) {
    outcome[buffer_name(item.key(), dp_rank(), step)] = state[item.key()].clone();
  }
}

/// A rank's part of the training, and its state afterwards.
Outcome run_rank(const Training& training, const std::shared_ptr<Holder>& module) {
  DistributedModel<std::shared_ptr<Holder>> model(module);
  DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), kLearningRate);
  const Program* now = nullptr;
  const Backward backward = [&](const Tensors& roots, const Tensors& gradients) {
    const bool ones = std::none_of(gradients.begin(), gradients.end(),
                                   [](const auto& gradient) { return gradient.defined(); });
    model->backward(roots, ones ? Tensors() : gradients);
  };
  auto train = step([&](const Tensors& inputs) { return model(*now, inputs, backward); },
                    StepOptions().name(kName).input_split_axes({{0, 0}}));  // several sizes
  module->declare_constants();
  const int first = dp_rank() * training.microbatches;
  bool trained = false;
  Outcome outcome;
  for (size_t i = 0; i < training.steps.size(); ++i) {
    now = &training.steps[i];
    const auto outputs = train(batch_of(*now, i, first, training.microbatches));
    for (size_t o = 0; o < outputs.size(); ++o) {
      for (int m = 0; m < training.microbatches; ++m) {
        outcome[output_name(o, first + m, i)] = outputs[o].outputs()[m].clone();
      }
    }
    for (const auto& item : model->local_named_parameters()) {
      if (!item.value().grad().defined()) continue;
      outcome[gradient_name(item.key(), i)] = item.value().grad().clone();
    }
    trained |= !now->roots.empty();
    if (training.updates && trained) {  // an update without a training is refused
      optimizer.step();
      optimizer.zero_grad();
    }
    note_state(model, *module, i, outcome);
  }
  return outcome;
}

Outcome run_over_ranks(const Training& training) {
  const auto config = Config()
                          .partitions(training.stages)
                          .microbatches(training.microbatches)
                          .pipeline(training.pipeline)
                          .placement_strategy(training.placement)
                          .ddp(training.replicas > 1)
                          .trace_execution_times(false)  // or the cuts would depend on the load
                          .seed(static_cast<int64_t>(training.seed))
                          .timeout_seconds(60);
  const int ranks = training.stages * training.replicas;
  std::vector<std::shared_ptr<Holder>> modules;
  for (int r = 0; r < ranks; ++r) modules.push_back(std::make_shared<Holder>(training.steps[0]));
  Outcome all;
  std::mutex mutex;
  run_as_threads(ranks, config, [&] {
    const Outcome own = run_rank(training, modules[rank()]);
    const std::lock_guard<std::mutex> lock(mutex);
    merge(all, own);
  });
  return all;
}

// ---- Changes between steps --------------------------------------------------------------

/// The program after `eval()`, with or without a NoGradGuard.
Program in_evaluation(Program program, Random& random) {
  program.roots.clear();
  program.backward_after = -1;
  for (Instruction& instruction : program.instructions) {
    const std::string name = instruction.operation->name;
    if (name == "dropout" || name == "alpha_dropout") instruction.numbers.push_back(0);
    if (name == "batch_norm") instruction.operation = &operation("batch_norm_eval");
  }
  if (random.chance(50)) return program;
  program.outer.no_grad = true;
  for (Instruction& instruction : program.instructions) instruction.mode.no_grad = true;
  return program;
}

Program under_the_other_autocast(Program program, Random& random) {
  program.outer.autocast ^= true;
  for (Instruction& instruction : program.instructions) {
    if (!random.chance(20)) instruction.mode.autocast = program.outer.autocast;
  }
  return program;
}

Program with_other_sizes(Program program, Random& random) {
  for (Leaf& leaf : program.leaves) {
    if (leaf.kind == Leaf::Kind::kInput && random.chance(70)) leaf.sizes[0] += 1;
  }
  return program;
}

struct Change {
  const char* name;
  Program (*make)(Program program, Random& random);
};

const std::vector<Change>& changes() {
  static const std::vector<Change> kChanges = {
      {"numbers", with_other_numbers}, {"one more", with_one_more},
      {"evaluation", in_evaluation},   {"autocast", under_the_other_autocast},
      {"sizes", with_other_sizes},
  };
  return kChanges;
}

/// Whether libtorch can run the program.
bool runs(const Program& program) {
  Training alone;
  alone.steps = {program};
  try {
    return !has_non_finite(run_plain(alone));
  } catch (const std::exception&) {
    return false;
  }
}

/// The schedules that train, by name.
std::vector<std::string> pipelines() {
  std::vector<std::string> names = {"auto"};
  for (const auto& kind : pipeline::schedule_kinds()) {
    if (kind.trains) names.push_back(kind.name);
  }
  return names;
}

/// How many stages the program can be cut into.
int pieces_of(const Program& program) {
  const auto graph = capture(program, random_programs::Trial());
  const std::vector<bool> legal = partitioner::legal_cuts(*graph);
  return 1 + static_cast<int>(std::count(legal.begin(), legal.end(), true));
}

/// Dropout in evaluation returns its argument, so a tensor written then may be a parameter.
bool is_refused(const Program& program) {
  try {
    capture(program, random_programs::Trial());
    return false;
  } catch (const CaptureError&) {
    return true;
  }
}

/// Stages on each rank that the schedule needs.
int stages_per_rank(const std::string& pipeline) {
  if (pipeline == "auto") return 1;
  const auto placement = pipeline::schedule_kind(pipeline).placement;
  const bool several =
      placement == pipeline::Placement::kLooped || placement == pipeline::Placement::kVShaped;
  return several ? 2 : 1;
}

/// The cases that have been tried, and how often.
using Counts = std::map<std::string, int>;

Training training_of(const Program& program, Counts& counts) {
  Random random(program.seed * 101 + 13);
  Training training;
  training.seed = program.seed;
  const std::vector<std::string> names = pipelines();
  training.pipeline = names[random.below(static_cast<int64_t>(names.size()))];
  training.placement = random.chance(50) ? "cluster" : "spread";
  training.replicas = 1 + static_cast<int>(random.below(2));
  training.microbatches = 1 + static_cast<int>(random.below(3));
  training.stages = 1 + static_cast<int>(random.below(3));
  training.updates = program.trains && random.chance(60);
  training.steps = {program};
  for (int64_t more = 1 + random.below(2); more > 0; --more) {
    const Change& change = changes()[random.below(static_cast<int64_t>(changes().size()))];
    const Program changed = change.make(program, random);
    if (runs(changed) && !is_refused(changed)) {
      training.steps.push_back(changed);
      ++counts[change.name];
    }
    training.steps.push_back(program);
  }
  int pieces = pieces_of(program);
  for (const Program& step : training.steps) pieces = std::min(pieces, pieces_of(step));
  const int most = pieces / stages_per_rank(training.pipeline);
  if (most == 0) training.pipeline = "simple";
  training.stages = std::clamp(training.stages, 1, std::max(most, 1));
  return training;
}

/// The outcome of libtorch; nothing where it cannot run the training.
std::optional<Outcome> expected_of(const Training& training) {
  try {
    Outcome outcome = run_plain(training);
    if (!has_non_finite(outcome)) return outcome;
  } catch (const std::exception&) {
    // A buffer that a step has changed may make the next one impossible.
  }
  return std::nullopt;
}

void count(const Training& training, Counts& counts) {
  ++counts["compared"];
  ++counts["in " + training.pipeline];
  counts["of several stages"] += training.stages > 1;
  counts["of several replicas"] += training.replicas > 1;
  counts["of both"] += training.stages > 1 && training.replicas > 1;
  counts["updated"] += training.updates;
  counts["trained"] += !training.steps[0].roots.empty();
}

std::string describe(const Training& training) {
  std::string text = c10::str("\n", training.stages, " stages, ", training.replicas, " replicas, ",
                              training.microbatches, " microbatches, ", training.pipeline, "\n");
  for (const Program& step : training.steps) text += step.to_string();
  return text;
}

/// The error; empty if there is none.
std::string failure_of(const Program& program, Counts& counts) {
  ++counts["programs"];
  if (!runs(program)) return "";
  Counts changed;
  Training training;
  std::string text;
  try {
    training = training_of(program, changed);
    const std::optional<Outcome> expected = expected_of(training);
    if (!expected) return "";
    text = difference(run_over_ranks(training), *expected);
  } catch (const PartitionError& error) {
    // A later program may ask for operators on one rank whose tensors two ranks own.
    text = error.what_without_backtrace();
    if (text.find("belongs to partition") == std::string::npos) return "threw: " + text;
    ++counts["refused"];
    return "";
  } catch (const c10::Error& error) {
    text = std::string("threw: ") + error.what_without_backtrace();
  } catch (const std::exception& error) {
    text = std::string("threw: ") + error.what();
  }
  if (training.steps.empty()) return text;
  count(training, counts);
  for (const auto& [what, number] : changed) counts["changed " + what] += number;
  return text.empty() ? text : text + describe(training);
}

/// The failure but for its numbers, so that shrinking does not come upon another one.
std::string kind_of(const std::string& failure) {
  if (failure.rfind("threw", 0) != 0) return failure.empty() ? "" : "other bits";
  std::string kind = failure.substr(failure.find(']') + 1);
  kind = kind.substr(0, kind.find_first_of("0123456789\n"));
  return "threw" + kind;
}

/// The smallest program that fails in the same way, and how it does.
std::string explain(const Program& program, const std::string& failure) {
  Counts none;
  const Program smallest = shrink(program, [&](const Program& candidate) {
    return kind_of(failure_of(candidate, none)) == kind_of(failure);
  });
  return failure_of(smallest, none);
}

/// The least counts for a thousand programs.
std::map<std::string, int> least() {
  std::map<std::string, int> floors = {{"compared", 800},
                                       {"trained", 500},
                                       {"updated", 350},
                                       {"of several stages", 400},
                                       {"of several replicas", 350},
                                       {"of both", 200}};
  for (const std::string& pipeline : pipelines()) floors["in " + pipeline] = 15;
  for (const Change& change : changes()) floors[std::string("changed ") + change.name] = 100;
  return floors;
}

uint64_t setting(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

TEST(RandomSteps, TrainAsPlainLibtorch) {
  torch::set_num_threads(1);
  const uint64_t first = setting("SMP_RANDOM_FIRST", 0);
  const uint64_t programs = setting("SMP_RANDOM_PROGRAMS", 200);
  const uint64_t most = setting("SMP_RANDOM_FAILURES", 5);
  Counts counts;
  uint64_t failures = 0;
  for (uint64_t seed = first; seed < first + programs && failures < most; ++seed) {
    const Program program = generate(seed);
    const std::string failure = failure_of(program, counts);
    if (failure.empty()) continue;
    ++failures;
    ADD_FAILURE() << "seed " << seed << ": " << failure.substr(0, failure.find('\n'))
                  << "\nshrunk to\n"
                  << explain(program, failure);
  }
  for (const auto& [what, number] : counts) std::cout << what << ": " << number << "\n";
  EXPECT_LE(counts["refused"] * 1000, counts["programs"] * 60);
  for (const auto& [what, floor] : least()) {
    EXPECT_GE(counts[what] * 1000, counts["programs"] * floor) << what;
  }
}

}  // namespace
}  // namespace smp::random_programs
