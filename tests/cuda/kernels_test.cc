// SPDX-License-Identifier: Apache-2.0
// On which of libtorch's kernels for CUDA the bits of a model depend. Prints its findings.

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/SDPBackend.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "graph/memory_layout.h"
#include "optim/cuda/list_kernel.h"
#include "tests/device/finding.h"

namespace smp::testing {
namespace {

const at::Device kGpu(at::kCUDA, 0);

std::string name_of(at::SDPBackend backend) {
  switch (backend) {
    case at::SDPBackend::math:
      return "math";
    case at::SDPBackend::flash_attention:
      return "flash";
    case at::SDPBackend::efficient_attention:
      return "memory-efficient";
    case at::SDPBackend::cudnn_attention:
      return "cuDNN";
    default:
      return c10::str("number ", static_cast<int64_t>(backend));
  }
}

/// Which attention a block of examples/gpt takes.
at::SDPBackend attention_of(at::ScalarType type, double dropout) {
  const at::Tensor qkv = at::rand({2, 256, 3, 4, 64}, at::TensorOptions(type).device(kGpu))
                             .requires_grad_()
                             .permute({2, 0, 3, 1, 4});
  return static_cast<at::SDPBackend>(
      at::_fused_sdp_choice(qkv[0], qkv[1], qkv[2], /*attn_mask=*/{}, dropout, /*is_causal=*/true));
}

/// cuDNN's backward has no deterministic form that libtorch knows of.
TEST(CudaKernels, DeterministicAttentionIsNotThatOfCudnn) {
  at::Context& context = at::globalContext();
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const double dropout : {0.0, 0.1}) {
      for (const bool deterministic : {false, true}) {
        context.setDeterministicAlgorithms(deterministic, /*warn_only=*/false);
        const at::SDPBackend backend = attention_of(type, dropout);
        context.setDeterministicAlgorithms(false, /*warn_only=*/false);
        print_finding(c10::str("attention, ", type, ", dropout ", dropout,
                               deterministic ? ", deterministic algorithms" : ""),
                      name_of(backend), "backend");
        EXPECT_NE(backend, at::SDPBackend::error);
        if (deterministic) {
          EXPECT_NE(backend, at::SDPBackend::cudnn_attention);
        }
      }
    }
  }
}

struct Product {
  int64_t rows, in, out;
};

/// These values at so many bytes from a multiple of 256.
at::Tensor shifted(const at::Tensor& values, int64_t bytes) {
  const at::Tensor memory = at::zeros({values.numel() + 256}, values.options());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.const_data_ptr()) % 256, 0U);
  at::Tensor result =
      memory.narrow(0, bytes / values.element_size(), values.numel()).view(values.sizes());
  return result.copy_(values);
}

/// Whether a linear layer gives the same bits wherever its input begins.
bool is_independent_of(int64_t bytes, const Product& product, at::ScalarType type) {
  at::manual_seed(1);
  const at::TensorOptions options = at::TensorOptions(type).device(kGpu);
  const auto x = at::randn({product.rows, product.in}, options),
             weight = at::randn({product.out, product.in}, options),
             bias = at::randn({product.out}, options);
  const at::Tensor expected =
      at::addmm(shifted(bias, 0), shifted(x, 0), shifted(weight, 0).transpose(0, 1));
  bool same = true;
  // All three operands, and each alone.
  for (const auto& [of_bias, of_x, of_weight] :
       {std::tuple(bytes, bytes, bytes), std::tuple(bytes, int64_t{0}, int64_t{0}),
        std::tuple(int64_t{0}, bytes, int64_t{0}), std::tuple(int64_t{0}, int64_t{0}, bytes)}) {
    same &= at::equal(expected, at::addmm(shifted(bias, of_bias), shifted(x, of_x),
                                          shifted(weight, of_weight).transpose(0, 1)));
  }
  return same;
}

