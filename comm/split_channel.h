// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <memory>
#include <utility>

#include "comm/channel.h"
#include "core/check.h"

/// Channels of which the first bytes of a message (`ChannelSpec::host_bytes`) go over a channel of
/// the host, and the elements from device to device by a way of their own. The first bytes come
/// when the elements have been given to that way: the host waits for them, and for no device.
namespace smp::comm {

/// Memory of the current stream for the elements of a message.
inline at::Tensor make_elements(int64_t bytes, at::Device device) {
  return at::empty({bytes}, at::TensorOptions(at::kByte).device(device));
}

/// The end that sends. A derived class has the way of the elements.
class SplitSender : public Sender {
 public:
  /// `host` has the first bytes.
  SplitSender(std::unique_ptr<Sender> host, const ChannelSpec& spec)
      : host_(std::move(host)), spec_(spec), bytes_(element_bytes(spec)) {}

  void set_size(const MessageSize& size) final {
    bytes_ = size.bytes - size.host_bytes;
    SMP_INTERNAL_ASSERT(size.host_bytes <= spec_.host_bytes && bytes_ <= element_bytes(spec_),
                        "a message of ", size.host_bytes, " and ", bytes_,
                        " bytes on a channel for ", spec_.host_bytes, " and ",
                        element_bytes(spec_));
    host_->set_size({size.host_bytes});
  }

  const at::Tensor& prepare() final {
    const at::Tensor& message = host_->prepare();
    if (!next_.defined()) {
      next_ = take_elements(bytes_);
    }
    return message;
  }

  at::Tensor device_part() final { return next_; }

  void send() final {
    send_elements(std::exchange(next_, at::Tensor()));
    host_->send();
  }

  void flush() final { host_->flush(); }

 protected:
  /// Memory for the elements of the next message, of so many bytes. There is room for it on the
  /// host's channel.
  virtual at::Tensor take_elements(int64_t bytes) = 0;
  /// Sends them. The current stream has written them, or will have.
  virtual void send_elements(at::Tensor elements) = 0;

  at::Device device() const { return spec_.device; }

 private:
  const std::unique_ptr<Sender> host_;
  const ChannelSpec spec_;
  int64_t bytes_;
  at::Tensor next_;
};

/// Its other end.
class SplitReceiver : public Receiver {
 public:
  SplitReceiver(std::unique_ptr<Receiver> host, const ChannelSpec& spec)
      : host_(std::move(host)), device_(spec.device), bytes_(element_bytes(spec)) {}

  void set_size(const MessageSize& size) final {
    host_->set_size({size.host_bytes});
    bytes_ = size.bytes - size.host_bytes;
  }
  void expect(int messages) final { host_->expect(messages); }
  bool has_arrived() final { return host_->has_arrived(); }

  at::Tensor receive() final {
    at::Tensor message = host_->receive();
    received_ = receive_elements(bytes_);
    return message;
  }

  at::Tensor device_part() final { return std::exchange(received_, at::Tensor()); }

 protected:
  /// The elements, of so many bytes, of the message whose first bytes have come: in memory of the
  /// current stream, which comes after their arrival.
  virtual at::Tensor receive_elements(int64_t bytes) = 0;

  at::Device device() const { return device_; }

 private:
  const std::unique_ptr<Receiver> host_;
  const at::Device device_;
  int64_t bytes_;
  at::Tensor received_;
};

}  // namespace smp::comm
