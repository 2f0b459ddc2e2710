// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/restart.h"
#include "optim/state_dict.h"
#include "runtime/runtime.h"
#include "runtime/update/divided_states.h"
#include "tests/checkpoint/content.h"
#include "tests/smp/recovery_in_memory.h"
#include "tests/smp/tensor_parallel.h"
#include "tests/smp/tensor_parallel_sharding.h"
#include "tests/smp/training_case.h"
#include "tests/temp_folder.h"

// Checkpoints do not say among how many ranks layers were divided.
namespace smp {
namespace {

using namespace testing;

using Change = std::function<Config(Config)>;
using Training = TrainingCase<std::shared_ptr<DividedModel>,
                              Recipe<torch::optim::AdamW, torch::optim::AdamWOptions>>;
using Rank = Training::Rank;

Config unchanged(Config config) { return config; }

/// A run on ranks, which begin with the weights of a seed.
struct RunOptions {
  TensorLayout layout;
  int seed = 5;
  Change change = unchanged;
};

Training training_of(const RunOptions& run) {
  Training training([] { return std::make_shared<DividedModel>(); },
                    {torch::optim::AdamWOptions(1e-2)});
  training.batch = token_batch;
  training.config = run.change(config_of(run.layout));
  training.ranks = run.layout.ranks();
  training.seed = [seed = run.seed] { return seed; };
  const auto dtype = training.config.bf16() ? torch::kFloat : torch::kDouble;
  training.prepare = [dtype](auto& net) { net->to(dtype); };
  return training;
}

/// Everything of model and optimizer, whole.
Named everything(const Rank& rank) {
  Named result = to_map(rank.model->state_dict());
  const auto state = rank.optimizer->state_dict();
  for (const auto& [name, tensor] : optim::tensors_of(state)) result[name] = tensor.clone();
  return result;
}

class TensorParallelCheckpoint : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return folder_.file(name); }

  static void run(const RunOptions& options, const std::function<void(Rank&)>& body) {
    training_of(options).on_ranks(body);
  }

  /// The tensors that all ranks hold after `body`, on which they agree.
  static Named outcome(const RunOptions& options, const std::function<void(Rank&)>& body) {
    Named result;
    std::mutex mutex;
    training_of(options).on_ranks([&](Rank& rank) {
      body(rank);
      const Named held = everything(rank);
      const std::lock_guard lock(mutex);
      if (result.empty()) result = held;
      expect_equal(held, result, "of rank " + std::to_string(smp::rank()));
    });
    return result;
  }

 private:
  const TempFolder folder_;
};

TEST_F(TensorParallelCheckpoint, OtherDegreesAndStagesGoOn) {
  const auto uninterrupted = outcome({{1}}, [](Rank& rank) {
    for (int i = 0; i < 6; ++i) rank.step(i);
  });
  const auto first = outcome({{4}}, [&](Rank& rank) {
    rank.step(0);
    rank.step(1);
    save(path("a"), rank.model, *rank.optimizer);
  });
  const auto second = outcome({{1, 2}, 6}, [&](Rank& rank) {
    const auto loaded = load(path("a"), rank.model, *rank.optimizer);
    EXPECT_EQ(loaded.step, 2);
    rank.step(2);
    rank.step(3);
    save(path("b"), rank.model, *rank.optimizer);
  });
  const auto third = outcome({{2, 2, 2, true}, 7}, [&](Rank& rank) {
    rank.step(0);  // after the first step loading takes another way
    load(path("b"), rank.model, *rank.optimizer);
    rank.step(4);
    rank.step(5);
  });
  EXPECT_EQ(first.size(), uninterrupted.size());
  expect_close(third, uninterrupted, "value", 1e-10);
}

