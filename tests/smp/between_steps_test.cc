// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tests/smp/oracle.h"

// Code that programs of libtorch have between their steps, over all parameters: on every rank it
// does that rank's part, with the bits of one process, or is refused at once.
namespace smp {
namespace {

using namespace testing;
namespace to = torch::optim;

constexpr int kSteps = 3;
constexpr int kMicrobatches = 2;

struct Layout {
  std::string name;
  int ranks = 1;
  int replicas = 1;
  bool divides_state = false;

  Config config() const {
    return stages(ranks / replicas).ddp(replicas > 1).shard_optimizer_state(divides_state);
  }
};

const Layout kAlone{"alone", 1, 1}, kStages{"stages", 2, 1}, kBoth{"stages and replicas", 4, 2},
    kDivided{"divided state", 4, 2, true};

/// The program's work on its parameters when a step has trained them, before the update. It keeps
/// tensors by parameter.
using Between = std::function<void(const Tensors& parameters, Tensors& kept, int step)>;

struct Outcome {
  Named weights;
  Tensors kept;
};

torch::Tensor input_of(int step) {
  torch::manual_seed(50 + step);
  return torch::randn({8, MlpImpl::kWidth});
}

template <class Optimizer>
Outcome run_plain(const Between& between, int replicas) {
  auto net = make_mlp();
  const auto parameters = net->parameters();
  Optimizer optimizer(parameters, 0.01);
  Outcome outcome;
  for (int i = 0; i < kSteps; ++i) {
    optimizer.zero_grad();
    const auto x = input_of(i);
    plain_backward(parameters, replicas, kMicrobatches, [&](int m) {
      return net(part(x, int64_t{kMicrobatches} * replicas, m)).square().mean();
    });
    between(parameters, outcome.kept, i);
    optimizer.step();
  }
  outcome.weights = state_of(*net);
  return outcome;
}

struct Rank {
  DistributedModel<Mlp>& model;
  Mlp net;
  std::function<torch::Tensor(int)> train;
};

void on_ranks(const Layout& layout, const std::function<void(Rank&)>& body) {
  torch::set_num_threads(1);
  std::vector<Mlp> nets;
  for (int i = 0; i < layout.ranks; ++i) nets.push_back(make_mlp());
  std::vector<torch::Tensor> inputs;
  for (int i = 0; i < kSteps; ++i) inputs.push_back(input_of(i));
  run_as_threads(layout.ranks, layout.config(), [&] {
    DistributedModel<Mlp> model(nets[rank()]);
    auto train_on = step(
        [&](torch::Tensor x) {
          auto loss = model(x).square().mean();
          model->backward(loss);
          return loss;
        },
        StepOptions().name("train"));
    Rank here{model, nets[rank()], [&](int i) {
                return train_on(part(inputs[i], layout.replicas, dp_rank())).reduce_mean();
              }};
    body(here);
  });
}

/// Whether this rank owns a parameter.
bool is_local(DistributedModel<Mlp>& model, const torch::Tensor& parameter) {
  for (const auto& local : model->local_parameters()) {
    if (local.is_same(parameter)) return true;
  }
  return false;
}

/// Trains with `between` over all parameters, and compares weights and the tensors kept by each
/// rank with the plain program.
template <class Optimizer, class Plain>
void expect_as_plain(const Layout& layout, const Between& between) {
  SCOPED_TRACE(layout.name);
  const Outcome plain = run_plain<Plain>(between, layout.replicas);
  on_ranks(layout, [&](Rank& here) {
    const auto parameters = here.net->parameters();
    Optimizer optimizer(parameters, 0.01);
    Tensors kept;
    for (int i = 0; i < kSteps; ++i) {
      optimizer.zero_grad();
      here.train(i);
      between(parameters, kept, i);
      optimizer.step();
    }
    expect_equal(to_map(here.model->state_dict()), plain.weights, "value");
    for (size_t i = 0; i < kept.size(); ++i) {
      if (is_local(here.model, parameters[i])) expect_equal(kept[i], plain.kept[i], "kept");
    }
  });
}

void for_each(const Tensors& parameters, const std::function<void(torch::Tensor)>& body) {
  const torch::NoGradGuard no_grad;
  for (const auto& parameter : parameters) {
    if (parameter.grad().defined()) body(parameter);
  }
}

/// Changes of gradients.
const std::vector<std::pair<std::string, Between>> kOfGradients = {
    {"scale", [](const Tensors& all, Tensors&,
                 int i) { for_each(all, [&](auto p) { p.mutable_grad().div_(i + 2); }); }},
    {"scale by data", [](const Tensors& all, Tensors&,
                         int) { for_each(all, [](auto p) { p.grad().data().mul_(0.3); }); }},
    {"clip values",
     [](const Tensors& all, Tensors&, int) { torch::nn::utils::clip_grad_value_(all, 1e-3); }},
    {"decay by hand", [](const Tensors& all, Tensors&,
                         int) { for_each(all, [](auto p) { p.sub_(0.1 * p.grad()); }); }},
    {"update by hand", [](const Tensors& all, Tensors&,
                          int) { for_each(all, [](auto p) { p.data() -= p.grad() * 0.1; }); }},
    {"zero a row", [](const Tensors& all, Tensors&,
                      int) { for_each(all, [](auto p) { p.grad().narrow(0, 0, 1).zero_(); }); }},
    {"mask gradients",
     [](const Tensors& all, Tensors&, int) {
       for_each(all, [](auto p) { p.mutable_grad() = p.grad() * (p.abs() > 0.1); });
     }},
    {"normalise each by its own norm",
     [](const Tensors& all, Tensors&, int) {
       for_each(all, [](auto p) { p.grad().div_(p.grad().norm() + 1e-6); });
     }},
    {"keep gradients", [](const Tensors& all, Tensors& kept, int i) {
       for_each(all, [&](auto p) { i == 0 ? kept.push_back(p.grad().clone()) : void(); });
     }}};

/// Changes of parameters.
const std::vector<std::pair<std::string, Between>> kOfParameters = {
    {"clamp weights", [](const Tensors& all, Tensors&,
                         int) { for_each(all, [](auto p) { p.data().clamp_(-0.2, 0.2); }); }},
    {"decay weights",
     [](const Tensors& all, Tensors&, int) { for_each(all, [](auto p) { p.mul_(0.99); }); }},
    {"exponential moving average",
     [](const Tensors& all, Tensors& kept, int i) {
       size_t next = 0;
       for_each(all, [&](auto p) {
         if (i == 0) {
           kept.push_back(p.detach().clone());
         } else {
           kept[next++].mul_(0.9).add_(p, 0.1);
         }
       });
     }},
    {"weight noise that is zero",
     [](const Tensors& all, Tensors&, int) {
       for_each(all, [](auto p) { p.add_(torch::zeros_like(p)); });
     }},
    {"reset a layer", [](const Tensors& all, Tensors&, int i) {
       if (i == 1) for_each(all, [](auto p) { torch::nn::init::constant_(p, 0.125); });
     }}};

TEST(BetweenSteps, CodeOverAllParametersIsThatOfOneProcess) {
  using Distributed = DistributedOptimizer<to::Adam>;
  for (const auto* programs : {&kOfGradients, &kOfParameters}) {
    for (const auto& [name, between] : *programs) {
      SCOPED_TRACE(name);
      for (const Layout& layout : {kAlone, kStages, kBoth}) {
        expect_as_plain<Distributed, to::Adam>(layout, between);
      }
      if (programs == &kOfParameters) {
        expect_as_plain<Distributed, to::Adam>(kDivided, between);
      }
    }
  }
}

/// An optimizer of libtorch alone steps over other ranks' parameters.
TEST(BetweenSteps, PlainOptimizersAreThoseOfOneProcess) {
  const Between nothing = [](const Tensors&, Tensors&, int) {};
  for (const Layout& layout : {kStages, kBoth}) {
    expect_as_plain<to::Adam, to::Adam>(layout, nothing);
    expect_as_plain<to::AdamW, to::AdamW>(layout, nothing);
    expect_as_plain<to::SGD, to::SGD>(layout, nothing);
    expect_as_plain<to::RMSprop, to::RMSprop>(layout, nothing);
  }
}

/// One that made its state when parameters were whole on every rank is told how it goes on.
TEST(BetweenSteps, PlainOptimizersWithAStateAreRefused) {
  const auto text = error_of<UsageError>([] {
    expect_as_plain<to::Adagrad, to::Adagrad>(kStages, [](const Tensors&, Tensors&, int) {});
  });
  expect_has(text, {"the gradient of parameter \"",
                    "an optimizer that does not pass over them is wrapped as "
                    "smp::distributed(optimizer), which is for all but torch::optim::LBFGS: that "
                    "needs \"partitions\": 1"});
  expect_as_plain<DistributedOptimizer<to::Adagrad>, to::Adagrad>(
      kStages, [](const Tensors&, Tensors&, int) {});
}

/// Sharpness-aware minimisation: the only number over all parameters is the norm.
TEST(BetweenSteps, SharpnessAwareMinimisation) {
  const auto climb = [](const Tensors& parameters, const torch::Tensor& norm) {
    const torch::NoGradGuard no_grad;
    Tensors climbed;
    for (auto p : parameters) {
      climbed.push_back(p.grad() * (0.05 / (norm + 1e-12)));
      p.add_(climbed.back());
    }
    return climbed;
  };
  const auto descend = [](const Tensors& parameters, const Tensors& climbed) {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < parameters.size(); ++i) {
      auto parameter = parameters[i];
      parameter.sub_(climbed[i]);
    }
  };
  auto plain = make_mlp();
  const auto parameters = plain->parameters();
  to::SGD optimizer(parameters, 0.1);
  const auto train = [&](int i) {
    plain_backward(parameters, 1, kMicrobatches, [&](int m) {
      return plain(part(input_of(i), kMicrobatches, m)).square().mean();
    });
  };
  for (int i = 0; i < kSteps; ++i) {
    optimizer.zero_grad();
    train(i);
    Tensors norms;
    for (const auto& parameter : parameters) norms.push_back(parameter.grad().norm());
    const auto climbed = climb(parameters, torch::stack(norms).norm());
    optimizer.zero_grad();
    train(i);
    descend(parameters, climbed);
    optimizer.step();
  }
  on_ranks(kStages, [&](Rank& here) {
    const auto all = here.model->parameters();
    DistributedOptimizer<to::SGD> optimizer(all, 0.1);
    for (int i = 0; i < kSteps; ++i) {
      optimizer.zero_grad();
      here.train(i);
      const auto climbed = climb(all, grad_norm(here.model));
      optimizer.zero_grad();
      here.train(i);
      descend(all, climbed);
      optimizer.step();
    }
    expect_equal(to_map(here.model->state_dict()), state_of(*plain), "value");
  });
}

/// The text that each rank ends with.
std::vector<std::string> errors_of_ranks(const Layout& layout,
                                         const std::function<void(Rank&)>& program) {
  std::vector<std::string> texts(layout.ranks);
  on_ranks(layout, [&](Rank& here) {
    here.train(0);
    try {
      program(here);
    } catch (const c10::Error& error) {
      texts[rank()] = error.what_without_backtrace();
    }
  });
  return texts;
}

void expect_refused(const Layout& layout, const std::function<void(Rank&)>& program,
                    std::initializer_list<std::string> parts) {
  for (const auto& text : errors_of_ranks(layout, program)) expect_has(text, parts);
}

const std::initializer_list<std::string> kGradientText = {
    "the gradient of parameter \"", "\", which pp rank ",
    " owns: this rank does not have these "
    "numbers. For norms over all gradients call smp::grad_norm(model) or "
    "smp::clip_grad_norm_(model, max_norm); for the gradients of this rank go over "
    "model->local_parameters(), or local_named_parameters()"};

const std::initializer_list<std::string> kParameterText = {
    "parameter \"", "\", which pp rank ",
    "Between steps go over model->local_parameters(), or local_named_parameters(), which are those "
    "of this rank; model->state_dict() has copies of all, on every rank. The model runs in a step "
    "function (smp::step), and as a plain module once model->cpu() has gathered it"};

/// Every rank is told, whatever the order of its parameters is.
TEST(BetweenSteps, NumbersOverAllGradientsAreRefused) {
  const auto norm_of = [](const Tensors& all) {
    Tensors norms;
    for (const auto& parameter : all) norms.push_back(parameter.grad().norm());
    return torch::stack(norms).norm();
  };
  const std::vector<std::function<void(const Tensors&)>> programs = {
      [&](const Tensors& all) { norm_of(all); },
      [](const Tensors& all) { torch::nn::utils::clip_grad_norm_(all, 1.0); },
      [](const Tensors& all) {  // skip the update by the norm
        double sum = 0;
        for (const auto& parameter : all) {
          if (parameter.grad().defined()) sum += parameter.grad().square().sum().item<double>();
        }
        ADD_FAILURE() << sum;
      },
      [](const Tensors& all) {  // without the host
        auto sum = torch::zeros({});
        for (const auto& parameter : all) sum = sum + parameter.grad().square().sum();
        sum.sqrt().item<float>();
      },
      [](const Tensors& all) {
        auto largest = torch::zeros({});
        for (const auto& parameter : all) {
          largest = torch::maximum(largest, parameter.grad().abs().max());
        }
        for (const auto& parameter : all) parameter.grad().div_(largest);
      },
      [](const Tensors& all) {
        for (const auto& parameter : all) parameter.grad().data_ptr<float>();
      }};
  for (size_t i = 0; i < programs.size(); ++i) {
    SCOPED_TRACE(i);
    for (const Layout& layout : {kStages, kBoth}) {
      expect_refused(layout, [&](Rank& here) { programs[i](here.net->parameters()); },
                     {"the gradient of parameter \"", "\", which pp rank ",
                      "For norms over all gradients call smp::grad_norm(model) or "
                      "smp::clip_grad_norm_(model, max_norm)"});
    }
  }
  expect_refused(
      kStages, [](Rank& here) { torch::nn::utils::clip_grad_norm_(here.net->parameters(), 1.0); },
      kGradientText);
}

TEST(BetweenSteps, NumbersOfOtherRanksParametersAreRefused) {
  const auto x = torch::ones({2, MlpImpl::kWidth});
  const std::vector<std::function<void(Rank&)>> programs = {
      [&](Rank& here) { here.net->forward(x); },
      [&](Rank& here) {
        const torch::NoGradGuard no_grad;
        here.net->eval();
        here.net->forward(x);
      },
      [](Rank& here) { torch::nn::utils::parameters_to_vector(here.net->parameters()); },
      [](Rank& here) {
        double sum = 0;
        for (const auto& parameter : here.net->parameters()) {
          sum += parameter.norm().item<double>();
        }
        ADD_FAILURE() << sum;
      },
      [](Rank& here) {
        std::ostringstream out;
        for (const auto& item : here.net->named_parameters()) out << item.value();
      },
      [](Rank& here) {
        std::ostringstream out;
        torch::save(here.net, out);
      },
      [](Rank& here) {  // an average that was begun before the first step
        const torch::NoGradGuard no_grad;
        for (const auto& parameter : here.net->parameters()) {
          torch::zeros(parameter.sizes()).mul_(0.9).add_(parameter, 0.1);
        }
      },
      [](Rank& here) {  // another model, which lies whole on this rank
        const torch::NoGradGuard no_grad;
        const auto target = make_mlp();
        const auto from = here.net->parameters(), to = target->parameters();
        for (size_t i = 0; i < from.size(); ++i) to[i].data().copy_(from[i]);
      }};
  for (size_t i = 0; i < programs.size(); ++i) {
    SCOPED_TRACE(i);
    for (const Layout& layout : {kStages, kBoth, kDivided}) {
      expect_refused(layout, programs[i], kParameterText);
    }
  }
}

/// Parameters that `model->cpu()` gathers are there until the next step that trains.
TEST(BetweenSteps, GatheredParametersAreThereUntilTheNextStep) {
  on_ranks(kStages, [](Rank& here) {
    here.train(0);
    const auto x = torch::ones({4, MlpImpl::kWidth});
    const auto state = to_map(here.model->state_dict());
    here.model->cpu();
    auto plain = make_mlp();
    {
      const torch::NoGradGuard no_grad;
      for (const auto& item : plain->named_parameters()) item.value().copy_(state.at(item.key()));
    }
    expect_equal(here.net->forward(x), plain->forward(x), "output");
    here.train(1);
    expect_has(error_of<UsageError>([&] { here.net->forward(x); }), kParameterText);
  });
}

/// Pieces of gradients are not the `.grad` of a parameter.
TEST(BetweenSteps, GradientsInPiecesAreRefused) {
  for (const auto& [name, between] : kOfGradients) {
    SCOPED_TRACE(name);
    if (name == "keep gradients" || name == "mask gradients") continue;  // which read nothing
    expect_refused(kDivided,
                   [&, between = between](Rank& here) {
                     Tensors kept;
                     between(here.model->local_parameters(), kept, 0);
                   },
                   {".grad of parameter \"", "\", which is in pieces on the replicas",
                    "With \"shard_optimizer_state\" or \"sharded_data_parallel_degree\" read and "
                    "change the pieces of this rank: .grad of model->virtual_named_parameters()",
                    "smp::grad_norm(model) and smp::clip_grad_norm_(model, max_norm)"});
  }
}

TEST(BetweenSteps, ShardedParametersAreRefused) {
  const Config config = Config()
                            .microbatches(2)
                            .seed(kSeed)
                            .ddp(true)
                            .sharded_data_parallel_degree(2)
                            .sdp_param_persistence_threshold(1);
  std::vector<Mlp> nets{make_mlp(), make_mlp()};
  const auto x = input_of(0);
  run_as_threads(2, config, [&] {
    DistributedModel<Mlp> model(nets[rank()]);
    auto train = step([&](torch::Tensor x) {
      auto loss = model(x).square().mean();
      model->backward(loss);
      return loss;
    });
    train(x);
    const torch::NoGradGuard no_grad;
    const auto weight = nets[rank()]->head->weight;
    for (const auto& use : std::vector<std::function<void()>>{
             [&] { nets[rank()]->forward(x); }, [&] { weight.data().clamp_(-1, 1); },
             [&] { weight.t().sum().item<float>(); }}) {
      expect_has(error_of<UsageError>(use),
                 {"which sharded data parallelism divides over ranks: this rank does not have "
                  "these numbers. It is whole only while a step function (smp::step) reads it",
                  "model->state_dict()", "model->virtual_named_parameters()", "model->cpu()"});
    }
  });
}

/// A model and an optimizer that have trained without the library.
TEST(BetweenSteps, TrainingGoesOnFromAPlainProgram) {
  const auto warm_up = [](Mlp net, to::Adam& optimizer) {
    net(input_of(9)).square().mean().backward();
    optimizer.step();
  };
  const auto train_on = [](to::Optimizer& optimizer, const std::function<void(int)>& train) {
    for (int i = 0; i < kSteps; ++i) {
      if (i > 0) optimizer.zero_grad();  // at first to the gradients that there are
      train(i);
      optimizer.step();
    }
  };
  auto plain = make_mlp();
  to::Adam plain_optimizer(plain->parameters(), 0.01);
  warm_up(plain, plain_optimizer);
  train_on(plain_optimizer, [&](int i) {
    plain_backward(plain->parameters(), 1, kMicrobatches, [&](int m) {
      return plain(part(input_of(i), kMicrobatches, m)).square().mean();
    });
  });
  std::vector<Mlp> nets{make_mlp(), make_mlp()};
  std::vector<std::unique_ptr<to::Adam>> optimizers;
  for (auto& net : nets) {
    optimizers.push_back(std::make_unique<to::Adam>(net->parameters(), 0.01));
    warm_up(net, *optimizers.back());
  }
  std::vector<torch::Tensor> inputs;
  for (int i = 0; i < kSteps; ++i) inputs.push_back(input_of(i));
  run_as_threads(2, stages(2), [&] {
    DistributedModel<Mlp> model(nets[rank()]);
    auto optimizer = distributed(*optimizers[rank()]);
    auto train = step([&](torch::Tensor x) {
      auto loss = model(x).square().mean();
      model->backward(loss);
      return loss;
    });
    for (int i = 0; i < kSteps; ++i) {
      if (i > 0) optimizer.zero_grad();
      train(inputs[i]);
      optimizer.step();
    }
    expect_equal(to_map(model->state_dict()), state_of(*plain), "value");
  });
}

struct UntiedImpl : torch::nn::Module {
  UntiedImpl() {
    token = register_module("token", torch::nn::Linear(6, 6));
    head = register_module("head", torch::nn::Linear(6, 6));
    head->weight = token->weight;  // the member alone
  }
  torch::Tensor forward(torch::Tensor x) { return head(torch::tanh(token(x))); }
  torch::nn::Linear token{nullptr}, head{nullptr};
};
TORCH_MODULE(Untied);

TEST(UnreadParameters, AreNamedOnce) {
  ::testing::internal::CaptureStderr();
  run_as_threads(1, stages(1), [] {
    DistributedModel<Untied> model(Untied{});
    auto evaluate = step([&](torch::Tensor x) { return model(x).mean(); });
    auto train = step(
        [&](torch::Tensor x) {
          auto loss = model(x).mean();
          model->backward(loss);
        },
        StepOptions().name("train"));
    const auto x = torch::ones({4, 6});
    evaluate(x);
    train(x);
    train(x);
  });
  const std::string log = ::testing::internal::GetCapturedStderr();
  const std::string warning =
      "no operator of step function \"train\" reads parameter \"head.weight\"";
  expect_has(log, {warning,
                   "assigning a member (head->weight = token->weight) leaves the old one "
                   "registered; use one tensor instead (docs/recipes.md, \"Tied weights\")"});
  EXPECT_EQ(log.find(warning, log.find(warning) + 1), std::string::npos);
}

}  // namespace
}  // namespace smp
