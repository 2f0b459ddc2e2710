// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/pretrained.h"

#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include "tests/checkpoint/test_util.h"

namespace smp::checkpoint {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;

/// A head that is tied to the embedding, and a layer whose weight another library transposes.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    tokens = register_parameter("tokens", torch::randn({5, 3}));
    head = register_parameter("head", tokens);
    up = register_module("up", torch::nn::Linear(3, 4));
  }
  torch::Tensor tokens, head;
  torch::nn::Linear up{nullptr};
};
TORCH_MODULE(Net);

class PretrainedTest : public FolderTest {
 protected:
  PretrainedTest() {
    torch::manual_seed(1);
    wte_ = torch::randn({5, 3});
    weight_ = torch::randn({3, 4});
    bias_ = torch::randn({4});
  }

  /// Two files with an index, as transformers writes large models.
  void write_sharded() {
    write_safetensors(path("model-00001-of-00002.safetensors"), {{"transformer.wte.weight", wte_}});
    write_safetensors(path("model-00002-of-00002.safetensors"),
                      {{"transformer.h.0.c_fc.weight", weight_},
                       {"transformer.h.0.c_fc.bias", bias_},
                       {"transformer.h.0.attn.bias", torch::ones({2, 2})}});
    write_index("model-00002-of-00002.safetensors");
  }
  void write_index(const std::string& second) {
    nlohmann::json map = {{"transformer.wte.weight", "model-00001-of-00002.safetensors"}};
    for (const char* name : {"c_fc.weight", "c_fc.bias", "attn.bias"}) {
      map[std::string("transformer.h.0.") + name] = second;
    }
    spill(path("model.safetensors.index.json"),
          nlohmann::json{{"metadata", {{"total_size", 1}}}, {"weight_map", map}}.dump());
  }

  static NameMap names() {
    return NameMap()
        .ignore(R"(transformer\.h\.\d+\.attn\.bias)")
        .pattern(R"(transformer\.h\.0\.c_fc\.(weight))", "up.$1", Transform::kTranspose)
        .rename("transformer.h.0.c_fc.bias", "up.bias")
        .prefix("transformer.wte.weight", "tokens");
  }

  std::string error_of(const PretrainedOptions& options) {
    Net net;
    std::vector<at::Tensor> before;
    for (const auto& item : state_dict(*net)) before.push_back(item.value().clone());
    const std::string text = checkpoint_error([&] { load_pretrained(*net, path(""), options); });
    const auto after = state_dict(*net).values();
    for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(at::equal(before[i], after[i])) << i;
    return text;
  }

  torch::Tensor wte_, weight_, bias_;
};

TEST_F(PretrainedTest, LoadsShardedFilesByAMap) {
  write_sharded();
  Net net;
  const auto report = load_pretrained(*net, path(""), PretrainedOptions().names(names()));
  EXPECT_TRUE(torch::equal(net->tokens, wte_));
  EXPECT_TRUE(net->head.is_same(net->tokens));
  EXPECT_TRUE(torch::equal(net->up->weight, weight_.t()));
  EXPECT_TRUE(torch::equal(net->up->bias, bias_));
  EXPECT_THAT(report.used, ElementsAre(Pair("transformer.h.0.c_fc.bias", "up.bias"),
                                       Pair("transformer.h.0.c_fc.weight", "up.weight"),
                                       Pair("transformer.wte.weight", "tokens")));
  EXPECT_THAT(report.ignored, ElementsAre("transformer.h.0.attn.bias"));
  EXPECT_THAT(report.unused, IsEmpty());
  EXPECT_THAT(report.missing, IsEmpty());
}

TEST_F(PretrainedTest, LoadsOneFileWhereverItIs) {
  write_safetensors(path("model.safetensors"), {{"head", wte_.to(torch::kHalf)},
                                                {"up.weight", weight_.t()},
                                                {"up.bias", bias_.to(torch::kDouble)}});
  for (const auto& from : {path(""), path("model.safetensors")}) {
    Net net;
    load_pretrained(*net, from);
    EXPECT_TRUE(torch::equal(net->tokens, wte_.to(torch::kHalf).to(torch::kFloat)));
    EXPECT_TRUE(torch::equal(net->up->bias, bias_));
  }
  EXPECT_THAT(error_of(PretrainedOptions().convert(false)),
              AllOf(HasSubstr("head: expected F32 [5, 3] for \"head\", got F16 [5, 3]"),
                    HasSubstr("up.bias: expected F32 [4] for \"up.bias\", got F64 [4]")));
}

