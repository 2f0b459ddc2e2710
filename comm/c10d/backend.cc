// SPDX-License-Identifier: Apache-2.0
#include "comm/c10d/backend.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <numeric>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

#include "comm/c10d/group_work.h"
#include "comm/store/store_communicator.h"
#include "core/check.h"

namespace smp::comm {
namespace {

using c10d::OpType;
using Tensors = std::vector<at::Tensor>;

// The tensors of a call as a communicator takes them: contiguous and in host memory. In place of
// one on another device stands a copy there, which waits for the device. In place of a dense one
// with permuted dimensions (transposed, channels_last) stands a copy in the order of its indices,
// since ranks may permute differently. The communicator refuses a tensor that is neither.
class InOrder {
 public:
  at::Tensor read(const at::Tensor& tensor) {
    return needs_copy(tensor) ? copy_of(tensor) : tensor;
  }

  at::Tensor write(const at::Tensor& tensor) {
    return needs_copy(tensor)
               ? copied_back(at::empty(tensor.sizes(), tensor.options().device(at::kCPU)), tensor)
               : tensor;
  }

  at::Tensor update(const at::Tensor& tensor) {
    return needs_copy(tensor) ? copied_back(copy_of(tensor), tensor) : tensor;
  }

  // Copies written values back to the tensors of the caller.
  std::function<void()> copy_back() const {
    return [copies = copies_] {
      for (const auto& [copy, tensor] : copies) {
        tensor.copy_(copy);
      }
    };
  }

 private:
  static bool needs_copy(const at::Tensor& tensor) {
    return tensor.defined() && tensor.layout() == c10::kStrided &&
           (!tensor.is_cpu() || !tensor.is_contiguous()) && tensor.is_non_overlapping_and_dense();
  }

  static at::Tensor copy_of(const at::Tensor& tensor) {
    const at::AutoDispatchBelowADInplaceOrView as_the_communicator;
    return tensor.cpu().contiguous();
  }

  at::Tensor copied_back(at::Tensor copy, const at::Tensor& tensor) {
    copies_.emplace_back(copy, tensor);
    return copy;
  }

  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;
};

class SmpBackend final : public c10d::Backend {
 public:
  using Done = c10::intrusive_ptr<c10d::Work>;

  SmpBackend(CommunicatorPtr group, std::string name)
      : c10d::Backend(group->rank(), group->size()),
        name_(std::move(name)),
        group_(std::move(group)),
        context_(std::make_shared<WorkContext>(
            WorkContext{name_, group_->name(), group_->rank(), std::make_shared<Completer>()})) {}

  ~SmpBackend() override { context_->completer->stop(); }

  const std::string getBackendName() const override { return name_; }

  void setSequenceNumberForGroup() override {}  // all ranks start with 0

  uint64_t getSequenceNumberForGroup() override { return collectives_; }

  void setTimeout(std::chrono::milliseconds timeout) override { group_->set_timeout(timeout); }

  void abort() override { group_->abort("the c10d process group was aborted"); }

  Done allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    const auto start = [&](InOrder& in_order, size_t i) {
      return group_->async().all_reduce(in_order.update(tensors[i]), reduce_op(options.reduceOp));
    };
    return each({OpType::ALLREDUCE, "all_reduce"}, tensors, tensors, start);
  }

  Done allreduce_coalesced(Tensors& tensors,
                           const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }

  Done broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const auto start = [&](InOrder& in_order, size_t i) {
      return group_->async().broadcast(in_order.update(tensors[i]),
                                       static_cast<int>(options.rootRank));
    };
    return each({OpType::BROADCAST, "broadcast"}, tensors, tensors, start);
  }

  Done _allgather_base(at::Tensor& output, at::Tensor& input,
                       const c10d::AllgatherOptions& /*options*/) override {
    return all_gather_each({OpType::_ALLGATHER_BASE, "_all_gather_base"}, {input}, {output});
  }

