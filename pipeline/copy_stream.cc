// SPDX-License-Identifier: Apache-2.0
#include "pipeline/copy_stream.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "graph/layout.h"

namespace smp::pipeline {

using c10::impl::VirtualGuardImpl;

namespace {

template <class Queue>
void forget_done(Queue& queue) {
  while (!queue.empty() && queue.front().until.query()) queue.pop_front();
}

}  // namespace

CopyStream::CopyStream(at::Device device)
    : stream_(VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device)) {}

CopyStream::~CopyStream() {
  try {
    VirtualGuardImpl(stream_.device_type()).synchronizeStream(stream_);
    for (const Kept& arrival : arrivals_) arrival.until.synchronize();
  } catch (const c10::Error&) {
    // The device has failed, and copies no more.
  }
}

c10::Stream CopyStream::current() const {
  return VirtualGuardImpl(stream_.device_type()).getStream(stream_.device());
}

c10::Event CopyStream::recorded(const c10::Stream& stream) const {
  c10::Event event(stream_.device_type());
  event.record(stream);
  return event;
}

c10::Event CopyStream::to_host(const std::function<void()>& copy) {
  recorded(current()).block(stream_);
  {
    const c10::StreamGuard guard(stream_);
    copy();
  }
  return recorded(stream_);
}

void CopyStream::to_device(const at::Tensor& message, std::vector<at::Tensor>& tensors,
                           const std::function<void()>& copy) {
  forget_done(reads_);
  forget_done(arrivals_);
  const size_t first = tensors.size();
  {
    // Their memory is this stream's, so nothing that computes can still be using it.
    const c10::StreamGuard guard(stream_);
    copy();
  }
  c10::Event copied = recorded(stream_);
  copied.block(current());
  reads_.push_back({std::move(copied), {message}});
  std::vector<at::Tensor> arrived;
  for (size_t i = first; i < tensors.size(); ++i) {
    at::Tensor& tensor = tensors[i];
    if (!tensor.defined() || tensor._is_zerotensor() || tensor.device() != stream_.device()) {
      continue;
    }
    arrived.push_back(std::exchange(tensor, graph::copy_as_laid_out(tensor)));
  }
  arrivals_.push_back({recorded(current()), std::move(arrived)});
}

}  // namespace smp::pipeline
