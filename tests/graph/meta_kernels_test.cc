// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "graph/shapes.h"

namespace smp::graph::testing {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;

struct Case {
  std::string name;
  Tensors inputs;
  std::function<Tensors(const Tensors&)> call;
};

Tensor channels_last(const Tensor& tensor) {
  return tensor.contiguous(tensor.dim() == 5 ? at::MemoryFormat::ChannelsLast3d
                                             : at::MemoryFormat::ChannelsLast);
}

/// The cases of one operator on each of several layouts of its first input.
class Cases {
 public:
  void add(const std::string& name, Tensors inputs, std::function<Tensors(const Tensors&)> call) {
    cases.push_back({name, std::move(inputs), std::move(call)});
  }
  void add(const std::string& name, Tensors inputs, std::function<Tensor(const Tensors&)> call) {
    add(name, std::move(inputs),
        [call = std::move(call)](const Tensors& in) -> Tensors { return {call(in)}; });
  }
  std::vector<Case> cases;
};

using One = std::function<Tensor(const Tensors&)>;
using Many = std::function<Tensors(const Tensors&)>;

template <class... T>
Tensors list(const std::tuple<T...>& tuple) {
  return std::apply([](const auto&... element) { return Tensors{element...}; }, tuple);
}

/// Layouts of a tensor of 2, 3, 4 or 5 dimensions.
std::vector<std::pair<std::string, Tensor>> layouts() {
  const auto image = at::rand({2, 4, 6, 5});
  return {{"vector", at::rand({7})},
          {"scalar", at::rand({})},
          {"matrix", at::rand({3, 4})},
          {"transposed", at::rand({3, 4}).t()},
          {"strided", at::rand({6, 8}).slice(0, 0, 6, 2).slice(1, 0, 8, 3)},
          {"expanded", at::rand({3, 1}).expand({3, 4})},
          {"empty", at::rand({0, 4})},
          {"image", image},
          {"channels last", channels_last(image)},
          {"permuted", at::rand({5, 2, 4}).permute({2, 0, 1})},
          {"double", at::rand({3, 4}, at::kDouble)},
          {"half", at::rand({3, 4}).to(at::kBFloat16)},
          {"integer", at::randint(5, {3, 4})},
          {"complex", at::rand({3, 4}, at::kComplexFloat)},
          {"complex transposed", at::rand({3, 4}, at::kComplexFloat).t()}};
}

void add_elementwise(Cases& cases) {
  using Unary = std::pair<const char*, Tensor (*)(const Tensor&)>;
  const std::vector<Unary> unary = {
      {"relu", [](const Tensor& x) { return at::relu(x); }},
      {"abs", [](const Tensor& x) { return at::abs(x); }},
      {"isnan", [](const Tensor& x) { return at::isnan(x); }},
      {"angle", [](const Tensor& x) { return at::angle(x); }},
      {"logical_not", [](const Tensor& x) { return at::logical_not(x); }},
      {"conj_physical", [](const Tensor& x) { return at::conj_physical(x); }},
      {"max", [](const Tensor& x) { return at::max(x); }},
      {"min", [](const Tensor& x) { return at::min(x); }},
      {"prod", [](const Tensor& x) { return at::prod(x); }},
      {"median", [](const Tensor& x) { return at::median(x); }},
      {"flip",
       [](const Tensor& x) {
         return at::flip(x, x.dim() > 0 ? std::vector<int64_t>{-1} : std::vector<int64_t>{});
       }},
      {"roll all", [](const Tensor& x) { return at::roll(x, 2); }},
      {"std", [](const Tensor& x) { return at::std(x); }},
      {"var of dim", [](const Tensor& x) { return at::var(x, {-1}, false, true); }},
      {"logsumexp", [](const Tensor& x) { return at::logsumexp(x, {-1}); }},
      {"hardtanh", [](const Tensor& x) { return at::hardtanh(x); }},
      {"hardswish", [](const Tensor& x) { return at::hardswish(x); }},
      {"relu6", [](const Tensor& x) { return at::relu6(x); }},
      {"log_sigmoid", [](const Tensor& x) { return at::log_sigmoid(x); }},
      {"nan_to_num", [](const Tensor& x) { return at::nan_to_num(x); }},
      {"nansum", [](const Tensor& x) { return at::nansum(x); }}};
  for (const auto& [name, function] : unary) {
    for (const auto& [layout, tensor] : layouts()) {
      cases.add(std::string(name) + " of " + layout, {tensor},
                One([function = function](const Tensors& in) { return function(in[0]); }));
    }
  }
  for (const auto& [layout, tensor] : layouts()) {
    cases.add("where of " + layout, {tensor == tensor, tensor, tensor},
              One([](const Tensors& in) { return at::where(in[0], in[1], in[2]); }));
    cases.add("where and a number of " + layout, {tensor == tensor, tensor},
              One([](const Tensors& in) { return at::where(in[0], in[1], 2.5); }));
    cases.add("logical_and of " + layout, {tensor, tensor},
              One([](const Tensors& in) { return at::logical_and(in[0], in[1]); }));
    cases.add("huber_loss of " + layout, {tensor, tensor},
              One([](const Tensors& in) { return at::huber_loss(in[0], in[1]); }));
    cases.add("huber_loss without reduction of " + layout, {tensor, tensor},
              One([](const Tensors& in) { return at::huber_loss(in[0], in[1], 0); }));
    cases.add("floor_divide of " + layout, {tensor, tensor + 1},
              One([](const Tensors& in) { return at::floor_divide(in[0], in[1]); }));
  }
  cases.add("where broadcast",
            {at::rand({1, 4}) > 0.5, at::rand({3, 1}), at::rand({}, at::kDouble)},
            One([](const Tensors& in) { return at::where(in[0], in[1], in[2]); }));
  cases.add("masked softmax", {at::rand({2, 4, 4}), at::ones({4, 4}, at::kBool).tril()},
            One([](const Tensors& in) {
              return at::where(in[1], in[0], -1e9).softmax(-1).nan_to_num();
            }));
}

void add_movements(Cases& cases) {
  for (const auto& [layout, tensor] : layouts()) {
    if (tensor.dim() < 2) continue;
    cases.add("index_select of " + layout, {tensor, at::tensor({0L, 1L, 1L})},
              One([](const Tensors& in) { return at::index_select(in[0], 1, in[1]); }));
    cases.add("roll of " + layout, {tensor}, One([](const Tensors& in) {
                return at::roll(in[0], {1, -2}, {0, 1});
              }));
    cases.add("flip of two of " + layout, {tensor}, One([](const Tensors& in) {
                return at::flip(in[0], {0, 1});
              }));
    cases.add("var_mean of " + layout, {tensor}, Many([](const Tensors& in) {
                return list(at::var_mean(in[0], at::OptionalIntArrayRef({1}), 1));
              }));
    cases.add("kthvalue of " + layout, {tensor},
              Many([](const Tensors& in) { return list(at::kthvalue(in[0], 2, -1)); }));
    cases.add("median of a dimension of " + layout, {tensor},
              Many([](const Tensors& in) { return list(at::median(in[0], -1, true)); }));
    cases.add("count_nonzero of " + layout, {tensor}, One([](const Tensors& in) {
                return at::count_nonzero(in[0], at::IntArrayRef({0}));
              }));
  }
  cases.add("embedding", {at::rand({9, 4}), at::randint(9, {2, 3})},
            One([](const Tensors& in) { return at::embedding(in[0], in[1]); }));
  cases.add("trace", {at::rand({3, 3})}, One([](const Tensors& in) { return at::trace(in[0]); }));
  cases.add("dot", {at::rand({3}), at::rand({3})},
            One([](const Tensors& in) { return at::dot(in[0], in[1]); }));
  cases.add("take", {at::rand({3, 4}), at::randint(12, {2, 5})},
            One([](const Tensors& in) { return at::take(in[0], in[1]); }));
  cases.add("searchsorted", {at::arange(5.0), at::rand({2, 3})},
            One([](const Tensors& in) { return at::searchsorted(in[0], in[1]); }));
  cases.add("bucketize", {at::rand({2, 3}), at::arange(5.0)},
            One([](const Tensors& in) { return at::bucketize(in[0], in[1], true); }));
  cases.add("segment_reduce by lengths",
            {at::rand({2, 5, 3}), at::tensor({2, 3, 0, 5}).view({2, 2})},
            One([](const Tensors& in) {
              return at::segment_reduce(in[0], "max", in[1], {}, {}, /*axis=*/1);
            }));
  cases.add("segment_reduce by offsets", {at::rand({5, 3}), at::tensor({0, 2, 2, 5})},
            One([](const Tensors& in) { return at::segment_reduce(in[0], "sum", {}, {}, in[1]); }));
  cases.add("prelu", {at::rand({2, 4, 3}), at::rand({4})},
            One([](const Tensors& in) { return at::prelu(in[0], in[1]); }));
  cases.add("prelu channels last", {channels_last(at::rand({2, 4, 3, 3})), at::rand({4})},
            One([](const Tensors& in) { return at::prelu(in[0], in[1]); }));
}

void add_losses(Cases& cases) {
  for (int64_t reduction : {0, 1, 2}) {
    const std::string how = " with reduction " + std::to_string(reduction);
    cases.add("binary_cross_entropy" + how, {at::rand({3, 4}), at::rand({3, 4})},
              One([=](const Tensors& in) {
                return at::binary_cross_entropy(in[0], in[1], {}, reduction);
              }));
    cases.add("multi_margin_loss" + how, {at::rand({3, 4}), at::randint(4, {3})},
              One([=](const Tensors& in) {
                return at::multi_margin_loss(in[0], in[1], 1, 1, {}, reduction);
              }));
    cases.add("nll_loss2d" + how, {at::rand({2, 4, 3, 3}), at::randint(4, {2, 3, 3})},
              One([=](const Tensors& in) { return at::nll_loss2d(in[0], in[1], {}, reduction); }));
    cases.add("cross_entropy" + how, {at::rand({2, 4, 3, 3}), at::randint(4, {2, 3, 3})},
              One([=](const Tensors& in) {
                return at::cross_entropy_loss(in[0], in[1], {}, reduction);
              }));
  }
}

Tensors convolve(const Tensors& in, int64_t stride, int64_t padding, int64_t dilation,
                 bool transposed, int64_t groups) {
  const auto spatial = static_cast<size_t>(in[0].dim() - 2);
  const std::vector<int64_t> ones(spatial, 1), strides(spatial, stride), paddings(spatial, padding),
      dilations(spatial, dilation), output_padding(spatial, transposed ? stride - 1 : 0);
  return {at::convolution(in[0], in[1], in.size() > 2 ? in[2] : Tensor(), strides, paddings,
                          dilations, transposed, output_padding, groups)};
}

void add_convolutions(Cases& cases) {
  for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16}) {
    for (int64_t spatial : {1, 2, 3}) {
      for (bool transposed : {false, true}) {
        for (int64_t groups : {1, 4}) {
          for (int64_t stride : {1, 2}) {
            for (int last : {0, 1, 2, 3}) {
              if (last > 0 && spatial == 1) continue;
              std::vector<int64_t> input(spatial + 2, 7), weight(spatial + 2, 3);
              input[0] = 2;
              input[1] = weight[0] = 4;
              weight[1] = 4 / groups;
              auto x = at::rand(input, type), w = at::rand(weight, type);
              if (last & 1) x = channels_last(x);
              if (last & 2) w = channels_last(w);
              const std::string name = c10::str(
                  "convolution", spatial, "d ", type, transposed ? " transposed" : "", " groups ",
                  groups, " stride ", stride, last & 1 ? " input channels last" : "",
                  last & 2 ? " weight channels last" : "");
              cases.add(name, {x, w, at::rand({4}, type)}, Many([=](const Tensors& in) {
                          return convolve(in, stride, 1, stride == 1 ? 2 : 1, transposed, groups);
                        }));
            }
          }
        }
      }
    }
  }
  cases.add("conv2d of one pixel", {at::rand({2, 4, 1, 1}), at::rand({4, 4, 1, 1})},
            Many([](const Tensors& in) { return convolve(in, 1, 0, 1, false, 1); }));
  cases.add("conv2d without a batch", {at::rand({4, 7, 7}), at::rand({4, 4, 3, 3})},
            One([](const Tensors& in) { return at::conv2d(in[0], in[1]); }));
  cases.add("conv1d of a transposed input",
            {at::rand({2, 7, 4}).transpose(1, 2), at::rand({5, 4, 3})},
            One([](const Tensors& in) { return at::conv1d(in[0], in[1]); }));
  cases.add("conv2d of a permuted input",
            {at::rand({7, 4, 2, 7}).permute({2, 1, 0, 3}), at::rand({5, 4, 3, 3})},
            One([](const Tensors& in) { return at::conv2d(in[0], in[1]); }));
  cases.add("conv2d same padding", {at::rand({2, 4, 7, 7}), at::rand({4, 4, 2, 2})},
            One([](const Tensors& in) { return at::conv2d(in[0], in[1], {}, 1, "same"); }));
}

