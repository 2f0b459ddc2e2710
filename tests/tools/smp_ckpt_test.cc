// SPDX-License-Identifier: Apache-2.0
// Runs the real tool on checkpoints that the library wrote.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "checkpoint/catalog.h"
#include "checkpoint/reader.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/writer.h"
#include "tests/command.h"
#include "tests/temp_folder.h"

namespace smp::tools {
namespace {

namespace fs = std::filesystem;
using checkpoint::Reader;
using smp::testing::Outcome;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

class SmpCkpt : public ::testing::Test {
 protected:
  SmpCkpt() {
    at::set_num_threads(1);
    torch::manual_seed(1);
    weight_ = torch::randn({3, 4});
    bias_ = torch::randn({4}).to(torch::kBFloat16);
    save("step_1_partial", 1);
  }

  std::string path(const std::string& name) const { return folder_.file(name); }

  void save(const std::string& name, int64_t step) {
    checkpoint::Shard one, two;
    one.model = {{"net.weight", weight_, {"net.tied"}}, {"count", torch::tensor(7), {}}};
    two.model = {{"net.bias", bias_, {}}};
    one.optimizer = {
        {"param_groups",
         {{{"type", "SGDOptions"}, {"options", {{"lr", 0.5}}}, {"params", {"net.bias"}}}}},
        {"state", {{"net.bias", {{"shape", {4}}, {"scalars", nullptr}}}}}};
    two.optimizer_tensors["net.bias/master"] = master_;
    const checkpoint::Writer writer(path(name));
    writer.begin();
    checkpoint::RunState run;
    run.step = step;
    run.user_content = {{"epoch", 5}};
    writer.commit({writer.write_shard(0, 2, one), writer.write_shard(1, 2, two)}, run);
    checkpoint::update_newest(folder_.path(), name);
  }

  static Outcome run(const std::string& arguments) {
    return smp::testing::run_command("tools/smp_ckpt " + arguments + " 2>&1");
  }

  static Outcome expect_done(const std::string& arguments) {
    const Outcome outcome = run(arguments);
    EXPECT_EQ(outcome.status, 0) << outcome.output;
    return outcome;
  }

