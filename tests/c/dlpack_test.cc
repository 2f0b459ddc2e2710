// SPDX-License-Identifier: Apache-2.0
// Tensors that are given by DLPack: they are read as described, and each is given back once.
#include <ATen/dlpack.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <future>
#include <string>
#include <vector>

#include "smp/c/tensors.h"
#include "tests/c/interface.h"
#include "tests/error_of.h"

namespace smp::testing {
namespace {

/// A tensor that another library lends, and how often it was given back.
template <class Managed>
class Lent {
 public:
  explicit Lent(torch::Tensor tensor)
      : tensor_(std::move(tensor)),
        sizes_(tensor_.sizes().vec()),
        strides_(tensor_.strides().vec()) {
    DLTensor& described = managed_.dl_tensor;
    described.data = tensor_.mutable_data_ptr();
    described.device = {kDLCPU, 0};
    described.ndim = static_cast<int32_t>(tensor_.dim());
    described.dtype = {kDLFloat, 32, 1};
    described.shape = sizes_.data();
    described.strides = strides_.data();
    managed_.manager_ctx = this;
    managed_.deleter = [](Managed* self) { ++static_cast<Lent*>(self->manager_ctx)->given_back; };
    if constexpr (std::is_same_v<Managed, DLManagedTensorVersioned>) {
      managed_.version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
    }
  }
  Lent(const Lent&) = delete;
  Lent& operator=(const Lent&) = delete;

  Managed& managed() { return managed_; }
  DLTensor& described() { return managed_.dl_tensor; }

  smp_tensor tensor() {
    smp_tensor result{};
    result.struct_size = sizeof result;
    if constexpr (std::is_same_v<Managed, DLManagedTensorVersioned>) {
      result.dlpack_versioned = &managed_;
    } else {
      result.dlpack = &managed_;
    }
    return result;
  }

  int given_back = 0;

 private:
  torch::Tensor tensor_;
  std::vector<int64_t> sizes_, strides_;
  Managed managed_{};
};

using Old = Lent<DLManagedTensor>;
using Versioned = Lent<DLManagedTensorVersioned>;

class Dlpack : public ::testing::Test {
 protected:
  void SetUp() override {
    expect_ok(smp_set_threads(1));
    expect_ok(smp_model_open(kEval, &model_));
  }
  void TearDown() override { expect_ok(smp_model_close(model_)); }

  /// The model's outputs for an input of eight samples.
  torch::Tensor run(const smp_tensor& input) {
    auto result = torch::zeros({8, 2});
    smp_tensor output = view(result);
    expect_ok(smp_model_run(model_, &input, 1, &output, 1));
    return result;
  }

