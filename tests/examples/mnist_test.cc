// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <zlib.h>

#include <algorithm>
#include <set>

#include "examples/mnist/conv_net.h"
#include "examples/mnist/grouped_net.h"
#include "examples/mnist/idx_data.h"
#include "tests/error_of.h"
#include "tests/temp_folder.h"

namespace mnist {
namespace {

using smp::testing::error_of;
using smp::testing::TempFolder;
using testing::HasSubstr;

std::string big_endian(uint32_t value) {
  std::string bytes;
  for (int shift = 24; shift >= 0; shift -= 8) bytes.push_back(static_cast<char>(value >> shift));
  return bytes;
}

/// An idx file of unsigned bytes in which element i is i, modulo 256.
std::string idx(const std::vector<uint32_t>& sizes) {
  std::string file = big_endian(0x0800 + static_cast<uint32_t>(sizes.size()));
  int64_t count = 1;
  for (const uint32_t size : sizes) {
    file += big_endian(size);
    count *= size;
  }
  for (int64_t i = 0; i < count; ++i) file.push_back(static_cast<char>(i));
  return file;
}

void write_gzip(const std::string& path, const std::string& content) {
  gzFile file = gzopen(path.c_str(), "wb");
  ASSERT_EQ(gzwrite(file, content.data(), content.size()), static_cast<int>(content.size()));
  ASSERT_EQ(gzclose(file), Z_OK);
}

class IdxFile : public testing::Test {
 protected:
  std::string error(const std::string& content) const {
    return error_of<std::exception>([&] { read_idx(folder_.write("file", content)); });
  }

