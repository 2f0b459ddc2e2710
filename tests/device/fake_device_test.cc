// SPDX-License-Identifier: Apache-2.0
// The fake device itself: it is as late as it may, and finds breaches of the rules of streams.

#include "tests/device/fake_device.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include "tests/error_of.h"

namespace smp::testing {
namespace {

class FakeDevice : public ::testing::Test {
 protected:
  const c10::impl::VirtualGuardImpl guard_{fake_device().type()};
  const c10::Stream compute_ = guard_.getStream(fake_device());
  const c10::Stream side_ = guard_.getStreamFromGlobalPool(fake_device());
  BrokenRules rules_;

  /// Known to the host, so on no stream's way.
  at::Tensor ones(int64_t count) {
    const at::Tensor made = at::ones({count}, fake_device());
    guard_.synchronizeStream(compute_);
    return made;
  }

  void let_wait(const c10::Stream& waiting, const c10::Stream& waited) {
    c10::Event event(fake_device().type());
    event.record(waited);
    event.block(waiting);
  }

  void on_side(const std::function<void()>& call) {
    const c10::StreamGuard guard(side_);
    call();
  }

  void expect_rules_kept() { EXPECT_EQ(rules_.take(), std::vector<std::string>{}); }

  void expect_broken(std::initializer_list<std::string> parts) {
    const auto broken = rules_.take();
    ASSERT_EQ(broken.size(), 1u);
    expect_has(broken[0], parts);
  }

