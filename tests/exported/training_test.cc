// SPDX-License-Identifier: Apache-2.0
// Loaded programs in plain libtorch, against Python's modules of them. Python runs as a part of the
// test, with the torch that the test links: kernels differ by CPU, and with them their results.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "checkpoint/safetensors.h"
#include "smp/exported.h"
#include "tests/command.h"
#include "tests/exported/archives.h"
#include "tests/temp_folder.h"

namespace smp::testing {
namespace {

using torch::Tensor;

/// The results of Python with an archive: tensors by name.
class Expected {
 public:
  explicit Expected(const std::string& file) : reader_(file) {}

  bool has(const std::string& name) const { return reader_.entries().count(name) > 0; }
  Tensor at(const std::string& name) const { return reader_.read(name); }
  std::vector<Tensor> inputs(int step) const {
    std::vector<Tensor> result;
    while (has(std::to_string(step) + ".input." + std::to_string(result.size()))) {
      result.push_back(at(std::to_string(step) + ".input." + std::to_string(result.size())));
    }
    return result;
  }
  /// The tensors whose names begin with `prefix`, under the rest of their names.
  std::map<std::string, Tensor> under(const std::string& prefix) const {
    std::map<std::string, Tensor> result;
    for (const auto& entry : reader_.entries()) {
      if (entry.first.rfind(prefix, 0) != 0) continue;
      result[entry.first.substr(prefix.size())] = at(entry.first);
    }
    return result;
  }

 private:
  checkpoint::SafetensorsReader reader_;
};

using Call = std::function<c10::IValue(ExportedModule&, const std::vector<Tensor>&)>;

class ExportedTraining : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = std::make_unique<TempFolder>();
    const Outcome outcome = run_command(
        "bash tests/python/with_torch.sh "
        "external/libtorch/torch/share/cmake/Torch/TorchConfigVersion.cmake "
        "external/python_packages/packages/folder '' " +
        folder_->file("python") + " python3 tests/exported/results.py " + folder_->path() +
        " casts gpt modes numbers shapes shapes_core small writes writes_core zoo zoo_eval 2>&1");
    ASSERT_EQ(outcome.status, 0) << outcome.output;
  }
  static void TearDownTestSuite() { folder_.reset(); }
  void SetUp() override { torch::set_num_threads(1); }

  static Expected results(const std::string& name) {
    return Expected(folder_->file(name + ".safetensors"));
  }
  /// Three steps of SGD, each compared with Python's of the program `name`; `file` if another holds
  /// the same.
  static void train_like_python(const std::string& name, const Call& call,
                                const std::string& file = "");

 private:
  static std::unique_ptr<TempFolder> folder_;
};

std::unique_ptr<TempFolder> ExportedTraining::folder_;

Tensor loss_of(const c10::IValue& result) {
  const Tensor output = result.isTensor()
                            ? result.toTensor()
                            : result.toGenericDict().at("out").toListRef()[0].toTensor();
  return (output * output).mean();
}

c10::IValue call_with_one(ExportedModule& model, const std::vector<Tensor>& inputs) {
  return model(inputs.at(0));
}

c10::IValue call_with_shapes(ExportedModule& model, const std::vector<Tensor>& inputs) {
  c10::Dict<std::string, Tensor> named;
  named.insert("k", inputs.at(3));
  return model(inputs.at(0), std::make_tuple(inputs.at(1), inputs.at(2)), named, 3,
               ExportedModuleImpl::Named{{"mask", inputs.at(4)}});
}

c10::IValue call_with_numbers(ExportedModule& model, const std::vector<Tensor>& inputs) {
  const int64_t rows = inputs.at(0).size(0);
  return model(inputs.at(0), rows, rows - 1, 2.5);
}

c10::IValue call_with_states(ExportedModule& model, const std::vector<Tensor>& inputs) {
  c10::Dict<std::string, Tensor> states;
  states.insert("sum", inputs.at(1));
  states.insert("count", inputs.at(2));
  return model(inputs.at(0), states);
}

void expect_equal(const Tensor& got, const Tensor& expected, const std::string& what) {
  ASSERT_TRUE(got.defined()) << what;
  EXPECT_TRUE(torch::equal(got, expected))
      << what << ": largest difference " << (got - expected).abs().max().item<double>();
}

