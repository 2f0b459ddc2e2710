// SPDX-License-Identifier: Apache-2.0
// The steps of libtorch's optimizers by functions over lists, compared on a device with their own.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <tuple>
#include <typeinfo>
#include <utility>
#include <vector>

#include "core/tensor_lists.h"
#include "optim/foreach_step.h"
#include "optim/state_dict.h"
#include "tests/device/parity_suite.h"

namespace smp::testing {
namespace {

using Tensors = std::vector<torch::Tensor>;
using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;

constexpr int kSteps = 5;

/// One optimizer over two groups of parameters, of which the second learns half as fast.
struct Case {
  std::string name;
  std::function<std::unique_ptr<Optimizer>(const Tensors& first, const Tensors& second)> make;
};

std::ostream& operator<<(std::ostream& out, const Case& tested) { return out << tested.name; }

template <class Class, class Options>
Case make_case(std::string name, const Options& options) {
  return {std::move(name), [options](const Tensors& first, const Tensors& second) {
            auto slower = std::make_unique<Options>(options);
            slower->lr(options.lr() / 2);
            std::vector<OptimizerParamGroup> groups;
            groups.emplace_back(first);
            groups.emplace_back(second, std::move(slower));
            return std::make_unique<Class>(groups, options);
          }};
}

std::vector<Case> cases() {
  using namespace torch::optim;
  return {
      make_case<SGD>("Sgd", SGDOptions(0.1)),
      make_case<SGD>("SgdDecay", SGDOptions(0.1).weight_decay(0.01)),
      make_case<SGD>("SgdMomentum", SGDOptions(0.1).momentum(0.9)),
      make_case<SGD>("SgdDampening", SGDOptions(0.1).momentum(0.9).dampening(0.3)),
      make_case<SGD>("SgdNesterov", SGDOptions(0.1).momentum(0.9).nesterov(true)),
      make_case<SGD>("SgdNesterovDecay",
                     SGDOptions(0.1).momentum(0.9).nesterov(true).weight_decay(0.01)),
      make_case<Adam>("Adam", AdamOptions(0.01)),
      make_case<Adam>("AdamDecay", AdamOptions(0.01).weight_decay(0.1)),
      make_case<Adam>("AdamAmsgrad", AdamOptions(0.01).amsgrad(true)),
      make_case<Adam>("AdamAmsgradDecay", AdamOptions(0.01).amsgrad(true).weight_decay(0.1)),
      make_case<AdamW>("AdamW", AdamWOptions(0.01)),
      make_case<AdamW>("AdamWWithoutDecay", AdamWOptions(0.01).weight_decay(0)),
      make_case<AdamW>("AdamWAmsgrad", AdamWOptions(0.01).amsgrad(true).betas({0.8, 0.95})),
      make_case<Adagrad>("Adagrad", AdagradOptions(0.1)),
      make_case<Adagrad>(
          "AdagradDecay",
          AdagradOptions(0.1).lr_decay(0.1).weight_decay(0.01).initial_accumulator_value(0.5)),
      make_case<RMSprop>("RMSprop", RMSpropOptions(0.01)),
      make_case<RMSprop>("RMSpropCentered", RMSpropOptions(0.01).centered(true)),
      make_case<RMSprop>("RMSpropMomentumDecay",
                         RMSpropOptions(0.01).momentum(0.9).weight_decay(0.01)),
      make_case<RMSprop>("RMSpropCenteredMomentum",
                         RMSpropOptions(0.01).momentum(0.9).centered(true)),
  };
}

/// In float16, in which the usual eps is zero, and so are squares of small gradients.
std::vector<Case> cases_in_half() {
  using namespace torch::optim;
  return {
      make_case<SGD>("SgdNesterovDecay",
                     SGDOptions(0.1).momentum(0.9).nesterov(true).weight_decay(0.01)),
      make_case<Adam>("AdamAmsgradDecay",
                      AdamOptions(0.01).eps(0.1).amsgrad(true).weight_decay(0.1)),
      make_case<AdamW>("AdamW", AdamWOptions(0.01).eps(0.1)),
  };
}

bool is_here(const torch::Tensor&) { return false; }

bool step_by_lists(Optimizer& optimizer, const std::type_info& type) {
  return optim::foreach_step(optimizer, type, is_here);
}

bool step_by_lists(Optimizer& optimizer) { return step_by_lists(optimizer, typeid(optimizer)); }

/// Numbers of many magnitudes, some of them zero.
torch::Tensor draw(torch::IntArrayRef sizes, int64_t seed) {
  torch::manual_seed(seed);
  const auto numbers = torch::randn(sizes, torch::kDouble) *
                       torch::pow(10.0, torch::rand(sizes, torch::kDouble) * 7 - 6);
  return numbers.masked_fill(torch::rand(sizes) < 0.03, 0);
}

torch::Tensor to_device(const torch::Tensor& tensor, torch::Dtype dtype) {
  return tensor.to(dtype).to(test_device(0));
}

/// Leaves of sizes that are done as vectors, as the rest of vectors, in several blocks, or not at
/// all; one that lies transposed, one with gaps, and one that begins where no vector does.
Tensors make_parameters(torch::Dtype dtype) {
  const std::vector<std::vector<int64_t>> sizes = {
      {}, {1}, {3}, {64}, {1000}, {0}, {4099}, {33, 7}, {4, 0, 2}, {65536 + 5}, {2, 3, 4, 5}};
  Tensors parameters;
  for (size_t i = 0; i < sizes.size(); ++i) {
    parameters.push_back(to_device(draw(sizes[i], static_cast<int64_t>(i)), dtype));
  }
  parameters.push_back(to_device(draw({6, 5}, 90), dtype).t());
  parameters.push_back(to_device(draw({4, 9}, 91), dtype).narrow(1, 2, 3));
  parameters.push_back(to_device(draw({2001}, 92), dtype).narrow(0, 1, 2000));
  for (auto& parameter : parameters) parameter = parameter.detach().requires_grad_();
  return parameters;
}

/// Gives one to each parameter and its twin. Every third has no gradient in every other step, so
/// their counts of steps part.
void give_gradients(const Tensors& parameters, const Tensors& twins, int step) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    parameters[i].mutable_grad().reset();
    twins[i].mutable_grad().reset();
    if (i % 3 == 1 && step % 2 == 1) continue;
    const int64_t seed = 1000 * (step + 1) + static_cast<int64_t>(i);
    const auto grad = to_device(draw(parameters[i].sizes(), seed), parameters[i].scalar_type());
    parameters[i].mutable_grad() = grad;
    twins[i].mutable_grad() = grad.clone();
  }
}

