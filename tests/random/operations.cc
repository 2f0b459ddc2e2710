// SPDX-License-Identifier: Apache-2.0
// The vocabulary of random programs.

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <numeric>

#include "core/check.h"
#include "tests/random/program.h"

namespace smp::random_programs {
namespace {

using A = const Tensors&;
using N = const Numbers&;
using R = Random&;

Numbers none(R, A) { return {}; }

/// An axis of the first argument.
Numbers axis(R random, A a) { return {random.below(a[0].dim())}; }

Numbers axis_and_flag(R random, A a) { return {random.below(a[0].dim()), random.below(2)}; }

Numbers two_axes(R random, A a) { return {random.below(a[0].dim()), random.below(a[0].dim())}; }

/// A factor in quarters, from -1.5 to 1.5 and not 0.
Numbers factor(R random, A) {
  const int64_t quarters = 1 + random.below(6);
  return {random.chance(30) ? -quarters : quarters};
}

/// In quarters, from 0 to 1: seldom an end.
Numbers probability(R random, A) {
  return {random.chance(15) ? 4 * random.below(2) : 1 + random.below(3)};
}

double quarters(int64_t number) { return static_cast<double>(number) / 4; }

/// Axis, start and length of a part of the first argument.
Numbers range(R random, A a) {
  const int64_t dim = random.below(a[0].dim());
  const int64_t size = a[0].dim() == 0 ? 0 : a[0].size(dim);
  const int64_t start = random.below(size);
  return {dim, start, random.chance(5) ? 0 : 1 + random.below(size - start)};
}

Numbers axis_and_index(R random, A a) {
  const int64_t dim = random.below(a[0].dim());
  return {dim, random.below(a[0].dim() == 0 ? 0 : a[0].size(dim))};
}

/// Sizes with the same number of elements.
Numbers other_sizes(R random, A a) {
  Numbers sizes;
  int64_t left = a[0].numel();
  while (left > 1 && sizes.size() < 3) {
    int64_t size = 1 + random.below(left);
    while (left % size != 0) --size;
    sizes.push_back(size);
    left /= size;
  }
  if (left != 1 || sizes.empty()) sizes.push_back(left);
  return sizes;
}

Numbers permutation(R random, A a) {
  Numbers order(a[0].dim());
  std::iota(order.begin(), order.end(), 0);
  for (size_t i = order.size(); i-- > 1;) {
    std::swap(order[i], order[random.below(static_cast<int64_t>(i) + 1)]);
  }
  return order;
}

Numbers small_sizes(R random, A) {
  static const int64_t kSizes[] = {1, 2, 3, 4, 6, 6};
  Numbers sizes(random.below(3));
  for (int64_t& size : sizes) size = random.chance(3) ? 0 : kSizes[random.below(6)];
  return sizes;
}

/// Three indices that are in range for an axis of 3 or more.
Numbers indices(R random, A a) {
  return {random.below(a[0].dim()), random.below(3), random.below(3), random.below(3)};
}

/// Size, size, stride, stride, within the part of its storage that the first argument shows.
Numbers strides(R random, A a) {
  const int64_t elements = a[0].numel();
  const int64_t rows = 1 + random.below(3), columns = 1 + random.below(3);
  const int64_t step = columns + random.below(2);
  const int64_t last = (rows - 1) * step + columns - 1;
  if (last < elements) return {rows, columns, step, 1};
  return {std::min<int64_t>(elements, 1), 1, 1, 1};
}

at::Tensor dense(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() ? tensor : tensor.contiguous();
}

/// Whether dropout drops: a second number says so, where there is one.
bool drops(N n) { return n.size() < 2 || n[1] != 0; }

at::Tensor part(A a, N n) { return a[0].narrow(n[0], n[1], n[2]); }

/// Indices for an axis of `size`.
at::Tensor within(const at::Tensor& index, int64_t size) {
  return index.flatten().remainder(std::max<int64_t>(size, 1));
}

at::Tensor literal(N n, size_t first) {
  return at::tensor(Numbers(n.begin() + static_cast<std::ptrdiff_t>(first), n.end()));
}

at::Tensor real_part(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::real(tensor) : tensor;
}

/// Six numbers of the host, in quarters: sometimes all 0.
Numbers host_numbers(R random, A) {
  Numbers numbers(6);
  const bool zeros = random.chance(20);
  for (int64_t& number : numbers) number = zeros ? 0 : random.below(5);
  return numbers;
}

/// The tensor of a factory, filled through a pointer unless there is nothing to fill it with.
Tensors run_filled(A, N n) {
  at::Tensor tensor = at::zeros({static_cast<int64_t>(n.size())});
  if (std::all_of(n.begin(), n.end(), [](int64_t number) { return number == 0; })) return {tensor};
  std::transform(n.begin(), n.end(), tensor.mutable_data_ptr<float>(),
                 [](int64_t number) { return static_cast<float>(quarters(number)); });
  return {tensor};
}

Tensors run_max(A a, N n) {
  auto [values, indices] = a[0].max(n[0]);
  return {values, indices};
}

Tensors run_sort(A a, N n) {
  auto [values, indices] = a[0].sort(n[0]);
  return {values, indices};
}

Tensors run_topk(A a, N n) {
  auto [values, indices] = a[0].topk(1, n[0]);
  return {values, indices};
}

Tensors run_var_mean(A a, N n) {
  auto [variance, mean] = at::var_mean(a[0], {n[0]}, /*unbiased=*/false);
  return {variance, mean};
}

Tensors run_index_add(A a, N) {
  const auto index = within(a[1].flatten().slice(0, 0, 2), a[0].size(0));
  return {a[0].index_add_(0, index, a[0].detach().index_select(0, index).clone())};
}

Tensors run_foreach_add(A a, N) {
  at::_foreach_add_(Tensors{a[0], a[1]}, 0.25);
  return {};
}

Tensors run_foreach_mul_(A a, N) {
  at::_foreach_mul_(Tensors{a[0], a[1]}, Tensors{a[2].expand_as(a[0]), a[2].sum()});
  return {};
}

Tensors run_foreach_scale_(A a, N) {
  at::_foreach_mul_(Tensors{a[0], a[1]}, a[2].mean());
  return {};
}

Tensors run_foreach_copy_(A a, N) {
  at::_foreach_copy_(Tensors{a[0]}, Tensors{a[1].expand_as(a[0])});
  return {};
}

Tensors run_dropout(A a, N) {
  at::Tensor tensor = a[0];
  return {at::dropout_(tensor, 0.4, true)};
}

Tensors run_add_out(A a, N) {
  at::Tensor out = a[0];
  return {at::add_out(out, a[1].expand_as(out), a[1])};
}

Tensors run_tanh_out(A a, N) {
  at::Tensor out = a[0];
  return {at::tanh_out(out, a[1])};
}

Tensors run_mul_out_part(A a, N n) {
  at::Tensor out = part(a, n);
  const at::Tensor source = a[1].expand_as(a[0]).narrow(n[0], n[1], n[2]);
  return {at::mul_out(out, source, source)};
}

Tensors run_matmul_out(A a, N) {
  at::Tensor out = at::empty({a[0].size(0), a[1].size(1)}, a[0].options());
  return {at::matmul_out(out, a[0], a[1])};
}

/// The result of an operation, as an expression in its tensors `a` and numbers `n`.
#define SMP_RUN(...)                         \
  [](A a, [[maybe_unused]] N n) -> Tensors { \
    (void)a;                                 \
    return __VA_ARGS__;                      \
  }

const std::vector<Operation> kElementwise = {
    {"tanh", 4, "f", none, SMP_RUN({a[0].tanh()})},
    {"sigmoid", 3, "f", none, SMP_RUN({a[0].sigmoid()})},
    {"relu", 3, "f", none, SMP_RUN({a[0].relu()})},
    {"gelu", 2, "f", none, SMP_RUN({at::gelu(a[0])})},
    {"sin", 2, "f", none, SMP_RUN({a[0].sin()})},
    {"leaky_relu", 1, "f", none, SMP_RUN({at::leaky_relu(a[0], 0.1)})},
    {"square", 1, "f", none, SMP_RUN({at::square(a[0])})},
    {"clamp", 1, "f", none, SMP_RUN({a[0].clamp(-0.5, 0.75)})},
    {"mul_scalar", 3, "f", factor, SMP_RUN({a[0] * quarters(n[0])})},
    {"add_scalar", 2, "f", factor, SMP_RUN({a[0] + quarters(n[0])})},
    {"rsub", 1, "f", factor, SMP_RUN({1 - a[0]})},
    {"softmax", 2, "d", axis, SMP_RUN({a[0].softmax(n[0])})},
    {"log_softmax", 2, "d", axis, SMP_RUN({a[0].log_softmax(n[0])})},
    {"cumsum", 1, "d", axis, SMP_RUN({a[0].cumsum(n[0])})},
    {"flip", 1, "d", axis, SMP_RUN({a[0].flip({n[0]})})},
    {"roll", 1, "d", axis_and_index, SMP_RUN({a[0].roll({n[1]}, {n[0]})})},
    {"tril", 1, "m", none, SMP_RUN({a[0].tril()})},
    {"layer_norm", 2, "dv", none, SMP_RUN({at::layer_norm(a[0], {a[0].size(-1)}, a[1], {})})},
    {"add", 5, "fb", factor, SMP_RUN({a[0].add(a[1], quarters(n[0]))})},
    {"sub", 2, "fb", none, SMP_RUN({a[0] - a[1]})},
    {"mul", 5, "fb", none, SMP_RUN({a[0] * a[1]})},
    {"maximum", 1, "fb", none, SMP_RUN({at::maximum(a[0], a[1])})},
    {"lerp", 1, "fs", none, SMP_RUN({at::lerp(a[0], a[1], 0.25)})},
    {"where", 2, "feq", none, SMP_RUN({at::where(a[2], a[0], a[1])})},
    {"masked_fill", 1, "fq", none, SMP_RUN({a[0].masked_fill(a[1], 0.5)})},
    {"addcmul", 1, "fee", none, SMP_RUN({at::addcmul(a[0], a[1], a[2], 0.5)})},
    {"greater", 2, "fe", none, SMP_RUN({a[0] > a[1]})},
    {"positive", 1, "f", none, SMP_RUN({a[0] > 0})},
    {"mse_loss", 1, "fs", none, SMP_RUN({at::mse_loss(a[0], a[1])})},
    {"complex", 1, "fs", none, SMP_RUN({at::complex(a[0], a[1])})},
    {"complex_mul", 3, "cc", none, SMP_RUN({a[0] * a[1]})},
    {"complex_sin", 1, "c", none, SMP_RUN({a[0].sin()})},
    {"int_add", 1, "ii", none, SMP_RUN({a[0] + a[1]})},
    {"logical_not", 1, "Q", none, SMP_RUN({a[0].logical_not()})},
};

const std::vector<Operation> kProducts = {
    {"matmul", 5, "mk", none, SMP_RUN({a[0].matmul(a[1])})},
    {"matmul_transposed", 3, "ml", none, SMP_RUN({a[0].matmul(a[1].t())})},
    {"linear", 5, "dlB", axis_and_flag,
     SMP_RUN({at::linear(a[0], a[1], n[1] == 0 ? std::optional<at::Tensor>() : a[2])})},
    {"addmm", 2, "mko", none, SMP_RUN({at::addmm(a[2], a[0], a[1])})},
    {"outer", 1, "vv", none, SMP_RUN({at::outer(a[0].flatten(), a[1].flatten())})},
    {"einsum", 1, "ml", none, SMP_RUN({at::einsum("ij,kj->ik", {a[0], a[1]})})},
    {"bmm", 1, "33", none, SMP_RUN({a[0].bmm(a[1].transpose(1, 2))})},
    {"conv1d", 2, "33", none, SMP_RUN({at::conv1d(a[0], a[1], {}, 1, 1)})},
    {"attention", 2, "3s", none, SMP_RUN({at::scaled_dot_product_attention(a[0], a[1], a[0])})},
    {"batch_norm", 4, "mYZ", none,
     SMP_RUN({at::batch_norm(a[0], {}, {}, a[1], a[2], true, 0.1, 1e-5, false)})},
    {"batch_norm_eval", 1, "mYZ", none,
     SMP_RUN({at::batch_norm(a[0], {}, {}, a[1], a[2], false, 0.1, 1e-5, false)})},
};

const std::vector<Operation> kReductions = {
    {"sum", 2, "f", none, SMP_RUN({a[0].sum()})},
    {"sum_axis", 4, "d", axis_and_flag, SMP_RUN({a[0].sum(n[0], /*keepdim=*/n[1] != 0)})},
    {"mean", 2, "d", axis_and_flag, SMP_RUN({a[0].mean(n[0], n[1] != 0)})},
    {"amax", 1, "d", axis, SMP_RUN({a[0].amax(n[0])})},
    {"max", 2, "d", axis, run_max},
    {"sort", 1, "d", axis, run_sort},
    {"topk", 1, "d", axis, run_topk},
    {"logsumexp", 1, "d", axis, SMP_RUN({a[0].logsumexp(n[0])})},
    {"norm", 1, "d", none, SMP_RUN({a[0].norm()})},
    {"var_mean", 1, "d", axis, run_var_mean},
    {"argmax", 1, "d", axis, SMP_RUN({a[0].argmax(n[0])})},
};

const std::vector<Operation> kViews = {
    {"view", 3, "a", other_sizes, SMP_RUN({a[0].view(n)})},
    {"reshape", 2, "a", other_sizes, SMP_RUN({a[0].reshape(n)})},
    {"flatten", 1, "a", none, SMP_RUN({a[0].flatten()})},
    {"transpose", 3, "d", two_axes, SMP_RUN({a[0].transpose(n[0], n[1])})},
    {"permute", 2, "a", permutation, SMP_RUN({a[0].permute(n)})},
    {"narrow", 5, "d", range, SMP_RUN({part(a, n)})},
    {"select", 4, "d", axis_and_index, SMP_RUN({a[0].select(n[0], n[1])})},
    {"slice", 2, "d", axis, SMP_RUN({a[0].slice(n[0], 0, std::nullopt, 2)})},
    {"unsqueeze", 2, "a", axis, SMP_RUN({a[0].unsqueeze(n[0])})},
    {"squeeze", 1, "a", none, SMP_RUN({a[0].squeeze()})},
    {"expand", 2, "ae", none, SMP_RUN({a[1].expand_as(a[0])})},
    {"as_strided", 2, "f", strides, SMP_RUN({dense(a[0]).as_strided({n[0], n[1]}, {n[2], n[3]})})},
    {"diagonal", 2, "m", none, SMP_RUN({a[0].diagonal()})},
    {"unbind", 2, "d", axis, SMP_RUN(a[0].unbind(n[0]))},
    {"split", 2, "d", axis, SMP_RUN(a[0].split(2, n[0]))},
    {"chunk", 3, "d", axis, SMP_RUN(a[0].chunk(2, n[0]))},
    {"unfold", 1, "d", axis, SMP_RUN({a[0].unfold(n[0], 2, 1)})},
    {"alias", 1, "a", none, SMP_RUN({at::alias(a[0])})},
    {"detach", 2, "f", none, SMP_RUN({a[0].detach()})},
    {"view_as_real", 1, "c", none, SMP_RUN({at::view_as_real(a[0])})},
    {"real", 2, "c", none, SMP_RUN({at::real(a[0])})},
    {"imag", 1, "c", none, SMP_RUN({at::imag(a[0])})},
};

const std::vector<Operation> kCopies = {
    {"clone", 2, "a", none, SMP_RUN({a[0].clone()})},
    {"contiguous", 1, "a", none, SMP_RUN({a[0].contiguous()})},
    {"to_float", 1, "a", none, SMP_RUN({real_part(a[0]).to(at::kFloat)})},
    {"to_double", 1, "f", none, SMP_RUN({a[0].to(at::kDouble)})},
    {"to_half", 1, "f", none, SMP_RUN({a[0].to(at::kHalf)})},
    {"to_bfloat16", 1, "f", none, SMP_RUN({a[0].to(at::kBFloat16)})},
    {"to_int", 1, "f", none, SMP_RUN({(a[0] * 3).to(at::kLong)})},
    {"cat", 3, "ds", axis, SMP_RUN({at::cat({a[0], a[1], a[0]}, n[0])})},
    {"stack", 2, "fs", axis, SMP_RUN({at::stack({a[0], a[1]}, n[0])})},
    {"index_select", 2, "di", axis,
     SMP_RUN({a[0].index_select(n[0], within(a[1], a[0].size(n[0])))})},
    {"index", 2, "di", none, SMP_RUN({a[0].index({within(a[1], a[0].size(0))})})},
    {"index_second", 1, "mi", none,
     SMP_RUN({at::index(a[0], {std::optional<at::Tensor>(), within(a[1], a[0].size(1))})})},
    {"embedding", 2, "mi", none, SMP_RUN({at::embedding(a[0], a[1].remainder(a[0].size(0)))})},
    {"take_literal", 2, "d", indices,
     SMP_RUN({a[0].index_select(n[0], literal(n, 1).remainder(a[0].size(n[0])))})},
};

const std::vector<Operation> kFactories = {
    {"zeros", 2, "", small_sizes, SMP_RUN({at::zeros(n)})},
    {"ones", 1, "", small_sizes, SMP_RUN({at::ones(n)})},
    {"full", 1, "", small_sizes, SMP_RUN({at::full(n, 0.75)})},
    {"empty_fill", 1, "", small_sizes, SMP_RUN({at::empty(n).fill_(0.5)})},
    {"arange", 1, "", none, SMP_RUN({at::arange(6)})},
    {"literal", 2, "d", indices,
     SMP_RUN({at::tensor({quarters(n[0]), quarters(n[1]), quarters(n[2])}, at::kFloat)})},
    {"filled", 3, "", host_numbers, run_filled},
    {"zeros_like", 2, "f", none, SMP_RUN({at::zeros_like(a[0])})},
    {"empty_like_copy", 2, "f", none, SMP_RUN({at::empty_like(a[0]).copy_(a[0])})},
    {"new_zeros", 1, "f", none, SMP_RUN({a[0].new_zeros({6})})},
    {"dropout", 4, "f", probability, SMP_RUN({at::dropout(a[0], quarters(n[0]), drops(n))})},
    {"alpha_dropout", 1, "f", probability,
     SMP_RUN({at::alpha_dropout(a[0], quarters(n[0]), drops(n))})},
    {"rand_like", 2, "f", none, SMP_RUN({at::rand_like(a[0])})},
    {"randn", 2, "", small_sizes, SMP_RUN({at::randn(n)})},
    {"bernoulli", 1, "f", none, SMP_RUN({at::bernoulli(a[0].detach().sigmoid())})},
    {"randint", 1, "", none, SMP_RUN({at::randint(4, {3}, at::kLong)})},
};

const std::vector<Operation> kInPlace = {
    {"add_", 5, "we", factor, SMP_RUN({a[0].add_(a[1], quarters(n[0]))})},
    {"sub_", 1, "we", none, SMP_RUN({a[0].sub_(a[1])})},
    {"mul_", 3, "we", none, SMP_RUN({a[0].mul_(a[1])})},
    {"multiply_", 1, "we", none, SMP_RUN({a[0].multiply_(a[1])})},
    {"mul_scalar_", 4, "w", factor, SMP_RUN({a[0].mul_(quarters(n[0]))})},
    {"relu_", 3, "w", none, SMP_RUN({a[0].relu_()})},
    {"tanh_", 2, "w", none, SMP_RUN({a[0].tanh_()})},
    {"zero_", 2, "w", none, SMP_RUN({a[0].zero_()})},
    {"fill_", 1, "w", factor, SMP_RUN({a[0].fill_(quarters(n[0]))})},
    {"copy_", 4, "we", none, SMP_RUN({a[0].copy_(a[1])})},
    {"clamp_", 1, "w", none, SMP_RUN({a[0].clamp_(-0.5, 0.5)})},
    {"dropout_", 2, "w", none, run_dropout},
    {"uniform_", 1, "w", none, SMP_RUN({a[0].uniform_()})},
    {"normal_", 1, "w", none, SMP_RUN({a[0].normal_()})},
    {"masked_fill_", 2, "wq", none, SMP_RUN({a[0].masked_fill_(a[1], 0.25)})},
    {"addcmul_", 1, "wee", none, SMP_RUN({a[0].addcmul_(a[1], a[2], 0.5)})},
    {"lerp_", 1, "ws", none, SMP_RUN({a[0].lerp_(a[1], 0.25)})},
    {"copy_into_part", 6, "We", range,
     SMP_RUN({part(a, n).copy_(a[1].expand_as(a[0]).narrow(n[0], n[1], n[2]))})},
    {"add_to_part", 4, "We", range,
     SMP_RUN({part(a, n).add_(a[1].expand_as(a[0]).narrow(n[0], n[1], n[2]))})},
    {"zero_row", 3, "W", axis_and_index, SMP_RUN({a[0].select(n[0], n[1]).zero_()})},
    {"scale_diagonal", 1, "W", none, SMP_RUN({a[0].diagonal().mul_(0.5)})},
    {"tanh_of_transposed_part", 2, "W", range, SMP_RUN({part(a, n).transpose(0, -1).tanh_()})},
    {"index_put_", 3, "Wi", none,
     SMP_RUN({a[0].index_put_({within(a[1].slice(0, 0, 1), a[0].size(0))}, at::tensor(0.5f))})},
    {"index_add_", 2, "Wi", none, run_index_add},
    {"index_fill_", 1, "Wi", axis,
     SMP_RUN({a[0].index_fill_(n[0], within(a[1], a[0].size(n[0])), 0.125)})},
    {"scatter_", 1, "W", axis,
     SMP_RUN({a[0].scatter_(n[0], at::zeros_like(a[0], at::kLong), 0.375)})},
    {"int_add_", 1, "j", none, SMP_RUN({a[0].add_(1)})},
    {"transpose_", 1, "u", two_axes, SMP_RUN({a[0].transpose_(n[0], n[1])})},
    {"swapaxes_", 1, "u", two_axes, SMP_RUN({a[0].swapaxes_(n[0], n[1])})},
    {"unsqueeze_", 1, "u", none, SMP_RUN({a[0].unsqueeze_(0)})},
    {"detach_", 2, "w", none, SMP_RUN({a[0].detach_()})},
    {"foreach_add_", 2, "ww", none, run_foreach_add},
    {"foreach_mul_", 2, "wwe", none, run_foreach_mul_},
    {"foreach_scale_", 1, "wwf", none, run_foreach_scale_},
    {"foreach_copy_", 1, "we", none, run_foreach_copy_},
    {"foreach_mul", 1, "ff", none, SMP_RUN(at::_foreach_mul({a[0], a[1]}, 0.5))},
    {"add_out", 2, "Oe", none, run_add_out},
    {"tanh_out", 2, "Os", none, run_tanh_out},
    {"mul_out_part", 2, "Oe", range, run_mul_out_part},
    {"matmul_out", 1, "xk", none, run_matmul_out},
    {"running_mean_", 3, "Yt", none, SMP_RUN({a[0].mul_(0.75).add_(a[1].detach(), 0.25)})},
    {"count_", 2, "J", none, SMP_RUN({a[0].add_(1)})},
};

/// The slope of a function of the first with respect to the second; zeros where it has none.
Tensors run_slope(A a, N n) {
  const at::Tensor none = at::zeros_like(a[1]).detach();
  if (!a[0].requires_grad() || !a[1].requires_grad() || !at::GradMode::is_enabled()) return {none};
  const at::Tensor slope = torch::autograd::grad({a[0].pow(2).sum()}, {a[1]}, {},
                                                 /*retain_graph=*/true, /*create_graph=*/n[0] == 1,
                                                 /*allow_unused=*/true)[0];
  return {slope.defined() ? slope : none};
}

Numbers flag(R random, A) { return {random.below(2)}; }

const std::vector<Operation> kGradients = {
    {"slope", 5, "ff", flag, run_slope},
    {"variable", 2, "f", none, SMP_RUN({a[0].detach().requires_grad_()})},
};

/// Not chosen at random: they build the loss of a program.
const std::vector<Operation> kLosses = {
    {"loss_term", 0, "a", none, SMP_RUN({real_part(a[0]).to(at::kFloat).sum()})},
    {"loss_add", 0, "ff", none, SMP_RUN({a[0] + a[1]})},
    {"loss_gradient", 0, "f", none, SMP_RUN({at::ones_like(a[0].detach()) * 0.5})},
};

#undef SMP_RUN

}  // namespace

const std::vector<Operation>& operations() {
  static const std::vector<Operation> kAll = [] {
    std::vector<Operation> all;
    for (const auto* part : {&kElementwise, &kProducts, &kReductions, &kViews, &kCopies,
                             &kFactories, &kInPlace, &kGradients, &kLosses}) {
      all.insert(all.end(), part->begin(), part->end());
    }
    return all;
  }();
  return kAll;
}

const Operation& operation(const std::string& name) {
  const auto found = std::find_if(operations().begin(), operations().end(),
                                  [&](const Operation& known) { return known.name == name; });
  SMP_INTERNAL_ASSERT(found != operations().end(), "no operation ", name);
  return *found;
}

}  // namespace smp::random_programs
