// SPDX-License-Identifier: Apache-2.0
// Logs of hashes: written logs are read, and other files are refused.

#include "tools/hash_diff.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "core/check.h"
#include "core/text.h"
#include "graph/hash_log.h"
#include "tests/error_of.h"

namespace smp::tools {
namespace {

namespace fs = std::filesystem;
using graph::Graph;
using graph::HashLogReader;
using graph::HashLogWriter;
using graph::HashRows;
using smp::testing::error_of;
using smp::testing::expect_has;

constexpr uint64_t kGraph = 0x77ab;

class HashLog : public ::testing::Test {
 protected:
  HashLog() {
    fs::remove_all(root());
    rows_.texts = {"aten::mul: f32[2]", "aten::max, in module \"a\": f32[], i64[]",
                   "gradient of \"w\": f32[2]"};
  }

  static fs::path root() { return fs::path(::testing::TempDir()) / "hash_log"; }
  static std::string folder(const std::string& name) { return (root() / name).string(); }

  /// The log of two ranks: the first runs row 0 of two microbatches, the second the others.
  void write(const std::string& name, uint64_t second_of_max, int ranks = 2) const {
    for (int rank = 0; rank < 2; ++rank) {
      HashLogWriter log(folder(name), rank, ranks);
      log.add_graph(kGraph, rows_);
      for (uint64_t call = 0; call < 2; ++call) {
        log.begin_step({"train", call, kGraph});
        for (uint64_t microbatch = 0; microbatch < 2; ++microbatch) {
          log.begin_microbatch(microbatch);
          if (rank == 0) {
            log.add(0, 0, 10 + microbatch);
          } else {
            log.add(1, 1, call == 1 && microbatch == 1 ? second_of_max : 7);
            log.add(2, 0, 8);
          }
        }
        log.end_step();
      }
    }
  }

  static void damage(const std::string& name, const std::string& text) {
    fs::create_directories(folder(name));
    std::ofstream(folder(name) + "/rank_0.hashes") << text;
  }

  static std::string refusal(const std::string& name) {
    return error_of<Error>([&] { HashLogReader reader(folder(name)); });
  }

