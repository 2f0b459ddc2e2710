// SPDX-License-Identifier: Apache-2.0
#include "runtime/step/cost_measurement.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "comm/channel_pool.h"
#include "comm/objects.h"
#include "core/log.h"
#include "graph/devices.h"
#include "graph/profile.h"
#include "pipeline/message.h"
#include "runtime/step/pipeline_choice.h"

namespace smp::runtime {
namespace {

using partitioner::Compute;
using partitioner::CostModel;
using partitioner::Link;

/// The number of runs of each measurement, of which the least time counts, after one run that warms
/// up.
constexpr int kRuns = 5;
/// A run of this time is not disturbed by others around it.
constexpr double kLongEnoughUs = 1000;
constexpr double kLeastUs = 0.01;  // the least of a difference of two times

double elapsed_us(const std::function<void()>& run) {
  const auto start = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start)
      .count();
}

double least_us(const std::function<void()>& run) {
  run();
  double least = std::numeric_limits<double>::max();
  for (int i = 0; i < kRuns; ++i) least = std::min(least, elapsed_us(run));
  return least;
}

class ComputeProbe {
 public:
  /// `bytes`: those that may be allocated.
  ComputeProbe(at::Device device, int64_t bytes) : device_(device), bytes_(bytes) {}

  Compute run() const {
    Compute compute;
    compute.call_us = call_us();
    compute.bytes_per_us = bytes_per_us();
    compute.flops_per_us = flops_per_us(at::kFloat);
    compute.half_flops_per_us = flops_per_us(at::kBFloat16);
    return compute;
  }

 private:
  double least(const std::function<void()>& launch) const {
    return least_us([&] {
      launch();
      graph::synchronize(device_);
    });
  }

  double call_us() const {
    constexpr int kCalls = 100;
    const at::Tensor one = at::ones({1}, device_);
    return least([&] {
             for (int i = 0; i < kCalls; ++i) at::add(one, 1);
           }) /
           kCalls;
  }

  double bytes_per_us() const {
    constexpr int64_t kMost = int64_t{1} << 28;
    for (int64_t bytes = 1 << 12;; bytes *= 2) {
      const at::Tensor from = at::ones({bytes}, at::TensorOptions(device_).dtype(at::kByte));
      const at::Tensor to = from.clone();
      const double us = least([&] { to.copy_(from); });
      if (us > kLongEnoughUs || 2 * bytes > kMost || 4 * bytes > bytes_) {
        return 2 * static_cast<double>(bytes) / us;
      }
    }
  }

  double flops_per_us(at::ScalarType type) const {
    constexpr int64_t kMost = 4096;
    for (int64_t n = 16;; n *= 2) {
      const at::Tensor factor = at::ones({n, n}, at::TensorOptions(device_).dtype(type));
      const double us = least([&] { at::mm(factor, factor); });
      const auto elements = static_cast<double>(n) * static_cast<double>(n);
      const bool is_next_too_large =
          2 * n > kMost || 2 * 4 * elements * 4 > static_cast<double>(bytes_);
      if (us > kLongEnoughUs || is_next_too_large)
        return 2 * elements * static_cast<double>(n) / us;
    }
  }

  const at::Device device_;
  const int64_t bytes_;
};

/// One end of a link. `leads`: whether messages begin here.
class LinkProbe {
 public:
  LinkProbe(comm::CommunicatorPtr pipeline, int peer, bool leads, at::Device device, int64_t bytes)
      : pool_(std::move(pipeline)), peer_(peer), leads_(leads), device_(device), bytes_(bytes) {}

  Link run() {
    constexpr int kTensors = 33;
    constexpr int64_t kMost = 1 << 20;
    const int64_t elements = std::clamp<int64_t>(bytes_ / 32, 16, kMost);
    const double one = one_way_us(1, 16);
    const double many = one_way_us(kTensors, 16);
    const double large = one_way_us(1, elements);
    Link link;
    link.tensor_us = std::max((many - one) / (kTensors - 1), kLeastUs);
    link.message_us = std::max(one - link.tensor_us, kLeastUs);
    link.bytes_per_us =
        static_cast<double>(elements * sizeof(float)) / std::max(large - one, kLeastUs);
    return link;
  }

