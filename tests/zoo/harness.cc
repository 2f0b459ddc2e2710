// SPDX-License-Identifier: Apache-2.0
#include "tests/zoo/harness.h"

#include <ATen/CPUGeneratorImpl.h>

#include "runtime/runtime.h"

namespace smp::zoo {
namespace {

constexpr uint64_t kSeed = 17;

/// The difference of two tensors; "" if they are equal to the bit.
std::string difference(const torch::Tensor& got, const torch::Tensor& expected) {
  if (got.sizes() != expected.sizes() || got.dtype() != expected.dtype()) {
    return c10::str(got.dtype(), got.sizes(), " instead of ", expected.dtype(), expected.sizes());
  }
  if (torch::equal(got, expected)) return "";
  return c10::str("largest difference ", (got - expected).abs().max().to(torch::kDouble));
}

}  // namespace

void Trace::record(const std::string& what, const torch::Tensor& tensor) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto copy = tensor.detach().clone();
  const auto [known, is_new] = tensors_.emplace(what, copy);
  if (is_new) return;
  const std::string text = difference(copy, known->second);
  if (!text.empty()) contradictions_.push_back(what + " differs between ranks: " + text);
}

std::shared_ptr<const graph::Graph> first_graph(const Trace& trace) { return trace.first_graph; }

void Trace::record(const std::string& what, const Named& tensors) {
  for (const auto& [name, tensor] : tensors) record(what + ": " + name, tensor);
}

std::vector<std::string> Trace::contradictions() const { return contradictions_; }

std::vector<std::string> differences(const Trace& got, const Trace& expected) {
  std::vector<std::string> result = got.contradictions();
  for (const auto& [what, tensor] : expected.tensors()) {
    const auto found = got.tensors().find(what);
    if (found == got.tensors().end()) {
      result.push_back(what + " is missing");
      continue;
    }
    const std::string text = difference(found->second, tensor);
    if (!text.empty()) result.push_back(what + ": " + text);
  }
  for (const auto& [what, tensor] : got.tensors()) {
    if (expected.tensors().count(what) == 0) result.push_back(what + " is there, but not in plain");
  }
  return result;
}

std::shared_ptr<const partitioner::Plan> first_plan(const Trace& trace) { return trace.first_plan; }

Run::Run(Trace& trace, const Trace* plain, bool by_hand)
    : trace_(trace),
      plain_(plain),
      by_hand_(by_hand),
      generator_(at::make_generator<at::CPUGeneratorImpl>(kSeed)) {}

void Run::start(torch::nn::Module& net, const std::string& name) {
  const std::string what = name + " at the start: ";
  torch::NoGradGuard no_grad;
  const auto settle = [&](const torch::OrderedDict<std::string, torch::Tensor>& tensors) {
    for (const auto& item : tensors) {
      if (!is_plain()) item.value().copy_(plain_->tensors().at(what + item.key()));
      trace_.record(what + item.key(), item.value());
    }
  };
  settle(net.named_parameters());
  settle(net.named_buffers());
  for (const auto& parameter : testing::unique_parameters(net)) parameters_.push_back(parameter);
}

void Run::run_microbatches(int step_function, int call, int count,
                           const std::function<void(int)>& microbatch) {
  testing::plain_microbatches(parameters_, 1, count, [&](int m) {
    const KeyedRandom random(kSeed, "step " + std::to_string(step_function), call, m);
    microbatch(m);
  });
}

void Run::finish() {
  for (const auto& action : finally_) action();
}

std::shared_ptr<const Trace> run_plain(const Program& program) {
  torch::manual_seed(5);
  auto trace = std::make_shared<Trace>();
  Run run(*trace, nullptr, false);
  program.run(run);
  run.finish();
  return trace;
}

std::shared_ptr<const Trace> run_over_ranks(const Program& program, const Layout& layout,
                                            const Trace& plain) {
  const auto config = Config()
                          .partitions(layout.stages)
                          .microbatches(kMicrobatches)
                          .pipeline(layout.pipeline)
                          .auto_partition(!program.by_hand)
                          .default_partition(0)
                          .seed(kSeed)
                          .timeout_seconds(60);
  auto trace = std::make_shared<Trace>();
  run_as_threads(layout.stages, config, [&] {
    Run run(*trace, &plain, program.by_hand);
    program.run(run);
    run.finish();
    if (rank() == 0) {
      trace->first_graph = runtime::Runtime::get().first_step.measured;
      trace->first_plan = runtime::Runtime::get().first_step.plan;
    }
  });
  return trace;
}

}  // namespace smp::zoo
