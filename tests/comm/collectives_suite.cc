// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <numeric>
#include <thread>

#include "comm/reduce.h"
#include "core/check.h"
#include "tests/comm/harness.h"
#include "tests/comm/test_tensors.h"

namespace smp::comm {
namespace {

using ::testing::HasSubstr;

class Collectives : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Collectives, ::testing::ValuesIn(group_sizes()),
                         ::testing::PrintToStringParamName());

const std::vector<at::ScalarType> kTypes = {
    at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong,         at::kInt,
    at::kShort, at::kChar,   at::kByte, at::kBool,     at::kComplexFloat, at::kComplexDouble};
const std::vector<ReduceOp> kOps = {ReduceOp::kSum,   ReduceOp::kAverage, ReduceOp::kMin,
                                    ReduceOp::kMax,   ReduceOp::kProduct, ReduceOp::kBitAnd,
                                    ReduceOp::kBitOr, ReduceOp::kBitXor};

// Calls `check` for every reduction that exists.
void for_each_reduction(const std::function<void(at::ScalarType, ReduceOp)>& check) {
  for (const at::ScalarType dtype : kTypes) {
    for (const ReduceOp op : kOps) {
      if (is_defined(dtype, op)) {
        SCOPED_TRACE(c10::str(to_string(op), " of ", dtype));
        check(dtype, op);
      }
    }
  }
}

void expect_all_reduce(Communicator& group, int64_t elements, at::ScalarType dtype, ReduceOp op) {
  const auto parts = values_of_all(group.size(), elements, dtype);
  const at::Tensor tensor = parts[group.rank()].clone();
  group.all_reduce(tensor, op);
  EXPECT_TRUE(same_bits(tensor, reduce_by_hand(parts, op)))
      << elements << " elements, rank " << group.rank();
}

TEST_P(Collectives, AllReduceHasTheBitsOfTheSumInRankOrder) {
  on_every_rank(GetParam(), [](const CommunicatorPtr& group) {
    for_each_reduction([&](at::ScalarType dtype, ReduceOp op) {
      for (const int64_t elements : {0, 1, 7, 1000, 5001}) {
        expect_all_reduce(*group, elements, dtype, op);
      }
    });
  });
}

TEST_P(Collectives, ReduceGivesTheResultToTheRootOnly) {
  on_every_rank(GetParam(), [](const CommunicatorPtr& group) {
    for_each_reduction([&](at::ScalarType dtype, ReduceOp op) {
      for (const int64_t elements : {0, 1, 7, 5001}) {
        const auto parts = values_of_all(group->size(), elements, dtype);
        const int root = static_cast<int>(elements) % group->size();
        const at::Tensor tensor = parts[group->rank()].clone();
        group->reduce(tensor, root, op);
        EXPECT_TRUE(same_bits(
            tensor, group->rank() == root ? reduce_by_hand(parts, op) : parts[group->rank()]))
            << elements << " elements, rank " << group->rank();
      }
    });
  });
}

TEST_P(Collectives, ReduceScatterGivesEachRankItsPart) {
  on_every_rank(GetParam(), [](const CommunicatorPtr& group) {
    for_each_reduction([&](at::ScalarType dtype, ReduceOp op) {
      for (const int64_t elements : {0, 1, 7, 5001}) {
        const auto parts = values_of_all(group->size(), elements * group->size(), dtype);
        const at::Tensor input = parts[group->rank()].clone();
        const at::Tensor output = at::empty({elements}, dtype);
        group->reduce_scatter(output, input, op);
        const at::Tensor expected =
            reduce_by_hand(parts, op).narrow(0, group->rank() * elements, elements);
        EXPECT_TRUE(same_bits(output, expected)) << elements << " elements";
        EXPECT_TRUE(same_bits(input, parts[group->rank()])) << elements << " elements";
      }
    });
  });
}

TEST_P(Collectives, ReduceScatterInPlace) {
  on_every_rank(GetParam(), [](const CommunicatorPtr& group) {
    for (const int64_t elements : {10, 100'000}) {
      const auto parts = values_of_all(group->size(), elements * group->size(), at::kFloat);
      const at::Tensor input = parts[group->rank()].clone();
      const at::Tensor own = input.narrow(0, group->rank() * elements, elements);
      group->reduce_scatter(own, input);
      const at::Tensor expected = parts[group->rank()].clone();
      expected.narrow(0, group->rank() * elements, elements)
          .copy_(
              reduce_by_hand(parts, ReduceOp::kSum).narrow(0, group->rank() * elements, elements));
      EXPECT_TRUE(same_bits(input, expected));
    }
  });
}

TEST_P(Collectives, AllToAllWithEqualParts) {
  on_every_rank(GetParam(), [](const CommunicatorPtr& group) {
    const int size = group->size(), rank = group->rank();
    for (const int64_t elements : {0, 1, 7, 1000, 200'000}) {
      const auto inputs = values_of_all(size, elements * size, at::kFloat);
      const at::Tensor output = at::empty({elements * size});
      group->all_to_all(output, {}, inputs[rank], {});
      for (int peer = 0; peer < size; ++peer) {
        EXPECT_TRUE(same_bits(output.narrow(0, peer * elements, elements),
                              inputs[peer].narrow(0, rank * elements, elements)));
      }
    }
  });
}

// Rank r sends (r + 2 p) % 5 times `unit` elements to rank p, so some send nothing.
TEST_P(Collectives, AllToAllWithPartsOfAnySize) {
  on_every_rank(GetParam(), [](const CommunicatorPtr& group) {
    const int size = group->size(), rank = group->rank();
    for (const int64_t unit : {1, 33, 30'000}) {
      const auto splits_of = [&](int sender) {
        std::vector<int64_t> splits;
        for (int peer = 0; peer < size; ++peer) splits.push_back((sender + 2 * peer) % 5 * unit);
        return splits;
      };
      const auto offset = [](const std::vector<int64_t>& splits, int peer) {
        return std::accumulate(splits.begin(), splits.begin() + peer, int64_t{0});
      };
      std::vector<int64_t> receives;
      for (int peer = 0; peer < size; ++peer) receives.push_back(splits_of(peer)[rank]);
      const at::Tensor output = at::empty({offset(receives, size)}, at::kInt);
      const at::Tensor input = values_of(rank, offset(splits_of(rank), size), at::kInt);
      group->all_to_all(output, receives, input, splits_of(rank));
      for (int peer = 0; peer < size; ++peer) {
        const auto theirs = splits_of(peer);
        const at::Tensor sent = values_of(peer, offset(theirs, size), at::kInt);
        EXPECT_TRUE(same_bits(output.narrow(0, offset(receives, peer), receives[peer]),
                              sent.narrow(0, offset(theirs, rank), theirs[rank])))
            << unit << " from " << peer;
      }
    }
  });
}

TEST_P(Collectives, GatherAndScatterWithEveryRoot) {
  on_every_rank(GetParam(), [](const CommunicatorPtr& group) {
    const int size = group->size(), rank = group->rank();
    for (int root = 0; root < size; ++root) {
      for (const int64_t elements : {0, 1, 7, 1000, 200'000}) {
        const auto parts = values_of_all(size, elements, at::kHalf);
        const at::Tensor all =
            rank == root ? at::empty({size * elements}, at::kHalf) : at::Tensor();
        group->gather(all, parts[rank], root);
        if (rank == root) {
          EXPECT_TRUE(same_bits(all, at::cat(parts)));
        }
        const at::Tensor own = at::empty({elements}, at::kHalf);
        group->scatter(own, all, root);
        EXPECT_TRUE(same_bits(own, parts[rank]));
      }
    }
  });
}

TEST_P(Collectives, AllReduceOfLargeTensors) {
  on_every_rank(GetParam(), [](const CommunicatorPtr& group) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kByte, at::kComplexFloat}) {
      expect_all_reduce(*group, 1 << 18, dtype, ReduceOp::kSum);
    }
    expect_all_reduce(*group, (1 << 20) + 13, at::kFloat, ReduceOp::kSum);
  });
}

// Three or more ranks show another order of the sum: (2^24 + 1) + 1 is 2^24 in float32.
TEST_P(Collectives, AllReduceAddsInRankOrder) {
  on_every_rank(GetParam(), [](const CommunicatorPtr& group) {
    const at::Tensor tensor = at::full({5}, group->rank() == 0 ? 16777216.0F : 1.0F);
    group->all_reduce(tensor);
    EXPECT_TRUE(same_bits(tensor, at::full({5}, 16777216.0F))) << tensor;
  });
}

TEST_P(Collectives, MinimumAndMaximumKeepNan) {
  on_every_rank(GetParam(), [](const CommunicatorPtr& group) {
    for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
      const at::Tensor tensor = at::ones({group->size()});
      tensor.mutable_data_ptr<float>()[group->rank()] = std::nanf("");
      group->all_reduce(tensor, op);
      EXPECT_TRUE(tensor.isnan().all().item<bool>()) << tensor;
    }
  });
}

TEST_P(Collectives, AllReduceLeavesNoTraceInAutograd) {
  on_every_rank(GetParam(), [](const CommunicatorPtr& group) {
    const at::Tensor leaf = at::ones({100}).requires_grad_();
    group->all_reduce(leaf);
    EXPECT_TRUE(leaf.is_leaf());
    EXPECT_EQ(leaf[99].item<float>(), group->size());
  });
}

TEST_P(Collectives, BroadcastFromEveryRoot) {
  on_every_rank(GetParam(), [](const CommunicatorPtr& group) {
    for (int root = 0; root < group->size(); ++root) {
      for (const int64_t elements : {0, 1, 7, 1000, 1 << 18}) {
        const at::Tensor tensor = values_of(group->rank(), elements, at::kInt);
        group->broadcast(tensor, root);
        EXPECT_TRUE(same_bits(tensor, values_of(root, elements, at::kInt))) << elements;
      }
    }
  });
}

TEST_P(Collectives, AllGatherKeepsRankOrder) {
  on_every_rank(GetParam(), [](const CommunicatorPtr& group) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBool, at::kLong, at::kHalf}) {
      for (const int64_t elements : {0, 1, 7, 1000, 1 << 16}) {
        const auto parts = values_of_all(group->size(), elements, dtype);
        const at::Tensor output = at::empty({group->size() * elements}, dtype);
        group->all_gather(output, parts[group->rank()]);
        EXPECT_TRUE(same_bits(output, at::cat(parts))) << elements << " x " << dtype;
      }
    }
  });
}

