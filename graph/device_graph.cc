// SPDX-License-Identifier: Apache-2.0
#include "graph/device_graph.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/equal.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <utility>

#include "core/check.h"
#include "graph/devices.h"
#include "graph/generator_scope.h"

namespace smp::graph {
namespace {

MakeDeviceGraphPool& maker_of(c10::DeviceType type) {
  constexpr auto kTypes = static_cast<size_t>(c10::DeviceType::COMPILE_TIME_MAX_DEVICE_TYPES);
  static std::array<MakeDeviceGraphPool, kTypes> makers;
  return makers.at(static_cast<size_t>(type));
}

std::shared_ptr<DeviceGraphPool> make_pool(at::Device device) {
  SMP_CHECK_WITH(UsageError, has_device_graphs(device), "the work of device ", device,
                 " cannot be captured: this build has no graphs for it. Use a GPU, and build "
                 "for CUDA (docs/cuda.md)");
  return maker_of(device.type())(device);
}

c10::Stream current_stream(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

/// The captures that go on in this process, by their streams, whose random operators are theirs.
struct Captures {
  std::mutex mutex;
  std::vector<std::pair<c10::Stream, DeviceGraphCapture*>> all;
  std::atomic<int> count = 0;

  static Captures& get() {
    static Captures captures;
    return captures;
  }

  void add(const c10::Stream& stream, DeviceGraphCapture* capture) {
    const std::lock_guard lock(mutex);
    all.emplace_back(stream, capture);
    ++count;
  }
  void remove(const DeviceGraphCapture* capture) {
    const std::lock_guard lock(mutex);
    all.erase(std::find_if(all.begin(), all.end(),
                           [&](const auto& entry) { return entry.second == capture; }));
    --count;
  }

  /// Null if the stream is not captured.
  DeviceGraphCapture* on(const c10::Stream& stream) {
    const std::lock_guard lock(mutex);
    const auto found = std::find_if(all.begin(), all.end(),
                                    [&](const auto& entry) { return entry.first == stream; });
    return found == all.end() ? nullptr : found->second;
  }
};

}  // namespace

void register_device_graphs(c10::DeviceType type, MakeDeviceGraphPool make) {
  maker_of(type) = std::move(make);
}

bool has_device_graphs(at::Device device) { return maker_of(device.type()) != nullptr; }

void CapturedWork::launch(const RandomKey& key) const {
  if (is_empty_) return;
  std::vector<uint64_t> seeds;
  for (int ordinal : ordinals_) seeds.push_back(stream_seed(key, ordinal));
  graph_->launch(seeds);
}

DeviceGraphCapture::DeviceGraphCapture(at::Device device)
    : device_(with_index(device)), pool_(make_pool(device_)) {
  synchronize(device_);
}

DeviceGraphCapture::~DeviceGraphCapture() {
  try {
    c10::impl::VirtualGuardImpl(device_.type()).synchronizeStream(pool_->stream());
  } catch (const c10::Error&) {
    // The next call that asks the device is told.
  }
}

void DeviceGraphCapture::renew_pool() {
  if (has_begun_ && pool_.use_count() == 1) pool_ = make_pool(device_);
  has_begun_ = true;
}

CapturedWork DeviceGraphCapture::capture(const std::vector<int>& ordinals,
                                         const std::function<void()>& work) {
  renew_pool();
  CapturedWork captured;
  captured.pool_ = pool_;
  captured.graph_ = pool_->make_graph();
  ordinals_ = ordinals;
  draws_ = false;
  const c10::StreamGuard guard(pool_->stream());
  graph_ = captured.graph_.get();
  Captures::get().add(pool_->stream(), this);
  const auto ended = c10::make_scope_exit([this] {
    Captures::get().remove(this);
    graph_ = nullptr;
  });
  try {
    captured.graph_->begin(ordinals.size());
    work();
    captured.is_empty_ = !captured.graph_->end();
  } catch (...) {
    captured.graph_->abandon();
    throw;
  }
  if (draws_) captured.ordinals_ = ordinals;
  return captured;
}

/// An operator that asks the CPU for numbers would have the same ones at each launch.
void DeviceGraphCapture::call_random(const c10::OperatorHandle& op, torch::jit::Stack& stack,
                                     int ordinal) {
  const auto found = std::lower_bound(ordinals_.begin(), ordinals_.end(), ordinal);
  SMP_INTERNAL_ASSERT(found != ordinals_.end() && *found == ordinal, "random operator ", ordinal,
                      " was not announced");
  draws_ = true;
  const at::Generator host = at::make_generator<at::CPUGeneratorImpl>();
  const at::Tensor before = host.get_state();
  {
    const auto lock = lock_generators();
    const GeneratorScope scope(host);
    graph_->call_random(op, stack, static_cast<size_t>(found - ordinals_.begin()));
  }
  SMP_CHECK_WITH(UsageError, at::equal(before, host.get_state()), op.operator_name(),
                 " draws random numbers on the host");
}

void call_keyed(const c10::OperatorHandle& op, torch::jit::Stack& stack, const RandomKey& key,
                int ordinal) {
  if (Captures::get().count > 0) {
    const auto device = accelerator_of(op, stack);
    DeviceGraphCapture* capture = device ? Captures::get().on(current_stream(*device)) : nullptr;
    if (capture != nullptr) return capture->call_random(op, stack, ordinal);
  }
  call_seeded(op, stack, stream_seed(key, ordinal));
}

}  // namespace smp::graph