void add_layers(Cases& cases) {
  const auto image = at::rand({2, 4, 6, 5});
  const std::vector<std::pair<std::string, Tensor>> images = {
      {"image", image},
      {"channels last", channels_last(image)},
      {"permuted", at::rand({6, 5, 2, 4}).permute({2, 3, 0, 1})},
      {"rows", at::rand({2, 4})},
      {"sequence", at::rand({2, 4, 5})},
      {"volume", at::rand({2, 4, 3, 3, 3})},
      {"volume channels last", channels_last(at::rand({2, 4, 3, 3, 3}))}};
  const auto w = at::rand({4}), b = at::rand({4});
  for (const auto& [layout, tensor] : images) {
    for (bool training : {true, false}) {
      cases.add(c10::str("batch_norm of ", layout, training ? " training" : " evaluating"),
                {tensor, w, b, at::zeros({4}), at::ones({4})}, One([=](const Tensors& in) {
                  return at::batch_norm(in[0], in[1], in[2], in[3], in[4], training, 0.1, 1e-5,
                                        true);
                }));
    }
    cases.add("batch_norm without weights of " + layout, {tensor}, One([](const Tensors& in) {
                return at::batch_norm(in[0], {}, {}, {}, {}, true, 0.1, 1e-5, true);
              }));
    cases.add("layer_norm of " + layout, {tensor},
              One([](const Tensors& in) { return at::layer_norm(in[0], in[0].sizes().slice(1)); }));
    if (tensor.suggest_memory_format() == at::MemoryFormat::Contiguous) {  // else on zeros
      cases.add("group_norm of " + layout, {tensor, w, b},
                One([](const Tensors& in) { return at::group_norm(in[0], 2, in[1], in[2]); }));
    }
    if (tensor.dim() > 2) {
      cases.add("instance_norm of " + layout, {tensor, w, b}, One([](const Tensors& in) {
                  return at::instance_norm(in[0], in[1], in[2], {}, {}, true, 0.1, 1e-5, true);
                }));
    }
    if (tensor.dim() == 4) {
      for (int64_t size : {1, 3}) {
        cases.add(c10::str("adaptive_avg_pool2d to ", size, " of ", layout), {tensor},
                  One([=](const Tensors& in) {
                    return at::adaptive_avg_pool2d(in[0], {size, size});
                  }));
      }
      cases.add("reflection_pad2d of " + layout, {tensor}, One([](const Tensors& in) {
                  return at::reflection_pad2d(in[0], {1, 2, 1, 1});
                }));
      cases.add("channel_shuffle of " + layout, {tensor},
                One([](const Tensors& in) { return at::channel_shuffle(in[0], 2); }));
      cases.add("max_pool2d of " + layout, {tensor},
                One([](const Tensors& in) { return at::max_pool2d(in[0], 2); }));
      cases.add("grid_sampler of " + layout, {tensor, at::rand({2, 3, 3, 2})},
                One([](const Tensors& in) { return at::grid_sampler(in[0], in[1], 0, 0, true); }));
    }
    if (tensor.dim() == 5) {
      cases.add("adaptive_avg_pool3d of " + layout, {tensor}, One([](const Tensors& in) {
                  return at::adaptive_avg_pool3d(in[0], {2, 2, 2});
                }));
    }
  }
  cases.add("batch_norm of half with float weights", {image.to(at::kBFloat16), w, b},
            One([](const Tensors& in) {
              return at::batch_norm(in[0], in[1], in[2], {}, {}, true, 0.1, 1e-5, true);
            }));
  cases.add("batch_norm statistics of half",
            {image.to(at::kBFloat16), w.to(at::kBFloat16), b.to(at::kBFloat16)},
            Many([](const Tensors& in) {
              return list(at::native_batch_norm(in[0], in[1], in[2], {}, {}, true, 0.1, 1e-5));
            }));
  cases.add(
      "batch_norm statistics", {image, w, b, at::zeros({4}), at::ones({4})},
      Many([](const Tensors& in) {
        return list(at::native_batch_norm(in[0], in[1], in[2], in[3], in[4], false, 0.1, 1e-5));
      }));
  cases.add("layer_norm statistics", {image}, Many([](const Tensors& in) {
              return list(at::native_layer_norm(in[0], in[0].sizes().slice(2), {}, {}, 1e-5));
            }));
  cases.add("group_norm statistics", {image}, Many([](const Tensors& in) {
              return list(at::native_group_norm(in[0], {}, {}, 2, 4, 30, 2, 1e-5));
            }));
  cases.add("adaptive_avg_pool2d without a batch", {at::rand({4, 6, 5})},
            One([](const Tensors& in) {
              return at::adaptive_avg_pool2d(in[0], {2, 3});
            }));
}