TEST_P(Collectives, AllGatherInPlace) {
  on_every_rank(GetParam(), [](const CommunicatorPtr& group) {
    const auto parts = values_of_all(group->size(), 100, at::kFloat);
    const at::Tensor output = at::zeros({group->size() * 100});
    output.narrow(0, group->rank() * 100, 100).copy_(parts[group->rank()]);
    group->all_gather(output, output.narrow(0, group->rank() * 100, 100));
    EXPECT_TRUE(same_bits(output, at::cat(parts)));
  });
}

int64_t now_ns() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

// Ranks are on one host, where the monotonic clock is the same for all processes.
TEST_P(Collectives, NobodyLeavesABarrierBeforeTheLastHasCome) {
  on_every_rank(GetParam(), [](const CommunicatorPtr& group) {
    for (int late = 0; late < group->size(); ++late) {
      if (group->rank() == late) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      }
      const at::Tensor came = at::full({1}, now_ns(), at::kLong);
      group->barrier();
      const at::Tensor left = at::full({1}, now_ns(), at::kLong);
      group->all_reduce(came, ReduceOp::kMax);
      group->all_reduce(left, ReduceOp::kMin);
      EXPECT_LE(came.item<int64_t>(), left.item<int64_t>());
    }
  });
}

TEST_P(Collectives, ByteStringsOfAnyLength) {
  on_every_rank(GetParam(), [](const CommunicatorPtr& group) {
    const auto text_of = [](int rank) { return std::string(rank * 100, 'a' + rank) + '\0' + "x"; };
    const auto all = all_gather_bytes(*group, text_of(group->rank()));
    ASSERT_EQ(all.size(), static_cast<size_t>(group->size()));
    for (int rank = 0; rank < group->size(); ++rank) {
      EXPECT_EQ(all[rank], text_of(rank));
      EXPECT_EQ(broadcast_bytes(*group, text_of(group->rank()), rank), text_of(rank));
    }
    EXPECT_EQ(all_gather_bytes(*group, ""), std::vector<std::string>(group->size()));
    EXPECT_EQ(broadcast_bytes(*group, "", 0), "");
  });
}