/// Nothing but the layout changes: before the first step and after, and from one file.
TEST_F(TensorParallelCheckpoint, KeepsEveryBit) {
  const auto saved = outcome({{2, 2}}, [&](Rank& rank) {
    rank.step(0);
    save(path("all"), rank.model, *rank.optimizer);
    save_async(path("async"), rank.model, *rank.optimizer).wait();
    save_checkpoint(path("tagged"), "full", rank.model, SaveCheckpointOptions().partial(false));
    save_checkpoint(path("tagged"), "async", rank.model,
                    SaveCheckpointOptions().partial(false).asynchronous(true))
        .wait();
  });
  for (const TensorLayout& layout : {TensorLayout{1}, TensorLayout{4}, TensorLayout{2, 1, 2}}) {
    for (const std::string name : {"all", "async"}) {
      SCOPED_TRACE(c10::str(layout, ", ", name));
      const auto loaded = outcome({layout, 6}, [&](Rank& rank) {
        rank.step(1);
        load(path(name), rank.model, *rank.optimizer);
      });
      expect_equal(loaded, saved, "value");
    }
  }
  Named model;
  for (const auto& [name, tensor] : saved) {
    if (name.find('/') == std::string::npos) model[name] = tensor;
  }
  for (const std::string tag : {"full", "async"}) {
    const auto plain = make_model<PlainModel>(9);
    load_into_module(path("tagged/" + tag), *plain);
    expect_equal(state_of(*plain), model, "value in a plain module from " + tag);
  }
  run({{2, 1, 2}}, [&](Rank& rank) {
    resume_from_checkpoint(path("tagged"), "full", rank.model, LoadOptions().partial(false));
    expect_equal(to_map(rank.model->state_dict()), model, "value from one file");
    rank.step(0);
  });
}

/// Each replica writes some of the divided parameters, and of the whole ones.
TEST_F(TensorParallelCheckpoint, ACopyInMemoryKeepsEveryBit) {
  const RecoveryInMemory memory;
  for (const bool shards_states : {false, true}) {
    SCOPED_TRACE(shards_states);
    const auto keeps = [&](Config config) {
      return config.recovery("restart").recovery_interval(1).shard_optimizer_state(shards_states);
    };
    const auto kept = outcome({{2, 2, 2}, 5, keeps}, [&](Rank& rank) {
      for (int i = 0; i < 3; ++i) {
        rank.step(i);
        keep_copy(rank.model, *rank.optimizer);
      }
    });
    const auto loaded = outcome({{1}, 6}, [&](Rank& rank) {
      rank.step(0);
      load(kept_copy(), rank.model, *rank.optimizer);
    });
    expect_equal(loaded, kept, "value");
  }
}

/// A layout, and the replicas' division of a rank's tensors.
struct Division {
  TensorLayout layout;
  Change change;
};

const std::vector<Division> kDivisions{{{2, 1, 2}, with_divided_states},
                                       {{2, 2, 2, true}, with_divided_states},
                                       {{2, 1, 2}, with_divided_parameters}};

/// Each rank averages its parts of divided parameters, as a plain loop does the wholes.
TEST_F(TensorParallelCheckpoint, AveragesAreDividedAsParametersAre) {
  constexpr double kDecay = 0.7;
  Named averages;
  std::mutex mutex;
  run({{2, 2, 2}}, [&](Rank& rank) {
    const Ema ema(rank.model, EmaOptions().decay(kDecay));
    Named plain;
    for (int i = 0; i < 3; ++i) {
      rank.step(i);
      ema.update();
      for (const auto& [name, value] : to_map(rank.model->state_dict())) {
        const auto found = plain.find(name);
        if (found == plain.end()) {
          plain[name] = value.clone();
        } else {
          found->second.lerp_(value, 1 - kDecay);
        }
      }
    }
    {
      const auto averaged = ema.averaged();
      expect_equal(to_map(rank.model->state_dict()), plain, "average");
    }
    save(path("a"), rank.model, *rank.optimizer);
    const std::lock_guard lock(mutex);
    averages = plain;
  });
  const auto plain = make_model<PlainModel>(9);
  load_into_module(path("a"), *plain, LoadOptions().average("ema"));
  expect_equal(state_of(*plain), averages, "average in a plain module");
  const auto loads = [&](Rank& rank) {
    const Ema ema(rank.model, EmaOptions().decay(kDecay));
    load(path("a"), rank.model, *rank.optimizer);
    save(path("again"), rank.model, *rank.optimizer);
    rank.step(3);
    const auto check = [&](const std::string& from) {
      const auto averaged = ema.averaged();
      expect_equal(to_map(rank.model->state_dict()), averages, "average " + from);
    };
    check("from before the first step");
    load(path("again"), rank.model, *rank.optimizer);
    check("saved before the first step");
  };
  for (const TensorLayout& layout : {TensorLayout{1}, TensorLayout{4}, TensorLayout{2, 1, 2}}) {
    SCOPED_TRACE(c10::str(layout));
    run({layout, 6}, loads);
  }
  for (const auto& [layout, change] : kDivisions) run({layout, 6, change}, loads);
}

