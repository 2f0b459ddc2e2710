// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/file.h"
#include "checkpoint/reader.h"
#include "optim/state_dict.h"
#include "tests/checkpoint/content.h"
#include "tests/smp/recipe.h"
#include "tests/temp_folder.h"

// A checkpoint that is loaded and saved again is the same one, whatever the program does between,
// in every layout: nothing that waits for the first step is left out.
namespace smp {
namespace {

using namespace testing;
using namespace testing::precision;
using nlohmann::json;
namespace to = torch::optim;

json without_calls(json content) {
  content["random"].erase("step_calls");
  return content;
}

/// A rank of a program with all that a checkpoint can hold.
class Program {
 public:
  struct Setup {
    uint64_t seed = 5;
    bool scales_late = false;     ///< asks for the loss scale after loading
    bool schedules_late = false;  ///< registers the scheduler after loading
  };

  Program(Net net, const Recipe& recipe, const Setup& setup)
      : recipe_(recipe),
        model_(std::move(net)),
        plain_(recipe.optimizer(model_->parameters())),
        optimizer_(distributed(*plain_)),
        scheduler_(*plain_, 2, 0.5),
        train_(step(Train([this](torch::Tensor x, torch::Tensor y) {
                      auto loss = loss_of(model_(x), y);
                      model_->backward(loss);
                      return loss;
                    }),
                    StepOptions().name("train"))),
        evaluate_(step(Evaluate([this](torch::Tensor x) { return model_(x).sum(); }),
                       StepOptions().name("evaluate"))),
        position_(register_checkpoint_state(
            "position", [this] { return std::to_string(epoch_); },
            [this](const std::string& text) { epoch_ = std::stoi(text); })) {
    if (!setup.scales_late) scale_loss();
    if (!setup.schedules_late) register_schedule();
  }

  void scale_loss() {
    if (recipe_.scales()) optimizer_.scale_loss(recipe_.scale);
  }
  void register_schedule() { register_scheduler("lr", scheduler_); }

  void evaluate() { evaluate_(own(batch_of(0).first)); }
  void train_only(int number) {
    const auto [x, y] = batch_of(number);
    train_(own(x), own(y));
  }
  void train(int number) {
    optimizer_.zero_grad();
    train_only(number);
    optimizer_.step();
    scheduler_.step();
    ++epoch_;
  }

  void load(const std::string& path) { smp::load(path, model_, optimizer_); }
  void save(const std::string& path) { smp::save(path, model_, optimizer_); }

  DistributedModel<Net>& model() { return model_; }
  auto& optimizer() { return optimizer_; }

 private:
  using Train = std::function<torch::Tensor(torch::Tensor, torch::Tensor)>;
  using Evaluate = std::function<torch::Tensor(torch::Tensor)>;

  const Recipe& recipe_;
  DistributedModel<Net> model_;
  std::unique_ptr<to::Optimizer> plain_;
  DistributedOptimizerRef<to::Optimizer> optimizer_;
  to::StepLR scheduler_;
  Step<Train> train_;
  Step<Evaluate> evaluate_;
  int epoch_ = 0;
  RemovableHandle position_;
};

struct Case {
  Layout layout;
  Precision precision;
};

std::ostream& operator<<(std::ostream& out, const Case& value) {
  return out << value.layout << ", " << torch::toString(value.precision.type);
}

Recipe saved_recipe_of(const Precision& precision) {
  return recipe<to::AdamW>(precision, to::AdamWOptions(1e-2),
                           precision.type == torch::kHalf ? lively() : LossScaleOptions());
}

class LoadSave : public ::testing::TestWithParam<Case> {
 protected:
  LoadSave() { torch::set_num_threads(1); }

  std::string path(const std::string& name) const { return folder_.file(name); }