TEST_P(Collectives, ManyAtOnceCompleteInAnyOrderOfWaits) {
  on_every_rank(GetParam(), [](const CommunicatorPtr& group) {
    std::vector<at::Tensor> tensors;
    std::vector<WorkPtr> works;
    for (int i = 0; i < 8; ++i) {
      tensors.push_back(at::full({1000 * (i + 1)}, group->rank() + i, at::kInt));
      works.push_back(group->async().all_reduce(tensors.back(), ReduceOp::kSum));
    }
    const int ranks = group->size() * (group->size() - 1) / 2;
    for (int i = 7; i >= 0; --i) {
      works[i]->wait();
      EXPECT_TRUE(works[i]->test());
      EXPECT_TRUE(
          same_bits(tensors[i], at::full({1000 * (i + 1)}, ranks + group->size() * i, at::kInt)));
    }
  });
}

// Rank 0 sits in recv() while the others need its part of the collective.
TEST_P(Collectives, GoOnWhileTheirRankWaitsForSomethingElse) {
  on_every_rank(GetParam(), [](const CommunicatorPtr& group) {
    const at::Tensor sum = at::ones({1 << 16});
    const at::Tensor token = at::zeros({1});
    const WorkPtr work = group->async().all_reduce(sum, ReduceOp::kSum);
    for (int peer = 1; group->rank() == 0 && peer < group->size(); ++peer) {
      group->recv(token, peer, 1);
    }
    work->wait();
    if (group->rank() > 0) {
      group->send(token, 0, 1);
    }
    EXPECT_TRUE(same_bits(sum, at::full({1 << 16}, static_cast<float>(group->size()))));
  });
}

