// SPDX-License-Identifier: Apache-2.0
// The stream rules of pipeline/copy_stream.h, on a device that does copies as late as it may.

#include "pipeline/copy_stream.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <thread>

#include "graph/device_graph.h"
#include "graph/memory_layout.h"
#include "pipeline/message.h"
#include "tests/device/fake_device.h"

namespace smp::testing {
namespace {

using Lines = std::vector<std::string>;
using pipeline::CopyStream;
using pipeline::MessageLayout;

at::Tensor on_host(int64_t count) { return at::zeros({count}); }

TEST(CopyStream, CopiesToTheHostWaitForWhatTheDeviceMade) {
  CopyStream stream(fake_device());
  const at::Tensor made = at::arange(4.0).to(fake_device());
  const at::Tensor message = on_host(4);
  take_fake_log();
  const auto copied = stream.to_host([&] { message.copy_(made, /*non_blocking=*/true); });
  EXPECT_EQ(take_fake_log(), (Lines{"compute records event 0", "copy waits for event 0",
                                    "copy copies to the host", "copy records event 1"}));
  EXPECT_FALSE(at::equal(message, at::arange(4.0))) << "the host goes on";
  copied.synchronize();
  EXPECT_TRUE(at::equal(message, at::arange(4.0)));
}

TEST(CopyStream, ComputationsWaitForWhatArrivesAndTheHostDoesNot) {
  CopyStream stream(fake_device());
  const at::Tensor message = at::arange(4.0);
  take_fake_log();
  std::vector<at::Tensor> arrived;
  stream.to_device(message, arrived, [&] {
    arrived = {at::empty({4}, message.options().device(fake_device())), at::Tensor()};
    arrived[0].copy_(message, /*non_blocking=*/true);
  });
  EXPECT_EQ(take_fake_log(),
            (Lines{"copy copies to the device", "copy records event 0", "compute waits for event 0",
                   "copy records event 1", "compute records event 2"}));
  EXPECT_TRUE(at::equal(arrived[0].cpu(), at::arange(4.0)));
  EXPECT_FALSE(arrived[1].defined());
}

/// A rank that shares the device captures meanwhile, on another thread.
TEST(CopyStream, KeepsMemoryWhileAGraphIsCaptured) {
  graph::DeviceGraphCapture capture(fake_device());
  const at::Tensor x = at::ones({4}, fake_device());
  std::vector<at::Tensor> sums;
  const auto work = capture.capture({}, [&] {
    std::thread rank([&] {
      CopyStream stream(fake_device());
      for (int i = 0; i < 3; ++i) {
        const at::Tensor message = at::full({4}, static_cast<float>(i));
        std::vector<at::Tensor> arrived;
        stream.to_device(message, arrived, [&] {
          arrived = {at::empty({4}, message.options().device(fake_device()))};
          arrived[0].copy_(message, /*non_blocking=*/true);
        });
        sums.push_back(arrived[0] + 1);
      }
    });
    rank.join();
    x.add_(1);
  });
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(at::equal(sums[i].cpu(), at::full({4}, static_cast<float>(i + 1))));
  }
}

/// A message and a flag that is set when its memory goes back to the channel.
std::pair<at::Tensor, std::shared_ptr<bool>> make_message() {
  auto returned = std::make_shared<bool>(false);
  auto memory = std::make_shared<std::vector<float>>(4, 1.0f);
  const at::Tensor message = at::from_blob(
      memory->data(), {4}, [memory, returned](void*) { *returned = true; }, at::kFloat);
  return {message, returned};
}

TEST(CopyStream, KeepsMessagesUntilTheyAreCopied) {
  auto [message, returned] = make_message();
  auto stream = std::make_unique<CopyStream>(fake_device());
  const auto receive = [&](const at::Tensor& from) {
    std::vector<at::Tensor> arrived;
    stream->to_device(from, arrived, [&] {
      arrived = {at::empty({4}, from.options().device(fake_device()))};
      arrived[0].copy_(from, /*non_blocking=*/true);
    });
    return arrived[0];
  };
  const at::Tensor first = receive(message);
  message = at::Tensor();
  EXPECT_FALSE(*returned) << "while the copy may not have begun";
  EXPECT_TRUE(at::equal(first.cpu(), at::ones({4})));  // the host waits for the copy
  auto [second_message, second_returned] = make_message();
  const at::Tensor second = receive(second_message);
  EXPECT_TRUE(*returned) << "at the next message";
  second_message = at::Tensor();
  EXPECT_FALSE(*second_returned);
  stream.reset();
  EXPECT_TRUE(*second_returned) << "with the channel, which waits for the copy";
  EXPECT_TRUE(at::equal(second.cpu(), at::ones({4})));
}

/// The fake device shows it if the library forgets to wait or to record.
TEST(FakeDevice, ReadsWhatIsThereWhenNobodyWaits) {
  const at::Tensor made = at::ones({4}).to(fake_device());
  const at::Tensor host = on_host(4);
  host.copy_(made, /*non_blocking=*/true);
  EXPECT_TRUE(at::equal(host, at::zeros({4}))) << "copied before anyone waited";
  const c10::impl::VirtualGuardImpl guard(fake_device().type());
  guard.synchronizeStream(guard.getStream(fake_device()));
  EXPECT_TRUE(at::equal(host, at::ones({4})));
}

std::vector<graph::TensorMeta> metas_of(const std::vector<at::Tensor>& tensors) {
  std::vector<graph::TensorMeta> metas;
  for (const at::Tensor& tensor : tensors) metas.push_back(graph::TensorMeta::of(tensor));
  return metas;
}

std::vector<at::Tensor> to_fake(std::vector<at::Tensor> tensors) {
  for (at::Tensor& tensor : tensors) {
    const at::Tensor whole =
        at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(fake_device()));
    tensor = whole.copy_(tensor);
  }
  return tensors;
}