  Done allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                       const c10d::AllgatherOptions& /*options*/) override {
    check_as_many("allgather_into_tensor_coalesced", outputs.size(), inputs.size());
    return all_gather_each({OpType::COALESCED, "all_gather_into_tensor_coalesced"}, inputs,
                           outputs);
  }

  // Here the outputs are by rank, and then by input.
  Done allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                           const c10d::AllgatherOptions& /*options*/) override {
    check_as_many("allgather_coalesced", outputs.size(), getSize());
    std::vector<WorkPtr> works;
    Tensors flats;
    for (const at::Tensor& input : inputs) {
      flats.push_back(room_for_all(input));
      works.push_back(group_->async().all_gather(flats.back(), InOrder().read(input)));
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
    return collective({OpType::ALLGATHER_COALESCED, "all_gather_coalesced"}, std::move(works),
                      unpack_all, inputs, results);
  }

  Done allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::AllgatherOptions& /*options*/) override {
    const at::Tensor& input = single("allgather", "input", inputs);
    const Tensors parts = one_each("allgather", "output", outputs);
    const at::Tensor flat = room_for_all(input);
    return collective(
        {OpType::ALLGATHER, "all_gather"},
        {group_->async().all_gather(flat, InOrder().read(input))},
        [flat, parts] { unpack(flat, parts); }, inputs, parts);
  }

  Done _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                            const c10d::ReduceScatterOptions& options) override {
    return reduce_scatter_each({OpType::_REDUCE_SCATTER_BASE, "_reduce_scatter_base"}, {input},
                               {output}, reduce_op(options.reduceOp));
  }

  Done reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                       const c10d::ReduceScatterOptions& options) override {
    check_as_many("reduce_scatter_tensor_coalesced", outputs.size(), inputs.size());
    return reduce_scatter_each({OpType::COALESCED, "reduce_scatter_tensor_coalesced"}, inputs,
                               outputs, reduce_op(options.reduceOp));
  }

  Done reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                      const c10d::ReduceScatterOptions& options) override {
    const at::Tensor& output = single("reduce_scatter", "output", outputs);
    const Tensors parts = one_each("reduce_scatter", "input", inputs);
    InOrder in_order;
    const WorkPtr work = group_->async().reduce_scatter(in_order.write(output), pack(parts),
                                                        reduce_op(options.reduceOp));
    return collective({OpType::REDUCE_SCATTER, "reduce_scatter"}, {work}, in_order.copy_back(),
                      parts, outputs);
  }

  Done reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    const at::Tensor& tensor = single("reduce", "tensor", tensors);
    InOrder in_order;
    const WorkPtr work = group_->async().reduce(
        in_order.update(tensor), static_cast<int>(options.rootRank), reduce_op(options.reduceOp));
    return collective({OpType::REDUCE, "reduce"}, {work}, in_order.copy_back(), tensors, tensors);
  }

  Done gather(std::vector<Tensors>& outputs, Tensors& inputs,
              const c10d::GatherOptions& options) override {
    const int root = static_cast<int>(options.rootRank);
    const at::Tensor input = InOrder().read(single("gather", "input", inputs));
    if (getRank() != root) {
      return collective({OpType::GATHER, "gather"},
                        {group_->async().gather(at::Tensor(), input, root)}, nullptr, inputs, {});
    }
    const Tensors parts = one_each("gather", "output", outputs);
    const at::Tensor flat = room_for_all(input);
    return collective(
        {OpType::GATHER, "gather"}, {group_->async().gather(flat, input, root)},
        [flat, parts] { unpack(flat, parts); }, inputs, parts);
  }

  Done scatter(Tensors& outputs, std::vector<Tensors>& inputs,
               const c10d::ScatterOptions& options) override {
    const int root = static_cast<int>(options.rootRank);
    const at::Tensor& output = single("scatter", "output", outputs);
    const Tensors parts = getRank() == root ? one_each("scatter", "input", inputs) : Tensors();
    InOrder in_order;
    const WorkPtr work = group_->async().scatter(in_order.write(output),
                                                 parts.empty() ? at::Tensor() : pack(parts), root);
    return collective({OpType::SCATTER, "scatter"}, {work}, in_order.copy_back(), parts, outputs);
  }

  Done alltoall(Tensors& outputs, Tensors& inputs,
                const c10d::AllToAllOptions& /*options*/) override {
    check_one_each("alltoall", "output", outputs);
    check_one_each("alltoall", "input", inputs);
    const at::Tensor from = pack(inputs);
    const std::vector<int64_t> receives = elements_of(outputs);
    const int64_t room = std::accumulate(receives.begin(), receives.end(), int64_t{0});
    const at::Tensor to = at::empty({room}, outputs.front().options().device(at::kCPU));
    return collective(
        {OpType::ALLTOALL, "all_to_all"},
        {group_->async().all_to_all(to, receives, from, elements_of(inputs))},
        [to, outputs] { unpack(to, outputs); }, inputs, outputs);
  }

  Done alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                     std::vector<int64_t>& input_splits,
                     const c10d::AllToAllOptions& /*options*/) override {
    const auto receives = elements_of_rows("output", output, output_splits);
    const auto sends = elements_of_rows("input", input, input_splits);
    InOrder in_order;
    const WorkPtr work =
        group_->async().all_to_all(in_order.write(output), receives, in_order.read(input), sends);
    return collective({OpType::ALLTOALL_BASE, "all_to_all"}, {work}, in_order.copy_back(), {input},
                      {output});
  }

  Done send(Tensors& tensors, int destination, int tag) override {
    const at::Tensor tensor = InOrder().read(single("send", "tensor", tensors));
    return message({OpType::SEND, "send"}, group_->isend(tensor, destination, tag), nullptr,
                   tensors);
  }

  Done recv(Tensors& tensors, int source, int tag) override {
    InOrder in_order;
    const at::Tensor tensor = in_order.write(single("recv", "tensor", tensors));
    return message({OpType::RECV, "recv", source}, group_->irecv(tensor, source, tag),
                   in_order.copy_back(), tensors);
  }

  Done recvAnysource(Tensors& tensors, int tag) override {
    InOrder in_order;
    const at::Tensor tensor = in_order.write(single("recv", "tensor", tensors));
    return message({OpType::RECVANYSOURCE, "recvAnySource"}, group_->irecv_from_any(tensor, tag),
                   in_order.copy_back(), tensors);
  }

  Done barrier(const c10d::BarrierOptions& /*options*/) override {
    return collective({OpType::BARRIER, "barrier"}, {group_->async().barrier()}, nullptr, {}, {});
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
    return at::empty({getSize() * part.numel()}, part.options().device(at::kCPU));
  }

  Done collective(const WorkCall& call, std::vector<WorkPtr> works, std::function<void()> after,
                  const Tensors& inputs, const Tensors& results) {
    ++collectives_;
    return c10::make_intrusive<GroupWork>(context_, call, std::move(works), std::move(after),
                                          inputs, results);
  }

  // One collective for each result, which `start` begins.
  template <class Start>
  Done each(const WorkCall& call, const Tensors& inputs, const Tensors& results,
            const Start& start) {
    InOrder in_order;
    std::vector<WorkPtr> works;
    for (size_t i = 0; i < results.size(); ++i) works.push_back(start(in_order, i));
    return collective(call, std::move(works), in_order.copy_back(), inputs, results);
  }

  Done all_gather_each(const WorkCall& call, const Tensors& inputs, const Tensors& outputs) {
    return each(call, inputs, outputs, [&](InOrder& in_order, size_t i) {
      return group_->async().all_gather(in_order.write(outputs[i]), in_order.read(inputs[i]));
    });
  }

  Done reduce_scatter_each(const WorkCall& call, const Tensors& inputs, const Tensors& outputs,
                           ReduceOp op) {
    return each(call, inputs, outputs, [&](InOrder& in_order, size_t i) {
      return group_->async().reduce_scatter(in_order.write(outputs[i]), in_order.read(inputs[i]),
                                            op);
    });
  }

  Done message(const WorkCall& call, WorkPtr work, std::function<void()> after,
               const Tensors& tensors) {
    return c10::make_intrusive<GroupWork>(context_, call, std::vector<WorkPtr>{std::move(work)},
                                          std::move(after), tensors, tensors);
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
    const at::AutoDispatchBelowADInplaceOrView as_the_communicator;
    Tensors flat;
    for (const at::Tensor& part : parts) {
      flat.push_back(part.flatten());
    }
    return at::cat(flat).cpu();
  }

  static void unpack(const at::Tensor& flat, const Tensors& parts) {
    int64_t begin = 0;
    for (const at::Tensor& part : parts) {
      part.copy_(flat.narrow(0, begin, part.numel()).view(part.sizes()));
      begin += part.numel();
    }
  }

  const std::string name_;
  const CommunicatorPtr group_;
  const std::shared_ptr<const WorkContext> context_;
  std::atomic<uint64_t> collectives_{0};
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_backend(CommunicatorPtr group, const std::string& name) {
  return c10::make_intrusive<SmpBackend>(std::move(group), name);
}

c10::intrusive_ptr<c10d::Backend> make_smddp_backend(c10::intrusive_ptr<c10d::Store> store,
                                                     int rank, int size,
                                                     std::chrono::milliseconds timeout,
                                                     const std::string& group) {
  const CommunicatorPtr world = make_store_world(std::move(store), rank, size, timeout, group);
  world->set_timeout(timeout);
  return make_backend(world, "smddp");
}

}  // namespace smp::comm