/// Before the first step every stage has all of its parts.
TEST_F(TensorParallelCheckpoint, IsSavedBeforeTheFirstStep) {
  run({{2, 2}}, [&](Rank& rank) {
    save(path("a"), rank.model);
    save_checkpoint(path("tagged"), "full", rank.model, SaveCheckpointOptions().partial(false));
  });
  const auto expected = state_of(*make_model<PlainModel>(5));
  for (const std::string name : {"a", "tagged/full"}) {
    const auto plain = make_model<PlainModel>(9);
    load_into_module(path(name), *plain);
    expect_equal(state_of(*plain), expected, "value from " + name);
  }
}

/// At each point of a program, in each division.
TEST_F(TensorParallelCheckpoint, LoadedAndSavedAgainIsTheSame) {
  std::vector<Division> divisions = kDivisions;
  divisions.push_back({{4}, unchanged});
  divisions.push_back({{2, 2}, [](Config config) { return config.bf16(true); }});
  for (const auto& [layout, change] : divisions) {
    SCOPED_TRACE(c10::str(layout));
    const std::string trained = path("trained");
    run({layout, 5, change}, [&](Rank& rank) {
      rank.step(0);
      rank.step(1);
      save(trained, rank.model, *rank.optimizer);
    });
    const auto expected = content_of(trained);
    run({layout, 6, change}, [&](Rank& rank) {
      const auto loads_and_saves = [&](const std::string& point) {
        load(trained, rank.model, *rank.optimizer);
        save(path("again"), rank.model, *rank.optimizer);
        if (smp::rank() == 0) {
          EXPECT_EQ(content_of(path("again")), expected) << point;
        }
        barrier();  // until it has been read
      };
      loads_and_saves("before the first step");
      loads_and_saves("a second time");
      rank.step(2);
      loads_and_saves("after it");
    });
  }
}

/// Master weights are divided and joined as parameters are.
TEST_F(TensorParallelCheckpoint, KeepsMasterWeights) {
  const auto half = [](Config config) { return config.bf16(true); };
  const auto saved = outcome({{2, 2}, 5, half}, [&](Rank& rank) {
    rank.step(0);
    rank.step(1);
    save(path("a"), rank.model, *rank.optimizer);
  });
  EXPECT_EQ(saved.count("block0.up/master"), 1u);
  EXPECT_EQ(saved.at("block0.up/master").sizes(), (std::vector<int64_t>{32, 8}));
  for (const TensorLayout& layout : {TensorLayout{1}, TensorLayout{4}}) {
    const auto loaded = outcome({layout, 6, half}, [&](Rank& rank) {
      rank.step(1);
      load(path("a"), rank.model, *rank.optimizer);
    });
    expect_equal(loaded, saved, "value");
  }
}

