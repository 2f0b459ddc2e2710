// SPDX-License-Identifier: Apache-2.0
#include "runtime/update/update_watch.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <set>

#include "core/check.h"
#include "core/log.h"
#include "graph/absent.h"
#include "graph/visit.h"
#include "optim/grad_norm.h"
#include "runtime/model.h"
#include "runtime/precision.h"
#include "runtime/runtime.h"

namespace smp::runtime {
namespace {

/// Norms in float32, over gradients that were multiplied by a rounded factor.
constexpr double kSameNorm = 1e-3;
constexpr double kSameFactor = 1e-3;

bool same(double a, double b, double tolerance) {
  return std::abs(a - b) <= tolerance * std::max(std::abs(a), std::abs(b));
}

std::set<std::string> parameters_read_by(const graph::Graph& graph) {
  std::set<std::string> names;
  for (const graph::Operator& op : graph.operators) {
    graph::for_each_argument(op, [&](graph::ValueId id) {
      const graph::Value& value = graph.values[id];
      if (value.kind == graph::ValueKind::kParameter) names.insert(value.name);
    });
  }
  return names;
}

/// The first few names, and how many more there are.
std::string listed(const std::vector<std::string>& names) {
  constexpr size_t kShown = 8;
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), kShown); ++i)
    text += (i > 0 ? ", " : "") + names[i];
  if (names.size() > kShown) text += c10::str(" and ", names.size() - kShown, " more parameters");
  return (names.size() == 1 ? "parameter " : "parameters ") + text;
}

}  // namespace

bool UpdateWatch::Scaling::differs(const Scaling& other) const {
  return is_known() && other.is_known() &&
         !same(factor, other.factor, std::max({kSameFactor, tolerance, other.tolerance}));
}

/// Ranks that have other gradients of the same model.
bool UpdateWatch::has_others() const { return runtime_.group(CommGroup::kMp)->size() > 1; }

/// The parameters whose gradients this rank has whole.
std::vector<at::Tensor> UpdateWatch::own_gradients() const {
  std::vector<at::Tensor> result;
  for (const auto& entry : runtime_.table().entries()) {
    const at::Tensor& gradient = entry.tensor.grad();
    const bool is_whole = gradient.defined() && !graph::is_absent(gradient);
    if (is_whole && runtime_.owns(entry)) result.push_back(entry.tensor);
  }
  return result;
}

void UpdateWatch::look() {
  if (has_others()) probes_.look(own_gradients());
}

/// Takes note of the changes of gradients since `look`.
void UpdateWatch::settle() {
  if (!has_others()) return;
  const std::optional<double> factor = probes_.factor();
  if (!factor) return;
  scaling_.factor = scaling_.is_known() ? scaling_.factor * *factor : *factor;
  scaling_.tolerance = probes_.tolerance();
  if (*factor == 1) return;
  std::vector<at::Tensor> norms;
  for (const at::Tensor& parameter : own_gradients()) {
    norms.push_back(optim::gradient_norm(parameter.grad(), 2).to(at::kDouble));
  }
  scaling_.norm = optim::norm_of_norms(norms, 2).item<double>();
}

std::string UpdateWatch::before_step() {
  check_optimizer();
  settle();
  look();
  std::string note(sizeof(Scaling), '\0');
  std::memcpy(note.data(), &scaling_, sizeof(Scaling));
  scaling_ = {};
  return note;
}

void UpdateWatch::compare(const std::vector<std::string>& notes, const std::string& kind) {
  std::vector<Scaling> all(notes.size());
  for (size_t r = 0; r < all.size(); ++r) std::memcpy(&all[r], notes[r].data(), sizeof(Scaling));
  size_t first = 0, other = 0;
  bool clipped = false;
  for (size_t a = 0; a < all.size(); ++a) {
    for (size_t b = a + 1; b < all.size(); ++b) {
      if (!all[a].differs(all[b])) continue;
      if (other == 0) first = a, other = b;
      // Ranks clipped to the same norm by different factors: each by its own.
      clipped = clipped || same(all[a].norm, all[b].norm, kSameNorm);
    }
  }
  if (other == 0) return;
  // A program may scale all of one rank's gradients by a number of its own; clipping takes another
  // one every time.
  bool varies = false;
  for (size_t r = 0; r < differed_.size(); ++r) varies = varies || all[r].differs(differed_[r]);
  const bool is_first = differed_.empty();
  differed_ = all;
  const std::string message = c10::str(
      "the program has multiplied the gradients of ", kind, " ", first, " by ", all[first].factor,
      " and those of ", kind, " ", other, " by ", all[other].factor,
      " between the step that made them and optimizer.step(). torch::nn::utils::clip_grad_norm_ "
      "does so: on each rank it takes the norm of this rank's gradients alone. Call "
      "smp::clip_grad_norm_(model, max_norm), which takes the norm over all ranks");
  SMP_CHECK_WITH(UsageError, !clipped && !varies, message,
                 ", and go on from a checkpoint: the optimizer has stepped");
  if (is_first && runtime_.rank() == 0) {
    core::log_warning(message +
                      ". If these are factors of the program's own, that never change, all is "
                      "well");
  }
}