std::vector<Case> all_cases() {
  at::manual_seed(1);
  Cases cases;
  add_elementwise(cases);
  add_movements(cases);
  add_losses(cases);
  add_convolutions(cases);
  add_layers(cases);
  return cases.cases;
}

std::string describe(const Tensors& tensors) {
  std::string text;
  for (const Tensor& tensor : tensors) {
    text += tensor.defined() ? c10::str(tensor.scalar_type(), " ", tensor.sizes(), " strides ",
                                        tensor.strides(), "; ")
                             : "undefined; ";
  }
  return text;
}

/// Each call gives on the meta device the sizes, strides and types that it gives on the CPU.
TEST(MetaKernels, GiveTheShapesOfTheCpu) {
  at::set_num_threads(1);
  int compared = 0;
  for (const Case& test : all_cases()) {
    Tensors real;
    try {
      real = test.call(test.inputs);
    } catch (const c10::Error&) {
      continue;  // the CPU does not take this type or shape
    }
    Tensors shapes;
    for (const Tensor& input : test.inputs)
      shapes.push_back(make_shape_tensor(TensorMeta::of(input)));
    try {
      EXPECT_EQ(describe(test.call(shapes)), describe(real)) << test.name;
    } catch (const c10::Error& error) {
      ADD_FAILURE() << test.name << ": " << error.what_without_backtrace();
    }
    ++compared;
  }
  EXPECT_GT(compared, 500);
}