bool same_bits(const torch::Tensor& a, const torch::Tensor& b) {
  const auto x = a.detach().cpu().contiguous(), y = b.detach().cpu().contiguous();
  if (x.sizes() != y.sizes() || x.dtype() != y.dtype()) return false;
  return x.numel() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

/// An optimizer and its parameters.
struct Program {
  explicit Program(const Case& tested, torch::Dtype dtype) : parameters(make_parameters(dtype)) {
    const auto middle = parameters.begin() + 4;
    optimizer = tested.make({parameters.begin(), middle}, {middle, parameters.end()});
  }

  OptimizerState state() const {
    optim::ParameterNames names;
    for (size_t i = 0; i < parameters.size(); ++i) {
      names[parameters[i].unsafeGetTensorImpl()] = std::to_string(i);
    }
    return optim::share_state(*optimizer, names);
  }

  Tensors parameters;
  std::unique_ptr<Optimizer> optimizer;
};

void expect_same(const Program& program, const Program& expected) {
  for (size_t i = 0; i < expected.parameters.size(); ++i) {
    EXPECT_TRUE(same_bits(program.parameters[i], expected.parameters[i]))
        << "parameter " << i << " of shape " << expected.parameters[i].sizes();
  }
  const auto state = program.state(), wanted = expected.state();
  EXPECT_EQ(state.params.size(), wanted.params.size());
  for (const auto& [name, param] : wanted.params) {
    ASSERT_EQ(state.params.count(name), 1u) << "state of parameter " << name;
    const auto& own = state.params.at(name);
    EXPECT_EQ(own.scalars, param.scalars) << "state of parameter " << name;
    EXPECT_EQ(own.tensors.size(), param.tensors.size()) << "state of parameter " << name;
    for (const auto& [field, tensor] : param.tensors) {
      ASSERT_EQ(own.tensors.count(field), 1u) << field << " of parameter " << name;
      EXPECT_TRUE(same_bits(own.tensors.at(field), tensor)) << field << " of parameter " << name;
      EXPECT_EQ(own.tensors.at(field).strides(), tensor.strides())
          << field << " of parameter " << name;
    }
  }
}

/// Steps both under the same gradients: one by `step`, the other by libtorch's.
void train_beside(const Program& program, const Program& expected,
                  const std::function<void(Optimizer& optimizer, int number)>& step) {
  torch::set_num_threads(1);
  for (int number = 0; number < kSteps; ++number) {
    give_gradients(program.parameters, expected.parameters, number);
    expected.optimizer->step();
    step(*program.optimizer, number);
  }
}

class StepByLists : public ::testing::TestWithParam<std::tuple<Case, torch::Dtype>> {};

TEST_P(StepByLists, HasTheBitsOfLibtorchs) {
  const auto& [tested, dtype] = GetParam();
  const Program program(tested, dtype), expected(tested, dtype);
  train_beside(program, expected, [](Optimizer& optimizer, int number) {
    ASSERT_TRUE(step_by_lists(optimizer)) << "step " << number;
  });
  expect_same(program, expected);
}

/// Neither leaves anything that the other does not go on with.
TEST_P(StepByLists, TakesTurnsWithLibtorchs) {
  const auto& [tested, dtype] = GetParam();
  const Program program(tested, dtype), expected(tested, dtype);
  train_beside(program, expected, [](Optimizer& optimizer, int number) {
    if (number % 2 == 0) {
      optimizer.step();
    } else {
      ASSERT_TRUE(step_by_lists(optimizer)) << "step " << number;
    }
  });
  expect_same(program, expected);
}

std::string name_of(const ::testing::TestParamInfo<std::tuple<Case, torch::Dtype>>& info) {
  return std::get<0>(info.param).name + "Of" + c10::toString(std::get<1>(info.param));
}

INSTANTIATE_TEST_SUITE_P(All, StepByLists,
                         ::testing::Combine(::testing::ValuesIn(cases()),
                                            ::testing::Values(torch::kFloat, torch::kDouble,
                                                              torch::kBFloat16)),
                         name_of);
INSTANTIATE_TEST_SUITE_P(InHalf, StepByLists,
                         ::testing::Combine(::testing::ValuesIn(cases_in_half()),
                                            ::testing::Values(torch::kHalf)),
                         name_of);

/// One parameter on the device, with a gradient of ones.
torch::Tensor make_parameter(torch::Dtype dtype = torch::kFloat) {
  auto parameter = torch::ones({4, 3}, torch::dtype(dtype).device(test_device(0)));
  parameter.requires_grad_().mutable_grad() = torch::ones_like(parameter.detach());
  return parameter;
}

void expect_refused(Optimizer& optimizer, const std::type_info& type) {
  Tensors before;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) before.push_back(parameter.detach().clone());
  }
  const size_t states = optimizer.state().size();
  EXPECT_FALSE(step_by_lists(optimizer, type));
  EXPECT_EQ(optimizer.state().size(), states);
  size_t i = 0;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      EXPECT_TRUE(torch::equal(parameter.detach().cpu(), before[i++].cpu()));
    }
  }
}