  TempFolder folder_;
};

TEST_F(IdxFile, IsReadInRowMajorOrder) {
  const auto read = read_idx(folder_.write("file", idx({2, 3, 50})));
  const auto expected = torch::arange(300, torch::kLong).remainder(256).view({2, 3, 50});
  EXPECT_TRUE(torch::equal(read, expected.to(torch::kByte)));
}

TEST_F(IdxFile, MayBeGzipped) {
  write_gzip(folder_.file("file.gz"), idx({4, 5}));
  EXPECT_TRUE(torch::equal(read_idx(folder_.file("file.gz")),
                           torch::arange(20, torch::kByte).view({4, 5})));
}

TEST_F(IdxFile, TruncatedFilesAreRefused) {
  const auto good = idx({4, 5});
  const auto file = folder_.file("file");
  EXPECT_THAT(error(good.substr(0, good.size() - 3)),
              HasSubstr("idx file \"" + file +
                        "\": expected 20 bytes of data, got 17. The file is "
                        "truncated"));
  EXPECT_THAT(error(good.substr(0, 10)), HasSubstr("expected 4 bytes of sizes, got 2"));
  EXPECT_THAT(error(""), HasSubstr("expected 4 bytes of magic number, got 0"));
}

TEST_F(IdxFile, TruncatedGzipFilesAreRefused) {
  std::string noise = idx({100, 100});
  for (size_t i = 12; i < noise.size(); ++i)
    noise[i] = static_cast<char>(i * i * 2654435761u >> 13);
  write_gzip(folder_.file("whole"), noise);
  std::ifstream stream(folder_.file("whole"), std::ios::binary);
  std::string packed((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());
  EXPECT_THAT(error(packed.substr(0, packed.size() / 2)),
              HasSubstr("expected 10000 bytes of data"));
}

TEST_F(IdxFile, OtherFormatsAreRefused) {
  EXPECT_THAT(error("hello, world"),
              HasSubstr("expected magic number 0x000008NN (unsigned bytes, NN "
                        "from 1 to 4 dimensions), got 0x68656c6c."));
  EXPECT_THAT(error(big_endian(0x0D03) + "rest"), HasSubstr("got 0xd03."));
  EXPECT_THAT(error(idx({4, 5}) + "x"),
              HasSubstr("expected 20 bytes of data for shape [4, 5], got more"));
}

class MnistFolder : public testing::Test {
 protected:
  void write(const std::string& prefix, uint32_t images, uint32_t labels) const {
    write_gzip(folder_.file(prefix + "-images-idx3-ubyte.gz"), idx({images, 28, 28}));
    folder_.write(prefix + "-labels-idx1-ubyte", idx({labels}));
  }

  TempFolder folder_;
};

TEST_F(MnistFolder, HoldsTrainingAndTestDigits) {
  write("train", 30, 30);
  write("t10k", 20, 20);
  const auto data = load_mnist(folder_.path());
  EXPECT_EQ(data.training.size(), 30);
  EXPECT_EQ(data.test.size(), 20);
  EXPECT_EQ(data.training.images.sizes(), (std::vector<int64_t>{30, 1, 28, 28}));
  EXPECT_EQ(data.training.labels[7].item<int64_t>(), 7);
  EXPECT_NEAR(data.training.images[0][0][3][1].item<double>(), (85 / 255.0 - 0.1307) / 0.3081,
              1e-6);
}

TEST_F(MnistFolder, MayHoldOnlyTheTestFiles) {
  write("t10k", 20, 20);
  const auto data = load_mnist(folder_.path());
  EXPECT_EQ(data.training.size(), 18);
  EXPECT_EQ(data.test.size(), 2);
  EXPECT_EQ(data.test.labels[0].item<int64_t>(), 18);
  EXPECT_THAT(data.description, HasSubstr("only the t10k files of"));
  EXPECT_THAT(data.description, HasSubstr("their first 18 digits for training, the last 2 for"));
}

TEST_F(MnistFolder, ErrorsNameTheFileAndSayHowToGetIt) {
  const auto error = [&] { return error_of<std::exception>([&] { load_mnist(folder_.path()); }); };
  EXPECT_THAT(error(), HasSubstr("expected the file train-images-idx3-ubyte or "
                                 "train-images-idx3-ubyte.gz in \"" +
                                 folder_.path() + "\", found neither. Get the four idx files"));
  write("t10k", 20, 19);
  EXPECT_THAT(error(), HasSubstr("t10k-labels-idx1-ubyte\": expected the 20 labels of"));
  write("t10k", 20, 20);
  folder_.write("t10k-labels-idx1-ubyte", idx({4, 5}));
  EXPECT_THAT(error(), HasSubstr("got shape [4, 5]"));
  std::filesystem::remove(folder_.file("t10k-images-idx3-ubyte.gz"));
  folder_.write("t10k-images-idx3-ubyte", idx({20, 28, 27}));
  EXPECT_THAT(error(), HasSubstr("expected images of shape [count, 28, 28], got [20, 28, 27]"));
}

TEST(EpochSampler, GivesEachDigitOnceInAShuffledOrder) {
  const auto batches = EpochSampler(23, 10, /*seed=*/3).batches(0);
  ASSERT_EQ(batches.size(), 2u);  // 3 of 23 digits do not fill a batch
  std::vector<int64_t> order;
  for (const auto& batch : batches) {
    ASSERT_EQ(batch.numel(), 10);
    for (int64_t i = 0; i < 10; ++i) order.push_back(batch[i].item<int64_t>());
  }
  EXPECT_FALSE(std::is_sorted(order.begin(), order.end()));
  const std::set<int64_t> seen(order.begin(), order.end());
  EXPECT_EQ(seen.size(), 20u);
  EXPECT_GE(*seen.begin(), 0);
  EXPECT_LT(*seen.rbegin(), 23);
}

TEST(EpochSampler, IsAFunctionOfSeedAndEpoch) {
  const EpochSampler sampler(20, 20, 3);
  EXPECT_TRUE(torch::equal(sampler.batches(1)[0], EpochSampler(20, 20, 3).batches(1)[0]));
  EXPECT_FALSE(torch::equal(sampler.batches(1)[0], sampler.batches(2)[0]));
  EXPECT_FALSE(torch::equal(sampler.batches(1)[0], EpochSampler(20, 20, 9).batches(1)[0]));
  EXPECT_THAT(error_of<std::exception>([] { EpochSampler(9, 10, 1); }),
              HasSubstr("expected at least 10 digits for a batch, got 9. Choose a smaller"));
}

TEST(ConvNet, GivesLogProbabilitiesAndHasTheScriptsParameters) {
  at::set_num_threads(1);
  torch::manual_seed(0);
  ConvNet net;
  const auto out = net(torch::randn({2, 1, 28, 28}));
  ASSERT_EQ(out.sizes(), (std::vector<int64_t>{2, 10}));
  EXPECT_TRUE(torch::allclose(out.exp().sum(1), torch::ones({2})));
  int64_t count = 0;
  for (const auto& parameter : net->parameters()) count += parameter.numel();
  EXPECT_EQ(count, 1199882);  // the number that PyTorch's script prints
}

TEST(GroupedNet, IsTheSameNetworkInTwoPinnedHalves) {
  at::set_num_threads(1);
  torch::manual_seed(0);
  ConvNet whole;
  torch::manual_seed(0);
  GroupedNet grouped;
  whole->eval();
  grouped->eval();
  const auto images = torch::randn({2, 1, 28, 28});
  EXPECT_TRUE(torch::equal(grouped(images), whole(images)));
  for (const auto& item : grouped->named_parameters()) {
    EXPECT_EQ(smp::pinned_partition(item.value()), item.key().find("features") == 0 ? 0 : 1);
  }
}

}  // namespace
}  // namespace mnist
