// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <mutex>
#include <ostream>
#include <regex>
#include <string>
#include <vector>

#include "optim/state_dict.h"
#include "smp/smp.h"
#include "tests/optim/set_state.h"
#include "tests/smp/oracle.h"
#include "tests/temp_folder.h"

// Parameters whose names look like those of pieces of others, and one without dimensions: the same
// as one process of plain libtorch, wherever their states lie and go.
namespace smp {
namespace {

using namespace testing;
namespace to = torch::optim;

constexpr int64_t kElements = 200, kMicrobatches = 4;

struct BracketsImpl : torch::nn::Module {
  explicit BracketsImpl(const std::string& name_of_range = "w[0:2]") {
    torch::manual_seed(3);
    w = register_parameter("w", torch::randn({kElements}));
    of_index = register_parameter("w[0]", torch::randn({10, kElements / 10}));
    of_range = register_parameter(name_of_range, torch::randn({kElements}));
    scale = register_parameter("w[]", torch::randn({}));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = torch::tanh(x * w);
    x = torch::tanh(x * of_index.view(kElements));
    return torch::tanh(x * of_range) * scale;
  }
  torch::Tensor w, of_index, of_range, scale;
};
TORCH_MODULE(Brackets);

/// All samples are the same, so that a mean over any of them has the same bits.
torch::Tensor batch(int step) {
  const auto generator = at::detail::createCPUGenerator(100 + step);
  return torch::randn({1, kElements}, generator).expand({kMicrobatches, kElements}).contiguous();
}

/// How the ranks are laid out.
struct Layout {
  int stages, replicas;
  bool sharded_state = false, sharded_values = false, half = false;