/// The shape that a recording on shapes finds, and the real one.
void expect_same_shape(const char* name, const std::vector<c10::IValue>& arguments) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  torch::jit::Stack real = arguments, shape;
  op.callBoxed(real);
  for (const c10::IValue& argument : arguments) {
    shape.push_back(argument.isTensor() && argument.toTensor().defined()
                        ? make_shape_tensor(TensorMeta::of(argument.toTensor()))
                        : argument);
  }
  call_on_shapes(op, shape);
  EXPECT_TRUE(shape[0].toTensor().is_meta()) << name;
  EXPECT_EQ(describe({shape[0].toTensor()}), describe({real[0].toTensor()})) << name;
}

/// These take another way on the CPU than on the meta device.
TEST(MetaKernels, CompositeOperatorsHaveTheStridesOfTheCpu) {
  at::set_num_threads(1);
  for (const auto& query : {at::rand({2, 3, 8, 4}), at::rand({2, 8, 3, 4}).transpose(1, 2)}) {
    expect_same_shape("aten::scaled_dot_product_attention",
                      {query, query, query, c10::IValue(), 0.0, true, c10::IValue(), false});
  }
  expect_same_shape("aten::group_norm", {channels_last(at::rand({2, 4, 6, 5})), 2, c10::IValue(),
                                         c10::IValue(), 1e-5, true});
}

}  // namespace
}  // namespace smp::graph::testing
