// SPDX-License-Identifier: Apache-2.0
// Loaded programs over ranks, against the same in one plain process.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "smp/exported.h"
#include "tests/exported/archives.h"
#include "tests/smp/parity.h"

namespace smp::testing::parity {
namespace {

/// A program as a part of a model, whose names begin with "net.".
struct ZooNetImpl : torch::nn::Module {
  ZooNetImpl() {
    net = register_module(
        "net", load_exported(ExportedPrograms().train(archive("zoo")).eval(archive("zoo_eval"))));
  }

  torch::Tensor forward(torch::Tensor x) { return net(x).toTensor(); }
  static torch::Tensor criterion(const torch::Tensor& logits, const torch::Tensor& y) {
    return torch::cross_entropy_loss(logits.flatten(0, 1), y.flatten());
  }
  /// The loss of the plain process, which evaluates without gradients. There an LSTM takes another
  /// kernel, and a step of ours evaluates as its function says.
  torch::Tensor loss(torch::Tensor x, torch::Tensor y) {
    const torch::AutoGradMode with_gradients(true);
    return criterion(forward(x), y);
  }

  static std::vector<torch::Tensor> batch(int64_t size) {
    return {torch::randint(20, {size, 6}), torch::randint(20, {size, 6})};
  }

  ExportedModule net{nullptr};
};
TORCH_MODULE(ZooNet);

/// The wrapped module itself, which returns Python's results.
struct ModesNetImpl : ExportedModuleImpl {
  ModesNetImpl()
      : ExportedModuleImpl(ExportedPrograms().train(archive("modes")).eval(archive("modes"))) {}

  /// Evaluates without the program, which draws random numbers.
  torch::Tensor forward(torch::Tensor x) {
    if (!is_training()) return x.matmul(named_parameters()["b.weight"]);
    return call({x}).toTensor();
  }
  static torch::Tensor criterion(const torch::Tensor& y, const torch::Tensor& target) {
    return torch::mse_loss(y, target.slice(1, 0, y.size(1)));
  }
  torch::Tensor loss(torch::Tensor x, torch::Tensor y) { return criterion(forward(x), y); }
  /// The program's batch is no dynamic size.
  static std::vector<torch::Tensor> batch(int64_t size) {
    return {torch::randn({2 * size, 4}), torch::randn({2 * size, 8})};
  }
};
TORCH_MODULE(ModesNet);

/// Regions of autocast, in which a weight that is used several times is cast once.
struct CastsNetImpl : torch::nn::Module {
  CastsNetImpl() {
    const ExportedPrograms casts =
        ExportedPrograms().train(archive("casts")).eval(archive("casts"));
    net = register_module("net", load_exported(casts));
  }

  torch::Tensor forward(torch::Tensor x) { return net(x).toTensor(); }
  static torch::Tensor criterion(const torch::Tensor& y, const torch::Tensor& target) {
    return torch::mse_loss(y, target);
  }
  torch::Tensor loss(torch::Tensor x, torch::Tensor y) { return criterion(forward(x), y); }
  static std::vector<torch::Tensor> batch(int64_t size) {
    return {torch::randn({2 * size, 4}), torch::randn({2 * size, 4})};
  }

  ExportedModule net{nullptr};
};
TORCH_MODULE(CastsNet);

/// A program that writes tensors which it is given: the batch, and states that forward made.
struct WritesNetImpl : torch::nn::Module {
  explicit WritesNetImpl(const std::string& name) {
    const ExportedPrograms writes = ExportedPrograms().train(archive(name)).eval(archive(name));
    net = register_module("net", load_exported(writes));
  }

  torch::Tensor forward(torch::Tensor x) {
    c10::Dict<std::string, torch::Tensor> states;
    const auto sum = x.mean(0), count = torch::zeros({1}, torch::kLong);
    states.insert("sum", sum);
    states.insert("count", count);
    const auto y = net(x, states).toTensor();
    return y + x * sum + count;
  }
  static torch::Tensor criterion(const torch::Tensor& y, const torch::Tensor& target) {
    return torch::mse_loss(y, target);
  }
  torch::Tensor loss(torch::Tensor x, torch::Tensor y) { return criterion(forward(x), y); }
  static std::vector<torch::Tensor> batch(int64_t size) {
    return {torch::randn({size, 4}), torch::randn({size, 4})};
  }