  void run(const Layout& layout, const std::function<void(Program&)>& body,
           const Program::Setup& setup = {}) const {
    const Recipe recipe = saved_recipe_of(GetParam().precision);
    std::vector<Net> nets;
    for (int i = 0; i < layout.ranks(); ++i) {
      torch::manual_seed(setup.seed);
      nets.emplace_back();
    }
    run_as_threads(layout.ranks(), with_precision(config_of(layout), recipe.precision), [&] {
      Program program(nets[rank()], recipe, setup);
      body(program);
    });
  }

  static void TearDownTestSuite() {
    for (const auto& [type, path] : trained_) std::filesystem::remove_all(path);
  }

  /// The checkpoint `name` of a training in one process, which all tests share.
  json trained(const std::string& name) const {
    const torch::Dtype type = GetParam().precision.type;
    const auto [place, is_new] = trained_.emplace(
        type, c10::str(::testing::TempDir(), "/load_save.trained.", torch::toString(type)));
    if (is_new) {
      run({1, 1}, [&, path = place->second](Program& program) {
        program.evaluate();
        for (int i = 0; i < 3; ++i) program.train(i);
        program.save(path);
      });
    }
    std::filesystem::copy(place->second, path(name), std::filesystem::copy_options::recursive);
    const json content = content_of(path(name));
    EXPECT_EQ(content["step"], 3);
    EXPECT_EQ(content["extra"]["position"], 3);
    EXPECT_TRUE(content["extra"].contains("lr"));
    // Two moments and, in half precision, a master for each of the six parameters that train.
    const size_t fields = GetParam().precision.is_half() ? 3 : 2;
    EXPECT_GE(content["optimizer"]["tensors"].size(), 6 * fields);
    EXPECT_EQ(content["optimizer"].contains("loss_scale"),
              GetParam().precision.type == torch::kHalf);
    return content;
  }

