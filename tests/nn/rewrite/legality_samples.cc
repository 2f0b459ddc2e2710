// SPDX-License-Identifier: Apache-2.0
#include "tests/nn/rewrite/legality_samples.h"

namespace smp::nn::rewrite::testing {
namespace {

using torch::Tensor;

torch::TensorOptions float64() { return torch::kDouble; }

Tensor with_gradient(std::vector<int64_t> sizes) {
  return integers(std::move(sizes)).requires_grad_();
}

using Localize = std::function<void(Stack&, const LayoutList&, const LayoutList&)>;

/// A list of the result's sizes at `position`: `sizes` of the whole.
Localize sizes_at(size_t position, std::vector<int64_t> sizes, int ranks) {
  return [=](Stack& stack, const LayoutList&, const LayoutList& results) {
    const Sizes local = local_sizes(sizes, results[0], ranks);
    stack[position] = std::vector<int64_t>(local.begin(), local.end());
  };
}

/// Numbers along `dim`, at these positions, where that is divided and ranks can have their part.
Localize numbers_at(std::vector<size_t> positions, int dim, int ranks) {
  return [=](Stack& stack, const LayoutList& arguments, const LayoutList&) {
    if (!arguments[0].is_divided() || arguments[0].dim != dim) return;
    for (size_t position : positions) {
      const auto local = [&](int64_t number) {
        TORCH_CHECK(number % ranks == 0, "a part of ", number);
        return number / ranks;
      };
      if (stack[position].isInt()) {
        stack[position] = local(stack[position].toInt());
      } else {
        std::vector<int64_t> numbers = stack[position].toIntVector();
        for (int64_t& number : numbers) number = local(number);
        stack[position] = numbers;
      }
    }
  };
}

const c10::IValue kNone;
constexpr bool kInexact = false;

}  // namespace

Tensor integers(std::vector<int64_t> sizes) {
  const auto numbers = torch::randint(1, 10, sizes, float64());
  return numbers * (torch::randint(0, 2, sizes, float64()) * 2 - 1);
}

std::vector<Sample> elementwise_samples(int64_t n) {
  const auto x = [=] { return with_gradient({n, 2 * n}); };
  const Tensor row = with_gradient({2 * n}), one = with_gradient({n, 1});
  const Tensor mask = torch::randint(0, 2, {n, 2 * n}).to(torch::kBool);
  return {
      {"aten::add", "Tensor", {x(), x(), 2}, nullptr},
      {"aten::add", "Tensor", {x(), row, 1}, nullptr},
      {"aten::add", "Tensor", {one, row, 1}, nullptr},
      {"aten::add", "Tensor", {x(), integers({2 * n}), 1}, nullptr},
      {"aten::add", "Scalar", {x(), 3, 1}, nullptr},
      {"aten::sub", "Tensor", {x(), one, 1}, nullptr},
      {"aten::rsub", "Tensor", {x(), row, 1}, nullptr},
      {"aten::mul", "Tensor", {x(), x()}, nullptr},
      {"aten::mul", "Tensor", {x(), row}, nullptr},
      {"aten::mul", "Scalar", {x(), 3}, nullptr},
      {"aten::div", "Tensor", {x(), row}, nullptr},
      {"aten::div", "Scalar", {x(), 2}, nullptr},
      {"aten::neg", "", {x()}, nullptr},
      {"aten::relu", "", {x()}, nullptr},
      {"aten::gelu", "", {x(), "none"}, nullptr},
      {"aten::clone", "", {x(), kNone}, nullptr},
      {"aten::gt", "Tensor", {x(), row}, nullptr},
      {"aten::where", "self", {mask, x(), row}, nullptr},
      {"aten::where", "self", {x() > 0, integers({n, 1}), integers({2 * n})}, nullptr},
      {"aten::addcmul", "", {row, x(), one, 1}, nullptr},
      {"aten::addcdiv", "", {row, one, x(), 1}, nullptr},
      {"aten::masked_fill", "Scalar", {x(), mask, 7}, nullptr},
      {"aten::lerp", "Tensor", {one, x(), integers({n, 1})}, nullptr},
      {"aten::to", "dtype", {x(), torch::kFloat, false, false, kNone}, nullptr},
      {"aten::to", "dtype", {x(), torch::kLong, false, false, kNone}, nullptr},
      {"aten::dropout", "", {x(), 0.5, false}, nullptr},
  };
}

std::vector<Sample> reduction_samples(int64_t n) {
  const Tensor x = with_gradient({n, 3, 2 * n});
  const auto dims = [](std::vector<int64_t> list) { return c10::IValue(std::move(list)); };
  const auto ranks = static_cast<int>(n);
  return {
      {"aten::sum", "", {x, kNone}, nullptr},
      {"aten::sum", "dim_IntList", {x, dims({-1}), false, kNone}, nullptr},
      {"aten::sum", "dim_IntList", {x, dims({0, 1}), true, kNone}, nullptr},
      {"aten::sum", "dim_IntList", {x, dims({1}), false, kNone}, nullptr},
      {"aten::mean", "dim", {x, dims({1}), false, kNone}, nullptr, true, ranks},
      {"aten::mean", "dim", {x, dims({-1}), true, kNone}, nullptr, true, ranks},
      {"aten::softmax", "int", {x, -1, kNone}, nullptr},
      {"aten::log_softmax", "int", {x, 0, kNone}, nullptr},
      {"aten::cumsum", "", {x, 1, kNone}, nullptr},
      {"aten::amax", "", {x, dims({1}), false}, nullptr},
      {"aten::argmax", "", {x, 1, false}, nullptr},
      {"aten::argmax", "", {x, kNone, false}, nullptr, kInexact},
      {"aten::max", "dim", {x, 1, true}, nullptr},
      {"aten::sort", "", {integers({n, 2 * n}), -1, false}, nullptr},
      {"aten::layer_norm",
       "",
       {x, dims({2 * n}), with_gradient({2 * n}), with_gradient({2 * n}), 1e-5, false},
       nullptr},
      {"aten::tril", "", {with_gradient({2 * n, n, 2 * n}), 0}, nullptr},
      {"aten::glu", "", {with_gradient({n, 4 * n}), -1}, nullptr},
      {"aten::group_norm",
       "",
       {with_gradient({n, 4 * n, 3}), 2 * n, with_gradient({4 * n}), with_gradient({4 * n}), 1e-5,
        false},
       [ranks](Stack& stack, const LayoutList& arguments, const LayoutList&) {
         if (arguments[0].is_divided() && arguments[0].dim == 1) {
           stack[1] = stack[1].toInt() / ranks;
         }
       }},
  };
}

std::vector<Sample> shape_samples(int64_t n) {
  const auto ranks = static_cast<int>(n);
  const Tensor x = with_gradient({n, 3, 4 * n});
  const auto list = [](std::vector<int64_t> numbers) { return c10::IValue(std::move(numbers)); };
  const auto view = [&](const char* name, std::vector<int64_t> sizes) {
    return Sample{name, "", {x, sizes}, sizes_at(1, sizes, ranks)};
  };
  const c10::List<Tensor> two({with_gradient({n, 2 * n}), with_gradient({n, 2 * n})});
  const c10::List<Tensor> unequal({with_gradient({n, 2 * n}), with_gradient({n, n})});
  return {
      view("aten::view", {n, 3, n, 4}),
      view("aten::view", {n, 3, 2, 2 * n}),
      view("aten::reshape", {3 * n, 4 * n}),
      view("aten::reshape", {n * 12 * n}),
      view("aten::reshape", {n, 12 * n}),
      view("aten::_unsafe_view", {n, 3, 4, n}),
      {"aten::flatten", "using_ints", {x, 0, 1}, nullptr},
      {"aten::flatten", "using_ints", {x, 1, 2}, nullptr},
      {"aten::unflatten",
       "int",
       {x, 2, list({n, 4})},
       [n, ranks](Stack& stack, const LayoutList&, const LayoutList& results) {
         const Sizes local = local_sizes({n, 3, n, 4}, results[0], ranks);
         stack[2] = std::vector<int64_t>(local.begin() + 2, local.end());
       }},
      {"aten::permute", "", {x, list({2, 0, 1})}, nullptr},
      {"aten::transpose", "int", {x, 0, -1}, nullptr},
      {"aten::t", "", {with_gradient({n, 2 * n})}, nullptr},
      {"aten::mT", "", {x}, nullptr},
      {"aten::movedim", "int", {x, 2, 0}, nullptr},
      {"aten::movedim", "intlist", {x, list({0, -1}), list({1, 0})}, nullptr},
      {"aten::unsqueeze", "", {x, -2}, nullptr},
      {"aten::squeeze", "dim", {with_gradient({n, 1, 2 * n}), 1}, nullptr},
      {"aten::squeeze", "", {with_gradient({n, 1, 2 * n})}, nullptr},
      {"aten::squeeze", "dim", {with_gradient({n, 3}), 0}, nullptr},
      {"aten::squeeze", "dims", {with_gradient({n, 1, 2 * n}), list({})}, nullptr},
      {"aten::select", "int", {x, 1, 2}, nullptr},
      {"aten::unbind", "int", {with_gradient({2, 2 * n}), 0}, nullptr},
      {"aten::slice", "Tensor", {x, 2, 2 * n, 4 * n, 1}, numbers_at({2, 3}, 2, ranks)},
      {"aten::slice", "Tensor", {x, 2, n, 3 * n, 1}, numbers_at({2, 3}, 2, ranks)},
      {"aten::slice", "Tensor", {x, 1, 1, 3, 1}, nullptr},
      {"aten::slice", "Tensor", {x, 2, 0, 4 * n, 2}, numbers_at({2, 3}, 2, ranks), kInexact},
      {"aten::narrow", "", {x, -1, n, 2 * n}, numbers_at({2, 3}, 2, ranks)},
      {"aten::chunk", "", {with_gradient({n, 4 * n}), 2, -1}, nullptr},
      {"aten::chunk", "", {with_gradient({n, 5 * n}), 3, 1}, nullptr, kInexact},
      {"aten::split", "Tensor", {with_gradient({n, 4 * n}), 2 * n, 1}, numbers_at({1}, 1, ranks)},
      {"aten::split_with_sizes",
       "",
       {with_gradient({n, 3 * n}), list({2 * n, n}), -1},
       numbers_at({1}, 1, ranks)},
      {"aten::cat", "", {two, 1}, nullptr},
      {"aten::cat", "", {unequal, -1}, nullptr},
      {"aten::cat", "", {two, 0}, nullptr},
      {"aten::stack", "", {two, 1}, nullptr},
      {"aten::expand",
       "",
       {with_gradient({n, 1, 2}), list({3, n, 2 * n, 2}), false},
       sizes_at(1, {3, n, 2 * n, 2}, ranks)},
      {"aten::repeat",
       "",
       {with_gradient({n, 2}), list({3, 2, 1})},
       [=](Stack& stack, const LayoutList&, const LayoutList& results) {
         const bool by_copies = results[0].is_divided() && results[0].dim == 0;
         if (by_copies) stack[1] = list({3 / ranks, 2, 1});
       },
       kInexact},
      {"aten::repeat_interleave", "self_int", {x, 2, 1, kNone}, nullptr, kInexact},
      {"aten::index_select", "", {x, 1, torch::tensor({0, 2})}, nullptr, kInexact},
      {"aten::gather", "", {x, 1, torch::randint(0, 3, {n, 2, 4 * n}), false}, nullptr, kInexact},
      {"aten::flip", "", {x, list({1})}, nullptr, kInexact},
      {"aten::roll", "", {x, list({1}), list({2})}, nullptr, kInexact},
      {"aten::roll", "", {x, list({1}), list({})}, nullptr, kInexact},
      {"aten::unfold", "", {with_gradient({n, 6 * n}), 1, 2, 2}, nullptr, kInexact},
      {"aten::new_ones",
       "",
       {x, list({n, 2 * n}), kNone, kNone, kNone, kNone},
       sizes_at(1, {n, 2 * n}, ranks)},
  };
}

std::vector<Sample> layer_samples(int64_t n) {
  const auto g = [](std::vector<int64_t> sizes) { return with_gradient(std::move(sizes)); };
  const auto list = [](std::vector<int64_t> numbers) { return c10::IValue(std::move(numbers)); };
  const c10::IValue zero = list({0}), one = list({1}), two = list({2});
  const c10::IValue zeros = list({0, 0}), ones = list({1, 1}), twos = list({2, 2});
  const Tensor mean = integers({2}).detach(), variance = integers({2}).detach().abs();
  const std::vector<Tensor> matrices = {integers({3, 1}).detach(), integers({3, 1}).detach()};
  // libtorch does not check the sizes of a recurrent layer's matrices, and reads beyond them.
  const Localize whole_matrices = [](Stack&, const LayoutList& arguments, const LayoutList&) {
    TORCH_CHECK(!arguments[2].is_divided() && !arguments[3].is_divided(), "parts of matrices");
  };
  return {
      {"aten::conv1d",
       "",
       {g({n, 2 * n, 4}), g({2 * n, 1, 3}), kNone, one, one, one, 2 * n},
       nullptr,
       kInexact},
      {"aten::conv_transpose1d",
       "",
       {g({n, 2 * n, 3}), g({2 * n, 2, 2}), kNone, one, zero, zero, 1, one},
       nullptr,
       kInexact},
      {"aten::batch_norm",
       "",
       {g({n, 2, 3}), g({2}), g({2}), mean, variance, false, 0.1, 1e-5, false},
       nullptr,
       kInexact},
      {"aten::im2col", "", {g({n, 2, 3, 3}), twos, ones, zeros, ones}, nullptr, kInexact},
      {"aten::prelu", "", {g({n, 2 * n, 3}), g({2 * n})}, nullptr, kInexact},
      {"aten::prelu", "", {g({n, 2 * n}), g({1})}, nullptr, kInexact},
      {"aten::constant_pad_nd", "", {g({n, 2, 3 * n}), list({1, 1}), 0}, nullptr, kInexact},
      {"aten::reflection_pad2d", "", {g({n, 2, 3, 2 * n}), list({1, 1, 1, 1})}, nullptr, kInexact},
      {"aten::avg_pool1d", "", {g({n, 2, 4 * n}), two, one, zero, false, true}, nullptr, kInexact},
      {"aten::max_pool2d",
       "",
       {g({n, 2, 4, 4 * n}), twos, twos, zeros, ones, false},
       nullptr,
       kInexact},
      {"aten::upsample_bilinear2d",
       "",
       {g({n, 2, 2, 2 * n}), list({4, 4 * n}), false, kNone, kNone},
       nullptr,
       kInexact},
      {"aten::pixel_shuffle", "", {g({n, 4 * n, 2, 2}), 2}, nullptr, kInexact},
      {"aten::gru",
       "input",
       {g({1, n, 1}), g({1, n, 1}), matrices, false, 1, 0.0, false, false, false},
       whole_matrices,
       kInexact},
      {"aten::gru",
       "input",
       {g({n, 1, 1}), g({1, n, 1}), matrices, false, 1, 0.0, false, false, true},
       whole_matrices,
       kInexact},
  };
}

std::vector<Sample> product_samples(int64_t n) {
  const auto g = [](std::vector<int64_t> sizes) { return with_gradient(std::move(sizes)); };
  const Tensor queries = g({n, n, 2, 3}), keys = g({n, n, 4, 3}), values = g({n, n, 4, n});
  const c10::List<int64_t> one({1}), zero({0});
  return {
      {"aten::linear", "", {g({n, 3, 2 * n}), g({2 * n, 2 * n}), kNone}, nullptr},
      {"aten::linear", "", {g({3, n}), g({2 * n, n}), g({2 * n})}, nullptr},
      {"aten::mm", "", {g({n, 2 * n}), g({2 * n, n})}, nullptr},
      {"aten::matmul", "", {g({n, 2, n}), g({n, n})}, nullptr},
      {"aten::matmul", "", {g({n, 2, 3}), g({n, 3, 2 * n})}, nullptr},
      {"aten::matmul", "", {g({1, 2, 3}), g({n, 3, n})}, nullptr},
      {"aten::matmul", "", {g({n, n, 2}), g({2})}, nullptr},
      {"aten::matmul", "", {g({2 * n}), g({2 * n, n})}, nullptr},
      {"aten::matmul", "", {g({2 * n}), g({2 * n})}, nullptr},
      {"aten::matmul", "", {g({2}), g({n, 2, n})}, nullptr},
      {"aten::bmm", "", {g({n, 2, n}), g({n, n, 3})}, nullptr},
      {"aten::addmm", "", {g({n}), g({2, 2 * n}), g({2 * n, n}), 1, 2}, nullptr},
      {"aten::baddbmm", "", {g({n, 1, n}), g({n, 2, 3}), g({n, 3, n}), 1, 1}, nullptr},
      {"aten::conv1d", "", {g({n, n, 4}), g({n, n, 3}), kNone, one, one, one, 1}, nullptr},
      {"aten::conv1d", "", {g({2, n, 3}), g({n, n, 2}), g({n}), one, zero, one, 1}, nullptr},
      {"aten::embedding",
       "",
       {g({2 * n * n, n}), torch::arange(2 * n * n).view({n, 2 * n}), -1, false, false},
       nullptr},
      {"aten::embedding",
       "",
       {g({3, n}), torch::randint(3, {2 * n}), -1, true, false},
       nullptr,
       kInexact},
      {"aten::scaled_dot_product_attention",
       "",
       {queries, keys, values, kNone, 0.0, false, 0.01, false},
       nullptr},
      {"aten::scaled_dot_product_attention",
       "",
       {g({n, n, n, 3}), g({n, n, n, 3}), g({n, n, n, 3}), kNone, 0.0, true, 0.01, false},
       nullptr},
      {"aten::scaled_dot_product_attention",
       "",
       {integers({n, 1, n, 3}), integers({n, 1, 3, 3}), integers({n, 1, 3, 2}),
        torch::arange(3 * n, float64()).view({n, 3}).sin(), 0.0, false, 0.01, false},
       nullptr},
      {"aten::scaled_dot_product_attention",
       "",
       {integers({1, 4 * n, 2, 3}), integers({1, 2 * n, 3, 3}), integers({1, 2 * n, 3, 3}), kNone,
        0.0, false, 0.01, true},
       nullptr,
       kInexact},
  };
}

std::vector<Sample> collective_samples(int64_t n) {
  const auto same = [](const std::vector<Tensor>& in) -> std::vector<Tensor> {
    return {in[0].clone()};
  };
  const Tensor x = with_gradient({2 * n, 3, 2 * n});
  const Tensor target = torch::randint(2 * n, {n});
  const auto ours = [&](const char* name, Stack stack) {
    return Sample{name, "", std::move(stack), nullptr, true, 1, same};
  };
  return {
      ours("smp::tp_copy", {x}),
      ours("smp::tp_reduce", {x}),
      ours("smp::tp_scatter", {x, 2, 1}),
      ours("smp::tp_scatter", {x, 2, 2}),
      ours("smp::tp_gather", {x, 0, 1}),
      ours("smp::tp_gather", {x, 0, 2}),
      ours("smp::tp_all_gather", {x, 2}),
      ours("smp::tp_reduce_scatter", {x, 0}),
      ours("smp::tp_all_to_all", {x, 0, 2}),
      {"smp::tp_embedding",
       "",
       {with_gradient({2 * n, 2}), torch::randint(2 * n, {3, n}), 2 * n, -1, false},
       nullptr,
       true,
       1,
       [](const std::vector<Tensor>& in) -> std::vector<Tensor> {
         return {torch::embedding(in[0], in[1])};
       }},
      {"smp::tp_cross_entropy",
       "",
       {with_gradient({n, 2 * n}), target, kNone, int64_t{at::Reduction::None}, -100, 0.0},
       nullptr,
       true,
       1,
       [](const std::vector<Tensor>& in) -> std::vector<Tensor> {
         return {at::cross_entropy_loss(in[0], in[1], {}, at::Reduction::None)};
       }},
      {"smp::tp_linear_biases", "", {integers({2 * n, 2 * n, 2, n}), 2 * n, 8}, nullptr, kInexact},
      {"smp::tp_gathered_linear",
       "",
       {with_gradient({2 * n, 2}), with_gradient({2 * n, 2}), with_gradient({2 * n}), 0},
       nullptr,
       kInexact,
       1,
       [](const std::vector<Tensor>& in) -> std::vector<Tensor> {
         return {torch::linear(in[0], in[1], in[2])};
       }},
  };
}

}  // namespace smp::nn::rewrite::testing
