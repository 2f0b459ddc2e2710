// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/version.h>

#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <vector>

#include "comm/c10d/process_group.h"
#include "smp/error.h"
#include "tests/comm/harness.h"
#include "tests/comm/test_tensors.h"

// libtorch 2.15 has other names for some operations, which 2.11 does not know.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace smp::comm {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using ::testing::AllOf;
using ::testing::HasSubstr;

class ProcessGroup : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, ProcessGroup, ::testing::ValuesIn(group_sizes()),
                         ::testing::PrintToStringParamName());

void on_every_process_group(int size, const std::function<void(const Group&)>& body) {
  on_every_rank(size, [&body](const CommunicatorPtr& world) {
    torch::set_num_threads(1);
    body(make_process_group(world));
  });
}

TEST_P(ProcessGroup, AllReduce) {
  on_every_process_group(GetParam(), [](const Group& group) {
    const auto parts = values_of_all(group->getSize(), 1000, at::kFloat);
    const auto expect = [&](c10d::ReduceOp op, const at::Tensor& result) {
      std::vector<at::Tensor> tensors = {parts[group->getRank()].clone()};
      c10d::AllreduceOptions options;
      options.reduceOp = op;
      const auto work = group->allreduce(tensors, options);
      work->wait();
      EXPECT_TRUE(work->isCompleted());
      EXPECT_TRUE(same_bits(tensors[0], result)) << "op " << static_cast<int>(op.op_);
    };
    const at::Tensor sum = reduce_by_hand(parts, ReduceOp::kSum);
    expect(c10d::ReduceOp::SUM, sum);
    expect(c10d::ReduceOp::AVG, sum / group->getSize());
    expect(c10d::ReduceOp::MIN, reduce_by_hand(parts, ReduceOp::kMin));
    expect(c10d::ReduceOp::MAX, reduce_by_hand(parts, ReduceOp::kMax));
    expect(c10d::ReduceOp::PRODUCT, reduce_by_hand(parts, ReduceOp::kProduct));
  });
}

// Reducer's hooks wait for the future only.
TEST_P(ProcessGroup, FuturesCompleteWithoutAWaitOnTheWork) {
  on_every_process_group(GetParam(), [](const Group& group) {
    std::vector<at::Tensor> tensors = {at::ones({1 << 16})};
    const auto future = group->allreduce(tensors)->getFuture();
    future->waitAndThrow();
    const at::Tensor result = future->value().toTensorVector().at(0);
    EXPECT_TRUE(same_bits(result, at::full({1 << 16}, static_cast<float>(group->getSize()))));
  });
}

TEST_P(ProcessGroup, BroadcastReduceAndBarrier) {
  on_every_process_group(GetParam(), [](const Group& group) {
    const int last = group->getSize() - 1;
    const auto parts = values_of_all(group->getSize(), 77, at::kDouble);
    const at::Tensor& mine = parts[group->getRank()];

    std::vector<at::Tensor> tensors = {mine.clone()};
    c10d::BroadcastOptions from_last;
    from_last.rootRank = last;
    group->broadcast(tensors, from_last)->wait();
    EXPECT_TRUE(same_bits(tensors[0], parts[last]));

    tensors = {mine.clone()};
    c10d::ReduceOptions to_last;
    to_last.rootRank = last;
    group->reduce(tensors, to_last)->wait();
    EXPECT_TRUE(same_bits(tensors[0],
                          group->getRank() == last ? reduce_by_hand(parts, ReduceOp::kSum) : mine));
    // Not ProcessGroup::barrier, which writes a static tensor that rank threads would share.
    EXPECT_TRUE(group->getBackend(c10::kCPU)->barrier()->wait());
  });
}

