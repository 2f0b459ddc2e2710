// SPDX-License-Identifier: Apache-2.0
#include "dp/reducer.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "comm/group_core.h"
#include "core/check.h"

namespace smp::dp {
namespace {

/// Where ranks share a host they reduce buckets where they lie.
at::Tensor make_bucket(comm::Communicator& group, int64_t numel, const at::TensorOptions& options) {
  if (!options.device().is_cpu()) return at::zeros({numel}, options);
  return group.shared_tensor(numel, c10::typeMetaToScalarType(options.dtype()));
}

std::vector<at::TensorOptions> options_of(const std::vector<at::Tensor>& parameters) {
  std::vector<at::TensorOptions> options;
  for (const at::Tensor& parameter : parameters) {
    options.push_back(at::TensorOptions(parameter.dtype()).device(parameter.device()));
  }
  return options;
}

/// "3 of 8 parameters: a, b, c"; of many, the first.
std::string list_parameters(const std::vector<std::string>& names, const std::vector<bool>& ready) {
  constexpr size_t kShown = 20;
  std::vector<std::string> missing;
  for (size_t i = 0; i < names.size(); ++i) {
    if (!ready[i]) missing.push_back(names[i]);
  }
  const size_t count = missing.size();
  std::string more;
  if (count > kShown) {
    missing.resize(kShown);
    more = c10::str(" and ", count - kShown, " more");
  }
  return c10::str(count, " of ", names.size(), " parameters: ", c10::Join(", ", missing), more);
}

}  // namespace

Reducer::Reducer(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                 const Group& group, const ReducerOptions& options)
    : parameters_(std::move(parameters)),
      names_(std::move(names)),
      group_(group),
      communicator_(group.core().communicator()),
      options_(options),
      divisor_(communicator_->size()),
      used_(parameters_.size(), false),
      gradients_of_(parameters_.size(), 0) {
  make_buckets(make_bucket_layout(parameters_, options_of(parameters_),
                                  reverse_order(parameters_.size()), options_.bucket_sizes));
  for (size_t index = 0; index < parameters_.size(); ++index) add_hook(index);
}

Reducer::~Reducer() {
  for (size_t i = 0; i < accumulators_.size(); ++i) accumulators_[i]->del_post_hook(hook_keys_[i]);
}

void Reducer::add_hook(size_t index) {
  using torch::autograd::variable_list;
  auto accumulator = torch::autograd::impl::grad_accumulator(parameters_[index]);
  const auto hook = [this, index](const variable_list& outputs, const variable_list&) {
    on_gradient(index);
    return outputs;
  };
  hook_keys_.push_back(
      accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(hook)));
  index_of_[accumulator.get()] = index;
  accumulators_.push_back(std::move(accumulator));
}

void Reducer::make_buckets(const BucketLayout& layout) {
  memory_ = {};
  for (size_t bucket = 0; bucket < layout.size(); ++bucket) {
    memory_.buckets.push_back(
        make_bucket(*communicator_, layout.numel[bucket], layout.options[bucket]));
  }
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto [bucket, offset] = layout.slots[i];
    memory_.slices.push_back(gradient_slice(memory_.buckets[bucket], offset, parameters_[i]));
  }
  queue_ = std::make_unique<BucketQueue>(
      layout.members, names_,
      BucketQueue::Policy{[this](size_t bucket) { return hook_(grad_bucket(bucket)); },
                          "DistributedDataParallel reduced",
                          ". If the ranks have different numbers of batches, drop the surplus or "
                          "wrap the loop in model.join()",
                          /*awaits_all=*/true});
}

void Reducer::check_complete() const {
  const std::lock_guard lock(mutex_);
  SMP_CHECK_WITH(UsageError, !is_reducing_,
                 "DistributedDataParallel: the backward pass before this forward pass gave no "
                 "gradient to ",
                 list_parameters(names_, queue_->ready()),
                 ", so that their buckets were not reduced. If the loss does not always depend on "
                 "all parameters, use DDPOptions().find_unused_parameters(true); otherwise make "
                 "sure that all outputs of forward take part in the loss");
}

