// SPDX-License-Identifier: Apache-2.0
// Fine-tuning with frozen layers: stages to which no gradient flows have no backward, and all
// numbers are those of one process.
#include <gtest/gtest.h>

#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "runtime/runtime.h"
#include "tests/action_hook.h"
#include "tests/smp/models.h"
#include "tests/smp/oracle.h"
#include "tests/smp/parity.h"
#include "tests/temp_folder.h"

namespace smp::testing {
namespace {

using parity::Layout;
using pipeline::Action;

constexpr int kLayers = 6;

/// A TinyGpt that trains its last layers, so many, and its head.
TinyGpt partly_frozen(int trained) {
  TinyGpt net(/*tied=*/false, kLayers);
  for (auto& item : net->named_parameters()) {
    const std::string module = item.key().substr(0, item.key().find('.'));
    const int layer = module.back() - '0';
    const bool is_last = layer >= kLayers - trained && layer < kLayers;
    item.value().set_requires_grad(module == "head" || is_last);
  }
  return net;
}

/// The actions of the stages of all ranks, by stage and by letter: F, B, I, W, and R for reduces.
class Actions {
 public:
  void add(const Action& action) {
    if (action.is_transfer()) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    const bool reduces = action.kind == Action::Kind::kReduce;
    ++counts_[action.stage][reduces ? 'R' : to_string(action)[std::to_string(action.stage).size()]];
  }
  const std::map<int, std::map<char, int>>& counts() const { return counts_; }

