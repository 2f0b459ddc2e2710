// SPDX-License-Identifier: Apache-2.0
#include "optim/state_dict.h"

#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim.h>

#include <functional>
#include <limits>
#include <memory>

#include "core/check.h"
#include "smp/optim/adadelta.h"
#include "smp/optim/traits.h"
#include "tests/optim/set_state.h"

namespace smp::optim {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Params = std::map<std::string, torch::Tensor>;
using OptimizerPtr = std::unique_ptr<torch::optim::Optimizer>;
using MakeOptimizer = std::function<OptimizerPtr(std::vector<torch::Tensor>)>;

template <class Optimizer, class Options>
MakeOptimizer with(Options options) {
  return [=](std::vector<torch::Tensor> params) {
    return std::make_unique<Optimizer>(std::move(params), options);
  };
}

struct Case {
  const char* name;
  MakeOptimizer trained;  ///< Options of the saved run.
  MakeOptimizer fresh;    ///< Other options: they must be overwritten.
};

void PrintTo(const Case& value, std::ostream* out) { *out << value.name; }

std::vector<Case> cases() {
  namespace to = torch::optim;
  return {
      {"Sgd", with<to::SGD>(to::SGDOptions(0.1)), with<to::SGD>(to::SGDOptions(9))},
      {"SgdMomentum", with<to::SGD>(to::SGDOptions(0.1).momentum(0.9).nesterov(true)),
       with<to::SGD>(to::SGDOptions(9))},
      {"Adam", with<to::Adam>(to::AdamOptions(0.1).betas({0.8, 0.9}).amsgrad(true)),
       with<to::Adam>(to::AdamOptions(9))},
      {"AdamW", with<to::AdamW>(to::AdamWOptions(0.1).weight_decay(0.3)),
       with<to::AdamW>(to::AdamWOptions(9))},
      {"Adagrad", with<to::Adagrad>(to::AdagradOptions(0.1).lr_decay(0.2)),
       with<to::Adagrad>(to::AdagradOptions(9).initial_accumulator_value(7))},
      {"RMSprop", with<to::RMSprop>(to::RMSpropOptions(0.1).momentum(0.5).centered(true)),
       with<to::RMSprop>(to::RMSpropOptions(9))},
      {"Adadelta", with<Adadelta>(AdadeltaOptions(0.5).rho(0.7)),
       with<Adadelta>(AdadeltaOptions(9))},
  };
}

Params make_params() {
  torch::manual_seed(1);
  Params params;
  params["a.weight"] = torch::randn({3, 4}).requires_grad_();
  params["b.bias"] = torch::randn({5}).requires_grad_();
  params["c.scale"] = torch::randn({}).requires_grad_();
  return params;
}

Params copy_of(const Params& params) {
  Params result;
  for (const auto& [name, param] : params) {
    result[name] = param.detach().clone().requires_grad_();
  }
  return result;
}

ParameterNames names_of(const Params& params) {
  ParameterNames names;
  for (const auto& [name, param] : params) {
    names[param.unsafeGetTensorImpl()] = name;
  }
  return names;
}

/// The parameters called `names`, in that order.
std::vector<torch::Tensor> pick(const Params& params, const std::vector<std::string>& names) {
  std::vector<torch::Tensor> result;
  for (const std::string& name : names) {
    result.push_back(params.at(name));
  }
  return result;
}

/// One step with gradients that depend on the parameter's name and the step only.
void step(torch::optim::Optimizer& optimizer, const Params& params, int64_t step_index) {
  int64_t seed = 100 * step_index;
  for (const auto& [name, param] : params) {
    torch::manual_seed(++seed);
    param.mutable_grad() = torch::randn_like(param);
  }
  optimizer.step();
}

const std::vector<std::string> kForward = {"a.weight", "b.bias", "c.scale"};
const std::vector<std::string> kBackward = {"c.scale", "b.bias", "a.weight"};

template <class E>
std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const E& error) {
    return error.what();
  }
  ADD_FAILURE() << "expected an exception of the given type";
  return "";
}

class OptimizerStateTest : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override { at::set_num_threads(1); }
};

