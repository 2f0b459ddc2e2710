// SPDX-License-Identifier: Apache-2.0
#include "pipeline/copy_stream.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "graph/memory_layout.h"

namespace smp::pipeline {

using c10::impl::VirtualGuardImpl;

CopyStream::CopyStream(at::Device device)
    : stream_(VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device)) {}

CopyStream::~CopyStream() {
  try {
    VirtualGuardImpl(stream_.device_type()).synchronizeStream(stream_);
  } catch (const c10::Error&) {
    // The device has failed, and copies no more.
  }
}

c10::Stream CopyStream::current() const {
  return VirtualGuardImpl(stream_.device_type()).getStream(stream_.device());
}

c10::Event CopyStream::to_host(const std::function<void()>& copy) {
  c10::Event made(stream_.device_type()), copied(stream_.device_type());
  made.record(current());
  made.block(stream_);
  {
    const c10::StreamGuard guard(stream_);
    copy();
  }
  copied.record(stream_);
  return copied;
}

void CopyStream::to_device(const at::Tensor& message, std::vector<at::Tensor>& tensors,
                           const std::function<void()>& copy) {
  const size_t first = tensors.size();
  messages_.forget_done();
  {
    // Their memory is this stream's, so nothing that computes can still be using it.
    const c10::StreamGuard guard(stream_);
    copy();
  }
  c10::Event copied(stream_.device_type());
  copied.record(stream_);
  copied.block(current());
  messages_.keep({message}, stream_);
  std::vector<at::Tensor> arrived;
  for (size_t i = first; i < tensors.size(); ++i) {
    at::Tensor& tensor = tensors[i];
    if (!tensor.defined() || tensor._is_zerotensor() || tensor.device() != stream_.device()) {
      continue;
    }
    arrived.push_back(std::exchange(tensor, graph::copy_as_laid_out(tensor)));
  }
  arrived_.keep(std::move(arrived), current());
}

}  // namespace smp::pipeline
