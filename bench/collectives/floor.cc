// SPDX-License-Identifier: Apache-2.0
#include "bench/collectives/floor.h"

#include <ATen/ops/zeros.h>

#include <algorithm>

#include "comm/vectorize.h"

namespace {

constexpr int64_t kBlock = 1024;
constexpr int64_t kStop = -1;

__attribute__((target("avx2"))) void add(float* sum, const float* other, int64_t count) {
  SMP_VECTORIZE
  for (int64_t i = 0; i < count; ++i) {
    sum[i] += other[i];
  }
}

__attribute__((target("avx2"))) void add_both(float* a, float* b, int64_t count) {
  SMP_VECTORIZE
  for (int64_t i = 0; i < count; ++i) {
    a[i] = b[i] = a[i] + b[i];
  }
}

}  // namespace

Floor::Floor(int buffers, int64_t elements) : elements_(elements) {
  for (int i = 0; i < buffers; ++i) {
    tensors_.push_back(at::zeros({elements}));
    buffers_.push_back(tensors_.back().mutable_data_ptr<float>());
  }
}

void Floor::begin() {
  asked_ = done_ = 0;
  thread_ = std::thread([this] { loop(); });
}

void Floor::end() {
  asked_ = kStop;
  thread_.join();
}

void Floor::run() {
  const int64_t number = done_.load() + 1;
  asked_.store(number, std::memory_order_release);
  add_half(0);
  while (done_.load(std::memory_order_acquire) != number) {
  }
}

void Floor::loop() {
  int64_t last = 0;
  while (true) {
    const int64_t asked = asked_.load(std::memory_order_acquire);
    if (asked == kStop) {
      return;
    }
    if (asked != last) {
      add_half(1);
      last = asked;
      done_.store(asked, std::memory_order_release);
    }
  }
}

void Floor::add_half(int half) {
  const int64_t end = half == 0 ? elements_ / 2 : elements_;
  for (int64_t begin = half == 0 ? 0 : elements_ / 2; begin < end; begin += kBlock) {
    const int64_t count = std::min(kBlock, end - begin);
    float* const first = buffers_[0] + begin;
    if (buffers_.size() == 2) {
      add_both(first, buffers_[1] + begin, count);
      continue;
    }
    for (size_t i = 1; i < buffers_.size(); ++i) {
      add(first, buffers_[i] + begin, count);
    }
    for (size_t i = 1; i < buffers_.size(); ++i) {
      std::copy(first, first + count, buffers_[i] + begin);
    }
  }
}
