// SPDX-License-Identifier: Apache-2.0
#include "smp/objects.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "core/check.h"
#include "runtime/runtime.h"
#include "smp/group.h"
#include "smp/init.h"
#include "smp/save_load.h"
#include "tests/error_of.h"
#include "tests/temp_folder.h"

namespace smp {

// Types as users have them: with fields named inside or outside, and of two versions.
struct Result {
  int64_t step = 0;
  std::map<std::string, double> losses;
  at::Tensor best;
  std::vector<bool> improved;

  template <class Archive>
  void serialize(Archive& archive) {
    archive(step, losses, best, improved);
  }
};

struct Point {
  float x = 0;
  float y = 0;
};

template <class Archive>
void serialize(Archive& archive, Point& point) {
  archive(point.x, point.y);
}

enum class Phase : uint8_t { kTrain, kTest };

struct Old {
  template <class Archive>
  void serialize(Archive& archive) {
    archive(a);
  }
  int a = 1;
};

struct New {
  static constexpr int kVersion = 2;
  template <class Archive>
  void serialize(Archive& archive) {
    archive(a);
  }
  int a = 1;
};

namespace {

using smp::testing::error_of;
using ::testing::AllOf;
using ::testing::HasSubstr;

// 2 stages x 2 replicas: pp groups are [0, 1] and [2, 3], dp groups [0, 2] and [1, 3].
void on_four_ranks(const std::function<void()>& program) {
  run_as_threads(4, Config().partitions(2).ddp(true), program);
}

template <class T>
T through_bytes(const T& object) {
  return detail::from_bytes<T>(detail::to_bytes(object), "rank 0");
}

template <class T>
void expect_survives(const T& object) {
  EXPECT_EQ(through_bytes(object), object) << detail::Codec<T>::name();
}

TEST(Archive, KeepsValues) {
  expect_survives(true);
  expect_survives(int8_t{-3});
  expect_survives(uint64_t{1} << 63);
  expect_survives(0.1);
  expect_survives(Phase::kTest);
  expect_survives(std::string("a\0b", 3));
  expect_survives(std::string());
  expect_survives(std::vector<double>{0.1, 0.2});
  expect_survives(std::vector<bool>{true, false, true});
  expect_survives(std::vector<std::vector<std::string>>{{"a"}, {}, {"b", "c"}});
  expect_survives(std::array<int, 3>{1, 2, 3});
  expect_survives(std::deque<int>{1, 2});
  expect_survives(std::list<std::string>{"x", "y"});
  expect_survives(std::set<int>{3, 1});
  expect_survives(std::unordered_set<std::string>{"p", "q"});
  expect_survives(std::map<int, std::optional<std::string>>{{1, "one"}, {2, std::nullopt}});
  expect_survives(std::unordered_map<std::string, std::pair<int, float>>{{"k", {1, 2.5F}}});
  expect_survives(std::tuple<int, std::string, std::vector<int>>{1, "t", {2, 3}});
}

TEST(Archive, KeepsTensors) {
  EXPECT_FALSE(through_bytes(at::Tensor()).defined());
  for (const at::Tensor& tensor :
       {at::rand({3, 4}), at::rand({3, 4}).t(), at::arange(5), at::rand({2}).to(at::kBFloat16),
        at::ones({}, at::kBool), at::empty({0, 3}), at::rand({2}).requires_grad_(),
        at::randn({3}, at::kComplexFloat).conj(), at::_neg_view(at::rand({3}))}) {
    const at::Tensor copy = through_bytes(tensor);
    EXPECT_EQ(copy.scalar_type(), tensor.scalar_type());
    EXPECT_EQ(copy.requires_grad(), tensor.requires_grad());
    EXPECT_TRUE(at::equal(copy, tensor));
  }
  EXPECT_THAT(error_of<UsageError>([] {
                detail::to_bytes(at::rand({2, 2}).to_sparse());
              }),
              HasSubstr("expected a dense tensor to send as an object, got one of layout Sparse"));
}

TEST(Archive, KeepsIValues) {
  c10::Dict<std::string, at::Tensor> dict;
  dict.insert("weight", at::arange(4));
  const c10::IValue copy = through_bytes(c10::IValue(dict));
  EXPECT_TRUE(at::equal(copy.toGenericDict().at("weight").toTensor(), at::arange(4)));
  EXPECT_EQ(through_bytes(c10::IValue("text")).toStringRef(), "text");
}

TEST(Archive, TypesHaveNames) {
  EXPECT_EQ((detail::Codec<std::map<std::string, std::vector<int64_t>>>::name()),
            "map<string, vector<int64>>");
  EXPECT_EQ((detail::Codec<std::tuple<float, std::optional<bool>, at::Tensor>>::name()),
            "tuple<float32, optional<bool>, Tensor>");
  EXPECT_EQ(detail::Codec<New>::name(), "smp::New version 2");
}

TEST(Archive, RefusesOtherTypesAndDamage) {
  EXPECT_THAT(
      error_of<CommError>([] { detail::from_bytes<float>(detail::to_bytes(1.0), "rank 3"); }),
      HasSubstr("expected an object of type float32 from rank 3, got one of type float64"));
  EXPECT_THAT(
      error_of<CommError>([] { detail::from_bytes<New>(detail::to_bytes(New()) + "x", "rank 3"); }),
      HasSubstr(
          "an object of type smp::New version 2 from rank 3 has 1 bytes too many. Its serialize"));
  std::string cut = detail::to_bytes(std::vector<double>(4));
  cut.resize(cut.size() - 1);
  EXPECT_THAT(error_of<CommError>([&] { detail::from_bytes<std::vector<double>>(cut, "rank 0"); }),
              HasSubstr("announces 4 elements, more than its bytes hold"));
  cut = detail::to_bytes(int64_t{1});
  cut.resize(cut.size() - 1);
  EXPECT_THAT(error_of<CommError>([&] { detail::from_bytes<int64_t>(cut, "rank 0"); }),
              HasSubstr("an object that was received ends early: expected 8 more bytes, got 7"));
}

TEST(Objects, GoToARankOfEachGroup) {
  on_four_ranks([] {
    const std::string mine = "from " + std::to_string(rank());
    if (pp_rank() == 0) {
      send(mine, 1, CommGroup::kPp);
    } else {
      EXPECT_EQ(recv_from<std::string>(0, CommGroup::kPp), rank() == 1 ? "from 0" : "from 2");
    }
    if (dp_rank() == 1) {
      send(mine, 0, CommGroup::kDp);
    } else {
      EXPECT_EQ(recv_from<std::string>(1, CommGroup::kDp), rank() == 0 ? "from 2" : "from 3");
    }
    if (rank() == 3) send(mine, 0, CommGroup::kWorld);
    if (rank() == 0) {
      EXPECT_EQ(recv_from<std::string>(3, CommGroup::kWorld), "from 3");
    }
  });
}

TEST(Objects, OfUserTypes) {
  on_four_ranks([] {
    Result result;
    if (rank() == 0) {
      result = {7, {{"train", 0.5}, {"test", 0.75}}, at::arange(3), {true, false}};
    }
    result = broadcast(result, CommGroup::kWorld, 0);
    EXPECT_EQ(result.step, 7);
    EXPECT_EQ(result.losses.at("test"), 0.75);
    EXPECT_TRUE(at::equal(result.best, at::arange(3)));
    EXPECT_EQ(result.improved, (std::vector<bool>{true, false}));
    const auto points = allgather(Point{1.0F * dp_rank(), 2.0F * pp_rank()}, CommGroup::kDp);
    ASSERT_EQ(points.size(), 2U);
    EXPECT_EQ(points[1].x, 1);
    EXPECT_EQ(points[1].y, 2.0F * pp_rank());
  });
}

// SMP 1.x documents this: the others call recv_from, by whatever number they know the sender.
TEST(Objects, ABroadcastIsReceivedByRecvFrom) {
  on_four_ranks([] {
    if (dp_rank() == 1) {
      broadcast(10 * pp_rank(), CommGroup::kDp);
    } else if (pp_rank() == 0) {
      EXPECT_EQ(recv_from<int>(1, CommGroup::kDp), 0);
    } else {
      EXPECT_EQ(recv_from<int>(3, CommGroup::kWorld), 10);
    }
    barrier(CommGroup::kDp);
    barrier(CommGroup::kMp);
    barrier(CommGroup::kPp);
    barrier(CommGroup::kTp);
    barrier(CommGroup::kRdp);
    barrier();
  });
}

// A group of one has no other rank to send to, and a rank may send to itself.
TEST(Objects, Alone) {
  run_as_threads(1, Config(), [] {
    EXPECT_EQ(broadcast(std::string("x"), CommGroup::kDp, 0), "x");
    EXPECT_EQ(allgather(5, CommGroup::kWorld), std::vector<int>{5});
    send(6, 0, CommGroup::kWorld);
    EXPECT_EQ(recv_from<int>(0, CommGroup::kWorld), 6);
  });
}

TEST(Objects, OfOtherTypesAndVersionsAreErrors) {
  on_four_ranks([] {
    if (rank() == 0) send(1.5, 1, CommGroup::kWorld);
    if (rank() == 1) {
      EXPECT_THAT(
          error_of<CommError>([] { recv_from<std::string>(0, CommGroup::kWorld); }),
          HasSubstr("expected an object of type string from rank 0, got one of type float64"));
    }
    if (rank() == 2) send(Old(), 3, CommGroup::kWorld);
    if (rank() == 3) {
      EXPECT_THAT(error_of<CommError>([] { recv_from<New>(2, CommGroup::kWorld); }),
                  HasSubstr("expected an object of type smp::New version 2 from rank 2, got one of "
                            "type smp::Old"));
    }
  });
}

TEST(Objects, RefuseRanksThatAreNone) {
  on_four_ranks([] {
    EXPECT_THAT(error_of<UsageError>([] { send(1, 2, CommGroup::kPp); }),
                HasSubstr("smp::send: expected a pp rank in 0 to 1, got 2."));
    EXPECT_THAT(error_of<UsageError>([] { recv_from<int>(-1, CommGroup::kDp); }),
                HasSubstr("smp::recv_from: expected a dp rank in 0 to 1, got -1."));
    runtime::Runtime::get().current_step.is_running = true;
    EXPECT_THAT(error_of<UsageError>([] { allgather(1, CommGroup::kWorld); }),
                HasSubstr("smp::allgather was called inside a step function; send objects"));
    runtime::Runtime::get().current_step.is_running = false;
  });
}

/// A folder for files, which goes with it.
class SavedObjects : public ::testing::Test {
 protected:
  std::string path() const { return folder_.file("results"); }
  std::string content() const {
    std::ifstream file(path());
    return {std::istreambuf_iterator<char>(file), {}};
  }

