// SPDX-License-Identifier: Apache-2.0
// Tensors of a device that leave it for the host's memory while it computes.

#include "graph/offload_store.h"

#include <ATen/ATen.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <gtest/gtest.h>

#include "tests/device/fake_device.h"

namespace smp::testing {
namespace {

using Lines = std::vector<std::string>;

TEST(DeviceOffloadStore, CopiesBesideTheComputationsThatItWaitsFor) {
  const at::Tensor tensor = at::arange(4.0).to(fake_device());
  graph::OffloadStore store;
  take_fake_log();
  const auto stored = store.put(tensor);
  store.wait();
  EXPECT_EQ(take_fake_log(),
            (Lines{"compute records event 0", "copy waits for event 0", "copy copies to the host",
                   "copy records event 1", "host waits for event 1"}));
  const at::Tensor back = stored->get();
  EXPECT_EQ(take_fake_log(), (Lines{"copy copies to the device", "copy records event 0",
                                    "compute waits for event 0", "compute records event 1"}))
      << "behind its copy into memory of its own";
  EXPECT_FALSE(back.is_alias_of(tensor)) << "never left";
  EXPECT_TRUE(at::equal(back.cpu(), at::arange(4.0)));
}

/// The host may be done with a tensor long before the device has it back.
TEST(DeviceOffloadStore, GoesThroughPinnedMemoryThatIsKeptUntilItIsBack) {
  const at::Tensor tensor = at::arange(100.0).to(fake_device());
  graph::OffloadStore store;
  const size_t before = fake_pinned_bytes();
  auto stored = store.put(tensor);
  store.wait();
  EXPECT_EQ(fake_pinned_bytes(), before + tensor.nbytes());
  const at::Tensor twice = stored->get() * 2;
  stored.reset();
  EXPECT_EQ(fake_pinned_bytes(), before + tensor.nbytes()) << "it is still to be copied";
  EXPECT_TRUE(at::equal(twice.cpu(), at::arange(100.0) * 2));
}

/// They leave on one stream and return on another, so neither waits for the other's copies.
TEST(DeviceOffloadStore, ReturnsWithoutWaitingForWhatLeaves) {
  HostUses uses;
  graph::OffloadStore store;
  const auto first = store.put(at::ones({4}).to(fake_device(2)));
  store.wait();
  uses.take(2);
  first->prefetch();
  EXPECT_TRUE(at::equal(first->get(), at::ones({4}).to(fake_device(2))));
  std::vector<std::string> done;
  for (const HostUse& use : uses.take(2)) done.push_back(use.what);
  EXPECT_EQ(done, (Lines{"copies Float [4] to the device", "copies Float [4] to the device, waits",
                         "waits in aten::equal of Float [4]"}))
      << "the store's own copy is not waited for";
}

TEST(DeviceOffloadStore, TakesAwayWhatTheDeviceHasYetToMake) {
  const at::Tensor made = at::zeros({4}, fake_device());
  const at::Tensor host = at::arange(4.0);
  made.copy_(host, /*non_blocking=*/true);  // done when a thread waits
  graph::OffloadStore store;
  const auto stored = store.put(made);
  store.wait();
  EXPECT_TRUE(at::equal(stored->get().cpu(), host));
}

TEST(DeviceOffloadStore, MemoryOfTheDeviceIsFreeWhenATensorHasLeft) {
  graph::OffloadStore store;
  at::Tensor tensor = at::ones({100}, fake_device(1));
  const auto weak = tensor.storage().getWeakStorageImpl();
  const auto stored = store.put(tensor.t());
  tensor = at::Tensor();
  store.wait();
  EXPECT_TRUE(weak.expired());
  const at::Tensor back = stored->get();
  EXPECT_EQ(back.device(), fake_device(1));
  EXPECT_TRUE(at::equal(back.cpu(), at::ones({100})));
}

int64_t allocated_bytes(at::Device device) {
  return c10::getDeviceAllocator(device.type())
      ->getDeviceStats(device.index())
      .allocated_bytes[0]
      .current;
}

/// It is copied once more, into memory of the stream that uses it.
TEST(DeviceOffloadStore, LetsGoOfWhatCameBackAtTheNextCall) {
  const at::Device device = fake_device(3);
  const at::Tensor other = at::ones({1}).to(device);
  graph::OffloadStore store;
  for (const bool leaves : {false, true}) {
    const auto stored = store.put(at::ones({100}).to(device));
    store.wait();
    const at::Tensor back = stored->get();
    EXPECT_TRUE(at::equal(back.cpu(), at::ones({100})));  // waits for the copy
    const int64_t before = allocated_bytes(device);
    if (leaves) {
      store.put(other);
    } else {
      stored->prefetch();
    }
    EXPECT_EQ(before - allocated_bytes(device), static_cast<int64_t>(back.nbytes()))
        << (leaves ? "put" : "prefetch");
  }
}

}  // namespace
}  // namespace smp::testing