/// Dense, transposed, of other types, empty, with gaps, and with both.
std::vector<at::Tensor> various() {
  auto tensors = to_fake({at::arange(15.0).view({3, 5}), at::arange(15.0).view({3, 5}).t(),
                          at::arange(7), at::ones({2, 2}, at::kBool), at::zeros({0, 4}),
                          at::arange(12.0).view({3, 4}).slice(1, 0, 2),
                          at::arange(24.0).view({4, 6}).slice(1, 0, 4).t()});
  tensors.push_back(tensors[2].narrow(0, 3, 4));  // does not begin at a multiple of 64 bytes
  tensors.push_back(tensors[6].narrow(0, 1, 3));
  return tensors;
}

void expect_arrived(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& sent) {
  ASSERT_EQ(got.size(), sent.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].device(), fake_device());
    EXPECT_EQ(got[i].strides(), sent[i].strides()) << i;
    EXPECT_EQ(graph::shift_of(got[i]), graph::shift_of(sent[i])) << i;
    EXPECT_TRUE(at::equal(got[i].cpu(), sent[i].cpu())) << i;
  }
}

TEST(DeviceMessage, GoesThroughHostMemory) {
  const auto sent = various();
  const MessageLayout layout(metas_of(sent));
  EXPECT_EQ(layout.device(), fake_device());
  const at::Tensor message = layout.pack(sent);
  EXPECT_TRUE(message.is_cpu());
  expect_arrived(layout.unpack(message), sent);
}

TEST(DeviceMessage, ChangesSignsOnTheDevice) {
  const at::Tensor lazy = at::_neg_view(to_fake({at::arange(4.0)})[0]);
  const MessageLayout layout(metas_of({lazy}));
  const auto got = layout.unpack(layout.pack({lazy}));
  EXPECT_TRUE(at::equal(got[0].cpu(), -at::arange(4.0)));
}

TEST(DeviceMessage, SendsExpandedDimensionsOnce) {
  const at::Tensor expanded = to_fake({at::arange(4.0).view({4, 1})})[0].expand({4, 100});
  const MessageLayout layout(metas_of({expanded}));
  const auto got = layout.unpack(layout.pack({expanded}));
  EXPECT_EQ(got[0].strides(), expanded.strides());
  EXPECT_TRUE(at::equal(got[0].cpu(), expanded.cpu()));
}

TEST(DeviceMessage, GoesFromDeviceToDeviceWithItsHeaderOnTheHost) {
  const auto sent = various();
  const MessageLayout layout(metas_of(sent));
  const at::Tensor header = at::empty({layout.header_bytes()}, at::kByte);
  const at::Tensor part = at::empty({layout.nbytes() - layout.header_bytes()},
                                    at::TensorOptions(at::kByte).device(fake_device()));
  take_fake_log();
  EXPECT_FALSE(layout.begin_pack(sent, header, part)) << "nothing to wait for";
  const auto got = layout.unpack(header, part);
  for (const std::string& line : take_fake_log()) {
    EXPECT_EQ(line, "compute copies on the device") << "the host waits for nothing";
  }
  EXPECT_TRUE(got[0].is_alias_of(part));
  expect_arrived(got, sent);
}

}  // namespace
}  // namespace smp::testing