 private:
  std::mutex mutex_;
  std::map<int, std::map<char, int>> counts_;
};

/// Trains as one process does, and counts the actions by stage and letter.
std::map<int, std::map<char, int>> train(const Layout& layout, int trained) {
  Actions actions;
  parity::check<TinyGpt, torch::optim::AdamW>(
      layout, std::function<TinyGpt()>([&] { return partly_frozen(trained); }),
      torch::optim::AdamWOptions(1e-2),
      [&](int ranks, const Config& config, const std::function<void()>& program) {
        run_as_threads(ranks, Config(config).skip_tracing(true), [&] {
          ActionHook hook([&](const Action& action) { actions.add(action); });
          runtime::Runtime::get().execution.observers.push_back(&hook);
          program();
        });
      });
  return actions.counts();
}

int count(const std::map<char, int>& of_stage, char letter) {
  const auto found = of_stage.find(letter);
  return found == of_stage.end() ? 0 : found->second;
}

int backwards(const std::map<char, int>& of_stage) {
  return count(of_stage, 'B') + count(of_stage, 'W');
}

class Frozen : public ::testing::TestWithParam<Layout> {
 protected:
  void SetUp() override { torch::set_num_threads(1); }
};

// One trained layer of six: more than half of the work lies before it, so the first stage is
// frozen.
TEST_P(Frozen, StagesHaveNoBackward) {
  const Layout layout = GetParam();
  const auto counts = train(layout, /*trained=*/1);
  const int each = layout.replicas * layout.microbatches * layout.steps;
  EXPECT_EQ(count(counts.at(0), 'F'), 2 * each);  // and in evaluation
  EXPECT_EQ(backwards(counts.at(0)), 0);
  EXPECT_EQ(count(counts.at(0), 'R'), 0);
  const int last = counts.rbegin()->first;
  EXPECT_EQ(backwards(counts.at(last)), each);
  EXPECT_EQ(count(counts.at(last), 'R'), layout.replicas * layout.steps);
}

INSTANTIATE_TEST_SUITE_P(Schedules, Frozen,
                         ::testing::Values(Layout{2, 1, 4, "interleaved"}, Layout{2, 1, 4, "1f1b"},
                                           Layout{2, 2, 2, "simple"}, Layout{2, 1, 4, "zb_h2"},
                                           Layout{3, 1, 3, "zb_h1"}, Layout{2, 1, 4, "list"},
                                           Layout{2, 2, 4, "breadth_first"}, Layout{2, 1, 4, "zbv"},
                                           Layout{2, 1, 4, "auto"}.with_steps(14)));

/// Fused products round otherwise than one process, and alike in all layouts.
TEST(FrozenModel, FusedSumsAreThoseOfOneStage) {
  torch::set_num_threads(1);
  const auto train_on = [](int stage_count) {
    auto tested = parity::training<TinyGpt, torch::optim::AdamW>(
        Layout{stage_count, 1, 2, "1f1b"},
        std::function<TinyGpt()>([] { return partly_frozen(/*trained=*/1); }),
        torch::optim::AdamWOptions(1e-2));
    tested.config.gradient_accumulation_fusion(true).skip_tracing(true);
    return tested.run_on_ranks();
  };
  expect_same(train_on(2), train_on(1));
}

TEST(FrozenModel, HasAllBackwardsWhereAllLayersAreTrained) {
  torch::set_num_threads(1);
  const auto counts = train(Layout{2, 1, 2, "1f1b"}, kLayers);
  EXPECT_EQ(backwards(counts.at(0)), 2 * 3);
  EXPECT_EQ(backwards(counts.at(1)), 2 * 3);
}

/// Replicas divide nothing of a frozen stage, and still only one of them writes its averages.
TEST(FrozenModel, AveragesOfAFrozenStageAreSaved) {
  torch::set_num_threads(1);
  constexpr int kStages = 2, kReplicas = 2;
  const TempFolder folder;
  const std::string path = folder.file("checkpoint");
  std::vector<TinyGpt> nets;
  for (int i = 0; i < kStages * kReplicas; ++i) {
    torch::manual_seed(5);
    nets.push_back(partly_frozen(/*trained=*/1));
  }
  const auto ids = torch::randint(TinyGptImpl::kVocabulary, {2, TinyGptImpl::kLength});
  const auto config = stages(kStages).ddp(true).shard_optimizer_state(true).skip_tracing(true);
  run_as_threads(kStages * kReplicas, config, [&] {
    TinyGpt net = nets[rank()];
    DistributedModel<TinyGpt> model(net);
    DistributedOptimizer<torch::optim::Adam> optimizer(model->parameters(), 0.01);
    Ema ema(model, optimizer);
    auto train = step([&](torch::Tensor x) {
      auto loss = net->loss(x, x);
      model->backward(loss);
      return loss;
    });
    train(ids.clone());
    optimizer.step();
    ema.update();
    for (const auto& parameter : model->local_parameters()) {
      if (pp_rank() == 0) {
        EXPECT_FALSE(parameter.requires_grad());
      }
    }
    smp::save(path, model, optimizer);
  });
  // The first values that are averaged are the average.
  TinyGpt averaged = partly_frozen(1), saved = partly_frozen(1);
  load_into_module(path, *averaged, LoadOptions().average("ema"));
  load_into_module(path, *saved);
  expect_equal(state_of(*averaged), state_of(*saved), "average");
}

/// Other layers are trained in every step, so that stages have a backward in some of them only.
TEST(FrozenModel, MayBeThawedBetweenSteps) {
  torch::set_num_threads(1);
  constexpr int kSteps = 7, kReplicas = 2, kMicrobatches = 2;
  const auto freeze = [](Mlp& net, int step) {
    for (auto& item : net->named_parameters()) {
      const bool is_early = item.key().find("in.") == 0 || item.key().find("hidden0") == 0;
      const bool is_late = item.key().find("hidden3") == 0;
      item.value().set_requires_grad(!(is_early && step % 3 == 1) && !(is_late && step % 3 == 2));
    }
  };
  const auto data = torch::randn({kSteps, kReplicas, 8, MlpImpl::kWidth});
  Mlp plain = make_mlp();
  torch::optim::Adam plain_optimizer(plain->parameters(), 0.01);
  for (int i = 0; i < kSteps; ++i) {
    freeze(plain, i);
    plain_optimizer.zero_grad();
    plain_microbatches(plain->parameters(), kReplicas, kMicrobatches, [&](int m) {
      const auto& of_replica = data[i][m / kMicrobatches];
      plain(part(of_replica, kMicrobatches, m % kMicrobatches)).square().mean().backward();
    });
    plain_optimizer.step();
  }
  for (const std::string pipeline : {"interleaved", "zb_h1", "auto"}) {
    for (const int count : {1, 2}) {
      SCOPED_TRACE(pipeline + ", stages: " + std::to_string(count));
      std::vector<Mlp> nets;
      for (int rank = 0; rank < count * kReplicas; ++rank) nets.push_back(make_mlp());
      run_as_threads(count * kReplicas, stages(count).ddp(true).pipeline(pipeline), [&] {
        Mlp net = nets[rank()];
        DistributedModel<Mlp> model(net);
        DistributedOptimizer<torch::optim::Adam> optimizer(model->parameters(), 0.01);
        auto train = step([&](torch::Tensor x) { model->backward(model(x).square().mean()); });
        for (int i = 0; i < kSteps; ++i) {
          freeze(net, i);
          optimizer.zero_grad();
          train(data[i][rdp_rank()].clone());
          optimizer.step();
        }
        expect_equal(to_map(model->state_dict()), state_of(*plain), "value");
      });
    }
  }
}

}  // namespace
}  // namespace smp::testing