TEST_P(OptimizerStateTest, RestoredRunEqualsTheUninterruptedOneBitForBit) {
  Params params = make_params();
  const OptimizerPtr optimizer = GetParam().trained(pick(params, kForward));
  for (int64_t i = 0; i < 3; ++i) {
    step(*optimizer, params, i);
  }
  // The state goes through text and a tensor table, as it does in a checkpoint.
  const OptimizerState saved = get_state(*optimizer, names_of(params));
  const OptimizerState state =
      from_parts(nlohmann::json::parse(to_json(saved).dump()), tensors_of(saved));

  Params resumed = copy_of(params);
  const OptimizerPtr fresh = GetParam().fresh(pick(resumed, kBackward));
  step(*fresh, resumed, 77);  // the fresh one's own state must be replaced
  for (auto& [name, param] : resumed) {
    param.set_data(params.at(name).detach().clone());
  }
  set_state(*fresh, state, names_of(resumed));

  Params stage;  // a pipeline stage that holds one parameter
  stage["b.bias"] = params.at("b.bias").detach().clone().requires_grad_();
  const OptimizerPtr partial = GetParam().fresh({stage.at("b.bias")});
  set_state(*partial, state, names_of(stage));

  for (int64_t i = 3; i < 6; ++i) {
    step(*optimizer, params, i);
    step(*fresh, resumed, i);
    stage.at("b.bias").mutable_grad() = params.at("b.bias").grad().clone();
    partial->step();
  }
  for (const auto& [name, param] : params) {
    EXPECT_TRUE(torch::equal(param, resumed.at(name))) << name;
  }
  EXPECT_TRUE(torch::equal(params.at("b.bias"), stage.at("b.bias")));
  EXPECT_EQ(to_json(get_state(*fresh, names_of(resumed)))["state"],
            to_json(get_state(*optimizer, names_of(params)))["state"]);
}