TEST_P(ProcessGroup, AllGatherAndReduceScatter) {
  on_every_process_group(GetParam(), [](const Group& group) {
    const int size = group->getSize();
    const int rank = group->getRank();
    const auto parts = values_of_all(size, 6, at::kFloat);
    at::Tensor input = parts[rank].view({2, 3});

    at::Tensor flat = at::empty({size * 2, 3});
    group->_allgather_base(flat, input)->wait();
    EXPECT_TRUE(same_bits(flat.flatten(), at::cat(parts)));

    std::vector<std::vector<at::Tensor>> lists(1);
    for (int i = 0; i < size; ++i) {
      lists[0].push_back(at::empty({2, 3}));
    }
    std::vector<at::Tensor> inputs = {input};
    group->allgather(lists, inputs)->wait();
    for (int i = 0; i < size; ++i) {
      EXPECT_TRUE(same_bits(lists[0][i].flatten(), parts[i]));
    }

    // Rank r contributes r + 1 times (0, 1, 2 ...); the sum of the factors is known.
    const float factor = 0.5F * static_cast<float>(size * (size + 1));
    at::Tensor all = at::arange(size * 4, at::kFloat) * (rank + 1);
    const at::Tensor before = all.clone();
    at::Tensor own = at::empty({4});
    group->_reduce_scatter_base(own, all)->wait();
    const at::Tensor expected = (at::arange(size * 4, at::kFloat) * factor).narrow(0, rank * 4, 4);
    EXPECT_TRUE(same_bits(own, expected.contiguous()));
    EXPECT_TRUE(same_bits(all, before));

    std::vector<std::vector<at::Tensor>> chunks = {all.chunk(size)};
    std::vector<at::Tensor> outputs = {at::empty({4})};
    group->reduce_scatter(outputs, chunks)->wait();
    EXPECT_TRUE(same_bits(outputs[0], expected.contiguous()));
  });
}

TEST_P(ProcessGroup, CoalescedForms) {
  on_every_process_group(GetParam(), [](const Group& group) {
    const int rank = group->getRank(), size = group->getSize();
    const auto backend = group->getDefaultBackend();
    std::vector<at::Tensor> inputs = {at::full({2}, rank), at::full({3}, 10.0 * rank)};
    const at::Tensor ranks = at::arange(size);

    std::vector<at::Tensor> flat = {at::empty({2 * size}, at::kLong), at::empty({3 * size})};
    backend->allgather_into_tensor_coalesced(flat, inputs)->wait();
    EXPECT_TRUE(at::equal(flat[0], ranks.repeat_interleave(2)));
    EXPECT_TRUE(at::equal(flat[1], ranks.repeat_interleave(3) * 10.0F));

    std::vector<std::vector<at::Tensor>> by_rank(size);
    for (auto& outputs : by_rank) outputs = {at::empty({2}, at::kLong), at::empty({3})};
    backend->allgather_coalesced(by_rank, inputs)->wait();
    for (int r = 0; r < size; ++r) {
      EXPECT_TRUE(at::equal(by_rank[r][0], at::full({2}, r)));
      EXPECT_TRUE(at::equal(by_rank[r][1], at::full({3}, 10.0 * r)));
    }

    std::vector<at::Tensor> wide = {at::arange(size) + rank};
    std::vector<at::Tensor> own = {at::empty({1}, at::kLong)};
    backend->reduce_scatter_tensor_coalesced(own, wide)->wait();
    EXPECT_EQ(own[0].item<int64_t>(), size * rank + size * (size - 1) / 2);
    EXPECT_EQ(backend->getSequenceNumberForGroup(), 3U);
    flat.pop_back();
    EXPECT_THAT(
        error_of<c10::Error>([&] { backend->allgather_into_tensor_coalesced(flat, inputs); }),
        HasSubstr("': expected 2 outputs, got 1."));
  });
}