void ExportedTraining::train_like_python(const std::string& name, const Call& call,
                                         const std::string& file) {
  const Expected expected = results(name);
  ExportedModule model = load_exported(archive(file.empty() ? name : file));
  for (int step = 0; step < 3; ++step) {
    const std::string prefix = std::to_string(step) + ".";
    torch::manual_seed(100 + step);
    model->zero_grad();
    const std::vector<Tensor> inputs = expected.inputs(step);
    const Tensor loss = loss_of(call(model, inputs));
    for (size_t i = 0; i < inputs.size(); ++i) {
      const std::string key = prefix + "written." + std::to_string(i);
      const std::string before = prefix + "input." + std::to_string(i);
      expect_equal(inputs[i], expected.at(expected.has(key) ? key : before), key);
    }
    loss.backward();
    expect_equal(loss.detach(), expected.at(prefix + "loss"), "loss " + prefix);
    const auto parameters = model->named_parameters();
    for (const auto& [parameter, gradient] : expected.under(prefix + "gradient.")) {
      expect_equal(parameters[parameter].grad(), gradient, "gradient of " + parameter);
    }
    torch::NoGradGuard no_grad;
    std::set<torch::TensorImpl*> updated;
    for (auto parameter : parameters.values()) {
      if (!parameter.grad().defined()) continue;
      if (!updated.insert(parameter.unsafeGetTensorImpl()).second) continue;
      parameter.add_(parameter.grad(), -0.1);
    }
  }
  std::map<std::string, Tensor> values;
  for (const auto& item : model->named_parameters()) values[item.key()] = item.value();
  for (const auto& item : model->named_buffers()) values[item.key()] = item.value();
  for (const auto& [key, value] : expected.under("value.")) {
    ASSERT_EQ(values.count(key), 1u) << key;
    expect_equal(values.at(key).detach(), value, key);
  }
}

TEST_F(ExportedTraining, LayersWithStateAndRandomNumbers) {
  train_like_python("zoo", call_with_one);
}
TEST_F(ExportedTraining, RegionsAndConstants) { train_like_python("modes", call_with_one); }
TEST_F(ExportedTraining, StructuresSizesAndWrittenBuffers) {
  train_like_python("shapes", call_with_shapes);
}
TEST_F(ExportedTraining, FunctionalPrograms) { train_like_python("shapes_core", call_with_shapes); }
TEST_F(ExportedTraining, WrittenInputs) { train_like_python("writes", call_with_states); }
TEST_F(ExportedTraining, WrittenInputsOfFunctionalPrograms) {
  train_like_python("writes_core", call_with_states);
}
TEST_F(ExportedTraining, IntegersThatDiffer) { train_like_python("numbers", call_with_numbers); }
TEST_F(ExportedTraining, RegionsOfAutocast) { train_like_python("casts", call_with_one); }
TEST_F(ExportedTraining, AttentionWithoutRandomNumbers) { train_like_python("gpt", call_with_one); }
TEST_F(ExportedTraining, OneLayer) { train_like_python("small", call_with_one); }

TEST_F(ExportedTraining, ArchivesOfOtherVersionsOfTorch) {
  for (const char* file : {"torch_2_9", "torch_2_10", "torch_2_12", "torch_2_15"}) {
    SCOPED_TRACE(file);
    train_like_python("zoo", call_with_one, file);
  }
}

TEST_F(ExportedTraining, TwoProgramsAreTwoModes) {
  const Expected expected = results("zoo_eval");
  ExportedModule model =
      load_exported(ExportedPrograms().train(archive("zoo")).eval(archive("zoo_eval")));
  EXPECT_TRUE(model->is_training());
  model->eval();
  torch::NoGradGuard no_grad;
  for (int step = 0; step < 3; ++step) {
    expect_equal(loss_of(model(expected.inputs(step).at(0))),
                 expected.at(std::to_string(step) + ".loss"), "loss");
  }
  // Both have the same parameters.
  model->named_parameters()["head.weight"].zero_();
  EXPECT_EQ(loss_of(model(expected.inputs(0).at(0))).item<float>(), 0);
  model->train();
  EXPECT_EQ(loss_of(model(expected.inputs(0).at(0))).item<float>(), 0);
}

}  // namespace
}  // namespace smp::testing