  const testing::TempFolder folder_;
};

TEST_F(SavedObjects, ComeBack) {
  Result result;
  result.step = 7;
  result.losses = {{"train", 0.5}};
  result.best = at::rand({2, 3});
  save(result, path(), /*partial=*/false);
  const auto loaded = load<Result>(path(), /*partial=*/false);
  EXPECT_EQ(loaded.step, 7);
  EXPECT_EQ(loaded.losses, result.losses);
  EXPECT_TRUE(at::equal(loaded.best, result.best));
  save(std::string("again"), path(), false);
  EXPECT_EQ(load<std::string>(path(), false), "again");
}

TEST_F(SavedObjects, AreByRankWherePartial) {
  on_four_ranks([&] {
    if (rdp_rank() == 0) save(std::map<std::string, int>{{"rank", rank()}}, path());
    barrier();
    EXPECT_EQ((load<std::map<std::string, int>>(path()).at("rank")), pp_rank());
  });
  EXPECT_TRUE(std::filesystem::exists(path() + "_0_0"));
  EXPECT_TRUE(std::filesystem::exists(path() + "_1_0"));
}

TEST_F(SavedObjects, OtherTypesAndDamageAreRefused) {
  save(1.0, path(), false);
  EXPECT_THAT(error_of<CheckpointError>([&] { load<float>(path(), false); }),
              AllOf(HasSubstr("holds another object than was asked for: expected an object of type "
                              "float32 from the file, got one of type float64"),
                    HasSubstr(path())));
  std::string text = content();
  text.back() = static_cast<char>(text.back() ^ 1);
  std::ofstream(path()) << text;
  const auto damaged = error_of<CheckpointError>([&] { load<double>(path(), false); });
  EXPECT_THAT(damaged,
              HasSubstr("is no file that smp::save(object, path) wrote, or it is damaged"));
  std::ofstream(path()) << "short";
  EXPECT_EQ(error_of<CheckpointError>([&] { load<double>(path(), false); }), damaged);
  EXPECT_NE(error_of<CheckpointError>([&] { load<double>(path() + "1", false); }), "");
}

}  // namespace
}  // namespace smp
