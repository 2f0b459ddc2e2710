// SPDX-License-Identifier: Apache-2.0
#include "dp/gradient_buckets.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>
#include <future>

#include "comm/threads/run_ranks.h"
#include "core/check.h"
#include "tests/dp/summed_gradients.h"
#include "tests/error_of.h"

namespace smp::dp {
namespace {

struct Case {
  int replicas;
  int shards;
  int64_t bucket_bytes;
};

class GradientBucketsTest : public ::testing::TestWithParam<Case> {};

TEST_P(GradientBucketsTest, SumsShardsInOrderForAnyNumberOfReplicas) {
  const auto [replicas, shards, bucket_bytes] = GetParam();
  // The default generator is shared by the rank threads, so draw before they start.
  std::vector<std::vector<at::Tensor>> gradients(4);
  for (size_t p = 0; p < 4; ++p) {
    for (int m = 0; m < 8; ++m) gradients[p].push_back(gradient(p, m));
  }
  std::vector<at::Tensor> sums;
  for (size_t p = 0; p < 4; ++p) sums.push_back(expected(p, shards, 8));
  const int count = replicas;
  const int shard_count = shards;
  const int64_t bytes = bucket_bytes;
  comm::run_ranks(count, [&](const comm::CommunicatorPtr& group) {
    const auto parameters = make_parameters();
    BucketOptions options;
    options.bucket_bytes = bytes;
    options.microbatches = 8 / count;
    options.gradient_shards = shard_count;
    options.divisor = 8;
    GradientBuckets buckets(parameters, kNames, group, options);
    for (int step = 1; step <= 2; ++step) {
      for (int m = 0; m < 8 / count; ++m) {
        for (size_t p = 0; p < 4; ++p) {
          buckets.add(p, m, gradients[p][group->rank() * (8 / count) + m]);
        }
      }
      buckets.reduce();
      buckets.finish();
      for (size_t p = 0; p < 4; ++p) {
        // The second step adds to `.grad`, as backward does.
        const auto want = step == 1 ? sums[p] : sums[p] + sums[p];
        EXPECT_TRUE(at::equal(parameters[p].grad(), want)) << kNames[p] << " step " << step;
      }
      EXPECT_FALSE(parameters[4].grad().defined());
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Cases, GradientBucketsTest,
                         ::testing::Values(Case{1, 1, 1 << 20}, Case{1, 4, 1 << 20},
                                           Case{2, 2, 1 << 20}, Case{2, 4, 1 << 20},
                                           Case{4, 4, 1 << 20}, Case{2, 2, 64}, Case{4, 8, 64},
                                           Case{1, 8, 1}));

TEST(GradientBuckets, OneLargeOrSeveralSmallParametersFillABucket) {
  comm::run_ranks(1, [](const comm::CommunicatorPtr& group) {
    BucketOptions options;
    // Padded to 64 bytes: a 64, b 64, c 128, unused 64; d is of another type.
    options.bucket_bytes = 192;
    GradientBuckets buckets(make_parameters(), kNames, group, options);
    // From the last parameter, whose gradient is ready first; in the order in which they are full.
    const std::vector<std::vector<size_t>> expected_buckets{{3}, {4, 2}, {1, 0}};
    EXPECT_EQ(buckets.buckets(), expected_buckets);
  });
}

TEST(GradientBuckets, RefusesShardsThatDoNotFit) {
  comm::run_ranks(2, [](const comm::CommunicatorPtr& group) {
    BucketOptions options;
    options.gradient_shards = 3;
    const auto text = smp::testing::error_of<Error>(
        [&] { GradientBuckets(make_parameters(), kNames, group, options); });
    EXPECT_NE(text.find("expected a multiple of the number of replicas (2), got 3"),
              std::string::npos)
        << text;
    options.gradient_shards = 4;
    options.microbatches = 3;
    const auto other = smp::testing::error_of<Error>(
        [&] { GradientBuckets(make_parameters(), kNames, group, options); });
    EXPECT_NE(other.find("\"microbatches\": expected a multiple of the gradient shards"),
              std::string::npos)
        << other;
  });
}

TEST(GradientBuckets, TakeOtherNumbersOfMicrobatches) {
  comm::run_ranks(2, [](const comm::CommunicatorPtr& group) {
    const auto parameters = make_parameters();
    BucketOptions options;
    options.microbatches = options.gradient_shards = 4;
    options.divisor = 8;
    GradientBuckets buckets(parameters, kNames, group, options);
    const auto expect_mean = [&](const std::vector<double>& values, double divisor, double mean) {
      parameters[0].mutable_grad().reset();
      const auto count = static_cast<int>(values.size());
      buckets.set_microbatches(count, divisor);
      for (int m = 0; m < count; ++m) buckets.add(0, m, at::full({5, 3}, values[m]));
      buckets.reduce();
      buckets.finish();
      EXPECT_TRUE(at::equal(parameters[0].grad(), at::full({5, 3}, mean))) << count;
    };
    expect_mean({1, 2, 3, 4}, 8, 20. / 8);
    // Two shards each, whose sums go ((1e8 + 1) - 1e8) + 1 in float32, which has no 1e8 + 1.
    expect_mean({group->rank() == 0 ? 1e8 : -1e8, 1}, 4, 1. / 4);
    expect_mean({1, 2, 3, 4}, 8, 20. / 8);
    const auto text = smp::testing::error_of<Error>([&] { buckets.set_microbatches(3, 6); });
    EXPECT_NE(text.find("expected a multiple of the gradient shards of a replica (2), got 3"),
              std::string::npos)
        << text;
  });
}

TEST(GradientBuckets, RefusesSparseGradients) {
  comm::run_ranks(1, [](const comm::CommunicatorPtr& group) {
    GradientBuckets buckets(make_parameters(), kNames, group, {});
    const auto text = smp::testing::error_of<Error>([&] {
      buckets.add(0, 0, at::zeros({5, 3}).to_sparse());
    });
    EXPECT_NE(text.find("parameter \"a\" has a sparse gradient"), std::string::npos) << text;
  });
}

/// One step in which parameters become complete one by one; `complete(buckets)` says which.
std::vector<at::Tensor> step_of(const BucketOptions& options,
                                const std::function<void(GradientBuckets&)>& complete) {
  std::vector<at::Tensor> result(4);
  comm::run_ranks(2, [&](const comm::CommunicatorPtr& group) {
    const auto parameters = make_parameters();
    GradientBuckets buckets(parameters, kNames, group, options);
    for (size_t p = 0; p < 4; ++p) buckets.await(p);
    for (size_t p = 0; p < 4; ++p) {
      buckets.add(
          p, 0,
          at::full(parameters[p].sizes(), group->rank() + 0.1, parameters[p].options()).detach());
    }
    complete(buckets);
    buckets.reduce();
    buckets.finish();
    if (group->rank() > 0) return;
    for (size_t p = 0; p < 4; ++p) result[p] = parameters[p].grad();
  });
  return result;
}

TEST(GradientBuckets, ReducesWhatIsComplete) {
  BucketOptions options;
  options.gradient_shards = 2;
  options.bucket_bytes = 192;
  const auto expected = step_of(options, [](GradientBuckets&) {});
  for (const bool overlapping : {true, false}) {
    options.overlapping = overlapping;
    const auto got = step_of(options, [&](GradientBuckets& buckets) {
      buckets.complete(0);
      buckets.complete(1);
      EXPECT_FALSE(buckets.start_complete());  // the last bucket is, but not those before
      buckets.complete(3);
      EXPECT_FALSE(buckets.start_complete());
      buckets.complete(2);
      EXPECT_EQ(buckets.start_complete(), overlapping);
    });
    for (size_t p = 0; p < 4; ++p) EXPECT_TRUE(at::equal(got[p], expected[p])) << kNames[p];
  }
}

/// A reduction that does not go on before the rank says so does not hold it up.
TEST(GradientBuckets, NobodyWaitsWhereAReductionStarts) {
  for (const int shards : {2, 4}) {
    for (const bool divided : {false, true}) {
      SCOPED_TRACE(c10::str(shards, " shards, divided: ", divided));
      comm::run_ranks(2, [&](const comm::CommunicatorPtr& group) {
        const auto parameters = make_parameters();
        BucketOptions options;
        options.microbatches = 2;
        options.gradient_shards = shards;
        options.bucket_bytes = 192;
        const auto pieces =
            std::make_shared<ParameterPieces>(parameters, kNames, group, options.bucket_bytes);
        const auto buckets =
            divided ? std::make_unique<GradientBuckets>(pieces, options)
                    : std::make_unique<GradientBuckets>(parameters, kNames, group, options);
        std::promise<void> gone_on;
        const auto has_gone_on = gone_on.get_future().share();
        std::vector<std::string> events;
        buckets->observe([&](const ReductionEvent& event) {
          const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
          EXPECT_EQ(has_gone_on.wait_until(end), std::future_status::ready);
          EXPECT_GT(event.bytes, 0);
          events.push_back(c10::str(event.bucket, event.has_ended ? " ended" : " begins"));
        });
        for (size_t p = 0; p < 4; ++p) buckets->await(p);
        for (int m = 0; m < 2; ++m) {
          for (size_t p = 0; p < 4; ++p) {
            buckets->add(p, m, at::ones_like(parameters[p]).detach());
          }
        }
        for (size_t p = 0; p < 4; ++p) buckets->complete(p);
        EXPECT_TRUE(buckets->start_complete());
        EXPECT_TRUE(events.empty());
        gone_on.set_value();
        buckets->reduce();
        buckets->finish();
        std::vector<std::string> expected;
        for (size_t b = 0; b < buckets->buckets().size(); ++b) {
          expected.insert(expected.end(), {c10::str(b, " begins"), c10::str(b, " ended")});
        }
        EXPECT_EQ(events, expected);
      });
    }
  }
}

TEST(GradientBuckets, NoGradientComesTooLate) {
  comm::run_ranks(1, [&](const comm::CommunicatorPtr& group) {
    GradientBuckets buckets(make_parameters(), kNames, group, {});
    buckets.start_complete();
    const auto text =
        smp::testing::error_of<std::exception>([&] { buckets.add(1, 0, at::ones({7})); });
    EXPECT_NE(text.find("parameter \"b\" got a gradient of microbatch 0 when its bucket was being"),
              std::string::npos)
        << text;
  });
}

TEST(GradientBuckets, AddUpOverSteps) {
  comm::run_ranks(2, [](const comm::CommunicatorPtr& group) {
    const auto parameters = make_parameters();
    BucketOptions options;
    options.gradient_shards = 2;
    options.backward_passes = 3;
    GradientBuckets buckets(parameters, kNames, group, options);
    for (int step = 0; step < 6; ++step) {
      EXPECT_EQ(buckets.is_adding_up(), step % 3 > 0);
      buckets.add(0, 0, at::full({5, 3}, step + 10. * group->rank()));
      buckets.reduce();
      buckets.finish();
      if (step < 2) {
        EXPECT_FALSE(parameters[0].grad().defined());
      }
    }
    // (0 + ... + 5) of two ranks, and 10 in each step of one.
    EXPECT_TRUE(at::equal(parameters[0].grad(), at::full({5, 3}, 90.)));
  });
}

/// `.grad` lies in the bucket, until it is needed there while the program still has it.
TEST(GradientBuckets, GradientsAreViewsOfBuckets) {
  comm::run_ranks(1, [](const comm::CommunicatorPtr& group) {
    auto parameters = make_parameters();
    BucketOptions options;
    options.gradient_as_bucket_view = true;
    GradientBuckets buckets(parameters, kNames, group, options);
    const auto step = [&](double value, bool use_second) {
      buckets.add(0, 0, at::full({5, 3}, value));
      if (use_second) buckets.add(1, 0, at::full({7}, value));
      buckets.reduce();
      buckets.finish();
    };
    step(1, true);
    EXPECT_TRUE(parameters[0].grad().is_alias_of(parameters[1].grad()));
    const at::Tensor kept = parameters[0].grad();
    parameters[0].mutable_grad().reset();
    step(2, false);  // no rank uses the second
    EXPECT_TRUE(at::equal(kept, at::full({5, 3}, 1.)));
    EXPECT_TRUE(at::equal(parameters[0].grad(), at::full({5, 3}, 2.)));
    EXPECT_TRUE(at::equal(parameters[1].grad(), at::full({7}, 1.)));
    step(3, true);  // adds to the old one
    EXPECT_TRUE(at::equal(parameters[0].grad(), at::full({5, 3}, 5.)));
    EXPECT_TRUE(at::equal(parameters[1].grad(), at::full({7}, 4.)));
  });
}

TEST(GradientBuckets, ARankThatFailsDuringAReductionIsNamed) {
  std::string text;
  smp::testing::error_of<std::exception>([&] {
    comm::run_ranks(2, [&](const comm::CommunicatorPtr& group) {
      BucketOptions options;
      options.gradient_shards = 2;
      GradientBuckets buckets(make_parameters(), kNames, group, options);
      if (group->rank() == 1) throw Error("out of luck");
      text = smp::testing::error_of<std::exception>([&] {
        buckets.add(0, 0, at::ones({5, 3}));
        buckets.reduce();
        buckets.finish();
      });
    });
  });
  EXPECT_NE(text.find("out of luck"), std::string::npos) << text;
  EXPECT_NE(text.find("[while replicas reduced gradient bucket 1 of 2: d]"), std::string::npos)
      << text;
}

}  // namespace
}  // namespace smp::dp