 private:
  /// The time of a message of so many tensors of so many elements, packed and unpacked.
  double one_way_us(int tensors, int64_t elements) {
    const at::Tensor tensor = at::ones({elements}, device_);
    const std::vector<at::Tensor> values(tensors, tensor);
    const pipeline::MessageLayout layout(
        std::vector<graph::TensorMeta>(tensors, graph::TensorMeta::of(tensor)));
    const comm::ChannelSpec spec{peer_,       /*tag=*/0,       layout.nbytes(),      /*held=*/1,
                                 /*ahead=*/1, layout.device(), layout.header_bytes()};
    const auto ports = pool_.open({spec}, {spec});
    comm::Sender& sender = *ports.outgoing[0]->sender;
    comm::Receiver& receiver = *ports.incoming[0]->receiver;
    const comm::MessageSize size{layout.nbytes(), layout.header_bytes()};
    sender.set_size(size);
    receiver.set_size(size);
    receiver.expect(kRuns + 1);
    const auto send = [&] {
      const auto copied = layout.begin_pack(values, sender.prepare(), sender.device_part());
      if (copied) copied->synchronize();
      sender.send();
    };
    const auto receive = [&] {
      const at::Tensor message = receiver.receive();
      layout.unpack(message, receiver.device_part());
      graph::synchronize(device_);
    };
    const double us = least_us([&] {
      if (leads_) send();
      receive();
      if (!leads_) send();
    });
    sender.flush();
    return us / 2;
  }

  comm::ChannelPool pool_;
  const int peer_;
  const bool leads_;
  const at::Device device_;
  const int64_t bytes_;
};

/// Between all neighbours of a pipeline, one pair after the other.
std::vector<Link> measured_links(const comm::CommunicatorPtr& pipeline, at::Device device,
                                 int64_t bytes) {
  std::vector<Link> links;
  for (int first = 0; first + 1 < pipeline->size(); ++first) {
    Link link;
    const int mine = pipeline->rank() - first;
    if (mine == 0 || mine == 1) {
      link = LinkProbe(pipeline, mine == 0 ? first + 1 : first, mine == 0, device, bytes).run();
    }
    const std::string text =
        comm::broadcast_bytes(*pipeline, partitioner::to_json({{}, {link}}), first);
    links.push_back(partitioner::cost_model_from_json(text, "a measured link").links[0]);
  }
  return links.empty() ? CostModel().links : links;
}

void round(CostModel& costs) {
  const auto round = [](double& value) { value = graph::round_to_two_digits(value); };
  Compute& compute = costs.compute;
  for (double* value : {&compute.call_us, &compute.bytes_per_us, &compute.flops_per_us,
                        &compute.half_flops_per_us}) {
    round(*value);
  }
  for (Link& link : costs.links) {
    for (double* value : {&link.message_us, &link.tensor_us, &link.bytes_per_us}) round(*value);
  }
}

CostModel measured_costs(const Runtime& runtime) {
  const at::NoGradGuard no_grad;
  constexpr int64_t kMost = int64_t{1} << 30;
  const int64_t share = runtime.first_step.device_share;
  const int64_t bytes = share > 0 ? std::min(share / 8, kMost) : kMost;  // that may be allocated
  CostModel costs;
  // One device after the other, so that those that are shared are not busy: the ranks of world rank
  // 0's pipeline wait in `measured_links`.
  if (runtime.rank() == 0) {
    costs.compute = ComputeProbe(runtime.device(), bytes).run();
  }
  if (runtime.rank_in(CommGroup::kRdp) == 0 && runtime.rank_in(CommGroup::kTp) == 0) {
    costs.links = measured_links(runtime.group(CommGroup::kPp), runtime.device(), bytes);
  }
  round(costs);
  return costs;
}

}  // namespace

CostModel settle_costs(const Runtime& runtime) {
  const bool measures = runtime.config().cost_model() == "measured";
  CostModel costs;
  if (measures) {
    costs = measured_costs(runtime);
  } else if (runtime.rank() == 0) {
    costs = read_costs(runtime.config(), runtime.device());
  }
  const std::string text = comm::broadcast_bytes(*runtime.world(), to_json(costs), 0);
  if (measures && runtime.rank() == 0) {
    core::log_info("Measured costs, which a file can give as \"cost_model\": " + text);
  }
  costs = partitioner::cost_model_from_json(text, "the cost model of world rank 0");
  costs.between(0, runtime.topology().pp_size() - 1);  // throws where links are missing
  return costs;
}

}  // namespace smp::runtime