 private:
  static std::map<torch::Dtype, std::string> trained_;  // paths of checkpoints
  const TempFolder folder_;
};

std::map<torch::Dtype, std::string> LoadSave::trained_;

TEST_P(LoadSave, IsTheIdentityAtEveryPointOfAProgram) {
  const json expected = trained("a");
  const auto same = [&](const std::string& name) {
    if (rank() == 0) {
      EXPECT_EQ(content_of(path(name)), expected) << name;
    }
  };
  run(GetParam().layout,
      [&](Program& program) {
        program.load(path("a"));
        program.save(path("before the first step"));
        same("before the first step");
        program.save(path("a second time"));
        same("a second time");
        save_async(path("asynchronous"), program.model(), program.optimizer()).wait();
        same("asynchronous");

        program.evaluate();
        program.save(path("evaluated"));
        if (rank() == 0) {
          EXPECT_EQ(without_calls(content_of(path("evaluated"))), without_calls(expected));
        }
        program.load(path("before the first step"));
        program.save(path("after the first step"));
        same("after the first step");

        const auto loads_and_saves = [&](const std::string& point) {
          program.load(path("a"));
          program.save(path(point));
          same(point);
        };
        program.train_only(3);
        loads_and_saves("gradients");
        program.optimizer().step();
        loads_and_saves("updated");
        program.optimizer().zero_grad();
        loads_and_saves("dropped");
        program.train(4);
        loads_and_saves("trained");
      },
      {/*seed=*/6});
}

TEST_P(LoadSave, OverTheCheckpointThatWasLoaded) {
  const json expected = trained("a");
  run(GetParam().layout,
      [&](Program& program) {
        program.load(path("a"));
        program.save(path("a"));
        program.load(path("a"));
        program.save(path("a"));
        if (rank() == 0) {
          EXPECT_EQ(content_of(path("a")), expected);
        }
        program.train(3);
        program.save(path("b"));
      },
      {/*seed=*/6});
  run({1, 1}, [&](Program& program) {
    program.evaluate();
    for (int i = 0; i < 4; ++i) program.train(i);
    program.save(path("uninterrupted"));
  });
  EXPECT_EQ(content_of(path("b")), content_of(path("uninterrupted")));
}

TEST_P(LoadSave, StateThatWaitsForTheProgram) {
  const json expected = trained("a");
  run(GetParam().layout,
      [&](Program& program) {
        program.load(path("a"));
        program.save(path("waiting"));
        if (rank() == 0) {
          EXPECT_EQ(content_of(path("waiting")), expected);
        }
        program.scale_loss();
        program.register_schedule();
        program.save(path("taken"));
        if (rank() == 0) {
          EXPECT_EQ(content_of(path("taken")), expected);
        }
      },
      {/*seed=*/6, /*scales_late=*/true, /*schedules_late=*/true});
}

TEST_P(LoadSave, StateDictionariesBeforeTheFirstStep) {
  trained("a");
  const checkpoint::Reader reader(path("a"));
  run(GetParam().layout,
      [&](Program& program) {
        program.load(path("a"));
        const auto state = program.optimizer().state_dict();
        std::map<std::string, uint64_t> hashes, expected;
        for (const auto& [name, tensor] : optim::tensors_of(state)) {
          hashes[name] = checkpoint::hash_of(tensor);
        }
        for (const auto& [name, entry] : reader.index().optimizer_tensors) {
          expected[name] = entry.hash;
        }
        EXPECT_EQ(hashes, expected);
        // And back: into an optimizer that has lost it.
        program.optimizer().load_state_dict(state);
        program.save(path("b"));
        if (rank() == 0) {
          EXPECT_EQ(content_of(path("b")), content_of(path("a")));
        }
      },
      {/*seed=*/6});
}

/// The first step after a save draws the numbers that it would have drawn after a load.
TEST_P(LoadSave, ASaveBeforeTheFirstStepSettlesTheSeed) {
  run(GetParam().layout, [&](Program& program) {
    program.save(path("untrained"));
    program.evaluate();
    program.train(0);
    program.save(path("a"));
  });
  run({1, 1},
      [&](Program& program) {
        torch::manual_seed(77);  // which would be another seed
        program.load(path("untrained"));
        program.evaluate();
        program.train(0);
        program.save(path("b"));
      },
      {/*seed=*/6});
  EXPECT_EQ(content_of(path("a")), content_of(path("b")));
}

std::vector<Case> cases() {
  std::vector<Case> cases;
  const std::vector<Precision> precisions = {kFloat32, kBf16, kFp16};
  // Layouts that divide what is saved with each of the three, others with one.
  for (size_t i = 0; i < layouts().size(); ++i) {
    const Layout layout = layouts()[i];
    const bool divides = layout.shard_optimizer_state || layout.sharded_data_parallel_degree > 1;
    for (size_t p = 0; p < precisions.size(); ++p) {
      if (divides || p == i % precisions.size()) cases.push_back({layout, precisions[p]});
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Layouts, LoadSave, ::testing::ValuesIn(cases()));

/// An optimizer with the groups that a test gives it.
class LoadStrictly : public ::testing::Test {
 protected:
  LoadStrictly() { torch::set_num_threads(1); }

  /// The names of a group's parameters, and its rate.
  using Groups = std::vector<std::pair<std::set<std::string>, double>>;

  template <class Body>
  static void run(const Groups& groups, const Body& body) {
    torch::manual_seed(5);
    std::vector<Net> nets = {Net(), Net()};
    run_as_threads(2, stages(2).microbatches(2), [&] {
      DistributedModel<Net> model(nets[rank()]);
      std::vector<to::OptimizerParamGroup> all;
      for (const auto& [names, rate] : groups) {
        std::vector<torch::Tensor> parameters;
        for (const auto& item : model->named_parameters()) {
          const std::string layer = item.key().substr(0, item.key().find('.'));
          if (names.count(layer) > 0) parameters.push_back(item.value());
        }
        all.emplace_back(parameters, std::make_unique<to::AdamOptions>(rate));
      }
      DistributedOptimizer<to::Adam> optimizer(std::move(all), to::AdamOptions(1));
      auto train = step([&](torch::Tensor x, torch::Tensor y) {
        auto loss = loss_of(model(x), y);
        model->backward(loss);
        return loss;
      });
      const auto [x, y] = batch_of(0);
      body(model, optimizer, [&, x = x, y = y] {
        optimizer.zero_grad();
        train(x, y);
        optimizer.step();
      });
    });
  }

  void save_with(const Groups& groups) const {
    run(groups, [&](auto& model, auto& optimizer, const auto& train) {
      train();
      smp::save(path_, model, optimizer);
    });
  }

  /// The error of a strict load into an optimizer of `groups`, before and after the first step.
  std::set<std::string> errors_with(const Groups& groups) const {
    std::set<std::string> errors;
    std::mutex mutex;
    for (const bool trained : {false, true}) {
      run(groups, [&](auto& model, auto& optimizer, const auto& train) {
        if (trained) train();
        const std::string error =
            error_of<CheckpointError>([&] { smp::load(path_, model, optimizer); });
        const std::lock_guard lock(mutex);
        errors.insert(error.substr(error.find("does not fit")));
      });
    }
    return errors;
  }

  static constexpr const char* kRemedy =
      "\nNothing was loaded. Build the optimizer as it was when it was saved, or load with strict "
      "= "
      "false, by which parameters that only one of them has are left out, and every group takes "
      "what was saved with its parameters";
  const TempFolder folder_;
  const std::string path_ = folder_.file("saved");
};

TEST_F(LoadStrictly, RefusesFewerParameters) {
  save_with({{{"in", "norm", "middle", "head"}, 0.1}});
  EXPECT_EQ(
      errors_with({{{"in", "norm", "middle"}, 0.1}}),
      std::set<std::string>{std::string("does not fit the optimizer:\n"
                                        "  unexpected: head.bias\n  unexpected: head.weight") +
                            kRemedy});
}

TEST_F(LoadStrictly, RefusesMoreParameters) {
  save_with({{{"in", "norm", "middle"}, 0.1}});
  EXPECT_EQ(errors_with({{{"in", "norm", "middle", "head"}, 0.1}}),
            std::set<std::string>{std::string("does not fit the optimizer:\n"
                                              "  missing: head.bias\n  missing: head.weight") +
                                  kRemedy});
}

TEST_F(LoadStrictly, RefusesOtherGroups) {
  save_with({{{"in", "norm"}, 0.1}, {{"middle", "head"}, 0.2}});
  EXPECT_EQ(errors_with({{{"in", "norm", "middle", "head"}, 0.1}}),
            std::set<std::string>{std::string("does not fit the optimizer:\n"
                                              "  group 0: its parameters were in the groups 0, 1") +
                                  kRemedy});
  EXPECT_EQ(errors_with({{{"in"}, 0.1}, {{"norm"}, 0.1}, {{"middle", "head"}, 0.2}}),
            std::set<std::string>{std::string("does not fit the optimizer:\n  groups 0, "
                                              "1: their parameters were in one, group 0") +
                                  kRemedy});
}

TEST_F(LoadStrictly, TakesGroupsInAnotherOrderByTheirParameters) {
  save_with({{{"in", "norm"}, 0.1}, {{"middle", "head"}, 0.2}});
  run({{{"head", "middle"}, 7}, {{"norm", "in"}, 8}},
      [&](auto& model, auto& optimizer, const auto& train) {
        smp::load(path_, model, optimizer);
        EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.2);
        EXPECT_EQ(optimizer.param_groups()[1].options().get_lr(), 0.1);
        train();
        EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.2);
      });
}

/// Loads by name and leaves out values that only one side has.
TEST_F(LoadStrictly, FalseTakesWhatBothHave) {
  save_with({{{"in", "norm", "middle"}, 0.1}});
  for (const bool trained : {false, true}) {
    run({{{"in", "norm"}, 7}, {{"head"}, 8}}, [&](auto& model, auto& optimizer, const auto& train) {
      if (trained) train();
      smp::load(path_, model, optimizer, LoadOptions().strict(false));
      EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.1);
      EXPECT_EQ(optimizer.param_groups()[1].options().get_lr(), 8);
      const auto state = optimizer.state_dict();
      EXPECT_EQ(state.params.count("in.weight"), 1u);
      EXPECT_EQ(state.params.count("middle.weight"), 0u);
      EXPECT_EQ(state.params.count("head.weight"), 0u);
      train();
      EXPECT_NE(optimizer.state_dict().params.at("in.weight").scalars,
                optimizer.state_dict().params.at("head.weight").scalars);  // steps 2 and 1
    });
  }
}

/// A state that libtorch cannot read is refused when it is loaded, not in the first step.
TEST_F(LoadStrictly, RefusesAStateThatCannotBeRead) {
  save_with({{{"in"}, 0.1}});
  const std::string index = path_ + "/" + checkpoint::kIndexFile;
  const std::string whole = checkpoint::read_file(index);
  const size_t state = whole.find("\"state\": {");
  ASSERT_NE(state, std::string::npos);
  const auto error = [&](const std::string& from, const std::string& to) {
    std::string text = whole, error;
    EXPECT_NE(text.find(from, state), std::string::npos) << from;
    checkpoint::write_file(
        index, checkpoint::with_checksum(text.replace(text.find(from, state), from.size(), to)));
    run({{{"in"}, 0.1}}, [&](auto& model, auto& optimizer, const auto&) {
      error = error_of<CheckpointError>([&] { smp::load(path_, model, optimizer); });
    });
    return error;
  };
  const auto is_malformed =
      ::testing::HasSubstr("the saved optimizer state is malformed: state of parameter \"in.");
  EXPECT_THAT(error("\"step\": 1", "\"stop\": 1"), is_malformed);
  EXPECT_THAT(error("\"step\": 1", "\"step\": \"1\""), is_malformed);
  EXPECT_THAT(error("\"shape\": [", "\"shape\": [-"),
              ::testing::HasSubstr("in.bias: expected shape [24], got [-24]"));
}

/// Has a layer, a parameter and a buffer without elements.
struct HollowImpl : torch::nn::Module {
  HollowImpl() {
    in = register_module("in", torch::nn::Linear(4, 8));
    none = register_module("none", torch::nn::Linear(8, 0));
    head = register_module("head", torch::nn::Linear(8, 3));
    nothing = register_parameter("nothing", torch::empty({0}));
    void_ = register_buffer("void", torch::empty({0, 3}));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = torch::tanh(in(x));
    return head(x + none(x).sum() + nothing.sum() + void_.sum());
  }
  torch::nn::Linear in{nullptr}, none{nullptr}, head{nullptr};
  torch::Tensor nothing, void_;
};
TORCH_MODULE(Hollow);

/// They belong to every rank, whichever rank owns them.
TEST(LoadSaveHollow, LoadsTensorsWithoutElementsAfterTheFirstStep) {
  const std::string path = ::testing::TempDir() + "/load_save_hollow";
  torch::manual_seed(3);
  std::vector<Hollow> nets = {Hollow(), Hollow()};
  run_as_threads(2, stages(2).microbatches(2), [&] {
    DistributedModel<Hollow> model(nets[rank()]);
    DistributedOptimizer<to::Adam> optimizer(model->parameters(), to::AdamOptions(0.1));
    auto train = step([&](torch::Tensor x) {
      auto loss = model(x).sum();
      model->backward(loss);
      return loss;
    });
    train(torch::ones({4, 4}));
    optimizer.step();
    smp::save(path, model, optimizer);
    const auto saved = to_map(model->state_dict());
    optimizer.zero_grad();
    train(torch::ones({4, 4}));
    optimizer.step();
    smp::load(path, model, optimizer);
    expect_equal(to_map(model->state_dict()), saved, "loaded");
    model->cpu();
    EXPECT_EQ(model.get_module()->void_.sizes(), torch::IntArrayRef({0, 3}));
    EXPECT_EQ(model.get_module()->none->weight.sizes(), torch::IntArrayRef({0, 8}));
  });
  std::filesystem::remove_all(path);
}

}  // namespace
}  // namespace smp
