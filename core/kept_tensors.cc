// SPDX-License-Identifier: Apache-2.0
#include "core/kept_tensors.h"

#include <c10/util/Exception.h>

#include <utility>

namespace smp::core {

KeptTensors::~KeptTensors() {
  try {
    for (const Kept& kept : kept_) kept.until.synchronize();
  } catch (const c10::Error&) {
    // The device has failed, and uses nothing any more.
  }
}

void KeptTensors::keep(std::vector<at::Tensor> tensors, const c10::Stream& stream) {
  forget_done();
  c10::Event until(stream.device_type());
  until.record(stream);
  kept_.push_back({std::move(until), std::move(tensors)});
}

void KeptTensors::forget_done() {
  while (!kept_.empty() && kept_.front().until.query()) kept_.pop_front();
}

}  // namespace smp::core