TEST_P(Collectives, GroupsMayBeUsedInDifferentOrderByDifferentRanks) {
  on_every_rank(GetParam(), [](const CommunicatorPtr& group) {
    std::vector<int> all;
    for (int rank = 0; rank < group->size(); ++rank) {
      all.push_back(rank);
    }
    const CommunicatorPtr a = group->split(all, "a");
    const CommunicatorPtr b = group->split(all, "b");
    const at::Tensor in_a = at::ones({5000});
    const at::Tensor in_b = at::full({3}, 2.0F);
    const bool a_first = group->rank() % 2 == 0;
    const WorkPtr first = a_first ? a->async().all_reduce(in_a, ReduceOp::kSum)
                                  : b->async().all_reduce(in_b, ReduceOp::kSum);
    const WorkPtr second = a_first ? b->async().all_reduce(in_b, ReduceOp::kSum)
                                   : a->async().all_reduce(in_a, ReduceOp::kSum);
    first->wait();
    second->wait();
    EXPECT_EQ(in_a.sum().item<float>(), 5000.0F * group->size());
    EXPECT_EQ(in_b.sum().item<float>(), 6.0F * group->size());
  });
}

TEST_P(Collectives, SplitNumbersRanksFromZeroAndKeepsGroupsApart) {
  on_every_rank(GetParam(), [](const CommunicatorPtr& group) {
    std::vector<int> mine;  // the even or the odd ranks
    for (int rank = group->rank() % 2; rank < group->size(); rank += 2) {
      mine.push_back(rank);
    }
    const CommunicatorPtr half = group->split(mine, "half");
    EXPECT_EQ(half->name(), "half");
    EXPECT_EQ(half->rank(), group->rank() / 2);
    EXPECT_EQ(half->size(), static_cast<int>(mine.size()));
    EXPECT_EQ(half->timeout(), group->timeout());

    // The world and its part, from two threads at once.
    std::thread other([&] {
      for (int i = 0; i < 50; ++i) {
        const at::Tensor tensor = at::ones({1000});
        half->all_reduce(tensor);
        EXPECT_EQ(tensor[999].item<float>(), half->size());
      }
    });
    for (int i = 0; i < 50; ++i) {
      const at::Tensor tensor = at::ones({1000});
      group->all_reduce(tensor);
      EXPECT_EQ(tensor[999].item<float>(), group->size());
    }
    other.join();

    const CommunicatorPtr alone = half->split({half->rank()}, "alone");
    EXPECT_EQ(alone->size(), 1);
    const at::Tensor tensor = at::ones({3});
    alone->all_reduce(tensor);
    EXPECT_TRUE(same_bits(tensor, at::ones({3})));
  });
}