// `set_`, which torch::load calls, makes autograd forget the parameter's accumulator, whose hook
// says that there is a gradient.
void Reducer::keep_hooks() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    torch::autograd::impl::set_grad_accumulator(parameters_[i],
                                                core::WeakNodePtr(accumulators_[i]));
  }
}

void Reducer::rebuild(int root) {
  const std::lock_guard lock(mutex_);
  const at::NoGradGuard no_grad;
  const auto count = static_cast<int64_t>(parameters_.size());
  const at::Tensor order = at::zeros({count}, at::kLong);
  auto* indices = order.mutable_data_ptr<int64_t>();
  std::copy(ready_order_.begin(), ready_order_.end(), indices);
  communicator_->broadcast(order, root);
  const BucketLayout layout =
      make_bucket_layout(parameters_, options_of(parameters_),
                         std::vector<size_t>(indices, indices + count), options_.bucket_sizes);
  rebuild_is_due_ = false;
  was_rebuilt_ = true;
  if (layout.members == queue_->members()) return;
  const BucketMemory before = std::exchange(memory_, {});
  make_buckets(layout);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    at::Tensor& gradient = parameters_[i].mutable_grad();
    if (!gradient.is_same(before.slices[i])) continue;
    memory_.slices[i].copy_(gradient);
    gradient = memory_.slices[i];
  }
}

void Reducer::expect_backward(bool reduces, const std::vector<at::Tensor>& outputs) {
  const std::lock_guard lock(mutex_);
  reduces_ = reduces;
  callback_queued_ = false;  // a pass that failed never called back
  if (!reduces || !tracks_usage()) return;
  watch(outputs);
  if (!options_.static_graph) find_reachable(outputs);
}

/// The gradient of an output says that a pass begins: that is in the outermost pass, where a
/// parameter's may come in a re-entrant one, and also where the pass reaches no parameter.
void Reducer::watch(const std::vector<at::Tensor>& outputs) {
  for (const at::Tensor& output : outputs) {
    if (!output.requires_grad()) continue;
    output.register_hook([this, alive = std::weak_ptr<bool>(alive_)](const at::Tensor&) {
      if (alive.expired()) return;
      const std::lock_guard guard(mutex_);
      join_pass();
    });
  }
}

/// Adds the parameters on which the outputs depend; a pass may go back over several forward passes.
void Reducer::find_reachable(const std::vector<at::Tensor>& outputs) {
  std::vector<const Node*> stack;
  for (const at::Tensor& output : outputs) {
    const Node* node = torch::autograd::impl::gradient_edge(output).function.get();
    if (node != nullptr) stack.push_back(node);
  }
  if (stack.empty()) return;
  reachable_.resize(parameters_.size(), false);
  std::unordered_set<const Node*> seen(stack.begin(), stack.end());
  while (!stack.empty()) {
    const Node* node = stack.back();
    stack.pop_back();
    const auto found = index_of_.find(node);
    if (found != index_of_.end()) reachable_[found->second] = true;
    for (const auto& edge : node->next_edges()) {
      if (edge.function && seen.insert(edge.function.get()).second) {
        stack.push_back(edge.function.get());
      }
    }
  }
}

void Reducer::on_gradient(size_t index) {
  const std::lock_guard lock(mutex_);
  check_gradient(index);
  used_[index] = true;
  join_pass();
  if (!reduces_) return;
  const at::NoGradGuard no_grad;
  if (!is_reducing_) begin_reduction();
  if (!is_last_gradient(index)) return;
  fill(index);
  mark_ready(index);
}