TEST_F(PretrainedTest, ListsEverythingThatDoesNotFit) {
  write_sharded();
  const auto wrong =
      NameMap().rename("transformer.h.0.c_fc.weight", "up.weight").prefix("transformer.", "");
  EXPECT_EQ(
      error_of(PretrainedOptions().names(wrong)),
      "[smp] pretrained files \"" + path("") +
          "\" do not fit the model:\n"
          "  tokens: missing from the files\n"
          "  transformer.h.0.attn.bias: stored, but the model has no tensor of that name or "
          "what it is mapped to\n"
          "  transformer.h.0.c_fc.bias: stored, but the model has no tensor of that name or "
          "what it is mapped to\n"
          "  transformer.h.0.c_fc.weight: expected F32 [4, 3] for \"up.weight\", got F32 [3, 4]\n"
          "  transformer.wte.weight: stored, but the model has no tensor of that name or what "
          "it is mapped to\n"
          "  up.bias: missing from the files\n"
          "Map stored names to the model's with a NameMap, leave out what is not needed with "
          "its ignore(), or load with strict(false).");
}

TEST_F(PretrainedTest, WithoutStrictReportsTheRest) {
  write_sharded();
  Net net;
  const auto report = load_pretrained(
      *net, path(""),
      PretrainedOptions().strict(false).names(NameMap().rename("transformer.wte.weight", "head")));
  EXPECT_TRUE(torch::equal(net->tokens, wte_));
  EXPECT_THAT(report.used, ElementsAre(Pair("transformer.wte.weight", "head")));
  EXPECT_THAT(report.missing, ElementsAre("up.bias", "up.weight"));
  EXPECT_THAT(report.unused, ElementsAre("transformer.h.0.attn.bias", "transformer.h.0.c_fc.bias",
                                         "transformer.h.0.c_fc.weight"));
}

TEST_F(PretrainedTest, TiedTensorsMayBeStoredTwiceButNotDiffer) {
  const auto write = [&](const torch::Tensor& head) {
    write_safetensors(
        path("model.safetensors"),
        {{"tokens", wte_}, {"head", head}, {"up.weight", weight_.t()}, {"up.bias", bias_}});
  };
  write(wte_);
  Net net;
  load_pretrained(*net, path(""));
  EXPECT_TRUE(torch::equal(net->tokens, wte_));
  write(wte_ + 1);
  EXPECT_THAT(error_of({}),
              HasSubstr("tokens: mapped to \"tokens\", as is \"head\", which has other "
                        "contents"));
}

TEST_F(PretrainedTest, ChecksTheFilesAndTheirIndex) {
  EXPECT_THAT(error_of({}),
              AllOf(HasSubstr("cannot load pretrained files from \""),
                    HasSubstr("expected a file, or a folder with model.safetensors or "
                              "model.safetensors.index.json, got neither. Check the path.")));
  write_sharded();
  write_index("model-00001-of-00002.safetensors");
  EXPECT_THAT(
      error_of({}),
      HasSubstr("/model-00001-of-00002.safetensors\" lacks tensor \"transformer.h.0.attn.bias\""
                ", which it holds by model.safetensors.index.json. Fetch the files again."));
  write_index("../elsewhere");
  EXPECT_THAT(error_of({}), HasSubstr("is malformed: expected the file of tensor "
                                      "\"transformer.h.0.attn.bias\" as a plain file name, got"));
  write_index("missing.safetensors");
  EXPECT_THAT(error_of({}), HasSubstr("missing.safetensors\": No such file or directory"));
  spill(path("model.safetensors.index.json"), "{\"weight_map\": [1]}");
  EXPECT_THAT(error_of({}),
              HasSubstr("is malformed: expected an object \"weight_map\" with the file of each"));
}

TEST(NameMapTest, TheFirstRuleThatFitsDecides) {
  const auto map = NameMap()
                       .rename("a", "x", Transform::kTranspose)
                       .prefix("a", "y.")
                       .pattern("(b+)(c)", "$2-$1")
                       .ignore("b.*")
                       .prefix("", "rest.");
  const auto name = [&](const std::string& from) {
    const auto target = map.apply(from);
    return target ? target->name : "ignored";
  };
  EXPECT_EQ(name("a"), "x");
  EXPECT_EQ(map.apply("a")->transform, Transform::kTranspose);
  EXPECT_EQ(name("ab"), "y.b");
  EXPECT_EQ(name("bbc"), "c-bb");
  EXPECT_EQ(name("bd"), "ignored");
  EXPECT_EQ(name("d"), "rest.d");
  EXPECT_EQ(NameMap().apply("d")->name, "d");
}

TEST(NameMapTest, RefusesWhatIsNoExpression) {
  try {
    NameMap().pattern("(", "x");
    FAIL();
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr("a name map has a rule for \"(\": expected a regular "
                                        "expression, got one with an error"));
  }
}

}  // namespace
}  // namespace smp::checkpoint
