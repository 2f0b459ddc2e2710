// SPDX-License-Identifier: Apache-2.0
#include "smp/c/session.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/binary_cross_entropy_with_logits.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/huber_loss.h>
#include <ATen/ops/l1_loss.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/nll_loss_nd.h>
#include <ATen/ops/smooth_l1_loss.h>

#include <cmath>
#include <map>
#include <utility>

#include "core/check.h"
#include "core/status.h"
#include "core/text.h"
#include "runtime/runtime.h"
#include "runtime/together.h"
#include "smp/group.h"
#include "smp/save_load.h"
#include "smp/step.h"

namespace smp::c {
namespace {

using at::Tensor;
using runtime::Runtime;

constexpr const char* kOutput = "output";

using Loss = Tensor (*)(const Tensor& output, const Tensor& target);

/// The target of a loss of each number: another shape would be broadcast.
const Tensor& alike(const Tensor& target, const Tensor& output) {
  SMP_CHECK_WITH(UsageError, output.sizes() == target.sizes(), "the target has sizes ",
                 target.sizes(), " in a microbatch, and the model's first output ", output.sizes(),
                 ". Give them the same: a column of numbers is of sizes [batch, 1]");
  return target;
}

const std::map<std::string, Loss>& losses() {
  static const auto* table = new std::map<std::string, Loss>{
      {"mse", [](const Tensor& y, const Tensor& t) { return at::mse_loss(y, alike(t, y)); }},
      {"l1", [](const Tensor& y, const Tensor& t) { return at::l1_loss(y, alike(t, y)); }},
      {"smooth_l1",
       [](const Tensor& y, const Tensor& t) { return at::smooth_l1_loss(y, alike(t, y)); }},
      {"huber", [](const Tensor& y, const Tensor& t) { return at::huber_loss(y, alike(t, y)); }},
      {"cross_entropy",
       [](const Tensor& y, const Tensor& t) { return at::cross_entropy_loss(y, t); }},
      {"nll", [](const Tensor& y, const Tensor& t) { return at::nll_loss_nd(y, t); }},
      {"bce_with_logits",
       [](const Tensor& y, const Tensor& t) {
         return at::binary_cross_entropy_with_logits(y, alike(t, y));
       }},
  };
  return *table;
}

Config parse_config(const char* config) {
  if (config == nullptr) return Config();
  const std::string text = config;
  const size_t begin = text.find_first_not_of(" \t\r\n");
  const bool is_json = begin != std::string::npos && text[begin] == '{';
  return is_json ? Config::from_json(text, "the configuration given") : Config::from_file(text);
}

}  // namespace

Config read_config(const char* config) {
  Config effective = parse_config(config).merged_with_environment();
  SMP_CHECK_WITH(ConfigError, effective.preempt_seconds() == 0,
                 "config key \"preempt_seconds\": a program in C cannot ask whether it shall stop, "
                 "and SIGTERM would end it late. Leave it at 0, handle SIGTERM in the program, and "
                 "call smp_save");
  return effective;
}

std::vector<Tensor> Program::forward(const std::vector<Tensor>& inputs,
                                     const std::vector<std::string>& names) {
  std::vector<c10::IValue> by_position;
  Named by_name;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (names[i].empty()) {
      by_position.emplace_back(inputs[i]);
    } else {
      const bool is_first = by_name.emplace(names[i], inputs[i]).second;
      SMP_CHECK_WITH(UsageError, is_first, "two inputs have the name \"",
                     core::printable(names[i], 100), "\". Give each by a name of its own");
    }
  }
  return tensors_of(call(by_position, by_name));
}

std::shared_ptr<Program> load_for_inference(const std::string& path) {
  return std::make_shared<Program>(ExportedPrograms().eval(path));
}

Tensor loss_of(const std::string& name, const std::vector<Tensor>& outputs, const Tensor& target) {
  SMP_CHECK_WITH(UsageError, !outputs.empty(),
                 "the model returns no tensor, of which there would be a loss");
  const bool wants_target = name != kOutput;
  const auto found = losses().find(name);
  if (wants_target && found == losses().end()) {
    std::string known;
    for (const auto& entry : losses()) known += "\"" + entry.first + "\", ";
    core::fail<UsageError>("there is no loss \"", core::printable(name, 100), "\". There are ",
                           known, "and \"", kOutput, "\" for a model that returns its loss");
  }
  SMP_CHECK_WITH(UsageError, target.defined() == wants_target, "the loss \"", name, "\" takes ",
                 wants_target ? "a target, and none was given" : "no target, and one was given");
  return wants_target ? found->second(outputs.front(), target) : outputs.front();
}

std::vector<Tensor> need_gradients(const std::vector<Tensor>& outputs) {
  std::vector<Tensor> result;
  for (const Tensor& output : outputs) {
    if (output.requires_grad()) result.push_back(output);
  }
  SMP_CHECK_WITH(UsageError, !result.empty(),
                 "no output of the model needs a gradient, so that there is nothing to give one "
                 "of. Export a model that computes them from its parameters");
  return result;
}

Session::Session(const std::function<Config()>& config, const std::optional<int64_t>& communicator)
    : ranks_(config, communicator) {}

Session::~Session() {
  try {
    end();
  } catch (const std::exception&) {
    // The caller has let it go.
  }
}

void Session::fail(const std::string& reason) noexcept { ranks_.runtime()->fail(reason); }

void Session::end() {
  if (ranks_.runtime() == nullptr) return;
  {
    const runtime::SessionScope here(ranks_);
    state_.clear();
    train_ = nullptr;
    train_by_gradient_ = nullptr;
    evaluate_ = nullptr;
    optimizer_.reset();
    model_.reset();
  }
  ranks_.end();
}