/// Addresses that a graph's layouts (graph/memory_layout.h) hold to be alike: it gives memory of
/// the same remainder, and cuBLASLt is told alignments of up to 256 bytes.
TEST(CudaKernels, ProductsAreTheSameWhereverLayoutsMayPutThem) {
  const std::vector<Product> products = {
      {512, 256, 768}, {512, 256, 1024}, {512, 1024, 256}, {2048, 768, 3072}, {96, 80, 112}};
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const int64_t bytes : {16, 32, 64, 128, 192}) {
      bool same = true;
      for (const Product& product : products) same &= is_independent_of(bytes, product, type);
      print_finding(c10::str("addmm, ", type, ", at ", bytes, " bytes more"),
                    same ? "equal" : "differ", "bits");
      const auto at_bytes = shifted(at::ones({8}, at::TensorOptions(type).device(kGpu)), bytes);
      if (graph::shift_of(at_bytes) == 0) {
        EXPECT_TRUE(same) << type << " at " << bytes << " bytes";
      }
    }
  }
}

using Tensors = std::vector<at::Tensor>;

/// One element after the other has another magnitude.
Tensors numbers(uint64_t seed, at::ScalarType type) {
  at::manual_seed(seed);
  Tensors tensors;
  for (const int64_t count : {1, 3, 64, 4099, 65541}) {
    const auto options = at::TensorOptions(at::kDouble).device(kGpu);
    const at::Tensor magnitude = at::pow(10, at::randint(-6, 3, {count}, options));
    tensors.push_back((at::randn({count}, options) * magnitude).to(type));
  }
  return tensors;
}

/// Copies that begin so many elements behind where memory does.
Tensors copies(const Tensors& tensors, int64_t offset = 0) {
  Tensors result;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor memory = at::zeros({offset + tensor.numel()}, tensor.options());
    result.push_back(memory.narrow(0, offset, tensor.numel()).copy_(tensor));
  }
  return result;
}

/// The tensor's bits as whole numbers. As they are, a NaN equals none and zeros of both signs are
/// equal.
at::Tensor bits_of(const at::Tensor& tensor) {
  const auto size = tensor.element_size();
  return tensor.view(size == 2 ? at::kShort : size == 4 ? at::kInt : at::kLong);
}

/// How many elements differ in a bit.
int64_t differing(const Tensors& a, const Tensors& b) {
  EXPECT_EQ(a.size(), b.size());
  int64_t count = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    EXPECT_EQ(a.at(i).scalar_type(), b[i].scalar_type());
    count += at::ne(bits_of(a[i]), bits_of(b[i])).sum().item<int64_t>();
  }
  return count;
}

/// An operator on each tensor, and the functions that are to give its bits: the function over
/// lists, and the operation of a kernel over lists with this number.
struct OverLists {
  std::string name;
  std::function<at::Tensor(const at::Tensor& x, const at::Tensor& y, const at::Tensor& z)> one;
  std::function<Tensors(const Tensors& x, const Tensors& y, const Tensors& z)> all;
  std::string in_kernel;
  double number;
  bool of_absolute_values = false;
};

std::vector<OverLists> functions_over_lists(double s) {
  using T = const at::Tensor&;
  using L = const Tensors&;
  return {
      {"mul", [s](T x, T, T) { return x.mul(s); },
       [s](L x, L, L) { return at::_foreach_mul(x, s); }, "mul(x[0], s(0))", s},
      {"add of a number", [s](T x, T, T) { return x.add(s); },
       [s](L x, L, L) { return at::_foreach_add(x, s); }, "add(x[0], s(0))", s},
      {"add", [s](T x, T y, T) { return x.add(y, s); },
       [s](L x, L y, L) { return at::_foreach_add(x, y, s); }, "add(x[0], x[1], s(0))", s},
      {"addcmul", [s](T x, T y, T z) { return x.addcmul(y, z, s); },
       [s](L x, L y, L z) { return at::_foreach_addcmul(x, y, z, s); },
       "addcmul(x[0], x[1], x[2], s(0))", s},
      {"addcdiv", [s](T x, T y, T z) { return x.addcdiv(y, z, s); },
       [s](L x, L y, L z) { return at::_foreach_addcdiv(x, y, z, s); },
       "addcdiv(x[0], x[1], x[2], s(0))", s},
      {"sqrt", [](T x, T, T) { return x.sqrt(); }, [](L x, L, L) { return at::_foreach_sqrt(x); },
       "sqrt(x[0])", s, true},
      {"div", [s](T x, T, T) { return x.div(s); },
       [s](L x, L, L) { return at::_foreach_div(x, s); }, "mul(x[0], s(0))", 1 / s},
      // `at::max` may take one of two zeros, into which numbers of half precision underflow, and
      // the list the other. The update takes the maximum of averages of squares, of which no zero
      // is negative.
      {"maximum", [](T x, T y, T) { return at::max(x, y); },
       [](L x, L y, L) { return at::_foreach_maximum(x, y); }, "maximum(x[0], x[1])", s, true},
  };
}