INSTANTIATE_TEST_SUITE_P(All, OptimizerStateTest, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

TEST(OptimizerStateContentsTest, StateIsReadableByNameAndField) {
  Params params = make_params();
  torch::optim::Adam optimizer(pick(params, kForward), torch::optim::AdamOptions(0.1));
  step(optimizer, params, 0);
  const OptimizerState state = get_state(optimizer, names_of(params));
  const OptimizerState::Param& weight = state.params.at("a.weight");
  EXPECT_EQ(weight.shape, (std::vector<int64_t>{3, 4}));
  EXPECT_EQ(weight.scalars, R"({"step":1})");
  // Adam's first moment after one step is (1 - beta1) g.
  EXPECT_TRUE(torch::allclose(weight.tensors.at("exp_avg"), params["a.weight"].grad() * 0.1));
  ASSERT_EQ(state.groups.size(), 1u);
  EXPECT_EQ(state.groups[0].type, "torch::optim::AdamOptions");
  const auto options = nlohmann::json::parse(state.groups[0].options);
  EXPECT_EQ(options.at("lr"), 0.1);
  EXPECT_EQ(options.at("betas"), nlohmann::json({0.9, 0.999}));
  EXPECT_EQ(state.groups[0].params, kForward);
}

TEST(OptimizerStateContentsTest, StateIsACopy) {
  Params params = make_params();
  torch::optim::SGD optimizer(pick(params, kForward), torch::optim::SGDOptions(0.1).momentum(0.9));
  step(optimizer, params, 0);
  const OptimizerState state = get_state(optimizer, names_of(params));
  const torch::Tensor before = state.params.at("b.bias").tensors.at("momentum_buffer").clone();
  step(optimizer, params, 1);
  EXPECT_TRUE(torch::equal(before, state.params.at("b.bias").tensors.at("momentum_buffer")));
}

TEST(OptimizerStateContentsTest, ASharedStateHasTheOptimizersTensors) {
  Params params = make_params();
  torch::optim::Adam optimizer(pick(params, kForward));  // without amsgrad, one is undefined
  step(optimizer, params, 0);
  const OptimizerState state = share_state(optimizer, names_of(params));
  const auto& fields = state.params.at("b.bias");
  EXPECT_EQ(fields.tensors.size(), 2u);
  EXPECT_EQ(fields.tensors.count("exp_avg_sq"), 1u);
  const auto& own = static_cast<torch::optim::AdamParamState&>(
      *optimizer.state().at(params.at("b.bias").unsafeGetTensorImpl()));
  EXPECT_TRUE(fields.tensors.at("exp_avg").is_alias_of(own.exp_avg()));
  EXPECT_EQ(parse_fields(fields.scalars)["step"], 1);
}

TEST(OptimizerStateContentsTest, RestoredTensorsTakeTheStridesOfTheirParameter) {
  Params params;
  params["w"] =
      torch::randn({2, 3, 4, 4}).contiguous(at::MemoryFormat::ChannelsLast).requires_grad_();
  torch::optim::Adam optimizer({params["w"]});
  step(optimizer, params, 0);
  OptimizerState state = get_state(optimizer, names_of(params));
  for (auto& [field, tensor] : state.params.at("w").tensors) {
    tensor = tensor.contiguous();
  }
  torch::optim::Adam restored({params["w"]});
  set_state(restored, state, names_of(params));
  const auto& result = static_cast<const torch::optim::AdamParamState&>(
      *restored.state().at(params["w"].unsafeGetTensorImpl()));
  EXPECT_EQ(result.exp_avg().strides(), params["w"].strides());
}

/// Such as one that replicas with pieces of parameters saved. Adagrad demands a state of it.
TEST(OptimizerStateContentsTest, AParameterWithoutElementsKeepsItsState) {
  Params params{{"empty", torch::zeros({0, 4}).requires_grad_()},
                {"full", torch::ones({2}).requires_grad_()}};
  torch::optim::Adagrad optimizer({params["empty"], params["full"]});
  OptimizerState saved = get_state(optimizer, names_of(params));
  saved.params.erase("empty");
  set_state(optimizer, saved, names_of(params));
  for (auto& [name, param] : params) param.mutable_grad() = torch::ones_like(param);
  optimizer.step();
  EXPECT_EQ(get_state(optimizer, names_of(params)).params.count("empty"), 1u);
  EXPECT_TRUE(torch::equal(params["full"], torch::full({2}, 0.99)));
}

TEST(OptimizerStateContentsTest, InfiniteOptionsSurviveText) {
  Params params = make_params();
  const double infinity = std::numeric_limits<double>::infinity();
  torch::optim::SGD optimizer(pick(params, kForward), torch::optim::SGDOptions(infinity));
  const nlohmann::json json = to_json(get_state(optimizer, names_of(params)));
  torch::optim::SGD restored(pick(params, kForward), torch::optim::SGDOptions(1));
  set_state(restored, from_parts(nlohmann::json::parse(json.dump()), {}), names_of(params));
  EXPECT_EQ(restored.param_groups()[0].options().get_lr(), infinity);
}

TEST(OptimizerStateContentsTest, GroupsAreMatchedByMembership) {
  Params params = make_params();
  using Group = torch::optim::OptimizerParamGroup;
  const auto group = [&](const Params& source, std::vector<std::string> names, double lr) {
    return Group(pick(source, names), std::make_unique<torch::optim::SGDOptions>(lr));
  };
  torch::optim::SGD optimizer({group(params, {"a.weight"}, 0.1), group(params, {"b.bias"}, 0.2),
                               group(params, {"c.scale"}, 0.3)},
                              torch::optim::SGDOptions(1));
  const OptimizerState state = get_state(optimizer, names_of(params));
  // Another order, and an empty group, which is matched by its index.
  torch::optim::SGD restored(
      {group(params, {"b.bias"}, 7), group(params, {"a.weight"}, 7), group(params, {}, 7)},
      torch::optim::SGDOptions(1));
  set_state(restored, state, names_of(params));
  EXPECT_EQ(restored.param_groups()[0].options().get_lr(), 0.2);
  EXPECT_EQ(restored.param_groups()[1].options().get_lr(), 0.1);
  EXPECT_EQ(restored.param_groups()[2].options().get_lr(), 0.3);

  torch::optim::SGD joined({group(params, {"a.weight", "b.bias", "c.scale"}, 7)},
                           torch::optim::SGDOptions(1));
  EXPECT_THAT(
      message_of<CheckpointError>([&] { set_state(joined, state, names_of(params)); }),
      HasSubstr("group 0: its parameters were saved in groups 0 and 1 with different options"));
}

TEST(OptimizerStateErrorTest, ListsEveryProblemAndChangesNothing) {
  Params params = make_params();
  torch::optim::Adam optimizer(pick(params, kForward), torch::optim::AdamOptions(0.1));
  step(optimizer, params, 0);
  const OptimizerState state = get_state(optimizer, names_of(params));

  Params other;
  other["a.weight"] = torch::zeros({4, 3}).requires_grad_();
  other["b.bias"] = torch::zeros({5}).requires_grad_();
  other["d.new"] = torch::zeros({1}).requires_grad_();
  std::vector<torch::Tensor> tensors = pick(other, {"a.weight", "b.bias", "d.new"});
  tensors.push_back(torch::zeros({2, 2}).requires_grad_());
  torch::optim::Adam target(tensors, torch::optim::AdamOptions(0.9));
  EXPECT_EQ(message_of<CheckpointError>([&] { set_state(target, state, names_of(other)); }),
            "[smp] the saved optimizer state does not fit this optimizer:\n"
            "  a.weight: expected shape [4, 3], got [3, 4]\n"
            "  parameter 3 of group 0, shape [2, 2]: has no name\n"
            "Build the optimizer as it was when the state was saved.");
  EXPECT_TRUE(target.state().empty());
  EXPECT_EQ(target.param_groups()[0].options().get_lr(), 0.9);
}

TEST(OptimizerStateErrorTest, RefusesTheStateOfAnotherOptimizer) {
  Params params = make_params();
  torch::optim::Adam optimizer(pick(params, kForward));
  const OptimizerState state = get_state(optimizer, names_of(params));
  torch::optim::AdamW other(pick(params, kForward));
  EXPECT_THAT(message_of<CheckpointError>([&] { set_state(other, state, names_of(params)); }),
              HasSubstr("group 0: expected options of type torch::optim::AdamWOptions, got "
                        "torch::optim::AdamOptions"));
}

TEST(OptimizerStateErrorTest, RefusesAStateThatLacksAField) {
  Params params = make_params();
  torch::optim::Adam optimizer(pick(params, kForward), torch::optim::AdamOptions(0.1));
  step(optimizer, params, 0);
  OptimizerState state = get_state(optimizer, names_of(params));
  state.params.at("b.bias").scalars = "";
  torch::optim::Adam target(pick(params, kForward), torch::optim::AdamOptions(0.9));
  EXPECT_THAT(message_of<CheckpointError>([&] { set_state(target, state, names_of(params)); }),
              HasSubstr("the saved optimizer state is malformed: state of parameter \"b.bias\" "
                        "cannot be read (a field is missing, or of another type than the "
                        "optimizer's). Use another checkpoint."));
  EXPECT_EQ(target.param_groups()[0].options().get_lr(), 0.9);
  EXPECT_TRUE(target.state().empty());
}

TEST(OptimizerStateErrorTest, GetStateNamesParametersWithoutName) {
  Params params = make_params();
  torch::optim::SGD optimizer(pick(params, kForward), torch::optim::SGDOptions(1));
  params.erase("b.bias");
  EXPECT_THAT(message_of<UsageError>([&] { get_state(optimizer, names_of(params)); }),
              HasSubstr("cannot save the optimizer state by name:"
                        "\n  parameter 1 of group 0, shape [5]: has no name\n"
                        "Give the optimizer parameters of the model that is saved."));
}

TEST(OptimizerStateErrorTest, RefusesLbfgs) {
  Params params = make_params();
  torch::optim::LBFGS optimizer(pick(params, kForward));
  const char* expected = "torch::optim::LBFGS by parameter name: it has one state for all";
  EXPECT_THAT(message_of<UsageError>([&] { get_state(optimizer, names_of(params)); }),
              HasSubstr(expected));
  EXPECT_THAT(message_of<UsageError>([&] { set_state(optimizer, {}, names_of(params)); }),
              HasSubstr(expected));
}

TEST(OptimizerStateErrorTest, RefusesMalformedParts) {
  EXPECT_THAT(message_of<CheckpointError>([] {
                from_parts({{"state", 1}}, {});
              }),
              HasSubstr("the saved optimizer state is malformed: expected param_groups and state"));
  const nlohmann::json empty = to_json(OptimizerState());
  EXPECT_THAT(message_of<CheckpointError>([&] {
                from_parts(empty, {{"w/exp_avg", torch::zeros({1})}});
              }),
              HasSubstr("of a parameter with state, got \"w/exp_avg\""));
}

TEST(OptimizerStateErrorTest, RefusesTextThatIsNoObject) {
  Params params = make_params();
  torch::optim::SGD optimizer(pick(params, kForward), torch::optim::SGDOptions(1));
  for (const char* text : {"{", "[1]", "3"}) {
    OptimizerState bad = get_state(optimizer, names_of(params));
    bad.groups.at(0).options = text;
    EXPECT_THAT(message_of<CheckpointError>([&] { set_state(optimizer, bad, names_of(params)); }),
                HasSubstr(std::string("expected text of a JSON object, got ") + text));
  }
}

TEST(OptimizerStateErrorTest, RefusesANumberThatIsNone) {
  Params params = make_params();
  torch::optim::SGD optimizer(pick(params, kForward), torch::optim::SGDOptions(1));
  const OptimizerState state = get_state(optimizer, names_of(params));
  const std::vector<std::string> none_of_them = {R"({"float":"huge"})", R"({"float":3})", "{}"};
  for (const std::string& text : none_of_them) {
    OptimizerState bad = state;
    auto options = nlohmann::json::parse(bad.groups.at(0).options);
    options["lr"] = nlohmann::json::parse(text);
    bad.groups.at(0).options = options.dump();
    EXPECT_THAT(message_of<CheckpointError>([&] { set_state(optimizer, bad, names_of(params)); }),
                AllOf(HasSubstr("options of group 0 cannot be read"),
                      HasSubstr("optimizer state: expected a number, text, array or "
                                "{\"float\": \"inf\"}, got " +
                                text)));
  }
}

/// A state with a field that has no form in JSON.
struct ListedState : public torch::optim::OptimizerCloneableParamState<ListedState> {
  void serialize(torch::serialize::InputArchive& /*archive*/) override {}
  void serialize(torch::serialize::OutputArchive& archive) const override {
    archive.write("counts", c10::IValue(std::vector<int64_t>{1, 2}));
  }
};

TEST(OptimizerStateErrorTest, RefusesAFieldWithoutAFormInJson) {
  Params params = make_params();
  torch::optim::SGD optimizer(pick(params, kForward), torch::optim::SGDOptions(1));
  optimizer.state()[params["a.weight"].unsafeGetTensorImpl()] = std::make_unique<ListedState>();
  EXPECT_THAT(
      message_of<UsageError>([&] { get_state(optimizer, names_of(params)); }),
      HasSubstr("cannot save optimizer field \"counts\": expected a tensor, bool, integer, "
                "float, string, none or tuple of these, got GenericList. Serialise it as one "
                "of these."));
}

/// An optimizer as a user writes one: it steps against the sign of its averaged gradient.
struct SignParamState : public torch::optim::OptimizerCloneableParamState<SignParamState> {
  TORCH_ARG(torch::Tensor, average);

 public:
  void serialize(torch::serialize::InputArchive& archive) override {
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(torch::Tensor, average);
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(average);
  }
};

template <int kTag>
class SignOptimizer : public torch::optim::Optimizer {
 public:
  explicit SignOptimizer(std::vector<torch::Tensor> params)
      : Optimizer(std::move(params), std::make_unique<torch::optim::SGDOptions>(0.1)) {}

  torch::Tensor step(LossClosure = nullptr) override {
    const torch::NoGradGuard no_grad;
    for (torch::Tensor& param : param_groups_[0].params()) {
      auto& state = state_[param.unsafeGetTensorImpl()];
      if (!state) {
        auto fresh = std::make_unique<SignParamState>();
        fresh->average(torch::zeros_like(param));
        state = std::move(fresh);
      }
      torch::Tensor& average = static_cast<SignParamState&>(*state).average();
      average.mul_(0.5).add_(param.grad());
      param.sub_(average.sign(), param_groups_[0].options().get_lr());
    }
    return {};
  }
};

using KnownOptimizer = SignOptimizer<0>;
using UnknownOptimizer = SignOptimizer<1>;

}  // namespace