// At the same offset in all, in the middle of one; large and small.
TEST_P(Collectives, SharedTensorsWorkLikeOthers) {
  on_every_rank(GetParam(), [](const CommunicatorPtr& group) {
    const int size = group->size(), rank = group->rank();
    for (const int64_t elements : {1, 700, 300'001}) {
      SCOPED_TRACE(elements);
      const at::Tensor shared = group->shared_tensor(2 * elements, at::kFloat);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(shared.const_data_ptr()) % 64, 0U);
      EXPECT_TRUE(same_bits(shared, at::zeros({2 * elements})));
      group->barrier();  // no rank writes before all have looked

      const auto parts = values_of_all(size, elements, at::kFloat);
      const at::Tensor tensor = shared.narrow(0, elements / 2, elements);
      const auto fill = [&] { tensor.copy_(parts[rank]); };
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax}) {
        fill();
        group->all_reduce(tensor, op);
        EXPECT_TRUE(same_bits(tensor, reduce_by_hand(parts, op)));
      }
      fill();
      group->reduce(tensor, size - 1);
      EXPECT_TRUE(same_bits(
          tensor, rank == size - 1 ? reduce_by_hand(parts, ReduceOp::kSum) : parts[rank]));
      fill();
      group->broadcast(tensor, size - 1);
      EXPECT_TRUE(same_bits(tensor, parts[size - 1]));
      fill();
      const at::Tensor all = at::empty({size * elements});
      group->all_gather(all, tensor);
      EXPECT_TRUE(same_bits(all, at::cat(parts)));
      EXPECT_TRUE(same_bits(shared.narrow(0, 0, elements / 2), at::zeros({elements / 2})));
    }
  });
}

