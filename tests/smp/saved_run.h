// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "optim/state_dict.h"
#include "runtime/update/optimizer.h"
#include "tests/smp/models.h"
#include "tests/smp/training_case.h"
#include "tests/temp_folder.h"

/// Small runs that save and load, and the ranks' words about it.
namespace smp::testing {

using SavedModel = DistributedModel<TinyGpt>;
using SavedOptimizer = DistributedOptimizer<torch::optim::AdamW>;

/// A rank of a run: the model, the optimizer, and a step of training on the batch of that number.
struct SavedRun {
  SavedModel& model;
  SavedOptimizer& optimizer;
  std::function<torch::Tensor(int)> train;  ///< returns the loss of this replica
};

/// A folder of the test's own.
class SavedRunTest : public ::testing::Test {
 protected:
  SavedRunTest() {
    torch::set_num_threads(1);
    torch::manual_seed(3);
    for (int i = 0; i < kBatches; ++i) batches_.push_back(TinyGptImpl::batch(kBatch));
  }

  std::string path(const std::string& name = "") const { return folder_.file(name); }

  /// Plays so many stages and replicas as threads. The seed of the weights is `seed`.
  void run(int stages, int replicas, const std::function<void(SavedRun&)>& body, int seed = 5,
           bool sharded = false) const {
    TrainingCase<TinyGpt, Recipe<torch::optim::AdamW, torch::optim::AdamWOptions>> training(
        [] { return TinyGpt(/*tied=*/true, /*layers=*/2); }, {torch::optim::AdamWOptions(1e-2)});
    training.ranks = stages * replicas;
    training.config = Config()
                          .partitions(stages)
                          .trace_execution_times(false)  // or the files would depend on the load
                          .microbatches(kMicrobatches / replicas)
                          .ddp(replicas > 1)
                          .shard_optimizer_state(sharded)
                          .timeout_seconds(60);
    training.batch = [this](int step) { return batches_[step]; };
    training.seed = [seed] { return seed; };  // on all ranks: it is dropout's, too
    training.on_ranks([&](auto& rank) {
      SavedRun rank_run{rank.model, *rank.optimizer, [&](int i) {
                          rank.optimizer->zero_grad();
                          const auto loss = rank.train(i);
                          rank.optimizer->step();
                          return loss.reduce_mean();
                        }};
      body(rank_run);
    });
  }

  static constexpr int kBatches = 8;
  static constexpr int64_t kBatch = 8;
  static constexpr int kMicrobatches = 4;

 private:
  const TempFolder folder_;
  std::vector<std::vector<torch::Tensor>> batches_;
};

/// Texts that ranks add, without the prefix that names the rank.
class Texts {
 public:
  /// Adds the error of `action`; nothing is an empty text.
  template <class Error = CheckpointError, class Action>
  void of(const Action& action) {
    std::string text;
    try {
      action();
    } catch (const Error& error) {
      text = error.what() + core::error_prefix().size();
    }
    const std::lock_guard lock(mutex_);
    ++count_;
    texts_.insert(text);
  }

  /// The one text that so many ranks have added.
  std::string the_same_from(int ranks) const {
    EXPECT_EQ(count_, ranks);
    EXPECT_EQ(texts_.size(), 1u);
    for (const std::string& text : texts_) EXPECT_NE(text, "") << "no error";
    return texts_.empty() ? "" : *texts_.begin();
  }

  /// The one text that contains `part`.
  std::string one_with(const std::string& part) const {
    std::vector<std::string> found;
    for (const std::string& text : texts_) {
      if (text.find(part) != std::string::npos) found.push_back(text);
    }
    EXPECT_EQ(found.size(), 1u) << part;
    return found.empty() ? "" : found.front();
  }

 private:
  std::mutex mutex_;
  int count_ = 0;
  std::set<std::string> texts_;
};

/// Copies of everything that a rank holds of model and optimizer, by name.
inline std::map<std::string, torch::Tensor> held_by_rank(const SavedRun& run) {
  std::map<std::string, torch::Tensor> held;
  if (run.model->partitioned()) {
    for (const auto& item : run.model->local_state_dict()) held[item.key()] = item.value();
  } else {
    for (const auto& item : run.model->state_dict()) held[item.key()] = item.value();
  }
  const auto state = run.optimizer.impl().local_state();
  for (const auto& [name, tensor] : optim::tensors_of(state)) held[name] = tensor.clone();
  held["lr"] = torch::full({}, run.optimizer.param_groups()[0].options().get_lr(), torch::kDouble);
  return held;
}

inline void expect_same(const std::map<std::string, torch::Tensor>& got,
                        const std::map<std::string, torch::Tensor>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (const auto& [name, tensor] : expected) {
    ASSERT_EQ(got.count(name), 1u) << name;
    EXPECT_TRUE(torch::equal(got.at(name), tensor)) << name;
  }
}

}  // namespace smp::testing
