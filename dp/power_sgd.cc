// SPDX-License-Identifier: Apache-2.0
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/randn.h>

#include <algorithm>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "core/check.h"
#include "smp/comm_hooks.h"

namespace smp {
namespace {

using Tensors = std::vector<at::Tensor>;

/// Makes the columns of `matrix` orthonormal, from the first to the last (Gram-Schmidt). Those that
/// depend on the ones before become zero.
void orthonormalize(const at::Tensor& matrix, double epsilon) {
  for (int64_t i = 0; i < matrix.size(1); ++i) {
    const at::Tensor column = matrix.select(1, i);
    const double norm = column.norm().item<double>() + epsilon;
    if (norm == 0) continue;
    column.div_(norm);
    for (int64_t j = i + 1; j < matrix.size(1); ++j) {
      const at::Tensor other = matrix.select(1, j);
      other.sub_(column * column.dot(other));
    }
  }
}

/// Matrices one after the other in one flat tensor, so that they are reduced at once.
class Matrices {
 public:
  Matrices(const std::vector<std::pair<int64_t, int64_t>>& shapes,
           const at::TensorOptions& options) {
    int64_t numel = 0;
    for (const auto& [rows, columns] : shapes) numel += rows * columns;
    flat_ = at::empty({numel}, options);
    int64_t offset = 0;
    for (const auto& [rows, columns] : shapes) {
      views_.push_back(flat_.narrow(0, offset, rows * columns).view({rows, columns}));
      offset += rows * columns;
    }
  }

  const at::Tensor& flat() const { return flat_; }
  const at::Tensor& operator[](size_t index) const { return views_[index]; }
  size_t size() const { return views_.size(); }

 private:
  at::Tensor flat_;
  Tensors views_;
};

/// The state of a bucket that is kept from one iteration to the next.
struct BucketState {
  std::vector<size_t> low_rank, whole;  // its gradients that are compressed, and that are not
  std::unique_ptr<Matrices> p, q;
  at::Tensor error;
};

class PowerSGD {
 public:
  explicit PowerSGD(const PowerSGDOptions& options)
      : options_(options), generator_(at::detail::createCPUGenerator(options.random_seed())) {
    SMP_CHECK_WITH(UsageError,
                   options.matrix_approximation_rank() >= 1 && options.start_iter() >= 2,
                   "power_sgd_hook: expected a matrix_approximation_rank of 1 or more and a "
                   "start_iter of 2 or more, got ",
                   options.matrix_approximation_rank(), " and ", options.start_iter(),
                   ". Buckets are rebuilt after the first iteration");
  }

  WorkPtr start(const GradBucket& bucket) {
    const bool compresses = iteration_ >= options_.start_iter();
    if (bucket.is_last()) ++iteration_;
    if (!compresses || !bucket.buffer.is_floating_point()) return all_reduce_hook(bucket);
    BucketState& state = state_of(bucket);
    return state.low_rank.empty() ? all_reduce_hook(bucket) : compress(bucket, state);
  }

 private:
  BucketState& state_of(const GradBucket& bucket);
  bool is_worth_it(const at::Tensor& gradient) const;
  void begin_q(Matrices& q, bool is_new);
  WorkPtr compress(const GradBucket& bucket, BucketState& state);
  WorkPtr average_whole(const GradBucket& bucket, const BucketState& state) const;
  void decompress(const GradBucket& bucket, BucketState& state, const Tensors& matrices) const;

