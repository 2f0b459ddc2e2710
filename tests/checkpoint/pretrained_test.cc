// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/pretrained.h"

#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <filesystem>

#include "tests/checkpoint/test_util.h"

namespace smp::checkpoint {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;

/// A head that is tied to the embedding, and a layer whose weight another library transposes.
struct TiedNetImpl : torch::nn::Module {
  TiedNetImpl() {
    tokens = register_parameter("tokens", torch::randn({5, 3}));
    head = register_parameter("head", tokens);
    up = register_module("up", torch::nn::Linear(3, 4));
  }
  torch::Tensor tokens, head;
  torch::nn::Linear up{nullptr};
};
TORCH_MODULE(TiedNet);

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
        .ignore("transformer.h.{layer}.attn.bias")
        .rename("transformer.h.0.c_fc.weight", "up.weight", Transform::kTranspose)
        .rename("transformer.h.0.c_fc.{rest*}", "up.{rest*}")
        .rename("transformer.wte.weight", "tokens");
  }

  std::string error_of(const PretrainedOptions& options) {
    TiedNet net;
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
  TiedNet net;
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
    TiedNet net;
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
  const auto wrong = NameMap()
                         .rename("transformer.h.0.c_fc.weight", "up.weight")
                         .rename("transformer.{rest*}", "{rest*}");
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
  TiedNet net;
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
  TiedNet net;
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

/// Queries, keys and values apart in the files, and one matrix here; a table that lies in two here;
/// a buffer that the files do not have.
struct FusedImpl : torch::nn::Module {
  FusedImpl() {
    qkv = register_parameter("qkv", torch::randn({6, 4}));
    low = register_parameter("low", torch::randn({1, 2}));
    high = register_parameter("high", torch::randn({2, 2}));
    mask = register_buffer("mask", torch::ones({2}));
  }
  static NameMap names() {
    return NameMap()
        .optional_prefix("net.")
        .join({"net.q", "net.k", "net.v"}, "qkv", Transform::kTranspose)
        .split("net.table", {"low", "high"})
        .omit("mask");
  }
  torch::Tensor qkv, low, high, mask;
};
TORCH_MODULE(Fused);

class FusedTest : public FolderTest {
 protected:
  std::string error_of(const NameMap& names) {
    return checkpoint_error(
        [&] { load_pretrained(*net_, path(""), PretrainedOptions().names(names)); });
  }

  torch::Tensor q_ = torch::randn({4, 2}), k_ = torch::randn({4, 2}), v_ = torch::randn({4, 2});
  torch::Tensor table_ = torch::randn({3, 2});
  Fused net_;
};

TEST_F(FusedTest, LoadsPartsAndWritesThemAgain) {
  for (const std::string prefix : {"", "net."}) {
    write_safetensors(
        path("model.safetensors"),
        {{prefix + "q", q_}, {prefix + "k", k_}, {prefix + "v", v_}, {prefix + "table", table_}});
    net_ = Fused();
    const auto report =
        load_pretrained(*net_, path(""), PretrainedOptions().names(FusedImpl::names()));
    EXPECT_TRUE(torch::equal(net_->qkv, torch::cat({q_.t(), k_.t(), v_.t()})));
    EXPECT_TRUE(torch::equal(net_->low, table_.narrow(0, 0, 1)));
    EXPECT_TRUE(torch::equal(net_->high, table_.narrow(0, 1, 2)));
    EXPECT_THAT(report.used,
                ElementsAre(Pair(prefix + "k", "qkv"), Pair(prefix + "q", "qkv"),
                            Pair(prefix + "table", "low"), Pair(prefix + "table", "high"),
                            Pair(prefix + "v", "qkv")));
    EXPECT_THAT(report.missing, IsEmpty());

    save_pretrained(*net_, path("out/deep"), FusedImpl::names());
    const SafetensorsReader written(path("out/deep/model.safetensors"));
    EXPECT_EQ(written.entries().size(), 4u);
    EXPECT_TRUE(torch::equal(written.read("net.q"), q_));
    EXPECT_TRUE(torch::equal(written.read("net.k"), k_));
    EXPECT_TRUE(torch::equal(written.read("net.v"), v_));
    EXPECT_TRUE(torch::equal(written.read("net.table"), table_));
  }
}

TEST_F(FusedTest, SaysWhichPartsDoNotFit) {
  const auto write = [&](const torch::Tensor& v, const torch::Tensor& table) {
    write_safetensors(path("model.safetensors"),
                      {{"net.q", q_}, {"net.k", k_}, {"net.v", v}, {"net.table", table}});
  };
  write(torch::randn({5, 2}), torch::randn({4, 2}));
  EXPECT_THAT(
      error_of(FusedImpl::names()),
      AllOf(HasSubstr(
                "net.q: expected F32 [6, 4] for \"qkv\", got F32 [2, 4], F32 [2, 4], F32 [2, 5]"),
            HasSubstr("net.table: expected F32 [1, 2], F32 [2, 2] for \"low\", \"high\", got F32 "
                      "[4, 2]")));
  write(v_, table_);
  EXPECT_THAT(
      error_of(NameMap()
                   .join({"net.q", "net.k", "net.v", "net.w"}, "qkv", Transform::kTranspose)
                   .split("net.table", {"low", "top"})),
      AllOf(HasSubstr("net.w: missing from the files, a part of \"qkv\""),
            HasSubstr("net.table: the model lacks \"top\", a part of it"),
            HasSubstr("high: missing from the files"), HasSubstr("mask: missing from the files")));
}

// Three tensors without elements have together more rows than a number holds.
TEST_F(FusedTest, RowsOfMadeUpShapesAreNotAdded) {
  std::string header;
  for (const char* name : {"q", "k", "v"}) {
    header += (header.empty() ? "{\"net." : ",\"net.") + std::string(name) +
              R"(":{"dtype":"U8","shape":[0,4611686018427387904],"data_offsets":[0,0]})";
  }
  header += "}";
  std::string size(8, '\0');
  size[0] = static_cast<char>(header.size());
  ASSERT_LT(header.size(), 256u);
  spill(path("model.safetensors"), size + header);
  EXPECT_THAT(
      error_of(FusedImpl::names()),
      HasSubstr("net.q: expected F32 [6, 4] for \"qkv\", got U8 [4611686018427387904, 0], U8 "));
}