  ExportedModule net{nullptr};
};
TORCH_MODULE(WritesNet);

class ExportedOnRanks : public ::testing::Test {
 protected:
  void SetUp() override { torch::set_num_threads(1); }
};

TEST_F(ExportedOnRanks, LayersWithStateAndRandomNumbers) {
  const std::function<ZooNet()> make = [] { return ZooNet(); };
  for (const Layout& layout :
       {Layout{1, 1, 2, "simple"}, Layout{2, 1, 2, "interleaved"}, Layout{2, 2, 2, "simple"}}) {
    SCOPED_TRACE(layout);
    check<ZooNet, torch::optim::SGD>(layout, make, torch::optim::SGDOptions(0.1));
  }
}

TEST_F(ExportedOnRanks, RegionsAndConstants) {
  const std::function<ModesNet()> make = [] { return ModesNet(); };
  for (const Layout& layout : {Layout{1, 1, 2, "simple"}, Layout{2, 1, 2, "simple"}}) {
    SCOPED_TRACE(layout);
    check<ModesNet, torch::optim::AdamW>(layout, make, torch::optim::AdamWOptions(0.01));
  }
}

TEST_F(ExportedOnRanks, RegionsOfAutocast) {
  const std::function<CastsNet()> make = [] { return CastsNet(); };
  for (const Layout& layout :
       {Layout{1, 1, 2, "simple"}, Layout{2, 1, 2, "interleaved"}, Layout{2, 2, 2, "simple"}}) {
    SCOPED_TRACE(layout);
    check<CastsNet, torch::optim::SGD>(layout, make, torch::optim::SGDOptions(0.1));
  }
}

/// In place, and as results of a functional program.
TEST_F(ExportedOnRanks, InputsThatAProgramWrites) {
  for (const std::string name : {"writes", "writes_core"}) {
    const std::function<WritesNet()> make = [name] { return WritesNet(name); };
    for (const Layout& layout :
         {Layout{1, 1, 2, "simple"}, Layout{2, 1, 2, "interleaved"}, Layout{2, 2, 2, "simple"}}) {
      SCOPED_TRACE(c10::str(name, ", ", layout));
      check<WritesNet, torch::optim::SGD>(layout, make, torch::optim::SGDOptions(0.1));
    }
  }
}

/// Arguments of a step are each microbatch's own: a program's writes are seen in the step alone.
TEST_F(ExportedOnRanks, ArgumentsOfAStepThatAProgramWrites) {
  const auto x = torch::randn({4, 4}), sum = torch::randn({4});
  const auto count = torch::zeros({1}, torch::kLong);
  const auto x_before = x.clone(), sum_before = sum.clone();
  for (const char* name : {"writes", "writes_core"}) {
    SCOPED_TRACE(name);
    run_as_threads(1, Config().microbatches(2), [&] {
      DistributedModel<ExportedModule> model(load_exported(archive(name)));
      auto train = step([&](torch::Tensor x, torch::Tensor sum, torch::Tensor count) {
        c10::Dict<std::string, torch::Tensor> states;
        states.insert("sum", sum);
        states.insert("count", count);
        auto loss = model(x, states).toTensor().square().mean();
        model->backward(loss);
        return std::make_tuple(loss, x, count);
      });
      for (int call = 0; call < 2; ++call) {
        const auto [loss, written, counts] = train(x, whole(sum), whole(count));
        for (int m = 0; m < 2; ++m) {
          EXPECT_TRUE(torch::equal(written.outputs()[m], x.narrow(0, 2 * m, 2) * 0.5)) << m;
          EXPECT_EQ(counts.outputs()[m].item<int64_t>(), 1) << m;
        }
      }
    });
    EXPECT_TRUE(torch::equal(x, x_before));
    EXPECT_TRUE(torch::equal(sum, sum_before));
    EXPECT_EQ(count.item<int64_t>(), 0);
  }
}

/// The capture knows the modules of operators without parameters, too, from the wrapped model on.
TEST_F(ExportedOnRanks, OperatorsHaveTheModulesOfPython) {
  std::string explanation;
  run_as_threads(1, Config().microbatches(1), [&] {
    DistributedModel<ZooNet> model{ZooNet()};
    auto train = step([&](torch::Tensor x, torch::Tensor y) {
      auto loss = ZooNetImpl::criterion(model(x), y);
      model->backward(loss);
      return loss;
    });
    const auto batch = ZooNetImpl::batch(4);
    train(batch[0], batch[1]);
    explanation = explain_partition();
  });
  for (const char* line : {"(aten::embedding) in net.emb:", "(aten::add_.Tensor) in net.bn:",
                           "(aten::batch_norm) in net.bn:", "(aten::softmax.int) in net.att:",
                           "(aten::dropout) in net.att:", "(aten::dropout) in net.drop:",
                           "(aten::lstm.input) in net.lstm:", "(aten::mul.Tensor) in net:"}) {
    EXPECT_NE(explanation.find(line), std::string::npos) << line << " in\n" << explanation;
  }
}

/// A wrapped program returns values of any structure, and takes them from the batch.
TEST_F(ExportedOnRanks, TheWrappedProgramItself) {
  const auto loss_of = [](auto& model, const std::vector<torch::Tensor>& x) {
    c10::Dict<std::string, torch::Tensor> named;
    named.insert("k", x[3]);
    const c10::IValue result = model(x[0], std::make_tuple(x[1], x[2]), named, 3,
                                     ExportedModuleImpl::Named{{"mask", x[4]}});
    const auto y = result.toGenericDict().at("out").toListRef()[0].toTensor();
    return (y * y).mean();
  };
  torch::manual_seed(1);
  std::vector<torch::Tensor> inputs;
  for (int i = 0; i < 5; ++i) inputs.push_back(torch::randn({6, 4}));
  torch::Tensor loss;
  run_as_threads(1, Config().microbatches(1), [&] {
    DistributedModel<ExportedModule> model(load_exported(archive("shapes")));
    auto train = step([&](std::vector<torch::Tensor> x) {
      auto value = loss_of(model, x);
      model->backward(value);
      return value;
    });
    loss = train(inputs).reduce_mean();
  });
  ExportedModule plain = load_exported(archive("shapes"));
  EXPECT_TRUE(torch::equal(loss, loss_of(plain, inputs)));
}

}  // namespace
}  // namespace smp::testing::parity