TEST_P(ProcessGroup, GatherScatterAndAllToAll) {
  on_every_process_group(GetParam(), [](const Group& group) {
    const int size = group->getSize();
    const int rank = group->getRank();
    const auto parts = values_of_all(size, 5, at::kFloat);
    std::vector<at::Tensor> one = {parts[rank]};
    std::vector<std::vector<at::Tensor>> lists;
    if (rank == 0) {
      lists.push_back(std::vector<at::Tensor>(size));
      for (at::Tensor& tensor : lists[0]) {
        tensor = at::zeros({5});
      }
    }
    group->gather(lists, one)->wait();
    for (int i = 0; rank == 0 && i < size; ++i) {
      EXPECT_TRUE(same_bits(lists[0][i], parts[i]));
    }

    one = {at::zeros({5})};
    group->scatter(one, lists)->wait();
    EXPECT_TRUE(same_bits(one[0], parts[rank]));

    // Row j of rank i goes to row i of rank j.
    at::Tensor input = (at::arange(size) + 100 * rank).contiguous();
    at::Tensor output = at::empty_like(input);
    std::vector<int64_t> even;
    group->alltoall_base(output, input, even, even)->wait();
    EXPECT_TRUE(same_bits(output, at::arange(size) * 100 + rank));

    // The same with lists, of 1, 2 ... elements for ranks 0, 1 ...
    std::vector<at::Tensor> sends, receives;
    for (int i = 0; i < size; ++i) {
      sends.push_back(at::full({i + 1}, 100 * rank + i));
      receives.push_back(at::zeros({rank + 1}, at::kLong));
    }
    group->alltoall(receives, sends)->wait();
    for (int i = 0; i < size; ++i) {
      EXPECT_TRUE(same_bits(receives[i], at::full({rank + 1}, 100 * i + rank)));
    }
  });
}

TEST_P(ProcessGroup, SendAndReceive) {
  on_every_process_group(GetParam(), [](const Group& group) {
    const int size = group->getSize();
    const int rank = group->getRank();
    std::vector<at::Tensor> out = {at::full({10}, rank, at::kInt)};
    std::vector<at::Tensor> in = {at::zeros({10}, at::kInt)};
    const auto receive = group->recv(in, (rank + size - 1) % size, 3);
    group->send(out, (rank + 1) % size, 3)->wait();
    receive->wait();
    EXPECT_TRUE(same_bits(in[0], at::full({10}, (rank + size - 1) % size, at::kInt)));
  });
}

TEST_P(ProcessGroup, ReceivesSayWhoHasSent) {
  on_every_process_group(GetParam(), [](const Group& group) {
    const int size = group->getSize(), rank = group->getRank();
    const int next = (rank + 1) % size, previous = (rank + size - 1) % size;
    std::vector<at::Tensor> out = {at::full({2, 3}, rank)};
    std::vector<at::Tensor> in = {at::empty({3, 2}, at::kLong).t()};
    for (const bool any : {false, true}) {
      const auto send = group->send(out, next, 1);
      const auto receive = any ? group->recvAnysource(in, 1) : group->recv(in, previous, 1);
      receive->wait();
      send->wait();
      EXPECT_EQ(receive->sourceRank(), previous);
      EXPECT_TRUE(at::equal(in[0], at::full({2, 3}, previous)));
      EXPECT_THROW(send->sourceRank(), c10::Error);
      EXPECT_THROW(receive->getFuture(), c10::Error);
    }
  });
}