void Reducer::check_gradient(size_t index) const {
  SMP_CHECK_WITH(UsageError, parameters_[index].grad().layout() == at::kStrided,
                 "DistributedDataParallel: parameter \"", names_[index],
                 "\" got a sparse gradient, which cannot be reduced. Build its embedding with "
                 "sparse(false)");
  SMP_CHECK_WITH(UsageError, !reduces_ || !at::GradMode::is_enabled(),
                 "DistributedDataParallel: backward(create_graph = true) reached parameter \"",
                 names_[index],
                 "\", but reduced gradients have no history. Take gradients of gradients with "
                 "torch::autograd::grad, and call backward on the final loss without create_graph");
}

/// The engine calls back when the pass is over, whatever it goes through.
void Reducer::join_pass() {
  if (callback_queued_) return;
  callback_queued_ = true;
  torch::autograd::Engine::get_default_engine().queue_callback([this] { on_end_of_pass(); });
}

void Reducer::begin_reduction() {
  is_reducing_ = true;
  queue_->reset();
  ready_order_.clear();
  gradients_left_ = gradients_of_;
  if (learns_graph()) return;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const bool unused =
        options_.static_graph ? gradients_of_[i] == 0 : !reachable_.empty() && !reachable_[i];
    if (!unused) continue;
    fill_unused(i);
    mark_ready(i);
  }
}

/// Whether this is the gradient that completes the parameter's; notes it where a static graph is
/// learned. Re-entrant backward passes bring several.
bool Reducer::is_last_gradient(size_t index) {
  if (learns_graph()) {
    ++gradients_of_[index];
    learned_order_.push_back(index);
    return false;
  }
  SMP_CHECK_WITH(UsageError, !queue_->ready()[index], "DistributedDataParallel: parameter \"",
                 names_[index],
                 "\" got a gradient twice in one reduction, or although no output of forward "
                 "depends on it. Add up the losses and call backward once; make what the loss "
                 "depends on an output of forward; where a re-entrant backward goes over it "
                 "several times in every iteration, use DDPOptions().static_graph(true)");
  return !options_.static_graph || --gradients_left_[index] <= 0;
}

/// Puts the parameter's gradient into its bucket.
void Reducer::fill(size_t index) {
  at::Tensor& gradient = parameters_[index].mutable_grad();
  at::Tensor& slice = memory_.slices[index];
  if (gradient.is_same(slice)) return;
  claim(slice);
  slice.copy_(gradient);
  if (options_.gradient_as_bucket_view) gradient = slice;
}

/// Lets a parameter without a gradient in this pass add the content of its `.grad`, which stays as
/// it is if no rank used the parameter.
void Reducer::fill_unused(size_t index) {
  at::Tensor& gradient = parameters_[index].mutable_grad();
  at::Tensor& slice = memory_.slices[index];
  if (gradient.is_same(slice)) {
    kept_[index] = slice.clone();
    return;
  }
  claim(slice);
  if (gradient.defined()) {
    slice.copy_(gradient);
  } else {
    slice.zero_();
  }
}

void Reducer::mark_ready(size_t index) {
  ready_order_.push_back(index);
  queue_->mark_ready(index);
  if (queue_->start_ready()) reduce_usage();
}

void Reducer::reduce_usage() {
  if (!tracks_usage()) return;
  used_anywhere_ = used_by_any({used_});
  usage_work_ = communicator_->async().all_reduce(used_anywhere_, ReduceOp::kMax);
}

GradBucket Reducer::grad_bucket(size_t bucket) const {
  GradBucket result{bucket, queue_->size(), memory_.buckets[bucket], {}, {}, {}, group_, divisor_};
  if (!has_hook_) return result;
  for (size_t index : queue_->members()[bucket]) {
    result.parameters.push_back(parameters_[index]);
    result.gradients.push_back(memory_.slices[index]);
    result.names.push_back(names_[index]);
  }
  return result;
}

