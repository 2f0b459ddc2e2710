// SPDX-License-Identifier: Apache-2.0
#include "pipeline/message.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace smp::pipeline {
namespace {

uintptr_t misalignment(const at::Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 64;
}

/// Sends `tensors` through a message and expects the same numbers, types and strides.
void expect_round_trip(const std::vector<at::Tensor>& tensors) {
  std::vector<graph::TensorMeta> metas;
  for (const at::Tensor& tensor : tensors) metas.push_back(graph::TensorMeta::of(tensor));
  const MessageLayout layout(metas);
  const at::Tensor message = layout.pack(tensors);
  EXPECT_EQ(message.nbytes(), static_cast<size_t>(layout.nbytes()));
  EXPECT_EQ(layout.nbytes() % 64, 0);
  at::Tensor received = layout.make_buffer();
  received.copy_(message);
  const auto got = layout.unpack(received);
  ASSERT_EQ(got.size(), tensors.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_TRUE(at::equal(got[i], tensors[i])) << i;
    EXPECT_EQ(got[i].scalar_type(), tensors[i].scalar_type());
    EXPECT_EQ(got[i].sizes(), tensors[i].sizes());
    if (tensors[i].numel() == 0) continue;
    EXPECT_EQ(misalignment(got[i]), misalignment(tensors[i])) << i;
    const bool dense = tensors[i].is_non_overlapping_and_dense();
    EXPECT_EQ(got[i].is_alias_of(received), dense && !got[i].is_complex()) << i;
  }
}

at::Tensor received(const at::Tensor& sent) {
  const MessageLayout layout({graph::TensorMeta::of(sent)});
  return layout.unpack(layout.pack({sent}))[0];
}

TEST(Message, CarriesTensorsOfAnyType) {
  expect_round_trip({at::randn({3, 5}), at::arange(7), at::ones({2, 2}, at::kBool),
                     at::randn({4}, at::kDouble), at::randn({3}).to(at::kHalf), at::zeros({}),
                     at::zeros({0, 4}), at::randn({2, 3}, at::kComplexFloat)});
}

/// Kernels may round differently on operands that lie otherwise.
TEST(Message, KeepsTheDistanceFromAMultipleOf64Bytes) {
  std::vector<at::Tensor> tensors;
  for (const auto type : {at::kByte, at::kHalf, at::kFloat, at::kDouble, at::kComplexFloat}) {
    const auto numbers = at::arange(200).to(type);
    for (const int64_t first : {0, 1, 7, 15, 63}) {
      tensors.push_back(numbers.narrow(0, first, 50));
      tensors.push_back(numbers.narrow(0, first, 1));
      tensors.push_back(numbers.narrow(0, first, 50).slice(0, 0, 50, 3));
      tensors.push_back(numbers.narrow(0, first, 24).view({4, 6}).t());
    }
  }
  expect_round_trip(tensors);
  for (const auto& tensor : tensors) {
    const auto expanded = tensor.unsqueeze(0).expand_as(at::stack({tensor, tensor}));
    EXPECT_TRUE(at::equal(received(expanded), expanded));
    EXPECT_EQ(misalignment(received(expanded)), misalignment(expanded));
  }
}

TEST(Message, KeepsStridesOfDenseTensors) {
  const auto transposed = at::randn({3, 5}).t();
  const auto permuted = at::randn({2, 3, 4}).permute({2, 0, 1});
  const MessageLayout layout({graph::TensorMeta::of(transposed), graph::TensorMeta::of(permuted)});
  const auto got = layout.unpack(layout.pack({transposed, permuted}));
  EXPECT_EQ(got[0].strides(), transposed.strides());
  EXPECT_EQ(got[1].strides(), permuted.strides());
  expect_round_trip({transposed, permuted});
}

TEST(Message, SendsExpandedDimensionsOnce) {
  const auto expanded = at::randn({4, 1}).expand({4, 1000});
  const MessageLayout layout({graph::TensorMeta::of(expanded)});
  const auto got = layout.unpack(layout.pack({expanded}));
  EXPECT_EQ(got[0].strides(), expanded.strides());
  EXPECT_TRUE(at::equal(got[0], expanded));
}

TEST(Message, KeepsGapsAndOverlaps) {
  const auto whole = at::arange(48).reshape({6, 8});
  for (const auto& sent :
       {whole.slice(1, 2, 5), whole.slice(0, 1, 3).t(), whole.diagonal(),
        at::arange(7).unfold(0, 3, 1), whole.slice(1, 0, 3).unsqueeze(1).expand({6, 4, 3}),
        at::arange(24).reshape({4, 6}).select(1, 5).expand({4, 4}).narrow(0, 0, 2)}) {
    const auto got = received(sent);
    EXPECT_TRUE(at::equal(got, sent));
    EXPECT_EQ(got.strides(), sent.strides());
  }
}

TEST(Message, MakesASmallPartOfALargeTensorDense) {
  const auto sent = at::randn({100, 50}).select(1, 3);
  EXPECT_TRUE(at::equal(received(sent), sent));
  EXPECT_EQ(received(sent).stride(0), 1);
}

TEST(Message, CarriesUndefinedTensors) {
  const auto defined = at::randn({3});
  const MessageLayout layout({graph::TensorMeta::of(defined), graph::TensorMeta::of(defined)});
  const auto got = layout.unpack(layout.pack({at::Tensor(), defined}));
  EXPECT_FALSE(got[0].defined());
  EXPECT_TRUE(at::equal(got[1], defined));
}

/// The zeros are the backward pass of `sign`: reading their memory would end the process.
TEST(Message, CarriesZerosThatHaveNoMemory) {
  const auto zeros = at::_efficientzerotensor({3, 4}, at::kFloat);
  const auto ones = at::ones({5});
  const MessageLayout layout({graph::TensorMeta::of(zeros), graph::TensorMeta::of(ones)});
  const auto got = layout.unpack(layout.pack({zeros, ones}));
  EXPECT_TRUE(got[0]._is_zerotensor());
  EXPECT_TRUE(at::equal(got[0].clone(), at::zeros({3, 4})));
  EXPECT_TRUE(at::equal(got[1], ones));
}

/// A number that libtorch has wrapped decides no type: promotion is as before the message, beside
/// a tensor of each type.
TEST(Message, CarriesThatANumberIsWrapped) {
  const std::vector<at::Scalar> numbers = {true, 3, 0.5, c10::complex<double>(0.5, 2)};
  for (const at::Scalar& number : numbers) {
    for (const bool is_wrapped : {true, false}) {
      at::Tensor sent = c10::scalar_to_tensor(number);
      sent.unsafeGetTensorImpl()->set_wrapped_number(is_wrapped);
      const at::Tensor got = received(sent);
      EXPECT_TRUE(at::equal(got, sent));
      EXPECT_EQ(got.unsafeGetTensorImpl()->is_wrapped_number(), is_wrapped) << sent;
      for (const at::ScalarType type :
           {at::kBool, at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kHalf,
            at::kBFloat16, at::kFloat, at::kDouble, at::kComplexFloat, at::kComplexDouble}) {
        const at::Tensor other = at::ones({2}, type);
        EXPECT_EQ(at::result_type(other, got), at::result_type(other, sent)) << type << sent;
        const at::Tensor product = at::mul(other, got), expected = at::mul(other, sent);
        EXPECT_EQ(product.scalar_type(), expected.scalar_type()) << type << sent;
        EXPECT_TRUE(at::equal(product.to(at::kComplexDouble), expected.to(at::kComplexDouble)))
            << type << sent;
      }
    }
  }
}

/// A gradient may be laid out otherwise than the value it belongs to.
TEST(Message, TakesOtherStridesThanTheLayoutWasMadeFor) {
  const auto value = at::randn({3, 4});
  const auto gradient = at::randn({4, 3}).t();
  const MessageLayout layout({graph::TensorMeta::of(value)});
  const auto got = layout.unpack(layout.pack({gradient}));
  EXPECT_EQ(got[0].strides(), gradient.strides());
  EXPECT_TRUE(at::equal(got[0], gradient));
}

}  // namespace
}  // namespace smp::pipeline