  HashRows rows_{Graph()};
};

TEST_F(HashLog, IsReadAsItWasWritten) {
  write("a", 7);
  HashLogReader reader(folder("a"));
  ASSERT_EQ(reader.steps().size(), 2u);
  EXPECT_EQ(reader.steps()[1].call, 1u);
  EXPECT_EQ(reader.steps()[1].function, "train");
  EXPECT_EQ(reader.rows(kGraph), rows_.texts);
  const HashLogReader::Step expected = {{{0, 0}, {{0, {10}}}},   {{0, 1}, {{1, {0, 7}}}},
                                        {{0, 2}, {{1, {8}}}},    {{1, 0}, {{0, {11}}}},
                                        {{1, 1}, {{1, {0, 7}}}}, {{1, 2}, {{1, {8}}}}};
  EXPECT_EQ(reader.read(reader.steps()[1]), expected);
}

TEST_F(HashLog, LeavesOutAStepThatWasNotWrittenToItsEnd) {
  write("a", 7);
  const std::string path = folder("a") + "/rank_1.hashes";
  fs::resize_file(path, fs::file_size(path) - 6);
  HashLogReader reader(folder("a"));
  ASSERT_EQ(reader.steps().size(), 2u);  // rank 0 has both
  EXPECT_EQ(reader.read(reader.steps()[1]).size(), 2u);
  EXPECT_EQ(reader.read(reader.steps()[0]).size(), 6u);
}

TEST_F(HashLog, IsComparedStepByStep) {
  write("a", 7);
  write("b", 7);
  write("c", 9);
  HashLogReader a(folder("a")), b(folder("b")), c(folder("c"));
  const auto equal = compare_hashes(a, b);
  EXPECT_TRUE(equal.are_equal);
  EXPECT_EQ(equal.text, "no difference in 2 steps (12 operators and gradients of microbatches)\n");
  const auto other = compare_hashes(a, c);
  EXPECT_FALSE(other.are_equal);
  EXPECT_EQ(other.text,
            "first difference: call 2 of step function \"train\", microbatch 1, row 1 of the "
            "program: aten::max, in module \"a\": f32[], i64[]\n  " +
                folder("a") + ": rank 1: 0 7\n  " + folder("c") + ": rank 1: 0 9\n");
}

TEST_F(HashLog, OfOtherStepFunctionsCannotBeCompared) {
  write("a", 7);
  HashLogWriter log(folder("d"), 0, 1);
  log.add_graph(kGraph, rows_);
  log.begin_step({"evaluate", 0, kGraph});
  log.end_step();
  HashLogReader a(folder("a")), d(folder("d"));
  expect_has(error_of<Error>([&] { compare_hashes(a, d); }),
             {"have no call of a step function together: 2 and 1 steps"});
}

TEST_F(HashLog, RefusesWhatIsNoLog) {
  expect_has(refusal("none"), {"rank_0.hashes\" cannot be read"});
  damage("a", "hello\n");
  expect_has(refusal("a"), {"line 1: expected \"smp hashes 1: rank 0 of ...\", got \"hello\"",
                            "The file is no log of hashes, or is damaged"});
  damage("b", "smp hashes 1: rank 0 of x\n");
  expect_has(refusal("b"), {"expected a number in place of \"x\""});
  const std::string title = "smp hashes 1: rank 0 of 1\n";
  damage("c", title + "graph 77: 1 rows\n");
  expect_has(refusal("c"), {"line 2: expected \"graph FINGERPRINT: N rows\""});
  damage("d", title + "graph 00000000000077ab: 1 rows\n");
  expect_has(refusal("d"), {"expected a row of the graph"});
  damage("e", title + "step 0 of graph 00000000000077ab: train\n");
  expect_has(refusal("e"), {"expected a step of a graph that came before"});
  damage("f", title + "step 0\n");
  expect_has(refusal("f"), {"expected \"step CALL of graph FINGERPRINT: NAME\""});
  damage("g", title + "what\n");
  expect_has(refusal("g"), {"expected a graph or a step, got \"what\""});
}

TEST_F(HashLog, TakesNoMoreThanTheFileHas) {
  const std::string title = "smp hashes 1: rank 0 of 1\n";
  damage("a", title + "graph 00000000000077ab: 4294967295 rows\none\n");
  expect_has(refusal("a"), {"line 4: expected a row of the graph"});
  damage("b", title + "graph 00000000000077ab: 1 rows\n" + std::string(1 << 20, 'x') + "\n");
  expect_has(refusal("b"), {"line 3: expected a line of less than 262144 bytes, got \"xxx"});
  EXPECT_LT(refusal("b").size(), 1000u);
  fs::create_directories(folder("c"));
  ASSERT_EQ(mkfifo((folder("c") + "/rank_0.hashes").c_str(), 0600), 0);
  expect_has(refusal("c"), {"rank_0.hashes\" cannot be read"});
}

TEST_F(HashLog, NamesAreLines) {
  for (const std::string name : {"a", "b"}) {
    HashLogWriter log(folder(name), 0, 1);
    graph::HashRows rows = rows_;
    rows.texts[0] = core::printable("aten::mul, in module \"a\nend\x1b[2J\": f32[2]");
    log.add_graph(kGraph, rows);
    log.begin_step({"train\nend", 0, kGraph});
    log.begin_microbatch(0);
    log.add(0, 0, name == "a" ? 1 : 2);
    log.end_step();
  }
  HashLogReader a(folder("a")), b(folder("b"));
  expect_has(compare_hashes(a, b).text,
             {"call 1 of step function \"train\\nend\", microbatch 0, row 0 of the program: "
              "aten::mul, in module \"a\\nend\\x1b[2J\": f32[2]"});
}

TEST_F(HashLog, RefusesARowThatTheGraphDoesNotHave) {
  const std::string begin =
      "smp hashes 1: rank 0 of 1\ngraph 00000000000077ab: 1 rows\naten::mul: f32[2]\n"
      "step 0 of graph 00000000000077ab: train\n";
  const auto refusal_of_step = [&](const std::string& name, const std::string& rows) {
    damage(name, begin + rows + "end\n");
    HashLogReader reader(folder(name));
    return error_of<Error>([&] { reader.read(reader.steps()[0]); });
  };
  expect_has(refusal_of_step("a", "microbatch 0\n1 00\n"),
             {"line 6: expected a row from 0 to 0, got \"1 00\""});
  expect_has(refusal_of_step("b", "0 00\n"), {"line 5: expected a microbatch or a row"});
}

TEST_F(HashLog, RefusesFilesOfSeveralRuns) {
  write("a", 7);
  HashLogWriter(folder("a"), 1, 3);
  expect_has(refusal("a"), {"has files of several runs: rank_0 is one of 2 ranks, rank_1 one of 3",
                            "an empty folder for each run"});
}

}  // namespace
}  // namespace smp::tools