  const Batch batch_ = batches(1).front();
  smp_model* model_ = nullptr;
};

TEST_F(Dlpack, TrainsAsOnBorrowedMemory) {
  smp_session* const borrowing = open_session();
  smp_session* const session = open_session();
  for (const Batch& batch : batches()) {
    const smp_tensor x = view(batch.x), y = view(batch.y);
    double wanted = 0, loss = -1;
    expect_ok(smp_train(borrowing, &x, 1, "mse", &y, &wanted));
    Old input(batch.x);
    Versioned target(batch.y);
    const smp_tensor lent_x = input.tensor(), lent_y = target.tensor();
    expect_ok(smp_train(session, &lent_x, 1, "mse", &lent_y, &loss));
    EXPECT_EQ(loss, wanted);
    EXPECT_EQ(input.given_back, 1);
    EXPECT_EQ(target.given_back, 1);

    Versioned evaluated(batch.x);
    Old compared(batch.y);
    const smp_tensor eval_x = evaluated.tensor(), eval_y = compared.tensor();
    expect_ok(smp_evaluate(session, &eval_x, 1, "mse", &eval_y, &loss, nullptr, 0));
    expect_ok(smp_evaluate(borrowing, &x, 1, "mse", &y, &wanted, nullptr, 0));
    EXPECT_EQ(loss, wanted);
    EXPECT_EQ(evaluated.given_back, 1);
    EXPECT_EQ(compared.given_back, 1);

    Old differentiated(batch.x);
    const smp_tensor by_gradient = differentiated.tensor();
    const auto gradient = [](void* lent, int64_t, const smp_tensor*, smp_tensor* gradients,
                             int64_t) {
      std::fill_n(static_cast<float*>(gradients->data), 8, 1.0F);
      return static_cast<Old*>(lent)->given_back;  // not yet
    };
    expect_ok(smp_train_by_gradient(session, &by_gradient, 1, gradient, &differentiated));
    Old again(batch.x);
    const smp_tensor borrowed = again.tensor();
    expect_ok(smp_train_by_gradient(borrowing, &borrowed, 1, gradient, &again));
    EXPECT_EQ(differentiated.given_back, 1);
  }
  expect_ok(smp_close(session));
  expect_ok(smp_close(borrowing));
}

TEST_F(Dlpack, PlacesOfElements) {
  const smp_tensor x = view(batch_.x);
  const auto wanted = run(x);
  Versioned transposed(batch_.x.t().contiguous().t());
  EXPECT_TRUE(torch::equal(run(transposed.tensor()), wanted));
  EXPECT_EQ(transposed.given_back, 1);

  auto wide = torch::zeros({2, 8, 3});
  wide[1].copy_(batch_.x);
  Old offset(wide);
  offset.described().ndim = 2;
  ++offset.described().shape;
  offset.described().strides = nullptr;  // allowed before version 1.2
  offset.described().byte_offset = 8 * 3 * sizeof(float);
  EXPECT_TRUE(torch::equal(run(offset.tensor()), wanted));

  Old without_deleter(batch_.x);
  without_deleter.managed().deleter = nullptr;
  EXPECT_TRUE(torch::equal(run(without_deleter.tensor()), wanted));

  Old pinned(batch_.x);
  pinned.described().device.device_type = kDLCUDAHost;  // the host's memory, too
  EXPECT_TRUE(torch::equal(run(pinned.tensor()), wanted));
}

TEST_F(Dlpack, ReadOnlyMemoryIsCopied) {
  Versioned lent(batch_.x);
  const auto own = c::read_tensor(lent.tensor(), "x", at::kCPU);
  EXPECT_EQ(own.data_ptr(), batch_.x.data_ptr());
  lent.managed().flags = DLPACK_FLAG_BITMASK_READ_ONLY;
  const auto copy = c::read_tensor(lent.tensor(), "x", at::kCPU);
  EXPECT_NE(copy.data_ptr(), batch_.x.data_ptr());
  EXPECT_TRUE(torch::equal(copy, batch_.x));
  EXPECT_EQ(lent.given_back, 0);  // calls do so
}

TEST_F(Dlpack, Types) {
  const auto expect_type = [](DLDataType type, torch::Dtype wanted) {
    Old lent(torch::zeros({4}, torch::kFloat64));
    lent.described().dtype = type;
    EXPECT_EQ(c::read_tensor(lent.tensor(), "x", at::kCPU).scalar_type(), wanted);
  };
  expect_type({kDLFloat, 16, 1}, torch::kFloat16);
  expect_type({kDLFloat, 32, 1}, torch::kFloat32);
  expect_type({kDLFloat, 64, 1}, torch::kFloat64);
  expect_type({kDLBfloat, 16, 1}, torch::kBFloat16);
  expect_type({kDLInt, 8, 1}, torch::kInt8);
  expect_type({kDLInt, 16, 1}, torch::kInt16);
  expect_type({kDLInt, 32, 1}, torch::kInt32);
  expect_type({kDLInt, 64, 1}, torch::kInt64);
  expect_type({kDLUInt, 8, 1}, torch::kUInt8);
  expect_type({kDLBool, 8, 1}, torch::kBool);
}

TEST_F(Dlpack, ErrorsGiveBackOnce) {
  const auto expect_refused = [&](const std::function<void(Old&, smp_tensor&)>& change,
                                  std::initializer_list<std::string> parts) {
    Old lent(batch_.x);
    smp_tensor tensor = lent.tensor();
    change(lent, tensor);
    expect_error(smp_model_run(model_, &tensor, 1, nullptr, 0), SMP_ERROR_USAGE, parts);
    EXPECT_EQ(lent.given_back, 1);
  };
  expect_refused(
      [](Old& lent, smp_tensor&) {
        lent.described().dtype = {kDLComplex, 64, 1};
      },
      {"input 0: DLPack type code 5 of 64 bits and 1 lanes has no smp_dtype"});
  expect_refused([](Old& lent, smp_tensor&) { lent.described().dtype.lanes = 4; },
                 {"input 0: DLPack type code 2 of 32 bits and 4 lanes has no smp_dtype"});
  expect_refused([](Old& lent, smp_tensor&) { lent.described().device.device_type = kDLVulkan; },
                 {"input 0: DLPack device type 7 is not taken. This library takes memory of the"});
  expect_refused([](Old& lent, smp_tensor&) { lent.described().ndim = 9; },
                 {"input 0: the DLPack tensor has 9 dimensions at shape"});
  expect_refused([](Old& lent, smp_tensor&) { lent.described().shape = nullptr; },
                 {"input 0: the DLPack tensor has 2 dimensions at shape"});
  expect_refused([](Old& lent, smp_tensor&) { lent.described().data = nullptr; },
                 {"input 0: data is NULL"});
  expect_refused([](Old&, smp_tensor& tensor) { tensor.data = &tensor; },
                 {"input 0: data, dlpack and dlpack_versioned are members of which one says"});
  expect_refused([](Old&, smp_tensor& tensor) { tensor.name = "none"; }, {"\"none\""});
  expect_refused([](Old&, smp_tensor& tensor) { tensor.struct_size += 8; },
                 {"The program was compiled with a newer smp/c.h"});
}

TEST_F(Dlpack, VersionsAndPairs) {
  Versioned newer(batch_.x);
  newer.managed().version.major = DLPACK_MAJOR_VERSION + 1;
  const smp_tensor tensor = newer.tensor();
  expect_error(smp_model_run(model_, &tensor, 1, nullptr, 0), SMP_ERROR_USAGE,
               {"input 0: the tensor is of DLPack 2.", "and this library knows versions 1.x"});
  EXPECT_EQ(newer.given_back, 1);

  Old old(batch_.x);
  Versioned versioned(batch_.x);
  smp_tensor both = old.tensor();
  both.dlpack_versioned = &versioned.managed();
  expect_error(smp_model_run(model_, &both, 1, nullptr, 0), SMP_ERROR_USAGE,
               {"are members of which one says"});
  EXPECT_EQ(old.given_back, 1);
  EXPECT_EQ(versioned.given_back, 1);

  Old one(batch_.x);
  const smp_tensor twice[2] = {one.tensor(), one.tensor()};
  EXPECT_EQ(smp_model_run(model_, twice, 2, nullptr, 0), SMP_ERROR_USAGE);
  EXPECT_EQ(one.given_back, 1);
}

/// All elements have the members that the first one's size says.
TEST_F(Dlpack, ElementsWithoutASize) {
  Old first(batch_.x), second(batch_.x);
  smp_tensor inputs[2] = {first.tensor(), second.tensor()};
  inputs[1].struct_size = 0;
  expect_error(smp_model_run(model_, inputs, 2, nullptr, 0), SMP_ERROR_USAGE,
               {"input 1: struct_size is 0, and that of input 0 is 192. Set it in each of an"});
  EXPECT_EQ(first.given_back, 1);
  EXPECT_EQ(second.given_back, 1);
  inputs[0].struct_size = int64_t{1} << 50;  // never set: there is no second element
  expect_error(smp_model_run(model_, inputs, 2, nullptr, 0), SMP_ERROR_USAGE,
               {"input 0: struct_size is 1125899906842624, more than the 192 bytes"});
  EXPECT_EQ(first.given_back, 1);

  const smp_tensor x = view(batch_.x);
  smp_tensor outputs[2] = {x, x};
  outputs[1].struct_size = offsetof(smp_tensor, device);
  smp_model* named = nullptr;
  expect_ok(smp_model_open(kNamed, &named));
  const auto scale = torch::ones({8, 1}), loss = torch::zeros({});
  smp_tensor named_inputs[2] = {x, view(scale)};
  named_inputs[1].name = "scale";
  outputs[0] = view(loss);
  expect_error(smp_model_run(named, named_inputs, 2, outputs, 2), SMP_ERROR_USAGE,
               {"output 1: struct_size is 168, and that of output 0 is 192"});
  expect_ok(smp_model_close(named));
}

/// Calls that do not begin take inputs over, too.
TEST_F(Dlpack, RefusedCalls) {
  const smp_tensor x = view(batch_.x), y = view(batch_.y);
  Old without_session(batch_.x);
  smp_tensor lent = without_session.tensor();
  EXPECT_EQ(smp_train(nullptr, &lent, 1, "mse", &y, nullptr), SMP_ERROR_USAGE);
  EXPECT_EQ(without_session.given_back, 1);

  smp_session* const session = open_session();
  Old second(batch_.x);
  const auto ask = [](void* pointer, int64_t, const smp_tensor*, smp_tensor*, int64_t) {
    auto& [session, input] = *static_cast<std::pair<smp_session*, Old*>*>(pointer);
    const smp_tensor tensor = input->tensor();
    auto busy = std::async(std::launch::async, [&, session = session] {
      return smp_evaluate(session, &tensor, 1, nullptr, nullptr, nullptr, nullptr, 0);
    });
    return busy.get() == SMP_ERROR_BUSY ? 0 : 1;
  };
  std::pair<smp_session*, Old*> context(session, &second);
  expect_ok(smp_train_by_gradient(session, &x, 1, ask, &context));
  EXPECT_EQ(second.given_back, 2);  // once by the call in each microbatch

  Old failing(batch_.x), failing_target(batch_.y);
  lent = failing.tensor();
  const smp_tensor target = failing_target.tensor();
  EXPECT_EQ(smp_train(session, &lent, 1, "median", &target, nullptr), SMP_ERROR_USAGE);
  EXPECT_EQ(failing.given_back, 1);
  EXPECT_EQ(failing_target.given_back, 1);
  Versioned ended(batch_.x);
  lent = ended.tensor();
  EXPECT_EQ(smp_train(session, &lent, 1, "mse", &y, nullptr), SMP_ERROR_ENDED);
  EXPECT_EQ(ended.given_back, 1);
  expect_ok(smp_close(session));
}

TEST_F(Dlpack, OutputsAreMemoryOfTheCaller) {
  const smp_tensor x = view(batch_.x);
  Old lent(torch::zeros({8, 2}));
  smp_tensor output = lent.tensor();
  expect_error(smp_model_run(model_, &x, 1, &output, 1), SMP_ERROR_USAGE,
               {"output 0: an output is given by DLPack, which inputs and targets may be"});
  EXPECT_EQ(lent.given_back, 0);
}

/// A program that was compiled with version 1 of the header has smaller structures.
TEST_F(Dlpack, StructuresOfVersion1) {
  constexpr size_t kSize = offsetof(smp_tensor, device);
  const auto wanted = run(view(batch_.x));
  struct Old1 {
    std::byte bytes[kSize];
  } inputs[2], outputs[1];
  const auto write = [](smp_tensor tensor, Old1& place) {
    tensor.struct_size = kSize;
    std::memcpy(&place, &tensor, kSize);
  };
  const auto scale = torch::full({8, 1}, 2.0), got = torch::zeros({8, 2});
  write(view(batch_.x), inputs[0]);
  write(view(got), outputs[0]);
  expect_ok(smp_model_run(model_, reinterpret_cast<smp_tensor*>(inputs), 1,
                          reinterpret_cast<smp_tensor*>(outputs), 1));
  EXPECT_TRUE(torch::equal(got, wanted));

  smp_session* const session = open_session();
  const auto ask = [](void*, int64_t, const smp_tensor* given, smp_tensor* gradients, int64_t) {
    const auto size = static_cast<int64_t>(offsetof(smp_tensor, device));
    return given->struct_size == size && gradients->struct_size == size ? 0 : 1;
  };
  expect_ok(smp_train_by_gradient(session, reinterpret_cast<smp_tensor*>(inputs), 1, ask, nullptr));
  int64_t count = 0;
  expect_ok(smp_gather_state(session, &count));
  write(view(got), outputs[0]);
  expect_ok(smp_state(session, 0, reinterpret_cast<smp_tensor*>(outputs)));
  expect_ok(smp_close(session));

  // The second of an array is where the first's size says.
  smp_model* named = nullptr;
  expect_ok(smp_model_open(kNamed, &named));
  smp_tensor by_name = view(scale);
  by_name.name = "scale";
  write(by_name, inputs[1]);
  expect_ok(smp_model_run(named, reinterpret_cast<smp_tensor*>(inputs), 2, nullptr, 0));
  expect_ok(smp_model_close(named));
}

}  // namespace
}  // namespace smp::testing