TEST_P(Collectives, ReduceScatterAndAllToAllOfSharedTensors) {
  on_every_rank(GetParam(), [](const CommunicatorPtr& group) {
    const int size = group->size(), rank = group->rank();
    for (const int64_t elements : {3, 150'001}) {
      const auto parts = values_of_all(size, elements * size, at::kFloat);
      const at::Tensor shared = group->shared_tensor(elements * size, at::kFloat);
      shared.copy_(parts[rank]);
      const at::Tensor own = shared.narrow(0, rank * elements, elements);
      const at::Tensor output = at::empty({elements * size});
      group->all_to_all(output, {}, shared, {});
      for (int peer = 0; peer < size; ++peer) {
        EXPECT_TRUE(same_bits(output.narrow(0, peer * elements, elements),
                              parts[peer].narrow(0, rank * elements, elements)));
      }
      group->reduce_scatter(own, shared);
      EXPECT_TRUE(same_bits(
          own, reduce_by_hand(parts, ReduceOp::kSum).narrow(0, rank * elements, elements)));
      group->all_gather(shared, own);
      EXPECT_TRUE(same_bits(shared, reduce_by_hand(parts, ReduceOp::kSum)));
    }
  });
}

TEST_P(Collectives, ASharedTensorOutlivesItsGroupAndWorksInOthers) {
  on_every_rank(GetParam(), [](const CommunicatorPtr& group) {
    std::vector<int> all(group->size());
    std::iota(all.begin(), all.end(), 0);
    CommunicatorPtr other = group->split(all, "other");
    const at::Tensor shared = other->shared_tensor(100'000, at::kInt);
    other.reset();
    shared.fill_(group->rank() + 1);
    group->all_reduce(shared);
    const int sum = group->size() * (group->size() + 1) / 2;
    EXPECT_TRUE(same_bits(shared, at::full({100'000}, sum, at::kInt)));
  });
}

// Blocking ones between outstanding ones, of all ways through the host.
TEST_P(Collectives, RunInTheOrderIssued) {
  on_every_rank(GetParam(), [](const CommunicatorPtr& group) {
    const int size = group->size(), rank = group->rank();
    const at::Tensor shared = group->shared_tensor(100'000, at::kLong);
    const at::Tensor ordinary = at::ones({100'000}, at::kLong);
    const at::Tensor small = at::ones({10}, at::kLong);
    shared.fill_(1);
    int64_t expected = 1;
    std::vector<WorkPtr> works;
    for (int i = 0; i < 12; ++i) {
      for (const at::Tensor& tensor : {shared, ordinary, small}) {
        works.push_back(group->async().all_reduce(tensor, ReduceOp::kSum));
      }
      expected *= size;
      if (i % 4 == 3) {
        group->broadcast(small, i % size);
      }
    }
    for (const WorkPtr& work : works) {
      work->wait();
    }
    for (const at::Tensor& tensor : {shared, ordinary, small}) {
      EXPECT_TRUE(same_bits(tensor, at::full_like(tensor, expected))) << "rank " << rank;
    }
  });
}

TEST_P(Collectives, ATaskTakesItsTurn) {
  on_every_rank(GetParam(), [](const CommunicatorPtr& group) {
    const int size = group->size(), rank = group->rank();
    const at::Tensor before = at::ones({100'000}), after = at::ones({100'000});
    const at::Tensor mine = at::full({size}, 1.0 + rank), sums = at::empty({size});
    const WorkPtr first = group->async().all_reduce(before);
    const WorkPtr task = group->start(at::kCPU, [=](TaskCollectives& collectives) {
      EXPECT_EQ(before[0].item<float>(), static_cast<float>(size)) << "nothing overtakes it";
      const at::Tensor received = at::empty({size});
      collectives.all_to_all(received, {}, mine, {});
      collectives.all_gather(sums, received.sum(0, /*keepdim=*/true));
    });
    const WorkPtr last = group->async().all_reduce(after);
    group->barrier();
    EXPECT_TRUE(task->test());
    for (const WorkPtr& work : {first, task, last}) {
      work->wait();
    }
    EXPECT_TRUE(at::equal(sums, at::full({size}, size * (size + 1) / 2.0))) << "rank " << rank;
    EXPECT_TRUE(at::equal(after, before));
  });
}

TEST_P(Collectives, WhatATaskThrowsIsThrownByItsWait) {
  on_every_rank(GetParam(), [](const CommunicatorPtr& group) {
    const auto run = [&] {
      group
          ->start(at::kCPU,
                  [](TaskCollectives& collectives) {
                    collectives.all_reduce(at::empty({2, 2}).t());
                  })
          ->wait();
    };
    EXPECT_THAT(error_of<UsageError>(run), HasSubstr("expected tensor to be contiguous"));
    group->barrier();
  });
}

}  // namespace
}  // namespace smp::comm