void Reducer::on_end_of_pass() {
  const std::lock_guard lock(mutex_);
  const at::NoGradGuard no_grad;
  callback_queued_ = false;
  if (!reduces_) {
    ++local_passes_;
    return;
  }
  if (tracks_usage()) {
    if (!is_reducing_) begin_reduction();  // no parameter was used here, but perhaps elsewhere
    add_what_was_learned();
    add_unused();
  }
  if (is_reducing_ && queue_->all_started()) finish();
}

/// In the pass in which a static graph is learned, all gradients are added at its end, in the order
/// in which they were complete.
void Reducer::add_what_was_learned() {
  if (!learns_graph()) return;
  knows_graph_ = true;
  std::vector<size_t> order;
  std::vector<bool> seen(parameters_.size(), false);
  for (auto it = learned_order_.rbegin(); it != learned_order_.rend(); ++it) {
    if (!seen[*it]) order.push_back(*it);
    seen[*it] = true;
  }
  for (auto it = order.rbegin(); it != order.rend(); ++it) {
    fill(*it);
    mark_ready(*it);
  }
}

void Reducer::add_unused() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    // One that a static graph says is used may come in a later pass.
    if (queue_->ready()[i] || gradients_of_[i] > 0) continue;
    fill_unused(i);
    mark_ready(i);
  }
}

void Reducer::finish() {
  wait();
  for (size_t index = 0; index < parameters_.size(); ++index) publish(index);
  end_reduction();
}

void Reducer::wait() {
  queue_->wait();
  if (usage_work_) std::exchange(usage_work_, nullptr)->wait();
}

/// Makes the reduced gradient `.grad`; one that no rank has used stays as it was.
void Reducer::publish(size_t index) {
  at::Tensor& gradient = parameters_[index].mutable_grad();
  const at::Tensor& slice = memory_.slices[index];
  const bool used = !tracks_usage() || used_anywhere_.const_data_ptr<uint8_t>()[index] != 0;
  if (!used) {
    const auto kept = kept_.find(index);
    if (kept != kept_.end()) slice.copy_(kept->second);
  } else if (options_.gradient_as_bucket_view) {
    gradient = slice;
  } else if (gradient.defined()) {
    gradient.copy_(slice);
  } else {
    gradient = slice.clone();
  }
}

void Reducer::end_reduction() {
  is_reducing_ = false;
  local_passes_ = 0;
  kept_.clear();
  reachable_.clear();
  used_.assign(parameters_.size(), false);
  const bool order_stays = !options_.find_unused_parameters || options_.static_graph;
  rebuild_is_due_ = order_stays && !was_rebuilt_;
}

void Reducer::reduce_zeros() {
  const std::lock_guard lock(mutex_);
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    // `.grad` stays in the bucket; tensors that the program has kept of it get memory of their own.
    at::Tensor& gradient = parameters_[i].mutable_grad();
    at::Tensor& slice = memory_.slices[i];
    const bool lies_there = gradient.is_same(slice);
    if (lies_there) gradient.reset();
    claim(slice);
    if (lies_there) gradient = slice;
  }
  for (const at::Tensor& bucket : memory_.buckets) bucket.zero_();
  queue_->reset();
  queue_->start_all();
  reduce_usage();
  wait();
  end_reduction();
}

void Reducer::register_comm_hook(CommHook hook) {
  SMP_CHECK_WITH(UsageError, !has_hook_,
                 "DistributedDataParallel: register_comm_hook was called twice; a model has one "
                 "communication hook");
  const std::lock_guard lock(mutex_);
  hook_ = std::move(hook);
  has_hook_ = true;
}

std::vector<std::vector<std::string>> Reducer::buckets() const {
  std::vector<std::vector<std::string>> result;
  for (const auto& members : queue_->members()) {
    auto& bucket = result.emplace_back();
    for (size_t index : members) bucket.push_back(names_[index]);
  }
  return result;
}

}  // namespace smp::dp
