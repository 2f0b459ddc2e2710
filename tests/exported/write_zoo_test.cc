// SPDX-License-Identifier: Apache-2.0
// The models of tests/zoo as programs, loaded back: outputs, gradients and buffers are the model's.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tuple>
#include <utility>
#include <vector>

#include "tests/exported/written.h"
#include "tests/zoo/models_convolutional.h"
#include "tests/zoo/models_generative.h"
#include "tests/zoo/models_irregular.h"
#include "tests/zoo/models_sequence.h"

namespace smp::testing {
namespace {

using torch::Tensor;

class WriteZoo : public ::testing::Test {
 protected:
  void SetUp() override {
    torch::set_num_threads(1);
    torch::manual_seed(1);
  }
};

Tensor ids(int64_t most, at::IntArrayRef sizes) {
  return torch::randint(0, most, sizes, torch::kLong);
}

const auto images = [](int64_t batch) { return std::make_tuple(torch::randn({batch, 3, 8, 8})); };

TEST_F(WriteZoo, ResNet) { expect_same_when_loaded("ResNet", stranger::ResNet(4), images); }
TEST_F(WriteZoo, DenseNet) { expect_same_when_loaded("DenseNet", stranger::DenseNet(4), images); }
TEST_F(WriteZoo, Inception) {
  expect_same_when_loaded("Inception", stranger::Inception(4), images);
}
TEST_F(WriteZoo, MlpMixer) { expect_same_when_loaded("MlpMixer", stranger::MlpMixer(4), images); }
TEST_F(WriteZoo, VisionTransformer) {
  expect_same_when_loaded("VisionTransformer", stranger::VisionTransformer(4), images);
}
TEST_F(WriteZoo, UNet) {
  expect_same_when_loaded("UNet", stranger::UNet(), [](int64_t batch) {
    return std::make_tuple(torch::randn({batch, 2, 9, 7}));
  });
}
TEST_F(WriteZoo, FourierOperator) {
  expect_same_when_loaded("FourierOperator", stranger::FourierOperator(), [](int64_t batch) {
    return std::make_tuple(torch::randn({batch, 12, 1}));
  });
}

TEST_F(WriteZoo, Vae) {
  expect_same_when_loaded("Vae", stranger::Vae(), [](int64_t batch) {
    return std::make_tuple(torch::rand({batch, 20}));
  });
}
TEST_F(WriteZoo, Generator) {
  expect_same_when_loaded("Generator", stranger::Generator(), [](int64_t batch) {
    return std::make_tuple(torch::randn({batch, stranger::GeneratorImpl::kNoise, 1, 1}));
  });
}
TEST_F(WriteZoo, Discriminator) {
  expect_same_when_loaded("Discriminator", stranger::Discriminator(), [](int64_t batch) {
    return std::make_tuple(torch::randn({batch, 1, 16, 16}));
  });
}
TEST_F(WriteZoo, VqVae) {
  expect_same_when_loaded("VqVae", stranger::VqVae(), [](int64_t batch) {
    return std::make_tuple(torch::randn({batch, 12}));
  });
}
TEST_F(WriteZoo, Diffusion) {
  expect_same_when_loaded("Diffusion", stranger::Diffusion(), [](int64_t batch) {
    return std::make_tuple(torch::randn({batch, 1, 8}), ids(4, {batch}));
  });
}
TEST_F(WriteZoo, Flow) {
  expect_same_when_loaded("Flow", stranger::Flow(), [](int64_t batch) {
    return std::make_tuple(torch::randn({batch, 6}));
  });
}

const auto zoo_sentences = [](int64_t batch) {
  return std::make_tuple(ids(stranger::GptImpl::kVocabulary, {batch, stranger::GptImpl::kLength}));
};

TEST_F(WriteZoo, Gpt) { expect_same_when_loaded("Gpt", stranger::Gpt(false), zoo_sentences); }
TEST_F(WriteZoo, GptTied) {
  expect_same_when_loaded("GptTied", stranger::Gpt(true), zoo_sentences);
}
TEST_F(WriteZoo, Translator) {
  expect_same_when_loaded("Translator", stranger::Translator(), [](int64_t batch) {
    // No row begins with padding, which would leave nothing to attend to.
    const auto padded = [&](int64_t length) {
      auto text = ids(stranger::TranslatorImpl::kVocabulary - 1, {batch, length}) + 1;
      return text.slice(1, 0, length).contiguous();
    };
    return std::make_tuple(padded(6), padded(5));
  });
}
TEST_F(WriteZoo, Lstm) {
  const auto make = [](int64_t batch) {
    using stranger::LstmModelImpl;
    const LstmModelImpl::State state{torch::randn({2, batch, LstmModelImpl::kHidden}),
                                     torch::randn({2, batch, LstmModelImpl::kHidden})};
    return std::make_tuple(ids(LstmModelImpl::kVocabulary, {batch, 5}), state);
  };
  expect_same_when_loaded("Lstm", stranger::LstmModel(), make, {0, 1, 1});
}
TEST_F(WriteZoo, Gru) {
  expect_same_when_loaded("Gru", stranger::GruModel(), [](int64_t batch) {
    using stranger::GruModelImpl;
    return std::make_tuple(ids(GruModelImpl::kVocabulary, {batch, 4}),
                           ids(GruModelImpl::kVocabulary, {batch, 4}),
                           torch::randn({batch, GruModelImpl::kHidden}));
  });
}
TEST_F(WriteZoo, WaveNet) {
  expect_same_when_loaded("WaveNet", stranger::WaveNet(), [](int64_t batch) {
    return std::make_tuple(torch::randn({batch, 1, 12}));
  });
}
TEST_F(WriteZoo, Rotary) {
  expect_same_when_loaded("Rotary", stranger::Rotary(), [](int64_t batch) {
    return std::make_tuple(ids(stranger::RotaryImpl::kVocabulary, {batch, 5}));
  });
}
TEST_F(WriteZoo, Bert) {
  expect_same_when_loaded("Bert", stranger::Bert(), [](int64_t batch) {
    using stranger::BertImpl;
    return std::make_tuple(ids(BertImpl::kVocabulary, {batch, BertImpl::kLength}),
                           ids(2, {batch, BertImpl::kLength}), ids(BertImpl::kLength, {batch}) + 1);
  });
}

TEST_F(WriteZoo, MixtureOfExperts) {
  expect_same_when_loaded("MixtureOfExperts", stranger::MixtureModel(), [](int64_t batch) {
    return std::make_tuple(ids(11, {batch, 5}));
  });
}
TEST_F(WriteZoo, GraphNetwork) {
  expect_same_when_loaded("GraphNetwork", stranger::GraphNetwork(3), [](int64_t batch) {
    return std::make_tuple(torch::randn({batch, 7, 5}), ids(7, {batch, 2, 11}));
  });
}
TEST_F(WriteZoo, MultiInput) {
  expect_same_when_loaded("MultiInput", stranger::MultiInput(), [](int64_t batch) {
    return std::make_tuple(stranger::MultiInputImpl::Dict{
        {"ids", ids(15, {batch, 5})},
        {"features", torch::randn({batch, 4}).to(torch::kDouble)},
        {"mask", torch::arange(5).unsqueeze(0) < ids(5, {batch, 1}) + 1}});
  });
}
TEST_F(WriteZoo, AnyDepth) {
  expect_same_when_loaded("AnyDepth", stranger::AnyDepth(5), [](int64_t batch) {
    return std::make_tuple(torch::randn({batch, 4}), size_t{3});
  });
}
TEST_F(WriteZoo, MixedTypes) {
  expect_same_when_loaded("MixedTypes", stranger::MixedTypes(), [](int64_t batch) {
    return std::make_tuple(torch::randn({batch, 6}));
  });
}
TEST_F(WriteZoo, Autocast) {
  expect_same_when_loaded("Autocast", stranger::AutocastModel(), [](int64_t batch) {
    return std::make_tuple(torch::randn({batch, 1, 8, 8}));
  });
}
TEST_F(WriteZoo, Siamese) {
  expect_same_when_loaded("Siamese", stranger::Siamese(), [](int64_t batch) {
    return std::make_tuple(torch::randn({batch, 1, 8, 8}));
  });
}
TEST_F(WriteZoo, InPlace) {
  expect_same_when_loaded("InPlace", stranger::InPlace(), [](int64_t batch) {
    return std::make_tuple(torch::randn({batch, 5, 4}), torch::rand({batch, 5}) < 0.3);
  });
}
TEST_F(WriteZoo, Recommender) {
  expect_same_when_loaded("Recommender", stranger::Recommender(), [](int64_t batch) {
    return std::make_tuple(ids(12, {batch}), ids(20, {batch, 3}), torch::rand({batch, 3}),
                           ids(9, {batch, 4}), torch::randn({batch, 3}));
  });
}

}  // namespace
}  // namespace smp::testing