  int ranks() const { return stages * replicas; }
};

std::ostream& operator<<(std::ostream& out, const Layout& layout) {
  return out << layout.stages << " stages x " << layout.replicas << " replicas"
             << (layout.sharded_state ? ", sharded state" : "")
             << (layout.sharded_values ? ", sharded values" : "");
}

const std::vector<Layout> kLayouts{
    {1, 1}, {2, 1}, {1, 2}, {1, 2, true}, {1, 4, true}, {2, 2, true}, {1, 2, false, true}};

Config config_of(const Layout& layout) {
  Config config = stages(layout.stages)
                      .microbatches(kMicrobatches)
                      .ddp(true)
                      .gradient_shards(4)
                      .shard_optimizer_state(layout.sharded_state)
                      .bucket_cap_mb(0.0005)
                      .bf16(layout.half);
  if (!layout.sharded_values) return config;
  return config.sharded_data_parallel_degree(layout.replicas)
      .sdp_param_persistence_threshold(0)
      .sdp_gradient_clipping(1e9);
}

struct Result {
  Named weights;
  OptimizerState state;
};

using Optimizer = to::Adam;
const auto kOptions = to::AdamOptions(0.05).amsgrad(true);
constexpr int kSteps = 4;

/// One process with plain libtorch.
Result train_plain(const std::string& name_of_range = "w[0:2]") {
  torch::set_num_threads(1);
  Brackets net(name_of_range);
  Optimizer optimizer(net->parameters(), kOptions);
  for (int i = 0; i < kSteps; ++i) {
    optimizer.zero_grad();
    net(batch(i).narrow(0, 0, 1)).square().mean().backward();
    optimizer.step();
  }
  return {state_of(*net),
          optim::get_state(optimizer, optim::parameter_names(net->named_parameters()))};
}

struct Rank {
  DistributedModel<Brackets>& model;
  DistributedOptimizer<Optimizer>& optimizer;
  std::function<void(int begin, int end)> train;
};

/// The weights and states that all ranks have after `body`.
Result run(const Layout& layout, const std::function<void(Rank&)>& body,
           const std::string& name_of_range = "w[0:2]") {
  torch::set_num_threads(1);
  std::vector<Brackets> nets;
  for (int i = 0; i < layout.ranks(); ++i) nets.emplace_back(name_of_range);
  Result result;
  std::mutex mutex;
  run_as_threads(layout.ranks(), config_of(layout), [&] {
    DistributedModel<Brackets> model(nets[rank()]);
    DistributedOptimizer<Optimizer> optimizer(model->parameters(), kOptions);
    auto train = step([&](torch::Tensor x) {
      auto loss = model(x).square().mean();
      model->backward(loss);
      return loss;
    });
    Rank mine{model, optimizer, [&](int begin, int end) {
                for (int i = begin; i < end; ++i) {
                  optimizer.zero_grad();
                  train(batch(i));
                  optimizer.step();
                }
              }};
    body(mine);
    const Result here{to_map(model->state_dict()), optimizer.state_dict()};
    const std::lock_guard lock(mutex);
    if (result.weights.empty()) result = here;
    expect_equal(optim::tensors_of(here.state), optim::tensors_of(result.state), "state");
  });
  return result;
}

void expect_as_plain(const Result& got, const Result& plain) {
  expect_equal(got.weights, plain.weights, "value");
  expect_equal(optim::tensors_of(got.state), optim::tensors_of(plain.state), "state");
  EXPECT_EQ(optim::to_json(got.state)["state"], optim::to_json(plain.state)["state"]);
  EXPECT_EQ(got.state.groups.at(0).params.size(), 4u);
}

TEST(ParameterNames, StatesAreOfTheirParameters) {
  const Result plain = train_plain();
  for (const Layout& layout : kLayouts) {
    SCOPED_TRACE(c10::str(layout));
    expect_as_plain(run(layout, [](Rank& rank) { rank.train(0, kSteps); }), plain);
  }
}

TEST(ParameterNames, CheckpointsGoToOtherLayouts) {
  const Result plain = train_plain();
  for (size_t i = 0; i < kLayouts.size(); ++i) {
    const TempFolder folder;
    run(kLayouts[i], [&](Rank& rank) {
      rank.train(0, kSteps / 2);
      save(folder.file("half"), rank.model, rank.optimizer);
    });
    for (const size_t other : {i, (i + 1) % kLayouts.size(), (i + 3) % kLayouts.size()}) {
      SCOPED_TRACE(c10::str(kLayouts[i], " to ", kLayouts[other]));
      expect_as_plain(run(kLayouts[other],
                          [&](Rank& rank) {
                            load(folder.file("half"), rank.model, rank.optimizer);
                            rank.train(kSteps / 2, kSteps);
                          }),
                      plain);
    }
  }
}

/// Takes a dictionary after half of the steps, goes astray, and goes on from there.
void go_back(Rank& rank, const std::function<OptimizerState()>& take) {
  rank.train(0, kSteps / 2);
  const auto saved = take();
  const auto weights = rank.model->state_dict();
  rank.train(kSteps / 2, kSteps);
  rank.model->load_state_dict(weights);
  rank.optimizer.load_state_dict(saved);
  rank.train(kSteps / 2, kSteps);
}

TEST(ParameterNames, DictionariesGoBack) {
  const Result plain = train_plain();
  for (const Layout& layout : kLayouts) {
    SCOPED_TRACE(c10::str(layout));
    const auto result_by = [&](const auto& take) {
      return run(layout, [&](Rank& rank) { go_back(rank, [&] { return take(rank.optimizer); }); });
    };
    expect_as_plain(result_by([](auto& optimizer) { return optimizer.state_dict(); }), plain);
    for (const bool gathers : {false, true}) {
      expect_as_plain(
          result_by([&](auto& optimizer) { return optimizer.local_state_dict(gathers); }), plain);
    }
  }
}

/// Each replica finds its own pieces among those of all.
TEST(ParameterNames, DictionariesOfReplicasGoBackTogether) {
  const Layout layout{1, 4, true};
  OptimizerState all;
  std::mutex mutex;
  const auto take = [&](Rank& rank) {
    OptimizerState own = rank.optimizer.local_state_dict(false);
    {
      const std::lock_guard lock(mutex);
      if (all.groups.empty()) all.groups = own.groups;
      auto& names = all.groups[0].params;
      names.insert(names.end(), own.groups[0].params.begin(), own.groups[0].params.end());
      all.params.merge(own.params);
    }
    barrier();
    return all;
  };
  expect_as_plain(run(layout, [&](Rank& rank) { go_back(rank, [&] { return take(rank); }); }),
                  train_plain());
}

TEST(ParameterNames, OthersAreUnexpected) {
  const auto error_with = [](const std::string& name) {
    std::string text;
    run({1, 1}, [&](Rank& rank) {
      rank.train(0, 1);
      auto state = rank.optimizer.state_dict();
      state.groups[0].params.push_back(name);
      text = error_of<CheckpointError>([&] { rank.optimizer.load_state_dict(state); });
    });
    return text;
  };
  expect_has(error_with("w[7]"), {"\n  unexpected: w[7]\n"});
  expect_has(error_with("v[0:64]"), {"\n  unexpected: v[0:64]\n"});
  expect_has(error_with("w[0:64]"), {"\n  missing: w\n", "fits the ranks that it was taken from"});
}

/// Those of pieces have the masters of the pieces.
TEST(ParameterNames, DictionariesGoBackInHalfPrecision) {
  const Layout layout{1, 2, true, false, /*half=*/true};
  const Result expected = run(layout, [](Rank& rank) { rank.train(0, kSteps); });
  for (const bool gathers : {false, true}) {
    const Result got = run(layout, [&](Rank& rank) {
      go_back(rank, [&] { return rank.optimizer.local_state_dict(gathers); });
    });
    expect_equal(optim::tensors_of(got.state), optim::tensors_of(expected.state), "state");
    expect_equal(got.weights, expected.weights, "value");
  }
}

/// The name of a piece of "w" in a dictionary.
std::string name_of_a_piece(const Layout& layout) {
  std::string found;
  std::mutex mutex;
  run(layout, [&](Rank& rank) {
    rank.train(0, 1);
    for (const auto& [name, param] : rank.optimizer.local_state_dict(false).params) {
      const std::lock_guard lock(mutex);
      if (std::regex_match(name, std::regex(R"(w\[\d+:\d+\])"))) found = name;
    }
  });
  return found;
}

/// A dictionary of pieces could not tell such a parameter from the piece; all else works.
TEST(ParameterNames, AParameterHasTheNameOfAPiece) {
  const Layout layout{1, 2, true};
  const std::string name = name_of_a_piece(layout);
  ASSERT_NE(name, "");
  std::vector<std::string> errors;
  std::mutex mutex;
  const auto take = [&](Rank& rank) {
    try {
      rank.optimizer.local_state_dict(false);
    } catch (const UsageError& error) {
      const std::lock_guard lock(mutex);
      errors.emplace_back(error.what());
    }
    return rank.optimizer.local_state_dict(true);
  };
  const Result got = run(
      layout, [&](Rank& rank) { go_back(rank, [&] { return take(rank); }); }, name);
  expect_as_plain(got, train_plain(name));
  ASSERT_EQ(errors.size(), 1u);
  EXPECT_NE(
      errors[0].find("cannot name the state of this replica's piece of parameter \"w\": \"" + name +
                     "\" is another parameter. Give that another name, or gather the "
                     "state: local_state_dict(true)"),
      std::string::npos)
      << errors[0];
}

}  // namespace
}  // namespace smp