TEST_F(FusedTest, SaysWhatCannotBeStored) {
  const auto error = checkpoint_error([&] {
    save_pretrained(*net_, path("out"),
                    NameMap()
                        .join({"a", "b", "c", "d"}, "qkv")
                        .split("e", {"low", "mask"})
                        .split("f", {"high", "top"}));
  });
  EXPECT_THAT(
      error, AllOf(HasSubstr("the model's tensors cannot be stored by the name map:\n"),
                   HasSubstr("qkv: expected 4 equal parts, got F32 [6, 4]\nCorrect the rules"),
                   HasSubstr("e: expected parts that differ in rows only, got F32 [1, 2], F32 [2]"),
                   HasSubstr("f: the model lacks \"top\", a part of it\n")));
  EXPECT_FALSE(std::filesystem::exists(path("out")));
  spill(path("file"), "");
  EXPECT_THAT(checkpoint_error([&] { save_pretrained(*net_, path("file"), {}); }),
              HasSubstr("cannot write pretrained files to \"" + path("file")));
}

TEST_F(PretrainedTest, StoresATiedTensorOnce) {
  TiedNet net;
  save_pretrained(*net, path("out"), names());
  const SafetensorsReader written(path("out/model.safetensors"));
  std::vector<std::string> stored;
  for (const auto& [name, entry] : written.entries()) stored.push_back(name);
  EXPECT_THAT(stored, ElementsAre("transformer.h.0.c_fc.bias", "transformer.h.0.c_fc.weight",
                                  "transformer.wte.weight"));
  EXPECT_TRUE(torch::equal(written.read("transformer.h.0.c_fc.weight"), net->up->weight.t()));
  EXPECT_TRUE(torch::equal(written.read("transformer.wte.weight"), net->tokens));
}

TEST(NameMapTest, TheFirstRuleThatFitsDecides) {
  const auto map = NameMap()
                       .rename("a", "x", Transform::kTranspose)
                       .rename("a{rest*}", "y.{rest*}")
                       .rename("{n}b{rest*}.{m}", "{rest*}-{m}.{n}")
                       .ignore("b{rest*}")
                       .omit("z")
                       .rename("c(d)", "z");
  const auto ours = [&](const std::string& theirs) { return map.of_theirs(theirs).ours; };
  const auto theirs = [&](const std::string& ours) { return map.of_ours(ours).theirs; };
  EXPECT_THAT(ours("a"), ElementsAre("x"));
  EXPECT_EQ(map.of_theirs("a").transform, Transform::kTranspose);
  EXPECT_THAT(ours("ab"), ElementsAre("y.b"));
  EXPECT_THAT(ours("10bc.2"), ElementsAre("c-2.10"));
  EXPECT_THAT(theirs("c-2.10"), ElementsAre("10bc.2"));
  EXPECT_THAT(ours("xbc.2"), ElementsAre("xbc.2"));
  EXPECT_THAT(ours("bd"), IsEmpty());
  EXPECT_THAT(theirs("z"), IsEmpty());
  EXPECT_THAT(ours("c(d)"), ElementsAre("z"));
  EXPECT_THAT(theirs("y.b"), ElementsAre("ab"));
  EXPECT_THAT(theirs("bd"), ElementsAre("bd"));
}

