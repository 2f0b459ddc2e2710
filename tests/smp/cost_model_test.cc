// SPDX-License-Identifier: Apache-2.0
// The costs by which a step is planned: fixed ones, those of a file, or those measured in the first
// step. None of it touches the numbers.

#include <ATen/Parallel.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/smp/api.h"

namespace smp::testing {
namespace {

class CostModel : public ApiTest {
 protected:
  /// Losses of two steps on so many stages.
  Tensors train(int ranks, const std::string& costs) {
    Tensors losses;
    run_as_threads(ranks, stages(ranks).skip_tracing(true).cost_model(costs), [&] {
      DistributedModel<Mlp> model(make_net());
      DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), 0.1);
      auto train = make_training(model);
      for (int i = 0; i < 2; ++i) {
        optimizer.zero_grad();
        const auto outputs = train(x_, y_).outputs();
        optimizer.step();
        if (rank() == 0) losses.insert(losses.end(), outputs.begin(), outputs.end());
      }
    });
    return losses;
  }

  std::string file_with(const std::string& text) {
    const auto path = std::filesystem::temp_directory_path() / "smp_costs.json";
    std::ofstream(path) << text;
    return path.string();
  }
};

TEST_F(CostModel, IsMeasuredInTheFirstStep) {
  const Tensors expected = train(3, "auto");
  ::testing::internal::CaptureStderr();
  const Tensors losses = train(3, "measured");
  const std::string log = ::testing::internal::GetCapturedStderr();
  expect_equal(losses, expected, "losses");
  const std::string before = "Measured costs, which a file can give as \"cost_model\": ";
  const size_t at = log.find(before);
  ASSERT_NE(at, std::string::npos) << log;
  const size_t begin = at + before.size();
  const std::string text = log.substr(begin, log.find('\n', begin) - begin);
  const auto costs = nlohmann::json::parse(text);
  ASSERT_EQ(costs.at("compute").size(), 4u);
  for (const auto& item : costs.at("compute").items()) {
    EXPECT_GT(item.value().get<double>(), 0) << item.key();
  }
  ASSERT_EQ(costs.at("links").size(), 2u) << "0|1 and 1|2";
  for (const auto& link : costs.at("links")) {
    for (const auto& item : link.items()) EXPECT_GT(item.value().get<double>(), 0) << item.key();
  }
  EXPECT_EQ(log.find(before, begin), std::string::npos) << "said once";
  // The text is such a file.
  expect_equal(train(3, file_with(text)), expected, "losses");
}

TEST_F(CostModel, AFileHasToBeThereAndToFitTheRanks) {
  const auto error = [&](int ranks, const std::string& costs) {
    return error_of<ConfigError>([&] { train(ranks, costs); });
  };
  expect_has(error(2, "/none/costs.json"), {"/none/costs.json", "cost model"});
  expect_has(error(2, file_with(R"({"compute": {"call_us": -1}})")),
             {"smp_costs.json: \"compute.call_us\": expected a number above 0, got -1"});
  expect_has(error(4, file_with(R"({"links": [{}, {}]})")),
             {"\"cost_model\": expected one link for all ranks of a pipeline, or one for each two "
              "neighbours, got 2 links for ranks up to 3"});
}

}  // namespace
}  // namespace smp::testing