  const torch::Tensor master_ = torch::tensor({1.001f, 2.002f, 3.003f, 4.004f});
  torch::Tensor weight_, bias_;
  const smp::testing::TempFolder folder_;
};

TEST_F(SmpCkpt, ListsAFolder) {
  save("step_2_partial", 2);
  fs::remove(path("step_1_partial/model-00001-of-00002.safetensors"));
  const Outcome listed = expect_done("list " + folder_.path());
  EXPECT_THAT(listed.output,
              AllOf(HasSubstr("step_1_partial: checkpoint \""), HasSubstr("is incomplete"),
                    HasSubstr("step_2_partial: step 2, 0.0 MiB in 3 files, model and optimizer "
                              "(newest)\n")));
  EXPECT_LT(listed.output.find("step_1_partial"), listed.output.find("step_2_partial"));
  EXPECT_THAT(run("list " + path("none")).output, HasSubstr("cannot list the checkpoints"));
  EXPECT_EQ(run("list " + path("none")).status, 2);
}

TEST_F(SmpCkpt, InspectsACheckpoint) {
  const Outcome text = expect_done("inspect " + path("step_1_partial") + " --tensors");
  EXPECT_THAT(
      text.output,
      AllOf(HasSubstr("model: 3 tensors, 17 elements, 0.0 MiB BF16 F32 I64\n"),
            HasSubstr("net.tied is net.weight\n"),
            HasSubstr("optimizer: 1 tensors, 4 elements, 0.0 MiB F32\n"),
            HasSubstr("1 parameters, SGDOptions {\"lr\":0.5}\n"), HasSubstr("step: 1\n"),
            HasSubstr("user_content: {\"epoch\":5}\n"),
            HasSubstr("net.weight: F32 [3,4] in model-00001-of-00002.safetensors\n"),
            HasSubstr("net.bias/master: F32 [4] in optimizer-00002-of-00002.safetensors\n")));
  const auto json = nlohmann::json::parse(
      expect_done("inspect " + path("step_1_partial") + " --format json").output);
  EXPECT_EQ(json["model"]["elements"], 17);
  EXPECT_EQ(json["step"], 1);
  EXPECT_FALSE(json.contains("model_tensors"));
  const Outcome file =
      expect_done("inspect --tensors " + path("step_1_partial/model-00002-of-00002.safetensors"));
  EXPECT_THAT(file.output, HasSubstr("net.bias: BF16 [4]\n"));
}

TEST_F(SmpCkpt, VerifiesAllBytes) {
  const Outcome whole = expect_done("verify " + path("step_1_partial"));
  EXPECT_THAT(whole.output, HasSubstr(": 4 tensors in 3 files are as they were written\n"));
  const std::string file = path("step_1_partial/optimizer-00002-of-00002.safetensors");
  std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
  stream.seekp(-1, std::ios::end);
  stream.put('\7');
  stream.close();
  const Outcome damaged = run("verify " + path("step_1_partial"));
  EXPECT_EQ(damaged.status, 1);
  EXPECT_THAT(damaged.output,
              HasSubstr("is damaged:\n  optimizer-00002-of-00002.safetensors: tensor "
                        "\"net.bias/master\": expected xxh64 "));
  EXPECT_EQ(run("verify " + path("none")).status, 1);
}

/// Hashes do not depend on the rank that wrote a file.
TEST_F(SmpCkpt, PrintsTheHashOfEachTensor) {
  const std::string hashes = expect_done("hashes " + path("step_1_partial")).output;
  EXPECT_THAT(hashes, ::testing::MatchesRegex("model/count [0-9a-f]{16}\n"
                                              "model/net.bias [0-9a-f]{16}\n"
                                              "model/net.weight [0-9a-f]{16}\n"
                                              "optimizer/net.bias/master [0-9a-f]{16}\n"));
  expect_done("reshard " + path("step_1_partial") + " " + path("other") + " --shards 1");
  EXPECT_EQ(expect_done("hashes " + path("other")).output, hashes);
  bias_ += 1;
  save("step_2_partial", 2);
  const std::string changed = expect_done("hashes " + path("step_2_partial")).output;
  const auto end_of_first = hashes.find('\n');
  EXPECT_EQ(changed.substr(0, end_of_first), hashes.substr(0, end_of_first));
  EXPECT_NE(changed, hashes);
}

TEST_F(SmpCkpt, MergesTheModelIntoOneFile) {
  expect_done("merge " + path("step_1_partial") + " " + path("all.safetensors"));
  const checkpoint::SafetensorsReader merged(path("all.safetensors"));
  EXPECT_EQ(merged.entries().size(), 3u);
  EXPECT_TRUE(torch::equal(merged.read("net.weight"), weight_));
  EXPECT_TRUE(torch::equal(merged.read("net.bias"), bias_));
  EXPECT_TRUE(torch::equal(merged.read("count"), torch::tensor(7)));
  const Outcome wrong = run("merge " + path("step_1_partial") + " " + path("folder"));
  EXPECT_EQ(wrong.status, 2);
  EXPECT_THAT(wrong.output,
              HasSubstr("expected an output that ends with .safetensors or .pt, got"));
}

TEST_F(SmpCkpt, WritesAStateDictionary) {
  expect_done("merge " + path("step_1_partial") + " " + path("all.pt"));
  std::ifstream in(path("all.pt"), std::ios::binary);
  const std::vector<char> bytes(std::istreambuf_iterator<char>(in), {});
  const auto dict = torch::pickle_load(bytes).toGenericDict();
  ASSERT_EQ(dict.size(), 4u);
  EXPECT_TRUE(torch::equal(dict.at("net.weight").toTensor(), weight_));
  EXPECT_TRUE(torch::equal(dict.at("net.bias").toTensor(), bias_));
  EXPECT_TRUE(torch::equal(dict.at("count").toTensor(), torch::tensor(7)));
  EXPECT_TRUE(dict.at("net.tied").toTensor().is_alias_of(dict.at("net.weight").toTensor()));
}

/// A module with a buffer and a tied parameter.
struct TiedImpl : torch::nn::Module {
  TiedImpl() : fc(register_module("fc", torch::nn::Linear(3, 2))) {
    norm = register_module("norm", torch::nn::BatchNorm1d(2));
    tied = register_parameter("tied", fc->weight);
  }
  torch::nn::Linear fc;
  torch::nn::BatchNorm1d norm{nullptr};
  torch::Tensor tied;
};
TORCH_MODULE(Tied);

TEST_F(SmpCkpt, ReadsWhatTorchSaved) {
  Tied module;
  torch::save(module, path("module.pt"));
  expect_done("convert " + path("module.pt") + " " + path("checkpoint"));
  expect_done("verify " + path("checkpoint"));
  Reader reader(path("checkpoint"));
  for (const auto& tensors : {module->named_parameters(), module->named_buffers()}) {
    for (const auto& item : tensors) {
      EXPECT_TRUE(torch::equal(reader.read_model(item.key()), item.value())) << item.key();
    }
  }
  EXPECT_EQ(reader.index().model.size() + reader.index().aliases.size(), 8u);
  // And back, as a state dictionary this time.
  expect_done("convert " + path("checkpoint") + " " + path("back.pt"));
  EXPECT_THAT(expect_done("diff " + path("module.pt") + " " + path("back.pt")).output,
              HasSubstr("no difference"));
  EXPECT_THAT(expect_done("inspect --tensors " + path("back.pt")).output,
              HasSubstr("norm.running_var: F32 [2]\n"));
}

TEST_F(SmpCkpt, ReadsDictionariesInDictionaries) {
  const auto pickle = [&](const std::string& name, const c10::IValue& value) {
    const std::vector<char> bytes = torch::pickle_save(value);
    std::ofstream(path(name), std::ios::binary).write(bytes.data(), bytes.size());
  };
  c10::Dict<std::string, torch::Tensor> inner;
  inner.insert("a", weight_);
  inner.insert("b", weight_);
  inner.insert("view", weight_.t().narrow(0, 1, 2));
  c10::Dict<std::string, c10::Dict<std::string, torch::Tensor>> outer;
  outer.insert("net", inner);
  pickle("nested.pt", outer);
  expect_done("convert " + path("nested.pt") + " " + path("nested") + " --dtype F64");
  Reader reader(path("nested"));
  EXPECT_TRUE(torch::equal(reader.read_model("net.b"), weight_.to(torch::kDouble)));
  EXPECT_TRUE(
      torch::equal(reader.read_model("net.view"), weight_.t().narrow(0, 1, 2).to(torch::kDouble)));
  EXPECT_EQ(reader.index().aliases.at("net.b"), "net.a");

  c10::Dict<std::string, int64_t> numbers;
  numbers.insert("epoch", 3);
  pickle("numbers.pt", numbers);
  const Outcome other = run("inspect " + path("numbers.pt"));
  EXPECT_EQ(other.status, 2);
  EXPECT_THAT(other.output, HasSubstr("numbers.pt\" is no state dictionary: expected tensors by "
                                      "name, got Int as \"epoch\". Save the state dictionary "
                                      "alone: torch.save(dict(model.state_dict()), path)"));
  c10::Dict<int64_t, torch::Tensor> by_number;
  by_number.insert(1, weight_);
  pickle("by_number.pt", by_number);
  EXPECT_THAT(
      run("inspect " + path("by_number.pt")).output,
      HasSubstr("is no state dictionary: expected tensors by name, got a key that is a Int"));
  fs::resize_file(path("nested.pt"), fs::file_size(path("nested.pt")) / 2);
  const Outcome damaged = run("inspect " + path("nested.pt"));
  EXPECT_EQ(damaged.status, 2);
  EXPECT_THAT(damaged.output,
              AllOf(HasSubstr("cannot read the state dictionary \""),
                    HasSubstr("It may be damaged, or an OrderedDict, which libtorch does not read. "
                              "Write it again with torch.save(dict(model.state_dict()), path)")));
}

TEST_F(SmpCkpt, ReshardsAndFindsNoDifference) {
  for (const int shards : {1, 2, 5}) {
    const std::string output = path("resharded" + std::to_string(shards));
    expect_done("reshard " + path("step_1_partial") + " " + output + " --shards " +
                std::to_string(shards));
    expect_done("verify " + output);
    EXPECT_THAT(expect_done("diff " + path("step_1_partial") + " " + output).output,
                HasSubstr("no difference"));
    Reader reader(output);
    EXPECT_EQ(reader.index().run.step, 1);
    EXPECT_EQ(reader.index().aliases.at("net.tied"), "net.weight");
    EXPECT_EQ(reader.index().optimizer, Reader(path("step_1_partial")).index().optimizer);
    EXPECT_LE(reader.index().files.size(), 2u * shards);
  }
  EXPECT_EQ(run("reshard " + path("step_1_partial") + " " + path("x") + " --shards 0").status, 105);
}

TEST_F(SmpCkpt, ConvertsTypes) {
  expect_done("convert " + path("step_1_partial") + " " + path("wide") + " --dtype F32");
  Reader wide(path("wide"));
  EXPECT_TRUE(torch::equal(wide.read_model("net.weight"), weight_));
  EXPECT_TRUE(torch::equal(wide.read_model("net.bias"), master_));  // not the rounded one
  EXPECT_TRUE(torch::equal(wide.read_model("count"), torch::tensor(7)));
  EXPECT_TRUE(torch::equal(wide.read_optimizer("net.bias/master"), master_));
  expect_done("convert " + path("wide") + " " + path("narrow") + " --dtype F16 --model-only");
  Reader narrow(path("narrow"));
  EXPECT_TRUE(torch::equal(narrow.read_model("net.weight"), weight_.to(torch::kHalf)));
  EXPECT_TRUE(narrow.index().optimizer_tensors.empty());
  // From a file to a checkpoint and back.
  expect_done("merge " + path("step_1_partial") + " " + path("all.safetensors"));
  expect_done("convert " + path("all.safetensors") + " " + path("made"));
  EXPECT_THAT(expect_done("diff " + path("all.safetensors") + " " + path("made")).output,
              HasSubstr("no difference"));
}

TEST_F(SmpCkpt, ShowsDifferences) {
  weight_ = weight_.clone();
  weight_[1][2] += 0.25;
  weight_[2][3] = std::numeric_limits<float>::quiet_NaN();
  bias_ = bias_.to(torch::kFloat);
  save("other", 3);
  const Outcome shown = run("diff " + path("step_1_partial") + " " + path("other"));
  EXPECT_EQ(shown.status, 1);
  EXPECT_THAT(shown.output,
              AllOf(HasSubstr("net.weight: 2 of 12 elements differ, largest difference 0.25\n"),
                    HasSubstr("net.tied: 2 of 12 elements differ, largest difference 0.25\n"),
                    HasSubstr("net.bias: BF16 [4] against F32 [4], largest difference 0\n"),
                    HasSubstr("step: 1 against 3\n"), Not(HasSubstr("count"))));
  expect_done("convert " + path("other") + " " + path("model") + " --model-only");
  EXPECT_THAT(run("diff " + path("other") + " " + path("model")).output,
              AllOf(HasSubstr("optimizer net.bias/master: only in the first\n"),
                    HasSubstr("optimizer/state: only in the first\n")));
  EXPECT_THAT(run("diff --lines 1 " + path("step_1_partial") + " " + path("other")).output,
              HasSubstr("and 3 more differences\n"));
  EXPECT_EQ(run("diff " + path("other") + " " + path("none")).status, 2);
}

TEST_F(SmpCkpt, ConvertsWhatAFormatHolds) {
  const at::Tensor ids = torch::arange(6).to(torch::kUInt16);
  const at::Tensor rotation = torch::complex(torch::ones({2}), torch::full({2}, 3.0));
  checkpoint::write_safetensors(path("f.safetensors"), {{"rotation", rotation}, {"ids", ids}});
  checkpoint::write_safetensors(path("g.safetensors"), {{"rotation", rotation}});
  EXPECT_THAT(run("merge " + path("f.safetensors") + " " + path("f.pt")).output,
              HasSubstr("cannot write \"" + path("f.pt") +
                        "\": tensor \"ids\" is of dtype U16, which "
                        "state dictionaries cannot hold. Write a .safetensors file."));
  EXPECT_FALSE(fs::exists(path("f.pt")));
  expect_done("merge " + path("g.safetensors") + " " + path("g.pt"));
  EXPECT_THAT(expect_done("diff " + path("g.safetensors") + " " + path("g.pt")).output,
              HasSubstr("no difference"));
  checkpoint::write_safetensors(path("h.safetensors"), {{"rotation", rotation * 2}});
  EXPECT_THAT(run("diff " + path("g.safetensors") + " " + path("h.safetensors")).output,
              HasSubstr("rotation: 2 of 2 elements differ, largest difference 3.16228\n"));
}

// Two layouts have the parameters of a group in other orders; differences are named.
TEST_F(SmpCkpt, ShowsDifferencesOfGroups) {
  const auto save = [&](const std::string& name, const nlohmann::json& optimizer) {
    checkpoint::Shard shard;
    shard.model = {{"w", weight_, {}}, {"b", bias_, {}}};
    shard.optimizer = optimizer;
    const checkpoint::Writer writer(path(name));
    writer.begin();
    writer.commit({writer.write_shard(0, 1, shard)}, {});
  };
  nlohmann::json optimizer = {
      {"param_groups",
       {{{"type", "SGDOptions"}, {"options", {{"lr", 0.5}}}, {"params", {"w", "b"}}},
        {{"type", "SGDOptions"}, {"options", {{"lr", 0.5}}}, {"params", nlohmann::json::array()}}}},
      {"state", {{"w", {{"shape", {3, 4}}, {"scalars", {{"step", 1}}}}}}}};
  save("one", optimizer);
  optimizer["param_groups"][0]["params"] = {"b", "w"};
  save("two", optimizer);
  EXPECT_THAT(expect_done("diff " + path("one") + " " + path("two")).output,
              HasSubstr("no difference"));
  optimizer["param_groups"][0]["params"] = {"w"};
  optimizer["param_groups"][1]["options"]["lr"] = 0.25;
  optimizer["param_groups"][1]["options"]["nesterov"] = true;
  optimizer["param_groups"][1]["params"] = {"b"};
  optimizer["state"]["w"]["scalars"]["step"] = 2;
  save("other", optimizer);
  EXPECT_EQ(run("diff " + path("one") + " " + path("other")).output,
            "optimizer group 0/params/b: only in the first\n"
            "optimizer group 1/options/lr: 0.5 against 0.25\n"
            "optimizer group 1/options/nesterov: only in the second\n"
            "optimizer group 1/params/b: only in the second\n"
            "optimizer/state/w/scalars/step: 1 against 2\n");
}

TEST_F(SmpCkpt, ShowsNamesOnOneLineEach) {
  const std::string name =
      "a\n[smp] forged\x1b[2J\xc2\x9b"
      "31m";
  const std::string shown = "a\\n[smp] forged\\x1b[2J\\x9b31m";
  checkpoint::Shard shard;
  shard.model = {{name, weight_, {name + "tied"}}};
  shard.optimizer = {
      {"param_groups",
       {{{"type", name}, {"options", {{name, name}}}, {"params", nlohmann::json::array()}}}},
      {"state", nlohmann::json::object()}};
  const checkpoint::Writer writer(path("c"));
  writer.begin();
  checkpoint::RunState state;
  state.user_content = {{name, name}};
  writer.commit({writer.write_shard(0, 1, shard)}, state);
  fs::rename(path("c"), path("c\x1b[2J"));
  const std::string folder = path("c\x1b[2J");
  for (const std::string& command :
       {"list " + folder_.path(), "inspect --tensors '" + folder + "'", "verify '" + folder + "'",
        "inspect --tensors --format json '" + folder + "'", "hashes '" + folder + "'",
        "diff '" + folder + "' " + path("step_1_partial")}) {
    const std::string output = run(command).output;
    EXPECT_EQ(output.find('\x1b'), std::string::npos) << command;
    EXPECT_EQ(output.find("\xc2\x9b"), std::string::npos) << command;
    EXPECT_EQ(output.find("\n[smp] forged"), std::string::npos) << command;
  }
  EXPECT_THAT(run("hashes '" + folder + "'").output, StartsWith("model/" + shown + " "));
  EXPECT_THAT(run("diff '" + folder + "' " + path("step_1_partial")).output,
              HasSubstr(shown + ": only in the first\n"));
}

}  // namespace
}  // namespace smp::tools