void UpdateWatch::compare_now() {
  if (!has_others()) return;
  const auto group = runtime_.group(CommGroup::kMp);
  compare(comm::all_gather_bytes(*group, before_step()), "mp rank");
}

void UpdateWatch::after_step(const std::string& step_name, const graph::Graph& graph) {
  if (graph.trains()) {
    if (++trainings_ == 1) warn_of_unread(step_name, graph);
    look();
  } else {
    ++evaluations_;
    last_evaluation_ = step_name;
  }
}

/// Most likely a weight that was tied by assigning a member, which leaves the old one registered.
void UpdateWatch::warn_of_unread(const std::string& step_name, const graph::Graph& graph) const {
  if (runtime_.rank() > 0) return;
  const std::set<std::string> read = parameters_read_by(graph);
  for (const auto& model : runtime_.models()) {
    std::vector<std::string> unread;
    const auto parameters = model->parameters();
    for (const at::Tensor& parameter : parameters) {
      const std::string& name = runtime_.table().at(parameter).name;
      if (read.count(name) == 0) unread.push_back("\"" + name + "\"");
    }
    // Parameters of a model that takes no part are trained by another step function.
    if (unread.empty() || unread.size() == parameters.size()) continue;
    core::log_warning(c10::str(
        "no operator of step function \"", step_name, "\" reads ", listed(unread),
        ", so this step does not train what the model registered there. If another step function "
        "reads it, all is well. If it was to be tied to another weight: assigning a member "
        "(head->weight = token->weight) leaves the old one registered; use one tensor instead "
        "(docs/recipes.md, \"Tied weights\")"));
  }
}

void UpdateWatch::before_update() {
  ++updates_;
  settle();
}

UpdateWatch::Updating::Updating(UpdateWatch& watch) : watch_(watch) {
  watch_.is_updating_ = true;
  for (const auto& entry : watch_.runtime_.table().entries()) {
    if (!is_foreign(watch_.runtime_, entry)) continue;
    at::Tensor& gradient = entry.tensor.mutable_grad();
    if (gradient.defined()) watch_.aside_.emplace_back(entry.tensor, std::exchange(gradient, {}));
  }
}

UpdateWatch::Updating::~Updating() {
  watch_.is_updating_ = false;
  for (auto& [parameter, gradient] : std::exchange(watch_.aside_, {})) {
    parameter.mutable_grad() = std::move(gradient);
  }
}

void UpdateWatch::give(const ForeignGradients& gradients) {
  for (const auto& [parameter, absent] : gradients) {
    if (is_updating_) {  // in a closure
      aside_.emplace_back(parameter, absent);
    } else if (!parameter.grad().defined()) {
      parameter.mutable_grad() = absent;
    }
  }
}

/// Parameters in half precision, whose gradients the program has dropped before a
/// `DistributedOptimizer` has used any. Sums that wait for later steps are in no `.grad` yet.
void UpdateWatch::check_optimizer() {
  if (warned_of_optimizer_ || updates_ > 0 || trainings_ == 0) return;
  if (runtime_.current_step.adding_up != nullptr) return;
  const auto half = half_type(runtime_.config());
  if (!half) return;
  for (const auto& entry : runtime_.table().entries()) {
    const at::Tensor& gradient = entry.tensor.grad();
    if (!gradient.defined()) continue;
    if (graph::is_absent(gradient) || gradient.any().item<bool>()) return;
  }
  warned_of_optimizer_ = true;
  if (runtime_.rank() > 0) return;
  core::log_warning(
      c10::str("a step has trained parameters of type ", *half,
               ", and its gradients were dropped before a DistributedOptimizer stepped. An "
               "optimizer of torch::optim alone knows neither master weights, so that it "
               "loses updates that are small beside a parameter, nor a loss scale. Wrap "
               "it: auto optimizer = smp::distributed(plain), and call its step()"));
}

UpdateWatch::OwnScaling::OwnScaling()
    : watch_(Runtime::exists() ? Runtime::get().update_watch.get() : nullptr) {
  if (watch_ != nullptr) watch_->settle();
}

UpdateWatch::OwnScaling::~OwnScaling() {
  if (watch_ != nullptr) watch_->look();
}

}  // namespace smp::runtime