// Ranks permute their tensors differently; elements are told by their indices.
TEST_P(ProcessGroup, TensorsMayBePermuted) {
  on_every_process_group(GetParam(), [](const Group& group) {
    const int size = group->getSize(), rank = group->getRank();
    const auto laid_out = [](const at::Tensor& values, int by) {
      return by % 2 == 0 ? values.contiguous()
                         : values.permute({2, 0, 1}).contiguous().permute({1, 2, 0});
    };
    const auto value = [](int of) { return at::arange(24).view({2, 3, 4}) + 100 * of; };
    const auto mine = [&] { return laid_out(value(rank), rank); };
    const auto room = [&](int more = 0) { return laid_out(at::zeros_like(value(0)), rank + more); };
    const at::Tensor sum = value(0) * size + 50 * size * (size - 1);
    std::vector<at::Tensor> everyone;
    for (int one = 0; one < size; ++one) {
      everyone.push_back(value(one));
    }

    std::vector<at::Tensor> tensors = {mine()};
    EXPECT_EQ(tensors[0].is_contiguous(), rank % 2 == 0);
    group->allreduce(tensors)->wait();
    EXPECT_TRUE(at::equal(tensors[0], sum));
    tensors = {mine()};
    group->broadcast(tensors)->wait();
    EXPECT_TRUE(at::equal(tensors[0], value(0)));
    tensors = {mine()};
    group->reduce(tensors)->wait();
    EXPECT_TRUE(at::equal(tensors[0], rank == 0 ? sum : value(rank)));

    at::Tensor input = mine();
    at::Tensor all = at::zeros({size * 2, 3, 4}, at::kLong);
    group->_allgather_base(all, input)->wait();
    EXPECT_TRUE(at::equal(all, at::cat(everyone)));
    at::Tensor part = room();
    group->_reduce_scatter_base(part, all)->wait();
    EXPECT_TRUE(at::equal(part, value(rank) * size));
    at::Tensor swapped = laid_out(at::zeros_like(all), 1);
    at::Tensor rows = laid_out(all, 1);
    std::vector<int64_t> even;
    group->alltoall_base(swapped, rows, even, even)->wait();
    EXPECT_TRUE(at::equal(swapped, value(rank).repeat({size, 1, 1})));

    std::vector<at::Tensor> inputs = {mine()};
    std::vector<std::vector<at::Tensor>> lists = {{}};
    for (int one = 0; one < size; ++one) {
      lists[0].push_back(room(one));
    }
    group->allgather(lists, inputs)->wait();
    for (int one = 0; one < size; ++one) {
      EXPECT_TRUE(at::equal(lists[0][one], value(one)));
    }
    std::vector<at::Tensor> own = {room()};
    group->reduce_scatter(own, lists)->wait();
    EXPECT_TRUE(at::equal(own[0], value(rank) * size));
    std::vector<std::vector<at::Tensor>> at_root;
    if (rank == 0) {
      at_root = lists;
    }
    own = {room()};
    group->scatter(own, at_root)->wait();
    EXPECT_TRUE(at::equal(own[0], value(rank)));
    group->gather(at_root, inputs)->wait();
    EXPECT_TRUE(rank != 0 || at::equal(at_root[0][size - 1], value(size - 1)));
  });
}

// Strided ones would have to be told from those whose elements overlap.
TEST_P(ProcessGroup, RefusesTensorsWithGaps) {
  on_every_process_group(GetParam(), [](const Group& group) {
    std::vector<at::Tensor> tensors = {at::ones({8}).slice(0, 0, 8, 2)};
    EXPECT_THAT(error_of<c10::Error>([&] { group->allreduce(tensors); }),
                HasSubstr("expected tensor to be contiguous, got sizes [4] with strides [2]"));
  });
}

// The callback of one future waits for the next one: torch's PowerSGD hook does so.
TEST_P(ProcessGroup, ACallbackMayWaitForLaterFutures) {
  on_every_process_group(GetParam(), [](const Group& group) {
    const float size = static_cast<float>(group->getSize());
    std::vector<at::Tensor> first = {at::ones({4})};
    const auto last = group->allreduce(first)->getFuture()->then(
        [&group, &first](c10::ivalue::Future&) {
          for (int i = 0; i < 3; ++i) {
            group->allreduce(first)->getFuture()->waitAndThrow();
          }
          return c10::IValue(first);
        },
        c10::ListType::create(c10::TensorType::get()));
    last->waitAndThrow();
    EXPECT_TRUE(same_bits(first[0], at::full({4}, size * size * size * size)));
  });
}

