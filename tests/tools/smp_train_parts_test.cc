// SPDX-License-Identifier: Apache-2.0
// The parts of smp_train: its command line, files of samples, their order, rates, and progress.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <iterator>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/safetensors.h"
#include "smp/error.h"
#include "tests/command.h"
#include "tests/error_of.h"
#include "tests/temp_folder.h"
#include "tests/tools/plain_order.h"
#include "tools/train/data.h"
#include "tools/train/options.h"
#include "tools/train/order.h"
#include "tools/train/progress.h"
#include "tools/train/schedule.h"

namespace smp::tools::train {
namespace {

using smp::testing::error_of;
using smp::testing::expect_has;
using smp::testing::Outcome;
using smp::testing::plain_order;
using smp::testing::SplitMix64;
using smp::testing::TempFolder;
using ::testing::AllOf;
using ::testing::DoubleEq;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pointwise;
using torch::Tensor;

/// The status that the reader of command lines returns, and the text that it prints.
Outcome parsed(const std::string& arguments) {
  std::istringstream stream("smp_train " + arguments);
  std::vector<std::string> words{std::istream_iterator<std::string>(stream), {}};
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  Options options;
  ::testing::internal::CaptureStderr();
  const auto status =
      parse_command_line(static_cast<int>(pointers.size()), pointers.data(), options);
  Outcome outcome;
  outcome.output = ::testing::internal::GetCapturedStderr();
  outcome.status = status.value_or(0);
  return outcome;
}

TEST(OptionsTest, WrongCommandLinesSayWhatToDo) {
  const std::string common = "a.pt2 --data d --steps 1 --batch-size 8 --folder f ";
  EXPECT_EQ(parsed(common + "--loss mse").status, 0);
  const std::vector<std::pair<std::string, std::string>> cases{
      {common, "--loss is required"},
      {common + "--loss cross", "--loss: cross not in"},
      {common + "--loss mse --format idx", "--labels goes with --format idx, and it needs it"},
      {common + "--loss mse --labels a", "--labels goes with --format idx, and it needs it"},
      {common + "--loss mse --format tokens", "--sequence goes with --format tokens"},
      {common + "--loss mse --shift", "--shift goes with --format tokens"},
      {common + "--loss mse --format idx --labels a --eval-data b --eval-model c",
       "--eval-data and --eval-labels go together"},
      {common + "--loss mse --eval-data a", "--eval-data and --eval-model go together"},
      {common + "--loss output --target y", "--target goes with a loss that compares"},
      {common + "--loss mse --clip -1", "--clip"},
      {common + "--loss mse --keep 0", "--keep"},
      {common + "--loss mse --optimizer lion", "--optimizer: lion not in"},
      {common + "--loss mse --final-rate 2", "--final-rate"}};
  for (const auto& [arguments, text] : cases) {
    const Outcome outcome = parsed(arguments);
    EXPECT_GT(outcome.status, 100) << arguments << outcome.output;  // CLI11's
    EXPECT_THAT(outcome.output, HasSubstr(text)) << arguments;
  }
}

TEST(OptionsTest, InputsAndTheLengthOfTheSchedule) {
  Options options;
  std::vector<std::string> words{"smp_train", "a.pt2",   "--data",       "d",  "--steps",  "9",
                                 "--folder",  "f",       "--loss",       "l1", "--inputs", "a,x=b",
                                 "--betas",   "0.8,0.9", "--batch-size", "8"};
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  ASSERT_FALSE(parse_command_line(static_cast<int>(words.size()), pointers.data(), options));
  EXPECT_THAT(options.inputs, ElementsAre("a", "x=b"));
  EXPECT_EQ(options.schedule.steps, 9);
  EXPECT_EQ(options.optimizer.betas, std::make_pair(0.8, 0.9));
  EXPECT_EQ(options.loss.kind, LossKind::kL1);
}

TEST(SamplesTest, NumbersOfEachType) {
  const TempFolder folder;
  const auto bytes_of = [](const Tensor& tensor) {
    return std::string(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
  };
  const std::map<std::string, at::ScalarType> types{{"uint8", torch::kByte},
                                                    {"uint16", torch::kUInt16},
                                                    {"int32", torch::kInt},
                                                    {"int64", torch::kLong}};
  for (const auto& [name, type] : types) {
    SCOPED_TRACE(name);
    const Tensor numbers = torch::tensor({1, 2, 3, 4, 5, 6, 250});
    const std::string file = folder.write(name, bytes_of(numbers.to(type)));
    DataOptions options;
    options.format = Format::kTokens;
    options.token_type = name;
    options.sequence = 3;
    const Samples plain(options, file, "", {"input", "target"});
    EXPECT_EQ(plain.size(), 2);
    const Tensor rows = torch::tensor({1, 0});
    EXPECT_TRUE(torch::equal(plain.rows("input", rows), torch::tensor({{4, 5, 6}, {1, 2, 3}})));
    EXPECT_TRUE(torch::equal(plain.rows("target", rows), plain.rows("input", rows)));
    options.shift = true;
    const Samples shifted(options, file, "", {"input", "target"});
    EXPECT_TRUE(
        torch::equal(shifted.rows("target", rows), torch::tensor({{5, 6, 250}, {2, 3, 4}})));
  }
  DataOptions options;
  options.format = Format::kTokens;
  options.sequence = 1;
  const Tensor large = torch::tensor({60000, 1}).to(torch::kUInt16);
  const Samples samples(options, folder.write("large", bytes_of(large)), "", {"input"});
  EXPECT_TRUE(torch::equal(samples.rows("input", torch::tensor({0})), torch::tensor({{60000}})));
}

TEST(SamplesTest, UnsignedNumbersOfSafetensors) {
  const TempFolder folder;
  const std::string file = folder.file("samples");
  const Tensor numbers = torch::tensor({1, 40000, 65535, 7}).view({2, 2});
  checkpoint::write_safetensors(file, {{"bytes", numbers.to(torch::kByte)},
                                       {"words", numbers.to(torch::kUInt16)},
                                       {"more", (numbers * 65537).to(torch::kUInt32)},
                                       {"most", numbers.to(torch::kUInt64)}});
  const Samples samples(DataOptions(), file, "", {"bytes", "words", "more"});
  const Tensor rows = torch::tensor({1, 0});
  EXPECT_TRUE(torch::equal(samples.rows("words", rows), torch::tensor({{65535, 7}, {1, 40000}})));
  EXPECT_TRUE(torch::equal(samples.rows("more", rows), samples.rows("words", rows) * 65537));
  EXPECT_EQ(samples.rows("bytes", rows).scalar_type(), torch::kByte);
  expect_has(error_of<UsageError>([&] { Samples(DataOptions(), file, "", {"most"}); }),
             {"samples\": \"most\" has type U64, whose numbers int64 may not hold. Write it as "
              "int64"});
}

std::string idx(const std::vector<unsigned char>& sizes, const std::string& data) {
  std::string bytes{'\0', '\0', '\x08', static_cast<char>(sizes.size())};
  for (const unsigned char size : sizes) bytes += {'\0', '\0', '\0', static_cast<char>(size)};
  return bytes + data;
}

TEST(SamplesTest, Idx) {
  const TempFolder folder;
  DataOptions options;
  options.format = Format::kIdx;
  const std::string images = folder.write("images", idx({2, 1, 2}, {'\xff', '\0', '\x33', '\x66'}));
  const std::string labels = folder.write("labels", idx({2}, {'\x09', '\x03'}));
  const Samples samples(options, images, labels, {"input", "target"});
  const Tensor rows = torch::tensor({1});
  EXPECT_TRUE(torch::equal(samples.rows("target", rows), torch::tensor({3})));
  EXPECT_TRUE(torch::equal(samples.rows("input", rows),
                           torch::tensor({51.0F, 102.0F}).div(255).view({1, 1, 1, 2})));

  const std::string three = folder.write("three", idx({3}, "abc"));
  expect_has(error_of<UsageError>([&] { Samples(options, images, three, {"input"}); }),
             {"\"target\" has 3 samples, and another tensor 2. The first dimension of each tensor "
              "counts the samples, at least one"});
  expect_has(error_of<UsageError>([&] { Samples(options, images, labels, {"x"}); }),
             {"has no \"x\": with --format tokens and idx tensors are called input and target"});
  const std::string packed = folder.write("labels.gz", "\x1f\x8b\x08 ...");
  expect_has(error_of<CheckpointError>([&] { Samples(options, images, packed, {"input"}); }),
             {"it is no idx file of unsigned bytes. Unpack it first if it ends with .gz"});
  const std::string cut = folder.write("cut", idx({4, 2}, "abc"));
  expect_has(error_of<CheckpointError>([&] { Samples(options, cut, labels, {"input"}); }),
             {"cut\": its header says [4, 2], and it holds 3 bytes. Get the file again"});
  const std::string none = folder.write("none", idx({2, 0}, ""));
  expect_has(error_of<CheckpointError>([&] { Samples(options, none, labels, {"input"}); }),
             {"none\": its header says [2, 0], and it holds 0 bytes. Get the file again"});
}

TEST(SamplesTest, WrongFiles) {
  const TempFolder folder;
  DataOptions options;
  expect_has(error_of<CheckpointError>([&] { Samples(options, folder.file("a"), "", {"x"}); }),
             {"/a"});
  checkpoint::write_safetensors(folder.file("b"), {{"x", torch::zeros({2})}});
  expect_has(error_of<UsageError>([&] { Samples(options, folder.file("b"), "", {"y"}); }),
             {"has no tensor \"y\", it has x. Choose by --inputs and --target"});
  options.format = Format::kTokens;
  options.sequence = 4;
  expect_has(error_of<CheckpointError>([&] { Samples(options, folder.file("a"), "", {}); }),
             {"there is no such file. Give the path of a file of samples"});
  expect_has(error_of<CheckpointError>([&] { Samples(options, folder.write("e", ""), "", {}); }),
             {"it is empty. Give the path of a file of samples"});
  expect_has(error_of<UsageError>([&] { Samples(options, folder.write("c", "abc"), "", {}); }),
             {"has 3 bytes, which are no tokens of type uint16 for a sample of 4. Choose another "
              "--token-type or --sequence"});
}

/// The first numbers of SplitMix64 for the seed 1234567, as its authors' program prints them.
TEST(OrderTest, FollowsFromSeedAndEpoch) {
  SplitMix64 generator(1234567);
  EXPECT_EQ(generator.next(), 6457827717110365317U);
  EXPECT_EQ(generator.next(), 3203168211198807973U);
  for (const uint64_t seed : {uint64_t{0}, uint64_t{7}, ~uint64_t{0}}) {
    for (const uint64_t epoch : {0, 1, 5}) {
      EXPECT_EQ(order_of(100, seed, epoch), plain_order(100, seed, epoch));
    }
  }
  EXPECT_NE(order_of(100, 7, 0), order_of(100, 7, 1));
  EXPECT_THAT(order_of(8, 7, 0), ElementsAre(1, 3, 5, 0, 6, 2, 7, 4));
  EXPECT_THAT(order_of(8, 7, 1), ElementsAre(0, 3, 2, 6, 5, 7, 4, 1));
}

TEST(ScheduleTest, RisesThenFalls) {
  ScheduleOptions schedule;
  schedule.warmup = 4;
  schedule.steps = 12;
  schedule.final_rate = 0.2;
  const auto rates = [&](const std::string& shape) {
    schedule.shape = shape;
    std::vector<double> result;
    for (const int64_t step : {0, 3, 4, 8, 12, 20}) result.push_back(rate_of(schedule, step));
    return result;
  };
  using Rates = std::vector<double>;
  EXPECT_THAT(rates("constant"), Pointwise(DoubleEq(), Rates{0.25, 1, 1, 1, 1, 1}));
  EXPECT_THAT(rates("linear"), Pointwise(DoubleEq(), Rates{0.25, 1, 1, 0.6, 0.2, 0.2}));
  schedule.shape = "cosine";
  EXPECT_EQ(rate_of(schedule, 4), 1);
  EXPECT_NEAR(rate_of(schedule, 6), 0.2 + 0.8 * (1 + std::sqrt(0.5)) / 2, 1e-15);
  EXPECT_NEAR(rate_of(schedule, 8), 0.6, 1e-15);
  EXPECT_EQ(rate_of(schedule, 12), 0.2);
}

TEST(ProgressTest, LinesJsonAndBar) {
  std::ostringstream lines, objects, bar;
  {
    Progress a(0, 5, 2, Style::kLines, lines), b(0, 5, 2, Style::kJson, objects),
        c(0, 5, 2, Style::kBar, bar);
    for (int64_t step = 1; step <= 5; ++step) {
      for (Progress* progress : {&a, &b, &c}) progress->show({step, 0.5, 0.25, 2.0});
    }
    for (Progress* progress : {&a, &b, &c}) {
      progress->show_evaluation(5, 0.125);
      progress->say("resumed");
    }
  }
  EXPECT_EQ(lines.str(),
            "step 2/5  loss 0.5  lr 0.25  norm 2\nstep 4/5  loss 0.5  lr 0.25  norm 2\n"
            "step 5/5  loss 0.5  lr 0.25  norm 2\nstep 5  evaluation loss 0.125\nresumed\n");
  EXPECT_THAT(objects.str(), HasSubstr("{\"step\":1,\"loss\":0.5,\"lr\":0.25,\"norm\":2.0}\n"));
  EXPECT_THAT(objects.str(), HasSubstr("{\"step\":5,\"eval_loss\":0.125}\n"));
  EXPECT_EQ(objects.str().find("resumed"), std::string::npos);
  EXPECT_THAT(bar.str(), AllOf(HasSubstr("\r[####--------------------] step 1/5  loss 0.5"),
                               HasSubstr("[########################] step 5/5"),
                               HasSubstr("left \033[K\nstep 5  evaluation loss 0.125\nresumed\n")));
}

}  // namespace
}  // namespace smp::tools::train