// The longest value of the first placeholder, then of the second, as far as the rest fits.
TEST(NameMapTest, FirstPlaceholdersTakeMost) {
  const auto values = [](const std::string& pattern, const std::string& name) {
    return NameMap().rename(pattern, "{a}|{b*}").of_theirs(name).ours.front();
  };
  EXPECT_EQ(values("{a}{b*}", "1234"), "123|4");
  EXPECT_EQ(values("x{b*}.{a}", "x1.2.3"), "3|1.2");
  EXPECT_EQ(values("{b*}{a}", "a1b22"), "2|a1b2");
  EXPECT_EQ(values("{b*}1{a}", "1111"), "1|11");
  EXPECT_EQ(values("{a}.{b*}.c", "12..c.c"), "12|.c");
  for (const char* name : {"", "12", "12.c", "a.b.c", "12..c", "12.x.c."}) {
    EXPECT_EQ(values("{a}.{b*}.c", name), name);  // no rule fits
  }
}

// std::regex overflows its stack at 30,000 characters, and takes hours for the last of these.
TEST(NameMapTest, NamesOfAnyLength) {
  const auto map = NameMap()
                       .rename("t.{a*}.x", "1.{a*}")
                       .rename("u.{layer}.x", "2.{layer}")
                       .rename("{a*}.{b*}.{c*}.y", "3.{a*}|{b*}|{c*}");
  const std::string x(1 << 20, 'x'), digits(1 << 20, '7');
  EXPECT_EQ(map.of_theirs("t." + x + ".x").ours.front(), "1." + x);
  EXPECT_EQ(map.of_theirs("u." + digits + ".x").ours.front(), "2." + digits);
  EXPECT_EQ(map.of_theirs("u." + digits + "a.x").ours.front(), "u." + digits + "a.x");
  const std::string dots(100000, '.');
  EXPECT_EQ(map.of_theirs(dots).ours.front(), dots);
  EXPECT_EQ(map.of_theirs(dots + "y").ours.front(), "3." + std::string(99995, '.') + "|.|.");
}

std::string usage_error(const std::function<void()>& action) {
  try {
    action();
  } catch (const UsageError& error) {
    return error.what();
  }
  ADD_FAILURE() << "expected a UsageError";
  return "";
}

TEST(NameMapTest, RefusesRulesThatDoNotFit) {
  EXPECT_THAT(usage_error([] { NameMap().rename("{", "x"); }),
              HasSubstr("a name map has the name \"{\": expected placeholders as {layer} or "
                        "{rest*}, each once, got \"{\". Correct the name"));
  EXPECT_THAT(usage_error([] { NameMap().ignore("{a}{a}"); }), HasSubstr("each once, got \"{a\""));
  EXPECT_THAT(usage_error([] { NameMap().rename("{a}.b", "{b}"); }),
              HasSubstr("a name map has the rule [{a}.b] -> [{b}]: expected the same placeholders "
                        "in all its names, got others. Name what is the same alike"));
}

class NameMapFileTest : public FolderTest {
 protected:
  std::string error_of(const std::string& text) {
    spill(path("map.json"), text);
    return smp::testing::error_of<ConfigError>([&] { NameMap::from_file(path("map.json")); });
  }
};

TEST_F(NameMapFileTest, SaysWhatTheRulesSay) {
  spill(path("map.json"), R"({"format": "smp-name-map", "optional_prefix": "net.", "rules": [
    {"theirs": ["net.q.{i}", "net.k.{i}"], "ours": "qk.{i}", "transform": "transpose"},
    {"theirs": "net.table", "ours": ["low", "high"]},
    {"theirs": "net.bias"},
    {"ours": "mask"}
  ]})");
  const auto map = NameMap::from_file(path("map.json"));
  const auto joined = map.of_theirs("k.3");
  EXPECT_THAT(joined.theirs, ElementsAre("net.q.3", "net.k.3"));
  EXPECT_THAT(joined.ours, ElementsAre("qk.3"));
  EXPECT_EQ(joined.transform, Transform::kTranspose);
  EXPECT_EQ(joined.index, 1u);
  EXPECT_THAT(map.of_ours("high").theirs, ElementsAre("net.table"));
  EXPECT_EQ(map.of_ours("high").index, 1u);
  EXPECT_THAT(map.of_theirs("net.bias").ours, IsEmpty());
  EXPECT_THAT(map.of_ours("mask").theirs, IsEmpty());
}

TEST_F(NameMapFileTest, SaysWhatIsWrongWithTheFile) {
  EXPECT_THAT(error_of(R"({"format": "other"})"),
              HasSubstr("map.json: \"format\": expected \"smp-name-map\", got \"other\""));
  EXPECT_THAT(error_of(R"({"format": "smp-name-map", "rules": [
                {"theirs": "a", "ours": "b", "transform": "twist"}]})"),
              HasSubstr("\"rules[0].transform\": expected \"transpose\", got \"twist\""));
  EXPECT_THAT(error_of(R"({"format": "smp-name-map", "rules": [
                {"theirs": ["a", "b"], "ours": ["c", "d"]}]})"),
              HasSubstr("\"rules[0]\": a name map has the rule [a, b] -> [c, d]: expected one name "
                        "on one side at least, got 2 and 2. Make several rules of it."));
}

}  // namespace
}  // namespace smp::checkpoint
