// SPDX-License-Identifier: Apache-2.0
#include "partitioner/report.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "partitioner/complete.h"
#include "partitioner/format.h"
#include "partitioner/modules.h"
#include "partitioner/partition.h"
#include "tests/partitioner/graph_builder.h"

namespace smp::partitioner::testing {
namespace {

/// A small language model: a tied embedding, blocks of two layers each, a loss.
GraphBuilder language_model(int blocks) {
  GraphBuilder b;
  const Ref embed = b.parameter("embed.weight", at::ones({512, 64}));
  const Ref tokens = b.input(at::zeros({4, 16}, at::kLong));
  b.scope = "embed";
  Ref x = b.op("aten::embedding", {embed, tokens, -1, c10::IValue(false), c10::IValue(false)});
  b.cost(40, 60, 4 * 16 * 8);
  for (int i = 0; i < blocks; ++i) {
    const std::string block = "blocks." + std::to_string(i);
    const Ref w1 = b.parameter(block + ".fc1.weight", at::ones({64, 256}));
    const Ref w2 = b.parameter(block + ".fc2.weight", at::ones({256, 64}));
    b.scope = block + ".fc1";
    Ref y = b.op("aten::matmul", {x, w1});
    b.cost(100, 200, 4 * 16 * 64 * 4);
    b.scope = block + ".act";
    y = b.op("aten::relu", {y});
    b.cost(10, 10, 4 * 16 * 256 * 4);
    b.scope = block + ".fc2";
    y = b.op("aten::matmul", {y, w2});
    b.cost(100, 200, 4 * 16 * 256 * 4);
    b.scope = block;
    x = b.op("aten::add.Tensor", {x, y, 1});
    b.cost(5, 0, 0);
  }
  b.scope = "";
  const Ref logits = b.op("aten::matmul", {x, b.op("aten::t", {embed})});
  b.cost(200, 400, 4 * 16 * 64 * 4);
  const Ref loss = b.op("aten::mean", {logits, c10::IValue()});
  b.cost(20, 20, 0);
  b.backward(loss);
  b.output(loss);
  return b;
}

TEST(Report, IsATableThatAPersonLikesToRead) {
  GraphBuilder b = language_model(8);
  const Plan plan = partition(b.graph(), PartitionOptions(4).memory_weight(0.2).step(StepModel(8)));
  EXPECT_EQ(report(b.graph(), plan, StepModel(8).active_microbatches(6)),
            R"(Partition assignments: 4 stages, 36 operators, 295 k parameters, 8 microbatches

  stage  modules                                    operators  parameters  weights  gradients   saved*   time  sends*
  -----  -----------------------------------------  ---------  ----------  -------  ---------  -------  -----  -------------------------
      0  embed, blocks.0-1                                  9      98.3 k  384 KiB    384 KiB  288 KiB  23.5%  16.0 KiB to 1 (1 tensor)
      1  blocks.2-3                                         8      65.5 k  256 KiB    256 KiB  288 KiB  21.8%  16.0 KiB to 2 (1 tensor)
      2  blocks.4-5, blocks.6.fc1                           9      81.9 k  320 KiB    320 KiB  304 KiB  27.0%  80.0 KiB to 3 (2 tensors)
      3  blocks.6.act, blocks.6.fc2, blocks.7, ...         10      49.2 k  192 KiB    192 KiB  288 KiB  27.7%  -
  * per microbatch

  balance   max/mean 1.11: stage 3 takes 1.59 ms per microbatch, the mean is 1.44 ms
  traffic   896 KiB forward and 896 KiB backward between stages per step
  tied      embed.weight (128 KiB) belongs to stage 0, read by stage 3, gradient back per microbatch
  step      17.5 ms predicted: 5.98 ms for one microbatch through all stages, then 1.65 ms for each of 7 more
  memory    partition 0 needs most, 3.2 MiB: weights 384 KiB, gradients 384 KiB, optimizer state 768 KiB, activations of 6 microbatches 1.7 MiB
)");
}

TEST(Report, WithoutTimesOrTransfers) {
  GraphBuilder b;
  b.grad_mode = false;
  b.output(b.op("aten::relu", {b.input(at::ones({2, 2}))}));
  EXPECT_EQ(report(b.graph(), partition(b.graph(), PartitionOptions(1)), StepModel(1)),
            R"(Partition assignments: 1 stage, 1 operator, no parameters, 1 microbatch

  stage  modules          operators  parameters  weights  gradients  saved*  time  sends*
  -----  ---------------  ---------  ----------  -------  ---------  ------  ----  ------
      0  (step function)          1           -        -          -       -     -  -
  * per microbatch

  balance   no times were measured
)");
}

TEST(StageModules, ShortestNamesThatAreTrue) {
  GraphBuilder b;
  b.grad_mode = false;
  Ref x = b.input(at::ones({2, 2}));
  for (const char* scope :
       {"a.x", "a.y", "b.0.p", "b.1.p", "b.1", "b.1", "b.2", "b.4", "c10", "c11"}) {
    b.scope = scope;
    x = b.op("aten::relu", {x});
  }
  const Plan plan = complete_plan(b.graph(), {0, 1}, {0, 0, 0, 0, 0, 1, 1, 1, 1, 1}, {});
  const std::vector<std::string> modules = stage_modules(b.graph(), plan);
  EXPECT_EQ(modules[0], "a, b.0, b.1.p");
  EXPECT_EQ(modules[1], "b.1 (part), b.2, b.4, c10, c11");
}

TEST(Format, UnitsOfBytesAndCounts) {
  EXPECT_EQ(format_bytes(0), "-");
  EXPECT_EQ(format_bytes(999), "999 B");
  EXPECT_EQ(format_bytes(1000), "1.0 KiB");
  EXPECT_EQ(format_bytes(1536), "1.5 KiB");
  EXPECT_EQ(format_bytes(150 * 1024 * 1024), "150 MiB");
  EXPECT_EQ(format_bytes(int64_t{5} << 40), "5.0 TiB");
  EXPECT_EQ(format_count(0), "-");
  EXPECT_EQ(format_count(999), "999");
  EXPECT_EQ(format_count(12'345), "12.3 k");
  EXPECT_EQ(format_count(1'300'000'000), "1.3 B");
}

}  // namespace
}  // namespace smp::partitioner::testing