void expect_refused(Optimizer& optimizer) { expect_refused(optimizer, typeid(optimizer)); }

class OwnStep : public torch::optim::SGD {
 public:
  using SGD::SGD;
};

TEST(ForeachStep, LeavesClassesThatItDoesNotKnow) {
  OwnStep derived({make_parameter()}, 0.1);
  expect_refused(derived);
  torch::optim::LBFGS other({make_parameter()});
  expect_refused(other);
}

/// A `DistributedOptimizer<SGD>` has the step of SGD.
TEST(ForeachStep, KnowsAClassByWhatItIsTold) {
  OwnStep derived({make_parameter()}, 0.5);
  EXPECT_TRUE(step_by_lists(derived, typeid(torch::optim::SGD)));
  EXPECT_TRUE(torch::equal(derived.param_groups()[0].params()[0].detach().cpu(),
                           torch::full({4, 3}, 0.5f)));
}

TEST(ForeachStep, LeavesWhatDoesNotFitLists) {
  const auto refused = [](const torch::Tensor& other) {
    torch::optim::SGD optimizer({make_parameter(), other}, 0.1);
    expect_refused(optimizer);
  };
  const auto on_the_host = torch::ones({2}).requires_grad_();
  on_the_host.mutable_grad() = torch::ones({2});
  refused(on_the_host);
  refused(make_parameter(torch::kComplexFloat));
}

