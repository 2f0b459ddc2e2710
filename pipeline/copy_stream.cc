// SPDX-License-Identifier: Apache-2.0
#include "pipeline/copy_stream.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

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
  forget_read();
  const c10::Stream compute = current();
  {
    // Their memory is this stream's, so nothing that computes can still be using it.
    const c10::StreamGuard guard(stream_);
    copy();
  }
  c10::Event copied(stream_.device_type());
  copied.record(stream_);
  copied.block(compute);
  for (const at::Tensor& tensor : tensors) {
    // It is free for another message when the computations that use it are done.
    if (!tensor.defined() || tensor.device() != stream_.device()) continue;
    VirtualGuardImpl(stream_.device_type())
        .recordDataPtrOnStream(tensor.storage().data_ptr(), compute);
  }
  reads_.push_back({std::move(copied), message});
}

void CopyStream::forget_read() {
  while (!reads_.empty() && reads_.front().done.query()) reads_.pop_front();
}

}  // namespace smp::pipeline
