// SPDX-License-Identifier: Apache-2.0
#include "partitioner/cost_model.h"

#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "graph/device_properties.h"
#include "graph/flops.h"
#include "partitioner/complete.h"
#include "partitioner/cost.h"
#include "partitioner/partition.h"
#include "partitioner/predict.h"
#include "tests/error_of.h"
#include "tests/partitioner/graph_builder.h"

namespace smp::partitioner {
namespace {

using smp::testing::error_of;
using ::testing::ElementsAre;
using testing::GraphBuilder;
using testing::Ref;
using ::testing::StartsWith;

/// The operations of the only operator of a graph.
double flops_of(const std::string& op,
                const std::function<std::vector<testing::Arg>(GraphBuilder&)>& arguments) {
  GraphBuilder b;
  b.grad_mode = false;
  const auto given = arguments(b);
  b.output(b.op(op, given));
  return graph::operator_flops(b.graph(), b.graph().operators.back());
}

using Sizes = std::vector<int64_t>;

std::vector<testing::Arg> inputs(GraphBuilder& b, const std::vector<Sizes>& sizes) {
  std::vector<testing::Arg> result;
  for (const Sizes& of_one : sizes) result.emplace_back(b.input(at::ones(of_one)));
  return result;
}

double product(const std::string& op, const std::vector<Sizes>& sizes,
               const std::vector<double>& factors = {}) {
  return flops_of(op, [&](GraphBuilder& b) {
    auto arguments = inputs(b, sizes);
    for (double factor : factors) arguments.emplace_back(factor);
    return arguments;
  });
}

/// The numbers are those of torch.utils.flop_counter, which has none for attention on the CPU.
TEST(Flops, AreThoseOfTorch) {
  EXPECT_EQ(product("aten::mm", {{5, 7}, {7, 11}}), 770);
  EXPECT_EQ(product("aten::addmm", {{11}, {5, 7}, {7, 11}}, {1, 1}), 770);
  EXPECT_EQ(product("aten::bmm", {{3, 5, 7}, {3, 7, 11}}), 2310);
  EXPECT_EQ(product("aten::baddbmm", {{3, 5, 11}, {3, 5, 7}, {3, 7, 11}}, {1, 1}), 2310);
  EXPECT_EQ(product("aten::linear", {{2, 3, 7}, {11, 7}, {11}}), 924);
  EXPECT_EQ(product("aten::relu", {{2, 3}}), 0);
}

TEST(Flops, OfConvolutionsAreThoseOfTorch) {
  const auto convolution = [](const Sizes& input, const Sizes& weight, int64_t stride,
                              int64_t padding, int64_t groups, bool transposed) {
    const Sizes ones(input.size() - 2, 1), none(input.size() - 2, 0);
    return flops_of("aten::convolution", [&](GraphBuilder& b) {
      auto arguments = inputs(b, {input, weight});
      arguments.emplace_back(c10::IValue());
      arguments.emplace_back(c10::IValue(Sizes(none.size(), stride)));
      arguments.emplace_back(c10::IValue(Sizes(none.size(), padding)));
      arguments.emplace_back(c10::IValue(ones));
      arguments.emplace_back(transposed);
      arguments.emplace_back(c10::IValue(none));
      arguments.emplace_back(c10::IValue(groups));
      return arguments;
    });
  };
  EXPECT_EQ(convolution({2, 4, 30}, {6, 4, 5}, 2, 0, 1, false), 6240);
  EXPECT_EQ(convolution({2, 8, 20, 20}, {12, 4, 3, 3}, 2, 1, 2, false), 172800);
  EXPECT_EQ(convolution({1, 3, 224, 224}, {64, 3, 7, 7}, 2, 3, 1, false), 236027904)
      << "the first of ResNet";
  EXPECT_EQ(convolution({2, 8, 10, 10}, {8, 3, 4, 4}, 2, 0, 2, true), 153600);
}

TEST(Flops, OfAttentionAreThoseOfItsTwoProducts) {
  const double scores = product("aten::bmm", {{6, 10, 8}, {6, 8, 14}});
  const double mixed = product("aten::bmm", {{6, 10, 14}, {6, 14, 8}});
  const double attention = flops_of("aten::scaled_dot_product_attention", [](GraphBuilder& b) {
    auto arguments = inputs(b, {{2, 3, 10, 8}, {2, 3, 14, 8}, {2, 3, 14, 8}});
    arguments.insert(arguments.end(), {c10::IValue(), 0.0, false, c10::IValue(), false});
    return arguments;
  });
  EXPECT_EQ(attention, scores + mixed);
}

TEST(CostModel, AnOperatorTakesTheLongerOfMovingAndComputing) {
  const auto time = [](int64_t width, at::ScalarType type, const Compute& compute) {
    GraphBuilder b;
    b.grad_mode = false;
    const auto factor = [&] { return b.input(at::ones({width, width}, type)); };
    const Ref left = factor(), right = factor();
    b.output(b.op("aten::mm", {left, right}));
    estimate_costs(b.graph(), nullptr, compute);
    return b.graph().operators[0].cost.forward_us;
  };
  const Compute compute{2, 1000, 50, 400};
  EXPECT_DOUBLE_EQ(time(4, at::kFloat, compute), 2 + 2 * 64 / 50.0);
  EXPECT_DOUBLE_EQ(time(2, at::kFloat, {2, 10, 50, 400}), 2 + 3 * 16 / 10.0);
  EXPECT_DOUBLE_EQ(time(4, at::kBFloat16, compute), 2 + 2 * 64 / 400.0);
}

TEST(CostModel, BetweenRanksTheSlowestLinkOnTheWayCounts) {
  CostModel costs;
  costs.links = {{20, 5, 3000}, {30, 5, 100}, {20, 5, 8000}};
  EXPECT_EQ(costs.between(0, 1), costs.links[0]);
  EXPECT_EQ(costs.between(3, 2), costs.links[2]);
  EXPECT_EQ(costs.between(0, 3), costs.links[1]);
  EXPECT_EQ(costs.between(1, 2), costs.slowest());
  const std::string error = error_of<ConfigError>([&] { costs.between(0, 4); });
  EXPECT_THAT(error,
              StartsWith("[smp] \"cost_model\": expected one link for all ranks of a pipeline, "
                         "or one for each two neighbours, got 3 links for ranks up to 4"));
  EXPECT_EQ(CostModel().between(2, 7), Link());
}

TEST(CostModel, IsReadAsItIsWritten) {
  CostModel costs;
  costs.compute = {1.5, 2e6, 6e7, 9e8};
  costs.links = {{20, 5, 3000}, {7, 0.25, 5e5}};
  EXPECT_EQ(cost_model_from_json(to_json(costs), "text"), costs);
  EXPECT_EQ(cost_model_from_json("{}", "text"), CostModel());
  const CostModel partly = cost_model_from_json(R"({"links": [{"tensor_us": 3}]})", "text");
  EXPECT_THAT(partly.links, ElementsAre(Link{20, 3, 3000}));
}

TEST(CostModel, WhatIsNoneIsRefused) {
  const auto problem = [](const char* text) {
    const std::string error =
        error_of<ConfigError>([&] { cost_model_from_json(text, "costs.json"); });
    return error.substr(0, error.find('\n')).substr(std::string("[smp] ").size());
  };
  EXPECT_EQ(problem(R"({"link": []})"),
            "costs.json: there is no field \"link\", but compute, links.");
  EXPECT_EQ(problem(R"({"links": []})"),
            "costs.json: \"links\": expected a list of objects, got an array of 0.");
  EXPECT_EQ(problem(R"({"links": [7]})"), "costs.json: \"links[0]\": expected an object, got 7.");
  EXPECT_EQ(problem(R"({"compute": {"calls": 1}})"),
            "costs.json: \"compute\": there is no field \"calls\", but call_us, bytes_per_us, "
            "flops_per_us, half_flops_per_us.");
  EXPECT_EQ(problem(R"({"compute": {"call_us": 0}})"),
            "costs.json: \"compute.call_us\": expected a number above 0, got 0.");
  EXPECT_EQ(problem(R"({"compute": {"call_us": "1"}})"),
            "costs.json: \"compute.call_us\": expected a number above 0, got \"1\".");
}

/// Layers of the same work, with a narrow tensor behind the second of four.
TEST(CostModel, OnASlowLinkLittleIsSent) {
  GraphBuilder b;
  b.grad_mode = false;
  Ref x = b.input(at::ones({64, 64}));
  for (const int64_t columns : {64, 1, 64, 64, 64, 64}) {
    x = b.op("aten::matmul",
             {x, b.parameter("w" + std::to_string(b.graph().operators.size()),
                             at::ones({b.graph().values[x.id].meta.sizes.back(), columns}))});
    b.cost(100);
  }
  b.output(x);
  const auto first_stage = [&](const Link& link) {
    CostModel costs;
    costs.links = {link};
    auto options = PartitionOptions(2).memory_weight(0);
    options.step().microbatches(4).costs(costs);
    const auto& stages = partition(b.graph(), options).stage_of_operator;
    return std::count(stages.begin(), stages.end(), 0);
  };
  EXPECT_EQ(first_stage({20, 5, 3000}), 3) << "balanced";
  EXPECT_EQ(first_stage({20, 5, 20}), 2) << "256 bytes instead of 16 KiB";
}

/// Three equal stages; of the links, the second takes 1000 us for a message.
TEST(CostModel, EachLinkCountsWhereItIs) {
  GraphBuilder b;
  b.grad_mode = false;
  Ref x = b.input(at::ones({2, 2}));
  for (int i = 0; i < 3; ++i) {
    x = b.op("aten::relu", {x});
    b.cost(100);
  }
  b.output(x);
  CostModel costs;
  costs.links = {{20, 4, 1}, {1000, 4, 1}};
  const auto step = StepModel(2).costs(costs);
  const Plan plan = complete_plan(b.graph(), {0, 1, 2}, {0, 1, 2}, {});
  const auto predicted = predict(b.graph(), plan, step);
  const double first = (20 + 4 + 16) / 2.0, second = (1000 + 4 + 16) / 2.0;  // at each end
  EXPECT_THAT(predicted.rank_us, ElementsAre(100 + first, 100 + first + second, 100 + second));
}

/// 0.64 of 2,039 GB/s and of 312 TFLOP/s, 0.72 of 19.5.
TEST(CostModel, KnowsGpusByName) {
  const auto a100 = CostModel::of_gpu("a100");
  ASSERT_TRUE(a100);
  EXPECT_NEAR(a100->compute.bytes_per_us, 1.3e6, 1e4);
  EXPECT_NEAR(a100->compute.flops_per_us, 1.4e7, 1e5);
  EXPECT_NEAR(a100->compute.half_flops_per_us, 2e8, 1e6);
  for (const auto& name : gpu_names()) {
    const auto gpu = CostModel::of_gpu(name);
    ASSERT_TRUE(gpu);
    EXPECT_GT(gpu->compute.half_flops_per_us, gpu->compute.flops_per_us) << name;
    EXPECT_EQ(gpu->links, a100->links) << name;
  }
  EXPECT_GT(CostModel::of_gpu("h200")->compute.bytes_per_us,
            CostModel::of_gpu("h100")->compute.bytes_per_us);
  EXPECT_FALSE(CostModel::of_gpu("costs.json"));
}

/// Numbers of a GPU as its driver gives them.
graph::DeviceProperties gpu(int capability, int multiprocessors, int mhz, int memory_mhz,
                            int bus_bits) {
  return {/*is_geforce=*/false, capability, multiprocessors, mhz * 1e3,
          memory_mhz * 1e3,     bus_bits};
}

/// The formula against data sheets, which it does not read.
TEST(CostModel, OfAGpuByWhatItSaysOfItselfIsThatOfItsDataSheet) {
  const std::vector<std::pair<std::string, graph::DeviceProperties>> gpus = {
      {"t4", gpu(75, 40, 1590, 5001, 256)},     {"v100", gpu(70, 80, 1530, 877, 4096)},
      {"a10", gpu(86, 72, 1695, 6251, 384)},    {"l4", gpu(89, 58, 2040, 6251, 192)},
      {"l40s", gpu(89, 142, 2520, 9001, 384)},  {"a100", gpu(80, 108, 1410, 1593, 5120)},
      {"h100", gpu(90, 132, 1980, 2619, 5120)}, {"h200", gpu(90, 132, 1980, 3201, 6144)},
      {"b200", gpu(100, 148, 1965, 3996, 8192)}};
  EXPECT_EQ(gpus.size(), gpu_names().size());
  for (const auto& [name, properties] : gpus) {
    const auto formula = CostModel::of_gpu(properties), sheet = CostModel::of_gpu(name);
    ASSERT_TRUE(formula && sheet) << name;
    const auto expect_near = [&name = name](double got, double expected) {
      EXPECT_NEAR(got / expected, 1, 0.1) << name;
    };
    expect_near(formula->compute.bytes_per_us, sheet->compute.bytes_per_us);
    expect_near(formula->compute.flops_per_us, sheet->compute.flops_per_us);
    expect_near(formula->compute.half_flops_per_us, sheet->compute.half_flops_per_us);
    EXPECT_EQ(formula->compute.call_us, sheet->compute.call_us);
    EXPECT_EQ(formula->links, sheet->links);
  }
}

/// NVIDIA's figures of an RTX 4090: 1,008 GB/s, 82.6 and 165 TFLOP/s.
TEST(CostModel, OfAGpuForGamesAddsInHalfTheSpeed) {
  auto properties = gpu(89, 128, 2520, 10501, 384);
  properties.is_geforce = true;
  const auto costs = CostModel::of_gpu(properties);
  ASSERT_TRUE(costs);
  EXPECT_NEAR(costs->compute.bytes_per_us, 0.64 * 1.008e6, 1e3);
  EXPECT_NEAR(costs->compute.flops_per_us, 0.72 * 82.6e6, 1e5);
  EXPECT_NEAR(costs->compute.half_flops_per_us, 0.64 * 165e6, 1e6);
}

TEST(CostModel, OfADeviceIsWhatItSaysOfItselfOrAnA100s) {
  const c10::Device device(c10::DeviceType::PrivateUse1, 1);
  EXPECT_EQ(CostModel::of_device(at::kCPU), CostModel());
  EXPECT_EQ(CostModel::of_device(device), *CostModel::of_gpu("a100")) << "it says nothing";
  graph::DeviceProperties said = gpu(90, 132, 1980, 3201, 6144);
  graph::register_device_properties(
      device.type(), [&](c10::Device asked) -> std::optional<graph::DeviceProperties> {
        if (asked.index() > 1) return std::nullopt;
        return said;
      });
  EXPECT_EQ(CostModel::of_device(device), *CostModel::of_gpu(said));
  EXPECT_FALSE(CostModel::of_device(device) == *CostModel::of_gpu("a100"));
  EXPECT_EQ(CostModel::of_device(c10::Device(device.type(), 2)), *CostModel::of_gpu("a100"))
      << "there is no such device";
  said.memory_khz = 0;
  EXPECT_EQ(CostModel::of_device(device), *CostModel::of_gpu("a100")) << "a number is missing";
  graph::register_device_properties(device.type(), [](c10::Device) { return std::nullopt; });
}

}  // namespace
}  // namespace smp::partitioner