TEST(ForeachStep, LeavesSparseGradients) {
  const auto parameter = make_parameter();
  const auto sparse =
      torch::sparse_coo_tensor(torch::zeros({1, 1}, torch::kLong), torch::ones({1, 3}), {4, 3});
  // The fake device has no sparse tensors.
  parameter.mutable_grad() = parameter.is_cuda() ? sparse.to(parameter.device()) : sparse;
  torch::optim::Adagrad optimizer({make_parameter(), parameter}, 0.1);
  expect_refused(optimizer);
}

TEST(ForeachStep, LeavesParametersThatShareMemory) {
  const auto memory = torch::ones({6}, test_device(0));
  Tensors parameters = {memory.narrow(0, 0, 4).detach(), memory.narrow(0, 3, 3).detach()};
  for (auto& parameter : parameters) {
    parameter.requires_grad_().mutable_grad() = torch::ones_like(parameter.detach());
  }
  torch::optim::SGD overlapping(parameters, 0.1);
  expect_refused(overlapping);
  const auto twice = make_parameter();
  torch::optim::SGD same({twice}, 0.1);
  same.param_groups()[0].params().push_back(twice);
  expect_refused(same);
}

/// Pieces of a flat buffer lie so.
TEST(ForeachStep, TakesNeighboursInMemory) {
  const auto memory = torch::ones({6}, test_device(0));
  Tensors parameters = {memory.narrow(0, 3, 3).detach(), memory.narrow(0, 0, 3).detach()};
  for (auto& parameter : parameters) {
    parameter.requires_grad_().mutable_grad() = torch::ones_like(parameter.detach());
  }
  torch::optim::SGD optimizer(parameters, 0.5);
  EXPECT_TRUE(step_by_lists(optimizer));
  EXPECT_TRUE(torch::equal(memory.cpu(), torch::full({6}, 0.5f)));
}

/// Reads as the gradient the values that it has just written to the parameter.
TEST(ForeachStep, TakesAGradientThatSharesMemoryWithItsParameter) {
  const auto parameter = make_parameter(), twin = make_parameter();
  for (const auto& one : {parameter, twin}) one.mutable_grad() = one.detach();
  const auto options = torch::optim::AdamWOptions(0.1).weight_decay(0.5);
  torch::optim::AdamW optimizer({parameter}, options), expected({twin}, options);
  expected.step();
  ASSERT_TRUE(step_by_lists(optimizer));
  EXPECT_TRUE(same_bits(parameter, twin));
}

TEST(ForeachStep, LeavesStatesThatLackSomething) {
  torch::optim::Adagrad without({make_parameter()}, 0.1);
  without.state().clear();
  expect_refused(without);
  torch::optim::AdamW later({make_parameter()}, 0.1);
  later.step();
  static_cast<torch::optim::AdamWOptions&>(later.param_groups()[0].options()).amsgrad(true);
  expect_refused(later);
}