template <>
struct ParamStateOf<KnownOptimizer> {
  using type = SignParamState;
};

namespace {

TEST(ParamStateOfTest, UserOptimizersAreRestoredThroughTheTrait) {
  Params params = make_params();
  KnownOptimizer optimizer(pick(params, kForward));
  step(optimizer, params, 0);
  const OptimizerState state = get_state(optimizer, names_of(params));
  Params resumed = copy_of(params);
  KnownOptimizer fresh(pick(resumed, kBackward));
  set_state(fresh, state, names_of(resumed));
  step(optimizer, params, 1);
  step(fresh, resumed, 1);
  EXPECT_TRUE(torch::equal(params["a.weight"], resumed["a.weight"]));
}

TEST(ParamStateOfTest, ErrorForAnUnknownOptimizerNamesTheTrait) {
  Params params = make_params();
  UnknownOptimizer optimizer(pick(params, kForward));
  const OptimizerState state = get_state(optimizer, names_of(params));
  const std::string message =
      message_of<UsageError>([&] { set_state(optimizer, state, names_of(params)); });
  EXPECT_THAT(message, HasSubstr("SignOptimizer<1>"));
  EXPECT_THAT(message, HasSubstr("Specialise smp::optim::ParamStateOf for it"));
}

TEST(ParameterNamesTest, TiedParametersHaveTheirFirstName) {
  const torch::Tensor weight = torch::zeros({2}).requires_grad_();
  torch::OrderedDict<std::string, at::Tensor> dict;
  dict.insert("z.weight", weight);
  dict.insert("a.weight", weight);
  EXPECT_EQ(parameter_names(dict), (ParameterNames{{weight.unsafeGetTensorImpl(), "z.weight"}}));
}

}  // namespace
}  // namespace smp::optim
