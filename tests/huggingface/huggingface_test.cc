// SPDX-License-Identifier: Apache-2.0
// Checkpoints that Hugging Face's library wrote (tests/huggingface/check.py), with the logits that
// it computes, in our models, and back.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <mutex>

#include "checkpoint/safetensors.h"
#include "smp/smp.h"
#include "tests/huggingface/imported.h"

namespace smp::testing {
namespace {

using checkpoint::SafetensorsReader;
using huggingface::logits_of;

constexpr const char* kSamples = "tests/huggingface/samples/";

class HuggingFace : public ::testing::TestWithParam<const char*> {
 protected:
  HuggingFace() {
    torch::set_num_threads(1);
    const SafetensorsReader sample(from() + "/sample.safetensors");
    inputs_ = sample.read("inputs");
    logits_ = sample.read("logits");
    out_ = ::testing::TempDir() + "/" + GetParam();
    std::filesystem::remove_all(out_);
  }

  std::string from() const { return std::string(kSamples) + GetParam(); }
  NameMap names() const {
    return NameMap::from_file(std::string("examples/huggingface/") + GetParam() + ".json");
  }
  PretrainedOptions options() const { return PretrainedOptions().names(names()); }

  void expect_logits(const torch::Tensor& logits) const {
    ASSERT_EQ(logits.sizes(), logits_.sizes());
    EXPECT_LT((logits - logits_).abs().max().item<double>(),
              1e-5 * logits_.abs().max().item<double>());
  }
  /// The file that was written is the one that was read, tensor by tensor.
  void expect_written() const {
    const SafetensorsReader before(from() + "/model.safetensors"),
        after(out_ + "/model.safetensors");
    EXPECT_EQ(after.entries().size(), before.entries().size());
    for (const auto& [name, entry] : before.entries()) {
      EXPECT_TRUE(torch::equal(after.read(name), before.read(name))) << name;
    }
  }

  torch::Tensor inputs_, logits_;
  std::string out_;
};

TEST_P(HuggingFace, GivesItsLogitsInAPlainModel) {
  run_as_threads(1, Config(), [&] {
    huggingface::with_model(huggingface::config_of(from()), [&](auto net) {
      const auto report = load_pretrained(from(), *net, options());
      EXPECT_THAT(report.missing, ::testing::IsEmpty());
      net->eval();
      const torch::NoGradGuard no_grad;
      expect_logits(logits_of(net, inputs_));
      save_pretrained(out_, *net, names());
    });
  });
  expect_written();
}

TEST_P(HuggingFace, GivesItsLogitsOnRanksThatDivideIt) {
  const auto config = Config()
                          .partitions(2)
                          .tensor_parallel_degree(2)
                          .ddp(true)
                          .prescaled_batch(true)
                          .timeout_seconds(60);
  run_as_threads(4, config, [&] {
    huggingface::with_model(huggingface::config_of(from()), [&](auto net) {
      DistributedModel<decltype(net)> model(net);
      DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), 0.1);
      auto train = step([&](torch::Tensor x) {
        auto loss = logits_of(net, x).square().mean();
        model->backward(loss);
        return loss;
      });
      auto evaluate = step([&](torch::Tensor x) { return logits_of(net, x); });
      train(inputs_);
      optimizer.step();
      load_pretrained(from(), model, options());
      model->eval();
      expect_logits(evaluate(inputs_).concat());
      save_pretrained(out_, model, names());
    });
  });
  expect_written();
}

/// Configurations of transformers since version 5, and before.
TEST(LlamaConfig, HasItsRotaryAnglesInEitherPlace) {
  huggingface::json config = {{"vocab_size", 8},          {"hidden_size", 8},
                              {"intermediate_size", 16},  {"num_hidden_layers", 1},
                              {"num_attention_heads", 2}, {"num_key_value_heads", 1},
                              {"rms_norm_eps", 1e-5}};
  EXPECT_EQ(llama::options_of(config).theta(), 10000);
  config["rope_theta"] = 500000;
  config["rope_scaling"] = nullptr;
  EXPECT_EQ(llama::options_of(config).theta(), 500000);
  config["rope_scaling"] = {{"rope_type", "llama3"}, {"factor", 8}};
  EXPECT_THROW(llama::options_of(config), c10::ValueError);
  config.erase("rope_theta");
  config.erase("rope_scaling");
  config["rope_parameters"] = {{"rope_theta", 250000}, {"rope_type", "default"}};
  EXPECT_EQ(llama::options_of(config).theta(), 250000);
  config["rope_parameters"]["rope_type"] = "yarn";
  EXPECT_THROW(llama::options_of(config), c10::ValueError);
}

INSTANTIATE_TEST_SUITE_P(Models, HuggingFace,
                         ::testing::Values("bert", "gpt2", "gpt_neox", "gptj", "llama", "roberta",
                                           "vit"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace smp::testing
