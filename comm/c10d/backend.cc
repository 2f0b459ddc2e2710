// SPDX-License-Identifier: Apache-2.0
#include "comm/c10d/backend.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <numeric>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

#include "comm/store/store_communicator.h"
#include "core/check.h"

namespace smp::comm {
namespace {

using c10d::OpType;
using Tensors = std::vector<at::Tensor>;

// Some communications that make one c10d operation, and what is to be done after them.
class GroupWork final : public c10d::Work {
 public:
  GroupWork(int rank, OpType type, std::vector<WorkPtr> works, std::function<void()> after,
            Tensors results, bool has_future)
      : c10d::Work(rank, type),
        works_(std::move(works)),
        after_(std::move(after)),
        results_(std::move(results)) {
    if (has_future) {
      future_ =
          c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    }
  }

  bool isCompleted() override {
    for (const WorkPtr& work : works_) {
      if (!work->test()) {
        return false;
      }
    }
    complete();
    return true;
  }

  bool wait(std::chrono::milliseconds /*timeout*/) override {
    complete();
    if (const std::exception_ptr failure = exception()) {
      std::rethrow_exception(failure);
    }
    return true;
  }

  Tensors result() override { return results_; }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_ ? future_ : c10d::Work::getFuture();  // which throws
  }

  // Waits and completes; by whichever thread comes first. Never throws.
  void complete() {
    std::call_once(once_, [this] {
      std::exception_ptr failure;
      try {
        for (const WorkPtr& work : works_) {
          work->wait();
        }
        const at::NoGradGuard no_grad;
        if (after_) {
          after_();
        }
      } catch (...) {
        failure = std::current_exception();
      }
      finish(failure);
      complete_future(failure);
    });
  }

 private:
  void complete_future(const std::exception_ptr& failure) {
    if (!future_) {
      return;
    }
    if (failure) {
      future_->setError(failure);
    } else {
      future_->markCompleted(c10::IValue(results_));
    }
  }

  const std::vector<WorkPtr> works_;
  const std::function<void()> after_;
  const Tensors results_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::once_flag once_;
};

using GroupWorkPtr = c10::intrusive_ptr<GroupWork>;

// A thread that completes works in the order given, so that their futures fire without a wait.
class Completer {
 public:
  Completer() : thread_([this] { loop(); }) {}

  // Returns when all works are complete.
  ~Completer() {
    push(nullptr);
    thread_.join();
  }

  void push(GroupWorkPtr work) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      works_.push_back(std::move(work));
    }
    added_.notify_one();
  }

 private:
  void loop() {
    while (const GroupWorkPtr work = pop()) {
      work->complete();
    }
  }

  GroupWorkPtr pop() {
    std::unique_lock<std::mutex> lock(mutex_);
    added_.wait(lock, [this] { return !works_.empty(); });
    GroupWorkPtr work = std::move(works_.front());
    works_.pop_front();
    return work;
  }

  std::mutex mutex_;
  std::condition_variable added_;
  std::deque<GroupWorkPtr> works_;  // a null one ends the thread
  std::thread thread_;
};

class SmpBackend final : public c10d::Backend {
 public:
  using Done = c10::intrusive_ptr<c10d::Work>;

  SmpBackend(CommunicatorPtr group, std::string name)
      : c10d::Backend(group->rank(), group->size()),
        name_(std::move(name)),
        group_(std::move(group)) {}

  const std::string getBackendName() const override { return name_; }

  void setSequenceNumberForGroup() override {}  // all ranks start with 0

  uint64_t getSequenceNumberForGroup() override { return collectives_; }

  void setTimeout(std::chrono::milliseconds timeout) override { group_->set_timeout(timeout); }

  void abort() override { group_->abort("the c10d process group was aborted"); }