TEST_P(ProcessGroup, AWaitMayHaveATimeoutOfItsOwn) {
  on_every_process_group(GetParam(), [](const Group& group) {
    std::vector<at::Tensor> in = {at::zeros({2})}, out = {at::ones({2})};
    const auto receive = group->recv(in, group->getRank(), 0);
    const auto start = std::chrono::steady_clock::now();
    EXPECT_THAT(
        error_of<TimeoutError>([&] { receive->wait(std::chrono::milliseconds(50)); }),
        AllOf(HasSubstr("c10d recv on group 'world:c10d' was not complete within the timeout of "),
              HasSubstr("of 0.05 s that its wait was given. Check that the other ranks")));
    EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(50));
    group->send(out, group->getRank(), 0)->wait();
    EXPECT_TRUE(receive->wait(std::chrono::seconds(60)));  // it went on
    EXPECT_TRUE(same_bits(in[0], out[0]));
  });
}

// A thread that waits may at once end the owner of the tensors.
TEST_P(ProcessGroup, ACompleteWorkHoldsItsResultsAlone) {
  on_every_process_group(GetParam(), [](const Group& group) {
    at::Tensor input = at::ones({1 << 16}), all = at::zeros({group->getSize() << 16});
    const auto work = group->_allgather_base(all, input);
    work->wait();
    EXPECT_EQ(input.use_count(), 1U);
    EXPECT_EQ(all.use_count(), 2U);
    std::vector<at::Tensor> in = {at::zeros({4})}, out = {at::ones({4})};
    const auto receive = group->recv(in, (group->getRank() + 1) % group->getSize(), 0);
    group->send(out, (group->getRank() + group->getSize() - 1) % group->getSize(), 0)->wait();
    receive->wait();
    EXPECT_EQ(in[0].use_count(), 2U);
    EXPECT_EQ(out[0].use_count(), 1U);
  });
}

TEST_P(ProcessGroup, ProfilersSeeItsCalls) {
  on_every_process_group(GetParam(), [](const Group& group) {
    thread_local std::vector<std::string> seen;
    seen.clear();
    const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(
        [](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
          const std::string name = function.name();
          if (name.rfind("smp:", 0) == 0) {
            seen.push_back(name);
          }
          return nullptr;
        }));
    std::vector<at::Tensor> tensors = {at::ones({2})};
    group->allreduce(tensors)->wait();
    group->broadcast(tensors)->wait();
    at::removeCallback(handle);
    group->allreduce(tensors)->wait();
    EXPECT_THAT(seen, ::testing::ElementsAre("smp:all_reduce", "smp:broadcast"));
  });
}

TEST_P(ProcessGroup, RefusesWhatItDoesNotHave) {
  on_every_process_group(GetParam(), [](const Group& group) {
    std::vector<at::Tensor> tensors = {at::ones({2})};
    c10d::AllreduceOptions scaled;
#if TORCH_VERSION_MINOR < 14
    scaled.reduceOp = c10d::makeNCCLPreMulSum(2.0);
#else
    scaled.reduceOp = c10d::makePreMulSum(2.0);
#endif
    EXPECT_THAT(error_of<c10::Error>([&] { group->allreduce(tensors, scaled); }),
                HasSubstr("expected SUM, AVG, MIN, MAX, PRODUCT, BAND, BOR or BXOR, got "
                          "c10d::ReduceOp number 8"));
    std::vector<std::vector<at::Tensor>> few = {{}};
    std::vector<std::vector<at::Tensor>> none;
    std::vector<at::Tensor> integers = {at::ones({2}, at::kInt)};
    c10d::AllreduceOptions average;
    average.reduceOp = c10d::ReduceOp::AVG;
    EXPECT_THAT(error_of<c10::Error>([&] { group->allgather(few, tensors); }),
                HasSubstr("expected one output tensor for each of the"));
    EXPECT_THAT(error_of<c10::Error>([&] { group->allgather(none, tensors); }),
                HasSubstr("': expected one list of output tensors, got 0."));
    EXPECT_THAT(error_of<c10::Error>([&] { group->allreduce(integers, average); }),
                HasSubstr("average is not defined for Int. Sum and divide, or convert"));
    at::Tensor output = at::zeros({2});
    at::Tensor input = at::zeros({2 * group->getSize() + 1});
    EXPECT_THAT(error_of<c10::Error>([&] { group->_reduce_scatter_base(output, input); }),
                HasSubstr("reduce_scatter on group 'world:c10d': expected an input of " +
                          std::to_string(group->getSize()) + " x 2 elements of Float, got "));
    at::Tensor rows = at::zeros({group->getSize()});
    std::vector<int64_t> even;
    std::vector<int64_t> uneven(group->getSize(), 5);
    EXPECT_THAT(
        error_of<c10::Error>([&] { group->alltoall_base(rows, input, even, uneven); }),
        AllOf(HasSubstr("c10d alltoall_base on group '"),
              HasSubstr("rows of the input do not divide into [5"),
              HasSubstr("], one number for each of the " + std::to_string(group->getSize()))));
  });
}

