// SPDX-License-Identifier: Apache-2.0
// Runs under mpirun, with torchrun's variables and alone.

#include "smp/smddp.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <cstdlib>
#include <numeric>

#include "core/check.h"
#include "smp/ddp.h"
#include "tests/error_of.h"

namespace smp {
namespace {

using smp::testing::error_of;
using ::testing::HasSubstr;

at::Tensor of_rank(int rank) { return at::arange(6, at::kFloat).view({3, 2}) + 10 * rank; }

at::Tensor sum_of_all() {
  at::Tensor sum = at::zeros({3, 2});
  for (int rank = 0; rank < smddp::get_world_size(); ++rank) sum += of_rank(rank);
  return sum;
}

class Smddp : public ::testing::Test {
 protected:
  /// All tests of the process share the world, which can be initialised once.
  static void SetUpTestSuite() {
    EXPECT_FALSE(smddp::is_initialized());
    EXPECT_THAT(
        error_of<UsageError>([] { smddp::get_rank(); }),
        HasSubstr("smddp was used before it was initialised. Call smp::smddp::init_process"));
    smddp::init_process_group(std::chrono::seconds(30));
  }
};

TEST_F(Smddp, IsInitialisedOnce) {
  EXPECT_TRUE(smddp::is_initialized());
  EXPECT_THAT(error_of<UsageError>([] { smddp::init_process_group(); }),
              HasSubstr("smp::smddp::init_process_group was called twice; call it once"));
}

TEST_F(Smddp, KnowsItsRanks) {
  const bool launched = std::getenv("OMPI_COMM_WORLD_SIZE") || std::getenv("WORLD_SIZE");
  EXPECT_EQ(smddp::is_available(), launched);
  EXPECT_EQ(smddp::get_local_rank(), smddp::get_rank());
  EXPECT_EQ(smddp::get_local_size(), smddp::get_world_size());
}

TEST_F(Smddp, Reductions) {
  const int rank = smddp::get_rank(), size = smddp::get_world_size();
  at::Tensor tensor = of_rank(rank);
  smddp::all_reduce(tensor);
  EXPECT_TRUE(at::equal(tensor, sum_of_all()));

  tensor = of_rank(rank);
  const WorkPtr work = smddp::all_reduce(tensor, ReduceOp::kAverage, true);
  work->wait();
  EXPECT_TRUE(at::equal(tensor, sum_of_all() / size));

  tensor = of_rank(rank);
  smddp::all_reduce(tensor, ReduceOp::kMax);
  EXPECT_TRUE(at::equal(tensor, of_rank(size - 1)));

  tensor = of_rank(rank);
  smddp::reduce(tensor, size - 1);
  EXPECT_TRUE(at::equal(tensor, rank == size - 1 ? sum_of_all() : of_rank(rank)));
}

TEST_F(Smddp, MovesTensors) {
  const int rank = smddp::get_rank(), size = smddp::get_world_size();
  const at::Tensor tensor = of_rank(rank);
  smddp::broadcast(tensor);
  EXPECT_TRUE(at::equal(tensor, of_rank(0)));

  std::vector<at::Tensor> all(size);
  for (at::Tensor& one : all) one = at::empty({3, 2});
  smddp::all_gather(all, of_rank(rank));
  for (int r = 0; r < size; ++r) EXPECT_TRUE(at::equal(all[r], of_rank(r)));
  all.push_back(tensor);
  EXPECT_THAT(error_of<UsageError>([&] { smddp::all_gather(all, tensor); }),
              HasSubstr("smddp::all_gather: expected one tensor for each of the"));
  smddp::barrier();
}

// Rank r sends r + p + 1 rows of 100 r + p to rank p.
TEST_F(Smddp, ExchangesRows) {
  const int rank = smddp::get_rank(), size = smddp::get_world_size();
  std::vector<int64_t> rows(size);
  std::iota(rows.begin(), rows.end(), rank + 1);
  std::vector<at::Tensor> sent, expected;
  for (int peer = 0; peer < size; ++peer) {
    sent.push_back(at::full({rows[peer], 2}, 100.0 * rank + peer));
    expected.push_back(at::full({rows[peer], 2}, 100.0 * peer + rank));
  }
  const at::Tensor input = at::cat(sent);
  const at::Tensor output = at::empty_like(input);
  smddp::all_to_all_single(output, input, rows, rows);
  EXPECT_TRUE(at::equal(output, at::cat(expected)));

  const at::Tensor even = at::full({size, 1}, rank, at::kInt);
  const at::Tensor got = at::empty_like(even);
  smddp::all_to_all_single(got, even);
  EXPECT_TRUE(at::equal(got.flatten(), at::arange(size, at::kInt)));
}

/// Needs no `smp::init`.
TEST_F(Smddp, TrainsReplicas) {
  const Group group = smddp::group();
  const int rank = smddp::get_rank(), size = smddp::get_world_size();
  EXPECT_EQ(group.size(), size);
  EXPECT_EQ(group.ranks()[rank], rank);
  torch::nn::Linear net(2, 3);
  DistributedDataParallel<torch::nn::Linear> model(net, DDPOptions().process_group(group));
  const auto all_weights = group.all_gather(net->weight).unbind();
  model(of_rank(rank)).sum().backward();
  // The gradient is that of the sum of all outputs: each row of the weight gets the sum of the
  // inputs.
  const at::Tensor mean = sum_of_all() / size;
  EXPECT_TRUE(at::allclose(net->weight.grad(), mean.sum(0).expand({3, 2})));
  for (const at::Tensor& each : all_weights) EXPECT_TRUE(at::equal(each, net->weight));
}

}  // namespace
}  // namespace smp