TEST_F(TensorParallelCheckpoint, OtherDivisionsGoOn) {
  const auto uninterrupted = outcome({{1}}, [](Rank& rank) {
    for (int i = 0; i < 8; ++i) rank.step(i);
  });
  for (int i = 0; i < 3; ++i) {
    const auto& [layout, change] = kDivisions[i];
    outcome({layout, 5 + i, change}, [&, i](Rank& rank) {
      if (i == 2) rank.step(0);  // after the first step loading takes another way
      if (i > 0) load(path(std::to_string(i)), rank.model, *rank.optimizer);
      rank.step(2 * i);
      rank.step(2 * i + 1);
      save(path(std::to_string(i + 1)), rank.model, *rank.optimizer);
    });
  }
  const auto last = outcome({{1, 2}, 9}, [&](Rank& rank) {
    load(path("3"), rank.model, *rank.optimizer);
    rank.step(6);
    rank.step(7);
  });
  expect_close(last, uninterrupted, "value", 1e-10);
}

/// Into other divisions, none, one file and a plain module; with master weights, too.
TEST_F(TensorParallelCheckpoint, KeepsEveryBitOfPiecesOfParts) {
  for (const bool half : {false, true}) {
    for (size_t i = 0; i < kDivisions.size(); ++i) {
      SCOPED_TRACE(c10::str("division ", i, half ? ", half precision" : ""));
      const auto with = [&](size_t division) {
        return [&, division](Config config) {
          return kDivisions[division].change(std::move(config)).bf16(half);
        };
      };
      const std::string name = path(c10::str(i, half));
      const auto saved = outcome({kDivisions[i].layout, 5, with(i)}, [&](Rank& rank) {
        rank.step(0);
        rank.step(1);
        save(name, rank.model, *rank.optimizer);
        save_async(name + ".async", rank.model, *rank.optimizer).wait();
        save_checkpoint(name + ".tags", "full", rank.model, SaveCheckpointOptions().partial(false));
        save_checkpoint(name + ".tags", "async", rank.model,
                        SaveCheckpointOptions().partial(false).asynchronous(true))
            .wait();
      });
      const auto load_all = [&](const std::string& from) {
        return [from](Rank& rank) {
          rank.step(1);
          load(from, rank.model, *rank.optimizer);
        };
      };
      const size_t other = (i + 1) % kDivisions.size();
      expect_equal(outcome({kDivisions[other].layout, 6, with(other)}, load_all(name)), saved,
                   "value");
      const auto alone = [&](Config config) { return config.bf16(half); };
      expect_equal(outcome({{1}, 6, alone}, load_all(name + ".async")), saved, "value");
      if (half) continue;
      for (const std::string tag : {"full", "async"}) {
        const auto plain = make_model<PlainModel>(9);
        load_into_module(name + ".tags/" + tag, *plain);
        for (const auto& [parameter, value] : state_of(*plain)) {
          expect_equal(value, saved.at(parameter), parameter + " from " + tag);
        }
      }
    }
  }
}

TEST_F(TensorParallelCheckpoint, OptimizerStatesOfPiecesGoIntoOtherDegrees) {
  for (const auto& [layout, change] : kDivisions) {
    OptimizerState whole;
    std::mutex mutex;
    const auto saved = outcome({layout, 5, change}, [&](Rank& rank) {
      rank.step(0);
      const auto before = everything(rank);
      for (const bool gathered : {true, false}) {
        rank.optimizer->load_state_dict(rank.optimizer->local_state_dict(gathered));
        expect_equal(everything(rank), before, "value after the local one");
      }
      const auto state = rank.optimizer->state_dict();
      const std::lock_guard lock(mutex);
      whole = state;
    });
    const auto loaded = outcome({{4}, 6}, [&](Rank& rank) {
      rank.step(1);
      rank.optimizer->load_state_dict(whole);
    });
    for (const auto& [name, tensor] : saved) {
      if (name.find('/') != std::string::npos) expect_equal(loaded.at(name), tensor, name);
    }
  }
}

