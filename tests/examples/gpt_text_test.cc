// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <set>

#include "examples/gpt/text_data.h"
#include "examples/gpt/trigram.h"
#include "tests/error_of.h"
#include "tests/temp_folder.h"

namespace gpt {
namespace {

using smp::testing::error_of;
using smp::testing::TempFolder;
using testing::HasSubstr;

constexpr int64_t kBlock = TextData::kBlock;

/// A text whose blocks can be told apart: block i is made of byte i.
std::string blocks(int64_t count) {
  std::string text;
  for (int64_t i = 0; i < count; ++i) text.append(kBlock, static_cast<char>(i));
  return text;
}

/// The bytes of one row of a batch.
std::string row_text(const at::Tensor& rows, int64_t row) {
  std::string text;
  for (int64_t i = 0; i < rows.size(1); ++i) {
    text.push_back(static_cast<char>(rows[row][i].item<int64_t>()));
  }
  return text;
}

TEST(TextSplit, HoldsOutEveryTenthBlock) {
  const TextData data(blocks(25), "test");
  EXPECT_EQ(data.held_out_text(), std::string(kBlock, 9) + std::string(kBlock, 19));
  EXPECT_EQ(static_cast<int64_t>(data.training_text().size()), 23 * kBlock);
  EXPECT_EQ(data.training_text().find('\x09'), std::string::npos);
  EXPECT_EQ(data.training_text().back(), 24);
}

TEST(TextSplit, KeepsAShortLastBlock) {
  const TextData data(blocks(10) + "tail", "test");
  EXPECT_EQ(data.training_text().substr(9 * kBlock), "tail");
}

TEST(TextFiles, AreReadInOrder) {
  const TempFolder folder;
  const auto first = folder.write("b", blocks(10)), second = folder.write("a", "after");
  const auto data = TextData::from_files({first, second});
  EXPECT_EQ(data.training_text().substr(9 * kBlock), "after");
}

TEST(TextFiles, LinksInAFolderAreLeftOut) {
  const TempFolder folder;
  folder.write("text", blocks(10));
  std::filesystem::create_symlink("text", folder.file("again"));
  EXPECT_EQ(static_cast<int64_t>(TextData::from_folder(folder.path()).training_text().size()),
            9 * kBlock);
}

TEST(TextFiles, ErrorsNameTheFile) {
  const TempFolder folder;
  const auto good = folder.write("good", "text"), empty = folder.write("empty", "");
  const auto read = [](std::vector<std::string> files) {
    return error_of<std::exception>([&] { TextData::from_files(files); });
  };
  EXPECT_THAT(read({good, folder.file("missing")}),
              HasSubstr("expected a text file, got \"" + folder.file("missing") +
                        "\", which does not exist or is no regular file. Check --data."));
  EXPECT_THAT(read({good, empty}), HasSubstr("expected text in \"" + empty + "\", got an empty"));
  EXPECT_THAT(read({good, good}),
              HasSubstr("expected at least 20480 bytes in \"" + good + "\", \"" + good +
                        "\", got 8, too few to hold out a block."));
  EXPECT_THAT(read({}), HasSubstr("expected at least one file"));
  EXPECT_THAT(error_of<std::exception>([&] { TextData::from_folder(folder.file("none")); }),
              HasSubstr("expected a folder of texts, got \"" + folder.file("none")));
}

TEST(TextBatches, AreWindowsOfTheTrainingText) {
  const TextData data(blocks(20), "test");
  const Batch batch = data.batch(/*seed=*/1, /*step=*/2, /*rows=*/5, /*sequence=*/kBlock + 1);
  ASSERT_EQ(batch.x.sizes(), (std::vector<int64_t>{5, kBlock + 1}));
  for (int64_t row = 0; row < 5; ++row) {
    const auto x = row_text(batch.x, row), y = row_text(batch.y, row);
    EXPECT_NE(data.training_text().find(x), std::string::npos);
    EXPECT_EQ(x.substr(1), y.substr(0, kBlock));
  }
}

TEST(TextBatches, AreAFunctionOfSeedAndStep) {
  const TextData data(blocks(20), "test"), again(blocks(20), "test");
  const auto draw = [](const TextData& from, uint64_t seed, int64_t step) {
    return from.batch(seed, step, 64, 8).x;
  };
  EXPECT_TRUE(torch::equal(draw(data, 1, 7), draw(again, 1, 7)));
  EXPECT_FALSE(torch::equal(draw(data, 1, 7), draw(data, 1, 8)));
  EXPECT_FALSE(torch::equal(draw(data, 1, 7), draw(data, 2, 7)));
  // The first rows do not depend on how many there are.
  EXPECT_TRUE(torch::equal(draw(data, 1, 7).narrow(0, 0, 3), data.batch(1, 7, 3, 8).x));
}

TEST(TextBatches, ReachTheWholeText) {
  const TextData data(blocks(10), "test");
  const auto last = static_cast<int64_t>(data.training_text().size()) - 2;
  std::set<int64_t> seen;
  const auto x = data.batch(3, 0, 4000, 1).x;
  for (int64_t row = 0; row < 4000; ++row) seen.insert(x[row][0].item<int64_t>());
  EXPECT_EQ(seen.size(), 9u);
  // There is one choice only for windows as long as the text.
  EXPECT_EQ(row_text(data.batch(3, 0, 1, last + 1).y, 0), data.training_text().substr(1));
}

TEST(TextBatches, RefuseAWindowLongerThanTheText) {
  const TextData data(blocks(10), "the text");
  EXPECT_THAT(error_of<std::exception>([&] { data.held_out_batches(1, kBlock); }),
              HasSubstr("expected at least 2049 bytes of held-out text in the text for sequences "
                        "of 2048 bytes, got 2048."));
}

TEST(HeldOutBatches, CoverTheTextFromEndToEnd) {
  std::string text;
  for (int64_t i = 0; i < 10 * kBlock; ++i) text.push_back(static_cast<char>(i * i / 77));
  const TextData data(text, "test");
  const auto& held_out = data.held_out_text();
  const auto batches = data.held_out_batches(/*rows=*/4, /*sequence=*/100);
  ASSERT_EQ(batches.size(), 6u);  // 21 windows of 100 cover 2047 bytes; 24 fill whole batches
  EXPECT_EQ(row_text(batches.front().x, 0), held_out.substr(0, 100));
  EXPECT_EQ(row_text(batches.back().y, 3), held_out.substr(held_out.size() - 100));
  int64_t covered = 1;
  for (const Batch& batch : batches) {
    for (int64_t row = 0; row < 4; ++row) {
      const auto at = held_out.find(row_text(batch.y, row));
      ASSERT_LE(static_cast<int64_t>(at), covered);
      covered = static_cast<int64_t>(at) + 100;
    }
  }
  EXPECT_EQ(covered, kBlock);
}

// Counted by hand on "abab": a and b occur twice; a is followed by b twice, b by a once, ab by a
// once, ba by b once.
TEST(Trigram, IsWittenBellByHand) {
  const TrigramModel model("abab");
  const double a = (2 + 2 * (1.0 / 256)) / 6, b = a, other = (2 * (1.0 / 256)) / 6;
  const double b_after_a = (2 + b) / 3, a_after_b = (1 + a) / 2;
  const double a_after_ab = (1 + a_after_b) / 2, b_after_ba = (1 + b_after_a) / 2;
  const std::string text = "abab";
  EXPECT_DOUBLE_EQ(model.probability(text, 0), a);
  EXPECT_DOUBLE_EQ(model.probability(text, 1), b_after_a);
  EXPECT_DOUBLE_EQ(model.probability(text, 2), a_after_ab);
  EXPECT_DOUBLE_EQ(model.probability(text, 3), b_after_ba);
  EXPECT_DOUBLE_EQ(model.probability("xya", 2), a);                // nothing known before it
  EXPECT_DOUBLE_EQ(model.probability("abz", 2), (other / 2) / 2);  // never seen at all
  EXPECT_DOUBLE_EQ(model.bits_per_byte(text),
                   -std::log2(a * b_after_a * a_after_ab * b_after_ba) / 4);
}

TEST(Trigram, ProbabilitiesSumToOne) {
  const TrigramModel model("the theme of the thesis");
  for (const std::string context : {"th", "he", "xx", "\xff\xfe", "e "}) {
    double sum = 0;
    for (int byte = 0; byte < 256; ++byte) {
      sum += model.probability(context + static_cast<char>(byte), 2);
    }
    EXPECT_NEAR(sum, 1.0, 1e-12) << context;
  }
}

}  // namespace
}  // namespace gpt
