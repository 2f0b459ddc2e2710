// SPDX-License-Identifier: Apache-2.0
#include "tests/device/fake_groups.h"

#include <ATen/ATen.h>

#include <utility>
#include <vector>

namespace smp::testing {
namespace {

class DoneWork final : public c10d::Work {
 public:
  bool isCompleted() override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
};

at::Tensor combined(const at::Tensor& a, const at::Tensor& b, const c10d::ReduceOp& op) {
  return op == c10d::ReduceOp::PRODUCT ? at::mul(a, b) : at::add(a, b);
}

}  // namespace

class FakeGroup final : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  FakeGroup(FakeNetwork& network, std::string name, int owner, int rank, int size)
      : Backend(rank, size), network_(network), name_(std::move(name)), owner_(owner) {}

  WorkPtr send(Tensors& tensors, int peer, int) override {
    post(peer, tensors[0]);
    return done();
  }
  WorkPtr recv(Tensors& tensors, int peer, int) override {
    tensors[0].copy_(take(peer));
    return done();
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const auto place = at_distance(rank_ - static_cast<int>(options.rootRank));
    if (place > 0) tensors[0].copy_(take(previous()));
    if (place < size_ - 1) post(next(), tensors[0]);
    return done();
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    const Tensors parts = tensors[0].view({-1}).tensor_split(size_);
    reduce_around(parts, options.reduceOp);
    gather_around(parts);
    return done();
  }
  /// From the rank behind the root around to it.
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    const auto place = at_distance(rank_ - static_cast<int>(options.rootRank) - 1);
    if (place > 0) tensors[0].copy_(combined(tensors[0], on_device(tensors[0]), options.reduceOp));
    if (place < size_ - 1) post(next(), tensors[0]);
    if (place == size_ - 1) finish(tensors[0], options.reduceOp);
    return done();
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    const Tensors parts = input.clone().tensor_split(size_);
    reduce_around(parts, options.reduceOp);
    output.copy_(parts[rank_]);
    return done();
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions&) override {
    const Tensors parts = output.tensor_split(size_);
    parts[rank_].copy_(input);
    gather_around(parts);
    return done();
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions&) override {
    const Tensors from = parts_of(input, input_splits), to = parts_of(output, output_splits);
    to[rank_].copy_(from[rank_]);
    for (int distance = 1; distance < size_; ++distance) {
      const int peer = at_distance(rank_ + distance);
      if (from[peer].numel() > 0) post(peer, from[peer]);
    }
    for (int distance = 1; distance < size_; ++distance) {
      const int peer = at_distance(rank_ - distance);
      if (to[peer].numel() > 0) to[peer].copy_(take(peer));
    }
    return done();
  }
  void setTimeout(std::chrono::milliseconds) override {}
  void abort() override {
    const std::lock_guard<std::mutex> lock(network_.mutex_);
    network_.aborted_.insert({owner_, name_});
    network_.changed_.notify_all();
  }
  const std::string getBackendName() const override { return "fake"; }

 private:
  static WorkPtr done() { return c10::make_intrusive<DoneWork>(); }
  int at_distance(int rank) const { return (rank + 2 * size_) % size_; }
  int next() const { return at_distance(rank_ + 1); }
  int previous() const { return at_distance(rank_ - 1); }

  Tensors parts_of(const at::Tensor& tensor, const std::vector<int64_t>& splits) const {
    return splits.empty() ? tensor.tensor_split(size_) : tensor.split_with_sizes(splits);
  }

  void post(int peer, const at::Tensor& tensor) {
    const at::Tensor message = tensor.detach().cpu().clone();
    const std::lock_guard<std::mutex> lock(network_.mutex_);
    network_.mail_[{name_, rank_, peer}].push_back(message);
    Traffic& sent = network_.sent_[owner_];
    ++sent.messages;
    sent.bytes += static_cast<int64_t>(message.nbytes());
    network_.changed_.notify_all();
  }

  at::Tensor take(int peer) {
    std::unique_lock<std::mutex> lock(network_.mutex_);
    auto& mail = network_.mail_[{name_, peer, rank_}];
    const auto is_aborted = [&] { return network_.aborted_.count({owner_, name_}) > 0; };
    ++network_.waiting_;
    network_.changed_.notify_all();
    network_.changed_.wait(lock, [&] { return !mail.empty() || is_aborted(); });
    --network_.waiting_;
    TORCH_CHECK(!is_aborted(), "fake group '", name_, "' was aborted");
    at::Tensor message = std::move(mail.front());
    mail.pop_front();
    return message;
  }

  at::Tensor on_device(const at::Tensor& like) { return take(previous()).to(like.device()); }

  /// Leaves each rank's part reduced.
  void reduce_around(const Tensors& parts, const c10d::ReduceOp& op) {
    for (int step = 1; step < size_; ++step) {
      post(next(), parts[at_distance(rank_ - step)]);
      const at::Tensor& part = parts[at_distance(rank_ - step - 1)];
      part.copy_(combined(on_device(part), part, op));
    }
    finish(parts[rank_], op);
  }

  void finish(const at::Tensor& tensor, const c10d::ReduceOp& op) const {
    if (op == c10d::ReduceOp::AVG) tensor.div_(size_);
  }

  void gather_around(const Tensors& parts) {
    for (int step = 0; step < size_ - 1; ++step) {
      post(next(), parts[at_distance(rank_ - step)]);
      parts[at_distance(rank_ - step - 1)].copy_(take(previous()));
    }
  }

  FakeNetwork& network_;
  const std::string name_;
  const int owner_;  // among the ranks of the network
};

comm::MakeDeviceGroup FakeNetwork::groups(int owner) {
  return [this, owner](const std::string& name, int rank, int size, comm::GroupUse use) {
    const std::lock_guard<std::mutex> lock(mutex_);
    made_[owner].push_back(name);
    if (use == comm::GroupUse::kLane) lanes_[owner].push_back(name);
    return std::make_shared<FakeGroup>(*this, name, owner, rank, size);
  };
}

Traffic FakeNetwork::take_sent(int rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(sent_[rank], {});
}

std::vector<std::string> FakeNetwork::made(int rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return made_[rank];
}

std::vector<std::string> FakeNetwork::ports(int rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return lanes_[rank];
}

void FakeNetwork::await_waiting(size_t ranks) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return waiting_ >= ranks; });
}

}  // namespace smp::testing