  std::string side_text() const { return "stream " + std::to_string(side_.id()) + " of fake:0"; }
};

/// The content of memory, whatever the device has been asked to do.
float first_of(const at::Tensor& tensor) {
  return *static_cast<const float*>(for_kernels(tensor.const_data_ptr()));
}

/// Raw reads and writes beside the device's kernels are faults, as on a GPU.
TEST_F(FakeDevice, TheHostCannotTouchMemory) {
  const at::Tensor x = ones(4);
  auto* const numbers = static_cast<volatile float*>(x.mutable_data_ptr());
  EXPECT_DEATH(numbers[0] = 2, "");
  EXPECT_DEATH(std::exit(numbers[3] == 1), "");
  EXPECT_EQ(first_of(x), 1);
}

TEST_F(FakeDevice, ResizedTensorsKeepTheirElements) {
  const at::Tensor x = ones(4);
  x.resize_({5000});
  EXPECT_TRUE(at::equal(x.narrow(0, 0, 4).cpu(), at::ones({4})));
}

TEST_F(FakeDevice, KernelsRunWhenTheHostWaits) {
  const at::Tensor x = ones(4);
  x.add_(1);
  const at::Tensor y = x * 3;
  EXPECT_EQ(y.sizes(), x.sizes()) << "the shape is known at once";
  EXPECT_EQ(first_of(x), 1);
  guard_.synchronizeStream(compute_);
  EXPECT_EQ(first_of(x), 2);
  EXPECT_EQ(first_of(y), 6);
}

TEST_F(FakeDevice, KernelsRunOnTheirStream) {
  const at::Tensor x = ones(4), y = ones(4);
  x.add_(1);
  on_side([&] { y.add_(1); });
  guard_.synchronizeStream(side_);
  EXPECT_EQ(first_of(x), 1);
  EXPECT_EQ(first_of(y), 2);
  let_wait(side_, compute_);
  guard_.synchronizeStream(side_);
  EXPECT_EQ(first_of(x), 2) << "one stream waits for the other, and the host for that one";
}

TEST_F(FakeDevice, AnEventIsReachedWhenItHasBeenAskedOftenEnough) {
  const at::Tensor x = ones(4);
  x.add_(1);
  x.add_(1);
  c10::Event event(fake_device().type());
  event.record(compute_);
  EXPECT_FALSE(event.query());
  EXPECT_TRUE(event.query());
  EXPECT_EQ(first_of(x), 3);
}

TEST_F(FakeDevice, NumbersOnTheHostAreReadWhenAKernelIsCalled) {
  const at::Tensor x = ones(4), factor = at::scalar_tensor(2);
  const at::Tensor y = x * factor;
  factor.fill_(5);
  guard_.synchronizeStream(compute_);
  EXPECT_EQ(first_of(y), 2);
}

TEST_F(FakeDevice, SizesOfOutArgumentsAreKnownAtOnce) {
  const at::Tensor x = ones(4);
  at::Tensor out = at::empty({0}, fake_device());
  at::mul_out(out, x, x + 1);
  EXPECT_EQ(out.sizes(), x.sizes());
  EXPECT_TRUE(at::equal(out.cpu(), at::full({4}, 2.0f)));
  expect_rules_kept();
}

TEST_F(FakeDevice, MemoryIsOverwrittenWhenItsStreamComesToThat) {
  const at::Tensor x = ones(4);
  at::Tensor y;
  {
    const at::Tensor between = x + 1;  // freed before it is made
    y = between * 3;
  }
  EXPECT_TRUE(at::equal(y.cpu(), at::full({4}, 6.0f)));
  expect_rules_kept();
}

TEST_F(FakeDevice, AReaderOnAnotherStreamWaitsForTheWriter) {
  const at::Tensor x = ones(4), y = ones(4);
  x.add_(1);
  on_side([&] { y.add_(x); });
  expect_broken({"aten::add on " + side_text(),
                 " reads memory of 16 bytes and does not wait for stream 0 of fake:0, which writes "
                 "it: aten::add"});
  let_wait(side_, compute_);
  on_side([&] { y.add_(x); });
  expect_rules_kept();
}

TEST_F(FakeDevice, AWriterOnAnotherStreamWaitsForTheReader) {
  const at::Tensor x = ones(4), y = ones(4);
  y.add_(x);
  on_side([&] { x.mul_(2); });
  expect_broken({"aten::mul on " + side_text(), " writes memory", "which reads it: aten::add"});
}

TEST_F(FakeDevice, StreamsMayReadTogetherAndWriteBesideEachOther) {
  const at::Tensor x = ones(4), y = ones(4), z = ones(4), parts = ones(8);
  y.add_(x);
  parts.narrow(0, 0, 4).add_(1);
  on_side([&] {
    z.add_(x);
    parts.narrow(0, 4, 4).add_(1);
  });
  expect_rules_kept();
}

TEST_F(FakeDevice, WhatTheHostHasWaitedForNeedNotBeWaitedForAgain) {
  const at::Tensor x = ones(4), y = ones(4);
  x.add_(1);
  let_wait(side_, compute_);
  guard_.synchronizeStream(side_);  // and so for the work it waited for
  on_side([&] { y.add_(x); });
  expect_rules_kept();
}

TEST_F(FakeDevice, MemoryMayStillBeInUseOnTheStreamThatAllocatesIt) {
  const at::Tensor x = ones(4);
  x.add_(1);
  const at::Tensor fresh = at::empty({4}, fake_device());
  on_side([&] { fresh.zero_(); });
  expect_broken(
      {" writes memory of 16 bytes and does not wait for stream 0 of fake:0, which writes "
       "it: what it had there before"});
}

TEST_F(FakeDevice, AUseOnAnotherStreamIsRecordedBeforeMemoryIsFreed) {
  const at::Tensor y = ones(4);
  at::Tensor x = ones(4);
  on_side([&] { y.add_(x); });
  x.reset();
  expect_broken({"memory of 16 bytes, allocated on stream 0 of fake:0, is freed while " +
                 side_text() +
                 " may use it (aten::add): record that use, "
                 "recordDataPtrOnStream"});

  x = ones(4);
  on_side([&] { y.add_(x); });
  guard_.recordDataPtrOnStream(x.storage().data_ptr(), side_);
  x.reset();
  expect_rules_kept();
  guard_.synchronizeStream(side_);
  EXPECT_EQ(first_of(y), 3) << "kept until the stream had read it";
}

TEST_F(FakeDevice, AUseThatItsStreamHasWaitedForNeedNotBeRecorded) {
  const at::Tensor y = ones(4);
  at::Tensor x = ones(4);
  on_side([&] { y.add_(x); });
  let_wait(compute_, side_);
  x.reset();
  x = ones(4);
  on_side([&] { y.add_(x); });
  guard_.synchronizeStream(side_);
  x.reset();
  expect_rules_kept();
}

TEST_F(FakeDevice, DevicesWaitForEachOtherInACopyBetweenThem) {
  const at::Tensor x = ones(4);
  x.add_(1);
  const at::Tensor there = x.to(fake_device(1));
  there.add_(1);
  x.zero_();
  EXPECT_TRUE(at::equal(there.cpu(), at::full({4}, 3.0f)));
  expect_rules_kept();
}

TEST(FakeStreamPool, HandsItsStreamsOutInTurn) {
  const c10::impl::VirtualGuardImpl guard(fake_device().type());
  const FakeStreamPool two(2);
  const c10::Stream first = guard.getStreamFromGlobalPool(fake_device());
  const c10::Stream second = guard.getStreamFromGlobalPool(fake_device());
  EXPECT_NE(first, second);
  EXPECT_NE(guard.getStreamFromGlobalPool(fake_device(1)).device(), first.device());
  EXPECT_EQ(guard.getStreamFromGlobalPool(fake_device()), first);
  EXPECT_EQ(guard.getStreamFromGlobalPool(fake_device()), second);
}

TEST(FakeDeviceDeathTest, ABrokenRuleEndsTheProgram) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        const c10::impl::VirtualGuardImpl guard(fake_device().type());
        const at::Tensor x = at::ones({4}, fake_device());
        const c10::StreamGuard side(guard.getStreamFromGlobalPool(fake_device()));
        x.add_(1);
      },
      "the fake device: aten::add on stream .* memory of 16 bytes and does not wait for stream 0 "
      "of "
      "fake:0");
}

}  // namespace
}  // namespace smp::testing