at::Device Session::device() const { return ranks_.runtime()->device(); }

void Session::set_device(at::Device device) {
  if (device != this->device()) ranks_.runtime()->choose_device(device);
}

void Session::load(const std::string& train, const std::string& eval) {
  SMP_CHECK_WITH(UsageError, !model_,
                 "the session has a model already, and it has one. Begin "
                 "another session for another model");
  model_.emplace(std::make_shared<Program>(ExportedPrograms().train(train).eval(eval)));
  program_ = eval.empty() ? train : eval;
  make_steps();
}

void Session::make_optimizer(const std::string& name, const std::string& options) {
  SMP_CHECK_WITH(UsageError, !optimizer_,
                 "the session has an optimizer already. Begin another session for another one");
  optimizer_ = c::make_optimizer(name, options, model()->parameters());
}

void Session::set_learning_rate(double rate) {
  SMP_CHECK_WITH(UsageError, std::isfinite(rate) && rate >= 0, rate,
                 " is no learning rate: expected a number of 0 or more");
  for (auto& group : optimizer().own->param_groups()) group.options().set_lr(rate);
}

const Session::Model& Session::model() const {
  SMP_CHECK_WITH(UsageError, model_.has_value(),
                 "the session has no model yet. Load one before: smp_load");
  return *model_;
}

const NamedOptimizer& Session::optimizer() const {
  SMP_CHECK_WITH(UsageError, optimizer_.has_value(),
                 "the session has no optimizer yet. Make one before: smp_optimizer");
  return *optimizer_;
}

void Session::make_steps() {
  const auto target_of = [](const Tensors& target) {
    return target.empty() ? Tensor() : target.front();
  };
  train_ = step(
      [this, target_of](const Tensors& inputs, const Tensors& target) {
        Tensor loss = loss_of(*given_.loss, call(inputs), target_of(target));
        model()->backward(loss);
        return loss;
      },
      StepOptions().name("train"));
  train_by_gradient_ = step(
      [this](const Tensors& inputs) {
        const Tensors outputs = need_gradients(call(inputs));
        model()->backward(outputs, output_gradients(outputs));
      },
      StepOptions().name("train by gradient"));
  evaluate_ = step(
      [this, target_of](const Tensors& inputs, const Tensors& target) {
        const at::NoGradGuard no_grad;
        Tensors results = call(inputs);
        if (given_.loss) results.push_back(loss_of(*given_.loss, results, target_of(target)));
        return results;
      },
      StepOptions().name("evaluate"));
}

/// One update of the optimizer.
void Session::update() {
  if (optimizer().clip_grad_norm) {
    optimizer().core->clip_master_grads(*optimizer().clip_grad_norm);
  }
  optimizer().own->step();
}

double Session::train(NamedTensors inputs, const std::string& loss, const Tensor& target) {
  optimizer().core->zero_grad();
  given_ = {std::move(inputs.names), loss};
  const StepOutput output = train_(inputs.tensors, target.defined() ? Tensors{target} : Tensors());
  update();
  return output.reduce_mean(group(CommGroup::kDp)).item<double>();
}

void Session::train_by_gradient(NamedTensors inputs, const OutputGradient& gradient) {
  optimizer().core->zero_grad();
  given_ = {std::move(inputs.names), std::nullopt};
  {
    const OutputGradientScope scope(gradient);
    train_by_gradient_(inputs.tensors);
  }
  update();
}

std::pair<std::vector<Tensor>, double> Session::evaluate(NamedTensors inputs,
                                                         const std::optional<std::string>& loss,
                                                         const Tensor& target) {
  const bool was_training = model()->is_training();
  model()->eval();
  given_ = {std::move(inputs.names), loss};
  const auto results = evaluate_(inputs.tensors, target.defined() ? Tensors{target} : Tensors());
  if (was_training) model()->train();
  std::pair<std::vector<Tensor>, double> evaluated;
  const size_t outputs = results.size() - (loss ? 1 : 0);
  for (size_t i = 0; i < outputs; ++i) {
    const bool is_number = results[i].outputs().front().dim() == 0;
    evaluated.first.push_back(is_number ? results[i].reduce_mean() : results[i].concat());
  }
  if (loss) evaluated.second = results.back().reduce_mean(group(CommGroup::kDp)).item<double>();
  return evaluated;
}

void Session::save(const std::string& folder, const std::string& tag) {
  smp::save_checkpoint(folder, tag, model(), *optimizer().core).wait();
}

void Session::save_weights(const std::string& folder, const std::string& tag) {
  smp::save_checkpoint(folder, tag, model(), SaveCheckpointOptions().partial(false)).wait();
}

void Session::save_program(const std::string& program, const std::string& path) {
  const core::CallScope here("smp_save_program");
  const auto state = model()->state_dict(/*gather_to_rank0=*/true);
  Runtime& runtime = *ranks_.runtime();
  runtime::together_for_long(*runtime.world(), [&] {
    if (runtime.rank() == 0) save_exported(program.empty() ? program_ : program, state, path);
    return std::string();
  });
}

int64_t Session::resume(const std::string& folder, const std::optional<std::string>& tag) {
  return smp::resume_from_checkpoint(folder, tag, model(), *optimizer().core,
                                     LoadOptions().begin_anew(true))
      .step;
}

void Session::gather_state() {
  state_.clear();
  for (const auto& entry : model()->state_dict()) {
    state_.emplace_back(entry.key(), entry.value().cpu().contiguous());
  }
}

}  // namespace smp::c
