// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/threads/run_ranks.h"
#include "core/check.h"
#include "graph/random.h"
#include "nn/tensor_group.h"
#include "tests/error_of.h"

/// The common part of the tests of operators and modules: ranks, and the results of their parts in
/// one process.
namespace smp::nn::testing {

using smp::testing::error_of;
using smp::testing::expect_has;

using Tensors = std::vector<torch::Tensor>;

/// Plays the ranks of a tensor-parallel group as threads; `fn` is called with its rank. `wrap`
/// may put another communicator in place of a rank's.
inline void on_ranks(
    int ranks, const std::function<void(int rank)>& fn,
    const std::function<comm::CommunicatorPtr(comm::CommunicatorPtr)>& wrap = nullptr) {
  comm::run_ranks(ranks, [&](const comm::CommunicatorPtr& group) {
    at::set_num_threads(1);
    group->set_timeout(std::chrono::seconds(60));
    const TensorGroupScope scope(wrap ? wrap(group) : group);
    fn(group->rank());
  });
}

/// Calls `make` on the ranks of this group one after the other, each with the same seed: rank
/// threads share the default generator. No rank goes on before all have returned.
inline void make_in_turn(const std::function<void()>& make) {
  const auto group = tensor_group();
  for (int rank = 0; rank < group->size(); ++rank) {
    if (rank == group->rank()) {
      torch::manual_seed(7);
      make();
    }
    group->barrier();
  }
}

/// The indices along a dimension of `size` that rank `rank` holds.
inline torch::Tensor held(int64_t size, int64_t blocks, int ranks, int rank) {
  std::vector<int64_t> indices;
  const int64_t part = size / blocks / ranks;
  for (int64_t block = 0; block < blocks; ++block) {
    for (int64_t i = 0; i < part; ++i) indices.push_back((block * ranks + rank) * part + i);
  }
  return torch::tensor(indices);
}

inline torch::Tensor part_of(const torch::Tensor& whole, int64_t dim, int64_t blocks, int ranks,
                             int rank) {
  return whole.index_select(dim, held(whole.size(dim), blocks, ranks, rank));
}

inline torch::Tensor whole_of(const Tensors& parts, int64_t dim, int64_t blocks = 1) {
  const int ranks = static_cast<int>(parts.size());
  auto sizes = parts[0].sizes().vec();
  sizes[dim] *= ranks;
  auto whole = torch::empty(sizes, parts[0].options());
  for (int r = 0; r < ranks; ++r) {
    whole.index_copy_(dim, held(sizes[dim], blocks, ranks, r), parts[r]);
  }
  return whole;
}

inline void expect_equal(const torch::Tensor& got, const torch::Tensor& expected,
                         const std::string& what) {
  ASSERT_TRUE(got.defined()) << what;
  ASSERT_EQ(got.scalar_type(), expected.scalar_type()) << what;
  ASSERT_EQ(got.sizes(), expected.sizes()) << what;
  EXPECT_TRUE(torch::equal(got, expected))
      << what << ": largest difference "
      << (got - expected).abs().max().to(torch::kDouble).item<double>();
}

/// Equal up to `relative` times the largest element of `expected`.
inline void expect_close(const torch::Tensor& got, const torch::Tensor& expected,
                         const std::string& what, double relative = 1e-12) {
  ASSERT_TRUE(got.defined()) << what;
  ASSERT_EQ(got.sizes(), expected.sizes()) << what;
  if (expected.numel() == 0) return;
  const double scale = expected.abs().max().to(torch::kDouble).item<double>();
  const double difference = (got - expected).abs().max().to(torch::kDouble).item<double>();
  EXPECT_LE(difference, relative * scale) << what << ", whose largest element is " << scale;
}

/// Autocast to bfloat16 on this thread until the end of the block.
class Autocast {
 public:
  Autocast() {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::increment_nesting();
  }
  ~Autocast() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
  }
};

/// Another communicator's operations, with a count of this rank's input to collectives.
class CountingGroup final : public comm::Communicator {
 public:
  explicit CountingGroup(comm::CommunicatorPtr inner) : inner_(std::move(inner)) {}

  int64_t elements() const { return elements_; }
  int64_t bytes() const { return bytes_; }
  const std::vector<std::string>& calls() const { return calls_; }

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  const std::string& name() const override { return inner_->name(); }
  WorkPtr isend(const at::Tensor& tensor, int destination, comm::Tag tag) override {
    return inner_->isend(tensor, destination, tag);
  }
  WorkPtr irecv(const at::Tensor& tensor, int source, comm::Tag tag) override {
    return inner_->irecv(tensor, source, tag);
  }
  comm::ReceiveWorkPtr irecv_from_any(const at::Tensor& tensor, comm::Tag tag) override {
    return inner_->irecv_from_any(tensor, tag);
  }
  WorkPtr start(const comm::Collective& call) override {
    count(call);
    return inner_->start(call);
  }
  WorkPtr start(at::Device device, comm::CollectiveTask task) override {
    return inner_->start(device, [this, task](comm::TaskCollectives& group) {
      comm::TaskCollectives counted([&](const comm::Collective& call) {
        count(call);
        group.issue(call);
      });
      task(counted);
    });
  }
  at::Tensor shared_tensor(int64_t numel, at::ScalarType dtype) override {
    return inner_->shared_tensor(numel, dtype);
  }
  comm::Channels open_channels(const std::vector<comm::ChannelSpec>& outgoing,
                               const std::vector<comm::ChannelSpec>& incoming) override {
    return inner_->open_channels(outgoing, incoming);
  }
  comm::CommunicatorPtr split(const std::vector<int>& members, const std::string& name) override {
    return inner_->split(members, name);
  }
  void set_device_transport(const comm::DeviceTransport& transport) override {
    inner_->set_device_transport(transport);
  }
  comm::DeviceTransport device_transport() const override { return inner_->device_transport(); }
  const std::shared_ptr<comm::WorldEnd>& world_end() const override { return inner_->world_end(); }
  void abort(const std::string& reason) noexcept override { inner_->abort(reason); }
  std::string abort_text() const override { return inner_->abort_text(); }
  void set_timeout(std::chrono::milliseconds timeout) override { inner_->set_timeout(timeout); }
  std::chrono::milliseconds timeout() const override { return inner_->timeout(); }
  void check_collectives(bool on) override { inner_->check_collectives(on); }

 private:
  void count(const comm::Collective& call) {
    if (call.kind == comm::Collective::Kind::kBarrier) return;
    elements_ += call.input.numel();
    bytes_ += static_cast<int64_t>(call.input.nbytes());
    calls_.push_back(call.name());
  }

  comm::CommunicatorPtr inner_;
  int64_t elements_ = 0, bytes_ = 0;
  std::vector<std::string> calls_;
};

}  // namespace smp::nn::testing