  const PowerSGDOptions options_;
  at::Generator generator_;
  int64_t iteration_ = 0;
  std::map<size_t, BucketState> states_;  // state of each bucket
};

/// Half precision is approximated in float32.
at::TensorOptions working_options(const at::Tensor& buffer) {
  return buffer.options().dtype(buffer.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
}

int64_t rows_of(const at::Tensor& gradient) { return gradient.size(0); }
int64_t columns_of(const at::Tensor& gradient) { return gradient.numel() / gradient.size(0); }

bool PowerSGD::is_worth_it(const at::Tensor& gradient) const {
  if (gradient.dim() < 2 || gradient.numel() == 0) return false;
  const int64_t compressed =
      (rows_of(gradient) + columns_of(gradient)) * options_.matrix_approximation_rank();
  return static_cast<double>(compressed) * options_.min_compression_rate() <
         static_cast<double>(gradient.numel());
}

BucketState& PowerSGD::state_of(const GradBucket& bucket) {
  const auto [found, is_new] = states_.try_emplace(bucket.index);
  BucketState& state = found->second;
  if (is_new) {
    std::vector<std::pair<int64_t, int64_t>> p, q;
    for (size_t i = 0; i < bucket.gradients.size(); ++i) {
      const at::Tensor& gradient = bucket.gradients[i];
      if (!is_worth_it(gradient)) {
        state.whole.push_back(i);
        continue;
      }
      state.low_rank.push_back(i);
      const auto rank =
          std::min({options_.matrix_approximation_rank(), rows_of(gradient), columns_of(gradient)});
      p.emplace_back(rows_of(gradient), rank);
      q.emplace_back(columns_of(gradient), rank);
    }
    state.p = std::make_unique<Matrices>(p, working_options(bucket.buffer));
    state.q = std::make_unique<Matrices>(q, working_options(bucket.buffer));
  }
  begin_q(*state.q, is_new);
  return state;
}

void PowerSGD::begin_q(Matrices& q, bool is_new) {
  for (size_t i = 0; i < q.size(); ++i) {
    if (is_new || !options_.warm_start()) {
      q[i].copy_(at::randn(q[i].sizes(), generator_, q[i].options().device(at::kCPU)));
    }
    orthonormalize(q[i], options_.orthogonalization_epsilon());
  }
}

WorkPtr PowerSGD::compress(const GradBucket& bucket, BucketState& state) {
  if (options_.use_error_feedback()) {
    if (state.error.defined()) bucket.buffer.add_(state.error);
    state.error = bucket.buffer.clone();
  }
  Tensors matrices;
  for (size_t i = 0; i < state.low_rank.size(); ++i) {
    const at::Tensor& gradient = bucket.gradients[state.low_rank[i]];
    matrices.push_back(gradient.reshape({rows_of(gradient), -1}).to(state.p->flat().dtype()));
    (*state.p)[i].copy_(at::matmul(matrices[i], (*state.q)[i]));
  }
  const auto whole = average_whole(bucket, state);
  return then(bucket.group.async().all_reduce(state.p->flat(), ReduceOp::kSum),
              [this, bucket, &state, matrices = std::move(matrices), whole] {
                decompress(bucket, state, matrices);
                if (whole) whole->wait();
              });
}

/// Averages the gradients that are not compressed; null if there are none.
WorkPtr PowerSGD::average_whole(const GradBucket& bucket, const BucketState& state) const {
  if (state.whole.empty()) return nullptr;
  Tensors gradients, parts;
  for (size_t i : state.whole) {
    gradients.push_back(bucket.gradients[i]);
    parts.push_back(bucket.gradients[i].reshape({-1}));
  }
  const at::Tensor flat = at::cat(parts);
  return then(bucket.group.async().all_reduce(flat, ReduceOp::kSum),
              [flat, gradients = std::move(gradients), divisor = bucket.divisor] {
                const auto means = at::unflatten_dense_tensors(flat.div_(divisor), gradients);
                for (size_t i = 0; i < means.size(); ++i) gradients[i].copy_(means[i]);
              });
}

/// The second half, when P has been summed. Those that are not compressed are still this rank's
/// own then, so that they leave no error.
void PowerSGD::decompress(const GradBucket& bucket, BucketState& state,
                          const Tensors& matrices) const {
  Matrices &p = *state.p, &q = *state.q;
  for (size_t i = 0; i < p.size(); ++i) {
    orthonormalize(p[i], options_.orthogonalization_epsilon());
    q[i].copy_(at::matmul(matrices[i].t(), p[i]));
  }
  bucket.group.async().all_reduce(q.flat())->wait();
  q.flat().div_(bucket.divisor);
  for (size_t i = 0; i < p.size(); ++i) {
    const at::Tensor& gradient = bucket.gradients[state.low_rank[i]];
    gradient.copy_(at::matmul(p[i], q[i].t()).view(gradient.sizes()));
  }
  if (options_.use_error_feedback()) state.error.sub_(bucket.buffer);
}

}  // namespace

CommHook power_sgd_hook(const PowerSGDOptions& options) {
  const auto state = std::make_shared<PowerSGD>(options);
  return [state](const GradBucket& bucket) { return state->start(bucket); };
}

}  // namespace smp