  Done allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    std::vector<WorkPtr> works;
    for (const at::Tensor& tensor : tensors) {
      works.push_back(group_->async().all_reduce(tensor, reduce_op(options.reduceOp)));
    }
    return collective(OpType::ALLREDUCE, std::move(works), nullptr, tensors);
  }

  Done allreduce_coalesced(Tensors& tensors,
                           const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }

  Done broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    std::vector<WorkPtr> works;
    for (const at::Tensor& tensor : tensors) {
      works.push_back(group_->async().broadcast(tensor, static_cast<int>(options.rootRank)));
    }
    return collective(OpType::BROADCAST, std::move(works), nullptr, tensors);
  }

  Done _allgather_base(at::Tensor& output, at::Tensor& input,
                       const c10d::AllgatherOptions& /*options*/) override {
    return collective(OpType::_ALLGATHER_BASE, {group_->async().all_gather(output, input)}, nullptr,
                      {output});
  }

  Done allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                       const c10d::AllgatherOptions& /*options*/) override {
    check_as_many("allgather_into_tensor_coalesced", outputs.size(), inputs.size());
    std::vector<WorkPtr> works;
    for (size_t i = 0; i < inputs.size(); ++i) {
      works.push_back(group_->async().all_gather(outputs[i], inputs[i]));
    }
    return collective(OpType::COALESCED, std::move(works), nullptr, outputs);
  }

  // Here the outputs are by rank, and then by input.
  Done allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                           const c10d::AllgatherOptions& /*options*/) override {
    check_as_many("allgather_coalesced", outputs.size(), getSize());
    std::vector<WorkPtr> works;
    Tensors flats;
    for (const at::Tensor& input : inputs) {
      flats.push_back(room_for_all(input));
      works.push_back(group_->async().all_gather(flats.back(), input));
    }
    Tensors results;
    for (const Tensors& of_rank : outputs) {
      check_as_many("allgather_coalesced", of_rank.size(), inputs.size());
      results.insert(results.end(), of_rank.begin(), of_rank.end());
    }
    const auto unpack_all = [flats, outputs] {
      for (size_t i = 0; i < flats.size(); ++i) {
        Tensors parts;
        for (const Tensors& of_rank : outputs) {
          parts.push_back(of_rank[i]);
        }
        unpack(flats[i], parts);
      }
    };
    return collective(OpType::ALLGATHER_COALESCED, std::move(works), unpack_all, results);
  }

  Done allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::AllgatherOptions& /*options*/) override {
    const at::Tensor& input = single("allgather", "input", inputs);
    const Tensors parts = one_each("allgather", "output", outputs);
    const at::Tensor flat = room_for_all(input);
    return collective(
        OpType::ALLGATHER, {group_->async().all_gather(flat, input)},
        [flat, parts] { unpack(flat, parts); }, parts);
  }

  Done _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                            const c10d::ReduceScatterOptions& options) override {
    return collective(OpType::_REDUCE_SCATTER_BASE,
                      {group_->async().reduce_scatter(output, input, reduce_op(options.reduceOp))},
                      nullptr, {output});
  }

  Done reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                       const c10d::ReduceScatterOptions& options) override {
    check_as_many("reduce_scatter_tensor_coalesced", outputs.size(), inputs.size());
    std::vector<WorkPtr> works;
    for (size_t i = 0; i < inputs.size(); ++i) {
      works.push_back(
          group_->async().reduce_scatter(outputs[i], inputs[i], reduce_op(options.reduceOp)));
    }
    return collective(OpType::COALESCED, std::move(works), nullptr, outputs);
  }

  Done reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                      const c10d::ReduceScatterOptions& options) override {
    const at::Tensor& output = single("reduce_scatter", "output", outputs);
    const at::Tensor flat = pack(one_each("reduce_scatter", "input", inputs));
    return collective(OpType::REDUCE_SCATTER,
                      {group_->async().reduce_scatter(output, flat, reduce_op(options.reduceOp))},
                      nullptr, {output});
  }

  Done reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    const at::Tensor& tensor = single("reduce", "tensor", tensors);
    const int root = static_cast<int>(options.rootRank);
    return collective(OpType::REDUCE,
                      {group_->async().reduce(tensor, root, reduce_op(options.reduceOp))}, nullptr,
                      {tensor});
  }

  Done gather(std::vector<Tensors>& outputs, Tensors& inputs,
              const c10d::GatherOptions& options) override {
    const int root = static_cast<int>(options.rootRank);
    const at::Tensor& input = single("gather", "input", inputs);
    if (getRank() != root) {
      return collective(OpType::GATHER, {group_->async().gather(at::Tensor(), input, root)},
                        nullptr, {});
    }
    const Tensors parts = one_each("gather", "output", outputs);
    const at::Tensor flat = room_for_all(input);
    return collective(
        OpType::GATHER, {group_->async().gather(flat, input, root)},
        [flat, parts] { unpack(flat, parts); }, parts);
  }

  Done scatter(Tensors& outputs, std::vector<Tensors>& inputs,
               const c10d::ScatterOptions& options) override {
    const int root = static_cast<int>(options.rootRank);
    const at::Tensor& output = single("scatter", "output", outputs);
    const at::Tensor flat =
        getRank() == root ? pack(one_each("scatter", "input", inputs)) : at::Tensor();
    return collective(OpType::SCATTER, {group_->async().scatter(output, flat, root)}, nullptr,
                      outputs);
  }

  Done alltoall(Tensors& outputs, Tensors& inputs,
                const c10d::AllToAllOptions& /*options*/) override {
    check_one_each("alltoall", "output", outputs);
    check_one_each("alltoall", "input", inputs);
    const at::Tensor from = pack(inputs);
    const std::vector<int64_t> receives = elements_of(outputs);
    const int64_t room = std::accumulate(receives.begin(), receives.end(), int64_t{0});
    const at::Tensor to = at::empty({room}, outputs.front().options());
    return collective(
        OpType::ALLTOALL, {group_->async().all_to_all(to, receives, from, elements_of(inputs))},
        [to, outputs] { unpack(to, outputs); }, outputs);
  }

  Done alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                     std::vector<int64_t>& input_splits,
                     const c10d::AllToAllOptions& /*options*/) override {
    const auto receives = elements_of_rows("output", output, output_splits);
    const auto sends = elements_of_rows("input", input, input_splits);
    return collective(OpType::ALLTOALL_BASE,
                      {group_->async().all_to_all(output, receives, input, sends)}, nullptr,
                      {output});
  }

  Done send(Tensors& tensors, int destination, int tag) override {
    const at::Tensor& tensor = single("send", "tensor", tensors);
    return point_to_point(OpType::SEND, group_->isend(tensor, destination, tag), tensors);
  }

  Done recv(Tensors& tensors, int source, int tag) override {
    const at::Tensor& tensor = single("recv", "tensor", tensors);
    return point_to_point(OpType::RECV, group_->irecv(tensor, source, tag), tensors);
  }

  Done recvAnysource(Tensors& /*tensors*/, int /*tag*/) override {
    core::fail<UsageError>("c10d recv on group '", group_->name(),
                           "': expected the rank to receive from, got any. Name the rank; sums "
                           "and results are in rank order here, never in order of arrival.");
  }

  Done barrier(const c10d::BarrierOptions& /*options*/) override {
    return collective(OpType::BARRIER, {group_->async().barrier()}, nullptr, {});
  }

 private:
  ReduceOp reduce_op(const c10d::ReduceOp& op) const {
    switch (op.op_) {
      case c10d::ReduceOp::SUM:
        return ReduceOp::kSum;
      case c10d::ReduceOp::AVG:
        return ReduceOp::kAverage;
      case c10d::ReduceOp::MIN:
        return ReduceOp::kMin;
      case c10d::ReduceOp::MAX:
        return ReduceOp::kMax;
      case c10d::ReduceOp::PRODUCT:
        return ReduceOp::kProduct;
      case c10d::ReduceOp::BAND:
        return ReduceOp::kBitAnd;
      case c10d::ReduceOp::BOR:
        return ReduceOp::kBitOr;
      case c10d::ReduceOp::BXOR:
        return ReduceOp::kBitXor;
      default:
        core::fail<UsageError>("c10d reduction on group '", group_->name(),
                               "': expected SUM, AVG, MIN, MAX, PRODUCT, BAND, BOR or BXOR, got "
                               "c10d::ReduceOp number ",
                               static_cast<int>(op.op_), ".");
    }
  }

  at::Tensor room_for_all(const at::Tensor& part) const {
    return at::empty({getSize() * part.numel()}, part.options());
  }

  Done collective(OpType type, std::vector<WorkPtr> works, std::function<void()> after,
                  const Tensors& results) {
    ++collectives_;
    auto work = c10::make_intrusive<GroupWork>(getRank(), type, std::move(works), std::move(after),
                                               results, true);
    completer_.push(work);
    return work;
  }

  Done point_to_point(OpType type, WorkPtr work, const Tensors& results) {
    return c10::make_intrusive<GroupWork>(getRank(), type, std::vector<WorkPtr>{std::move(work)},
                                          nullptr, results, false);
  }

  const at::Tensor& single(const char* call, const char* what, const Tensors& tensors) const {
    SMP_CHECK_WITH(UsageError, tensors.size() == 1, "c10d ", call, " on group '", group_->name(),
                   "': expected one ", what, ", got ", tensors.size(), ".");
    return tensors.front();
  }

  void check_as_many(const char* call, size_t got, size_t expected) const {
    SMP_CHECK_WITH(UsageError, got == expected, "c10d ", call, " on group '", group_->name(),
                   "': expected ", expected, " outputs, got ", got, ".");
  }

  void check_one_each(const char* call, const char* what, const Tensors& tensors) const {
    SMP_CHECK_WITH(UsageError, tensors.size() == static_cast<size_t>(getSize()), "c10d ", call,
                   " on group '", group_->name(), "': expected one ", what,
                   " tensor for each of the ", getSize(), " ranks, got ", tensors.size(), ".");
  }

  Tensors one_each(const char* call, const char* what, const std::vector<Tensors>& lists) const {
    SMP_CHECK_WITH(UsageError, lists.size() == 1, "c10d ", call, " on group '", group_->name(),
                   "': expected one list of ", what, " tensors, got ", lists.size(), ".");
    check_one_each(call, what, lists.front());
    return lists.front();
  }

  static std::vector<int64_t> elements_of(const Tensors& tensors) {
    std::vector<int64_t> elements;
    for (const at::Tensor& tensor : tensors) {
      elements.push_back(tensor.numel());
    }
    return elements;
  }

  // For each rank, the elements of as many rows as `splits` says, or evenly when it is empty.
  std::vector<int64_t> elements_of_rows(const char* what, const at::Tensor& tensor,
                                        const std::vector<int64_t>& splits) const {
    const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
    std::vector<int64_t> elements =
        splits.empty() ? std::vector<int64_t>(getSize(), rows / getSize()) : splits;
    SMP_CHECK_WITH(UsageError,
                   elements.size() == static_cast<size_t>(getSize()) &&
                       std::accumulate(elements.begin(), elements.end(), int64_t{0}) == rows,
                   "c10d alltoall_base on group '", group_->name(), "': the ", rows,
                   " rows of the ", what, " do not divide into [", c10::Join(", ", elements),
                   "], one number for each of the ", getSize(), " ranks.");
    for (int64_t& number : elements) {
      number *= tensor.numel() / std::max<int64_t>(rows, 1);
    }
    return elements;
  }

  static at::Tensor pack(const Tensors& parts) {
    Tensors flat;
    for (const at::Tensor& part : parts) {
      flat.push_back(part.flatten());
    }
    return at::cat(flat);
  }

  static void unpack(const at::Tensor& flat, const Tensors& parts) {
    int64_t begin = 0;
    for (at::Tensor part : parts) {
      part.copy_(flat.narrow(0, begin, part.numel()).view(part.sizes()));
      begin += part.numel();
    }
  }

  const std::string name_;
  const CommunicatorPtr group_;
  std::atomic<uint64_t> collectives_{0};
  Completer completer_;  // ends before the rest
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_backend(CommunicatorPtr group, const std::string& name) {
  return c10::make_intrusive<SmpBackend>(std::move(group), name);
}

c10::intrusive_ptr<c10d::Backend> make_smddp_backend(c10::intrusive_ptr<c10d::Store> store,
                                                     int rank, int size,
                                                     std::chrono::milliseconds timeout) {
  const CommunicatorPtr world = make_store_world(std::move(store), rank, size, timeout);
  world->set_timeout(timeout);
  return make_backend(world, "smddp");
}

}  // namespace smp::comm