torch::nn::Sequential make_network() {
  torch::nn::Sequential network(torch::nn::Linear(16, 64), torch::nn::ReLU(),
                                torch::nn::Linear(64, 8));
  torch::NoGradGuard no_grad;
  for (at::Tensor& parameter : network->parameters()) {
    parameter.copy_(values_of(0, parameter.numel(), at::kFloat).view(parameter.sizes()) / 100);
  }
  return network;
}

at::Tensor batch_of(int rank) { return values_of(rank, 4 * 16, at::kFloat).view({4, 16}) / 100; }

at::Tensor loss_of(torch::nn::Sequential& network, int rank) {
  return network->forward(batch_of(rank)).pow(2).mean();
}

// libtorch's own reducer on our group: gradients have the bits of the mean of those of plain single
// runs. The reducer multiplies by 1 / size before it sums, so the oracle does, too.
TEST_P(ProcessGroup, CarriesTheReducerOfLibtorch) {
  on_every_process_group(GetParam(), [](const Group& group) {
    const int size = group->getSize();
    auto network = make_network();
    auto parameters = network->parameters();
    const auto [buckets, limits] =
        c10d::compute_bucket_assignment_by_size(parameters, {1 << 10, 1 << 11});
    EXPECT_GT(buckets.size(), 1U);
    c10d::Reducer reducer(parameters, {buckets.rbegin(), buckets.rend()}, group,
                          std::vector<bool>(parameters.size(), false), 1 << 11, false, true, {},
                          1 << 10, false, false, {});
    reducer.prepare_for_forward();
    const at::Tensor loss = loss_of(network, group->getRank());
    reducer.prepare_for_backward({loss});
    loss.backward();

    std::vector<std::vector<at::Tensor>> by_parameter(parameters.size());
    for (int rank = 0; rank < size; ++rank) {
      auto plain = make_network();
      loss_of(plain, rank).backward();
      for (size_t i = 0; i < parameters.size(); ++i) {
        by_parameter[i].push_back(plain->parameters()[i].grad() * (1.0 / size));
      }
    }
    for (size_t i = 0; i < parameters.size(); ++i) {
      EXPECT_TRUE(same_bits(parameters[i].grad(), reduce_by_hand(by_parameter[i], ReduceOp::kSum)))
          << "parameter " << i;
    }
  });
}

// Averages like a data-parallel loop after each epoch.
TEST_P(ProcessGroup, AveragesTheBuffersOfBatchNorm) {
  on_every_process_group(GetParam(), [](const Group& group) {
    const auto trained = [](int rank) {
      torch::nn::BatchNorm1d norm(16);
      norm->forward(batch_of(rank));
      return norm;
    };
    auto mine = trained(group->getRank());
    c10d::AllreduceOptions average;
    average.reduceOp = c10d::ReduceOp::AVG;
    std::vector<at::Tensor> means = {mine->running_mean};
    group->allreduce(means, average)->wait();

    std::vector<at::Tensor> all;
    for (int rank = 0; rank < group->getSize(); ++rank) {
      all.push_back(trained(rank)->running_mean);
    }
    const at::Tensor expected = reduce_by_hand(all, ReduceOp::kSum) / group->getSize();
    EXPECT_TRUE(same_bits(mine->running_mean, expected));
  });
}

}  // namespace
}  // namespace smp::comm