/// Lists that functions are called with, and the expected results.
struct Lists {
  Lists(const OverLists& function, at::ScalarType type)
      : x(numbers(1, type)), y(numbers(2, type)), z(numbers(3, type)) {
    if (function.of_absolute_values) {
      for (Tensors* list : {&x, &y, &z}) *list = at::_foreach_abs(*list);
    }
    for (size_t i = 0; i < x.size(); ++i) expected.push_back(function.one(x[i], y[i], z[i]));
  }
  Tensors x, y, z, expected;
};

void for_each_function(
    const std::function<void(const OverLists&, const Lists&, const std::string& name)>& visit) {
  for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    for (const double s : {0.9, 0.001, 1.0, -0.0123456789, 0.03162}) {
      for (const OverLists& function : functions_over_lists(s)) {
        visit(function, Lists(function, type), c10::str(function.name, ", ", type, ", ", s));
      }
    }
  }
}

/// The update (optim/foreach_step.h) rests on it.
TEST(CudaKernels, FunctionsOverListsHaveTheBitsOfOperators) {
  for_each_function([](const OverLists& function, const Lists& lists, const std::string& name) {
    const Tensors result = function.all(copies(lists.x), copies(lists.y), copies(lists.z));
    EXPECT_EQ(differing(result, lists.expected), 0) << name;
  });
}

/// The update in one kernel rests on these.
TEST(CudaKernels, OperationsInKernelsOverListsHaveTheBitsOfOperators) {
  for_each_function([](const OverLists& function, const Lists& lists, const std::string& name) {
    const optim::ListKernelText text = {"  x[0] = " + function.in_kernel + ";\n", 7, 1};
    const optim::ListKernel kernel = optim::find_list_kernel(text, lists.x.front());
    ASSERT_TRUE(kernel) << name;
    for (const int64_t offset : {0, 1, 4}) {
      const Tensors x = copies(lists.x, offset), y = copies(lists.y), z = copies(lists.z);
      kernel({x, y, z}, {function.number});
      EXPECT_EQ(differing(x, lists.expected), 0) << name << ", offset " << offset;
      EXPECT_EQ(differing(y, lists.y) + differing(z, lists.z), 0) << name << " only reads them";
    }
  });
}

/// No launch has so many tensors, and no block so many elements.
TEST(CudaKernels, KernelsOverListsReachEachElementOnce) {
  const at::TensorOptions options = at::TensorOptions(at::kFloat).device(kGpu);
  Tensors x, expected;
  for (int64_t i = 0; i < 500; ++i) {
    x.push_back(at::arange(i % 7 == 3 ? 16384 * 3 + i : i, options));
    expected.push_back(x.back() + 1);
  }
  const auto kernel = optim::find_list_kernel({"  x[0] = add(x[0], s(0));\n", 1, 1}, x.front());
  ASSERT_TRUE(kernel);
  kernel({x}, {1});
  for (size_t i = 0; i < x.size(); ++i) EXPECT_TRUE(at::equal(x[i], expected[i])) << i;
}

/// The update is then one by functions over lists, and the log says once why.
TEST(CudaKernels, AKernelThatTheCompilerRefusesIsReported) {
  const at::Tensor x = at::ones({3}, kGpu);
  for (const bool first : {true, false}) {
    ::testing::internal::CaptureStderr();
    const optim::ListKernelText text = {first ? "  nonsense\n" : "  more nonsense\n", 1, 1};
    EXPECT_FALSE(optim::find_list_kernel(text, x));
    const std::string log = ::testing::internal::GetCapturedStderr();
    EXPECT_EQ(log.find("CUDA's compiler refuses the kernel") != std::string::npos, first) << log;
    EXPECT_EQ(log.find("nonsense") != std::string::npos, first) << log;
  }
}

}  // namespace
}  // namespace smp::testing