TEST_F(TensorParallelCheckpoint, OptimizerStatesGoIntoOtherDegrees) {
  OptimizerState whole;
  std::mutex mutex;
  const auto saved = outcome({{4}}, [&](Rank& rank) {
    rank.step(0);
    const auto state = rank.optimizer->state_dict();
    const auto local = rank.optimizer->local_state_dict();
    EXPECT_EQ(state.params.at("block1.down").tensors.at("exp_avg").sizes(),
              (std::vector<int64_t>{8, 16}));
    EXPECT_EQ(local.params.at("block1.down").tensors.at("exp_avg").sizes(),
              (std::vector<int64_t>{8, 4}));
    const auto before = everything(rank);
    rank.optimizer->load_state_dict(local);  // the state of this rank
    expect_equal(everything(rank), before, "value after the local one");
    const std::lock_guard lock(mutex);
    whole = state;
  });
  const auto loaded = outcome({{2, 2}, 6}, [&](Rank& rank) {
    rank.step(1);
    rank.optimizer->load_state_dict(whole);
  });
  for (const auto& [name, tensor] : saved) {
    if (name.find('/') != std::string::npos) expect_equal(loaded.at(name), tensor, name);
  }
}

/// Wholes of `cpu()` are taken back for parts that lie in memory as they did.
TEST_F(TensorParallelCheckpoint, PartsInAnotherOrderOfMemoryStay) {
  const TensorLayout layout{2};
  run_as_threads(layout.ranks(), config_of(layout), [&] {
    auto net = make_model<DividedModel>(5);
    torch::Tensor& up = net->blocks[0]->up;
    up.set_data(up.detach().t().contiguous().t());
    ModelOf<DividedModel> model(net);
    auto evaluate = step([&](torch::Tensor x, torch::Tensor y) { return net->loss(x, y); });
    const auto batch = token_batch(0);
    const torch::NoGradGuard no_grad;
    evaluate(own_batch(layout, batch[0]), own_batch(layout, batch[1]));
    const auto before = up.clone();
    model->cpu();
    EXPECT_EQ(up.size(0), 2 * DividedModel::kHidden);
    model->local_virtual_parameters();
    EXPECT_TRUE(torch::equal(up, before)) << up.strides();
  });
}

/// None needs the memory for all states, which matrices and vectors by turns would give to one.
TEST_F(TensorParallelCheckpoint, RanksOfAGroupPutTogetherAboutAsMuch) {
  std::vector<int64_t> elements(2);
  run({{2}}, [&](Rank& rank) {
    rank.step(0);
    const auto& runtime = runtime::Runtime::get();
    OptimizerState state;
    for (const auto* entry : runtime.table().divided()) {
      const auto sizes = entry->tensor.sizes().vec();
      state.params[entry->name] = {sizes, {{"average", torch::zeros(sizes)}}, ""};
    }
    runtime::join_states(runtime, {}, runtime.topology().axis(CommGroup::kTp), state);
    for (const auto& [name, param] : state.params) {
      EXPECT_EQ(param.tensors.at("average").sizes(), at::IntArrayRef(param.shape)) << name;
      elements[tp_rank()] += param.tensors.at("average").numel();
    }
  });
  const int64_t block = 2 * DividedModel::kHidden * (DividedModel::kWidth + 1) +
                        DividedModel::kWidth * DividedModel::kHidden;
  EXPECT_EQ(elements[0] + elements[1], 3 * block);
  EXPECT_GT(std::min(elements[0], elements[1]), block);
}

/// A rank that did another number of steps is found out.
TEST_F(TensorParallelCheckpoint, RefusesOtherStatesInAGroup) {
  const auto text = error_of<UsageError>([&] {
    run({{2}}, [&](Rank& rank) {
      rank.step(0);
      if (tp_rank() == 1) rank.optimizer->step();
      rank.optimizer->state_dict();
    });
  });
  expect_has(text, {"the optimizer's state of parameter \"block0.",
                    "differs between ranks that divide it: expected {", "\"step\":1", "\"step\":2",
                    "Call optimizer.step() on all ranks alike"});
}

}  // namespace
}  // namespace smp