TEST(ForeachStep, LeavesAStepWithoutGradients) {
  const auto parameter = make_parameter();
  parameter.mutable_grad().reset();
  torch::optim::AdamW optimizer({parameter}, 0.1);
  expect_refused(optimizer);
}

TEST(ForeachStep, PassesOverAbsentParameters) {
  const auto here = make_parameter(), absent = make_parameter();
  torch::optim::AdamW optimizer({here, absent}, torch::optim::AdamWOptions(0.1).weight_decay(0));
  EXPECT_TRUE(optim::foreach_step(
      optimizer, typeid(optimizer),
      [&](const torch::Tensor& parameter) { return parameter.is_same(absent); }));
  EXPECT_EQ(optimizer.state().size(), 1u);
  EXPECT_TRUE(torch::equal(absent.detach().cpu(), torch::ones({4, 3})));
  EXPECT_FALSE(torch::equal(here.detach().cpu(), torch::ones({4, 3})));
}

/// SGD leaves the versions of parameters, so that a graph that has saved them may go on.
TEST(ForeachStep, LeavesTheVersionsThatLibtorchsLeaves) {
  for (const bool by_lists : {false, true}) {
    const auto parameter = make_parameter();
    torch::optim::SGD sgd({parameter}, 0.1);
    const auto before = parameter._version();
    if (by_lists) {
      ASSERT_TRUE(step_by_lists(sgd));
    } else {
      sgd.step();
    }
    EXPECT_EQ(parameter._version(), before) << "by lists: " << by_lists;
  }
}

class TensorLists : public ::testing::TestWithParam<torch::Dtype> {};

TEST_P(TensorLists, AreDividedAsTensorsAre) {
  const torch::Dtype dtype = GetParam();
  const auto numbers = to_device(draw({257}, 1), dtype);
  for (int i = 1; i <= 200; ++i) {
    const double divisor = i < 100 ? i : std::sqrt(1 - std::pow(0.999, i - 99));
    const auto expected = numbers / divisor;
    const auto quotient = at::_foreach_div({numbers, numbers}, divisor)[1];
    Tensors in_place = {numbers.clone(), numbers.clone()};
    at::_foreach_div_(in_place, divisor);
    EXPECT_TRUE(same_bits(quotient, expected)) << divisor;
    EXPECT_TRUE(same_bits(in_place[0], expected)) << divisor;
    // Sums of gradients, which are of no half precision, are divided by a count in a tensor. Other
    // divisors make a difference there: CUDA takes the reciprocal in the tensor's dtype.
    if (dtype == torch::kBFloat16 || divisor != i) continue;
    EXPECT_TRUE(same_bits(numbers / torch::scalar_tensor(divisor, dtype), expected)) << divisor;
  }
}

TEST_P(TensorLists, AreAddedAndCopiedAsTensorsAre) {
  const torch::Dtype dtype = GetParam();
  const Tensors from = make_parameters(dtype);
  for (const torch::Dtype of_sum : {dtype, torch::kFloat}) {
    core::TensorUpdates updates;
    Tensors sums, copies, expected;
    for (size_t i = 0; i < from.size(); ++i) {
      const auto start = to_device(draw(from[i].sizes(), 50 + static_cast<int64_t>(i)), of_sum);
      const auto source = from[i].detach();
      expected.push_back(start.clone().add_(source));
      sums.push_back(start);
      copies.push_back(torch::zeros_like(start));
      updates.copy(copies[i], source);
      updates.add(sums[i], source);
    }
    updates.run();
    for (size_t i = 0; i < from.size(); ++i) {
      EXPECT_TRUE(same_bits(sums[i], expected[i])) << "tensor " << i;
      EXPECT_TRUE(same_bits(copies[i], from[i].detach().to(of_sum))) << "tensor " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, TensorLists,
                         ::testing::Values(torch::kFloat, torch::kDouble, torch::kBFloat16),
                         [](const auto& info) { return c10::toString(info.param); });

}  // namespace
}  // namespace smp::testing
