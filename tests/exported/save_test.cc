// SPDX-License-Identifier: Apache-2.0
// Loaded programs that are written with other weights.
#include <caffe2/serialize/inline_container.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "smp/exported.h"
#include "smp/smp.h"
#include "tests/error_of.h"
#include "tests/exported/archives.h"
#include "tests/temp_folder.h"

namespace smp::testing {
namespace {

using State = torch::OrderedDict<std::string, at::Tensor>;

State state_of(const ExportedModule& model) {
  State state = model->named_parameters();
  state.update(model->named_buffers());
  return state;
}

/// Gives every parameter and buffer other values.
void change(const ExportedModule& model) {
  const torch::NoGradGuard no_grad;
  for (auto& entry : state_of(model)) entry.value().add_(1);
}

void expect_same_state(const State& a, const State& b) {
  ASSERT_EQ(a.keys(), b.keys());
  for (const auto& entry : a) {
    EXPECT_TRUE(torch::equal(entry.value(), b[entry.key()])) << entry.key();
  }
}

bool holds_weights(const std::string& record) {
  return record.rfind("data/weights/weight_", 0) == 0 || record == "data/constants/tensor_0";
}

TEST(SaveExportedTest, WeightsChangeAndNothingElse) {
  const TempFolder folder;
  const ExportedModule model = load_exported(archive("zoo"));
  change(model);
  save_exported(model, folder.file("saved.pt2"));
  expect_same_state(state_of(load_exported(folder.file("saved.pt2"))), state_of(model));

  const Records before = records_of(archive("zoo")), after = records_of(folder.file("saved.pt2"));
  ASSERT_EQ(before.size(), after.size());
  int changed = 0;
  for (const auto& [name, content] : before) {
    ASSERT_EQ(after.count(name), 1U) << name;
    EXPECT_EQ(after.at(name) != content, holds_weights(name)) << name;
    EXPECT_EQ(after.at(name).size(), content.size()) << name;
    changed += after.at(name) != content ? 1 : 0;
  }
  EXPECT_EQ(changed,
            18);  // 17 of weights, of which one is tied, and a buffer that is not persistent
}

TEST(SaveExportedTest, RecordsLieAsInFilesOfTorch) {
  const TempFolder folder;
  save_exported(load_exported(archive("zoo")), folder.file("saved.pt2"));
  caffe2::serialize::PyTorchStreamReader before(archive("zoo")), after(folder.file("saved.pt2"));
  EXPECT_EQ(after.version(), before.version());
  EXPECT_EQ(after.getAllRecords(), before.getAllRecords());
  for (const std::string& record : before.getAllRecords()) {
    EXPECT_EQ(after.getRecordOffset(record) % 64, 0U) << record;
    if (record.rfind(".data/serialization_id", 0) == 0) continue;  // a hash of the records' names
    const auto [old_data, old_size] = before.getRecord(record);
    const auto [data, size] = after.getRecord(record);
    EXPECT_EQ(std::string(static_cast<const char*>(data.get()), size),
              std::string(static_cast<const char*>(old_data.get()), old_size))
        << record;
  }
}

/// A file may be written over while it is the source.
TEST(SaveExportedTest, TheModeChoosesTheProgramAndTheFileMayBeItsOwn) {
  const TempFolder folder;
  const std::string train = folder.write("train.pt2", archive_of(records_of(archive("zoo"))));
  const std::string eval = folder.write("eval.pt2", archive_of(records_of(archive("zoo_eval"))));
  ExportedModule model = load_exported(ExportedPrograms().train(train).eval(eval));
  change(model);
  EXPECT_EQ(model->file(), train);
  save_exported(model, train);
  model->eval();
  EXPECT_EQ(model->file(), eval);
  save_exported(model, eval);
  const ExportedModule again = load_exported(ExportedPrograms().train(train));
  expect_same_state(state_of(again), state_of(model));
  EXPECT_EQ(records_of(eval).at("models/model.json"),
            records_of(archive("zoo_eval")).at("models/model.json"));
  const auto tokens = torch::randint(20, {4, 6});
  ExportedModule saved = load_exported(ExportedPrograms().eval(eval));
  EXPECT_TRUE(torch::equal(saved(tokens).toTensor(), model(tokens).toTensor()));
}

TEST(SaveExportedTest, StatesOfOtherTypesAreConvertedAndUnknownNamesLeftOut) {
  const TempFolder folder;
  State state;
  state.insert("layer.weight", torch::full({2, 3}, 1.5, torch::kBFloat16));
  state.insert("layer.bias", torch::full({2}, 2.5, torch::kDouble));
  state.insert("other", torch::zeros(1));
  save_exported(archive("small"), state, folder.file("saved.pt2"));
  const auto saved = state_of(load_exported(folder.file("saved.pt2")));
  EXPECT_EQ(saved.size(), 2U);
  EXPECT_TRUE(torch::equal(saved["layer.weight"], torch::full({2, 3}, 1.5)));
  EXPECT_TRUE(torch::equal(saved["layer.bias"], torch::full({2}, 2.5)));
}

TEST(SaveExportedTest, DividedOverRanks) {
  const TempFolder folder;
  torch::set_num_threads(1);
  const auto tokens = torch::randint(20, {4, 6});
  std::vector<State> states(2);
  run_as_threads(2, Config().partitions(2).microbatches(2), [&] {
    DistributedModel<ExportedModule> model(load_exported(archive("zoo")));
    auto train = step([&](torch::Tensor x) {
      auto loss = model(x).toTensor().square().mean();
      model->backward(loss);
      return loss;
    });
    DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), 0.1);
    train(tokens);
    optimizer.step();
    const auto state = model->state_dict(/*gather_to_rank0=*/true);
    if (rank() == 0) save_exported(archive("zoo"), state, folder.file("saved.pt2"));
    states[rank()] = model->state_dict();
  });
  const State saved = state_of(load_exported(folder.file("saved.pt2")));
  EXPECT_FALSE(
      torch::equal(saved["emb.weight"], state_of(load_exported(archive("zoo")))["emb.weight"]));
  for (const auto& entry : saved) {
    EXPECT_TRUE(torch::equal(entry.value(), states[1][entry.key()])) << entry.key();
  }
}

TEST(SaveExportedTest, WrongStatesAreRefused) {
  const TempFolder folder;
  const std::string path = folder.write("kept.pt2", "kept");
  State state;
  state.insert("layer.weight", torch::zeros({2, 3}));
  expect_has(error_of<CheckpointError>([&] { save_exported(archive("small"), state, path); }),
             {"small.pt2\" with other weights: the state has no \"layer.bias\". Give the "
              "parameters and buffers of the module that was loaded from it"});
  state.insert("layer.bias", torch::zeros({3}));
  expect_has(error_of<CheckpointError>([&] { save_exported(archive("small"), state, path); }),
             {"the state has \"layer.bias\" with shape [3], and the program with [2]. Give whole "
              "tensors, as model->state_dict() of all ranks has them"});
  expect_has(error_of<CheckpointError>([&] { save_exported(path, state, folder.file("new")); }),
             {"cannot read exported program"});
  std::ifstream kept(path);
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(kept), {}), "kept");
  state["layer.bias"] = torch::zeros({2});
  expect_has(error_of<CheckpointError>(
                 [&] { save_exported(archive("small"), state, folder.file("none/new.pt2")); }),
             {"none/new.pt2"});
}

}  // namespace
}  // namespace smp::testing
