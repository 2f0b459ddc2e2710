// SPDX-License-Identifier: Apache-2.0
// Ranks that make different calls of the library: whichever two meet, both ranks say which.

#include <gmock/gmock.h>

#include <array>
#include <optional>

#include "smp/ddp.h"
#include "tests/smp/oracle.h"
#include "tests/smp/recovery_in_memory.h"
#include "tests/smp/saved_run.h"

namespace smp::testing {
namespace {

using ::testing::HasSubstr;

/// A rank of a job of two that has trained once.
struct Rank {
  DistributedModel<Mlp>& model;
  DistributedOptimizer<torch::optim::AdamW>& optimizer;
  Ema& average;
  const std::function<void()>& train;
  std::string folder;
};

/// A call as errors name it. Each call of one table first meets the other rank in the same group of
/// ranks; others wait for each other in a circle, which a time-out shows.
struct Meeting {
  std::string name;
  std::function<void(const Rank&)> call;
  std::string collective = "";  // its name in errors, if the call is a collective of the user's own
};

std::vector<Meeting> own_collectives(CommGroup kind) {
  return {
      {"smp::barrier", [kind](const Rank&) { barrier(Group(kind)); }, "barrier"},
      {"smp::all_reduce", [kind](const Rank&) { return Group(kind).all_reduce(torch::ones({1})); },
       "all_reduce (sum) of 1 x Float"},
      {"smp::Group::all_gather",
       [kind](const Rank&) { return Group(kind).all_gather(torch::ones({1})); },
       "all_gather of 1 x Float"},
  };
}

std::vector<Meeting> with_own_collectives(std::vector<Meeting> meetings, CommGroup kind) {
  for (auto& own : own_collectives(kind)) meetings.push_back(std::move(own));
  return meetings;
}

/// In the group of a model's parts.
std::vector<Meeting> meetings_of_model() {
  const auto object = [](const Rank&) { allgather(1, CommGroup::kMp); };
  return with_own_collectives(
      {
          {"call 2 of step function \"train\"", [](const Rank& rank) { rank.train(); }},
          {"smp::save",
           [](const Rank& rank) { save(rank.folder + "a", rank.model, rank.optimizer); }},
          {"smp::save_checkpoint",
           [](const Rank& rank) {
             save_checkpoint(rank.folder, "b", rank.model, rank.optimizer,
                             SaveCheckpointOptions().asynchronous(true));
           }},
          {"smp::save_pretrained",
           [](const Rank& rank) { save_pretrained(rank.folder + "c", rank.model); }},
          {"smp::keep_copy", [](const Rank& rank) { keep_copy(rank.model, rank.optimizer); }},
          {"smp::grad_norm", [](const Rank& rank) { grad_norm(rank.model); }},
          {"smp::clip_grad_norm_", [](const Rank& rank) { clip_grad_norm_(rank.model, 1); }},
          {"smp::allgather", object},
      },
      CommGroup::kMp);
}

/// In that of all ranks.
std::vector<Meeting> meetings_of_world() {
  const auto object = [](const Rank&) { allgather(1, CommGroup::kWorld); };
  const auto unscale = [](const Rank& rank) {
    amp::GradScaler scaler;
    scaler.scale(torch::ones({}));
    scaler.unscale_(rank.optimizer);
  };
  return with_own_collectives(
      {
          {"smp::load",
           [](const Rank& rank) { load(rank.folder + "none", rank.model, rank.optimizer); }},
          {"smp::resume_from_checkpoint",
           [](const Rank& rank) {
             resume_from_checkpoint(rank.folder, std::nullopt, rank.model, rank.optimizer);
           }},
          {"smp::load_pretrained",
           [](const Rank& rank) { load_pretrained(rank.folder + "none", rank.model); }},
          {"smp::memory_report", [](const Rank&) { memory_report(); }},
          {"smp::stop_requested", [](const Rank&) { stop_requested(); }},
          {"GradScaler::unscale_", unscale},
          {"smp::allgather", object},
      },
      CommGroup::kWorld);
}

/// In that of a pipeline.
std::vector<Meeting> meetings_of_pipeline() {
  const auto mean = [](const Rank&) {
    return StepOutput({torch::ones({})}).reduce_mean(Group(CommGroup::kPp));
  };
  return with_own_collectives(
      {
          {"model->state_dict", [](const Rank& rank) { rank.model->state_dict(); }},
          {"model->cpu", [](const Rank& rank) { rank.model->cpu(); }},
          {"optimizer.state_dict", [](const Rank& rank) { rank.optimizer.state_dict(); }},
          {"StepOutput::reduce_mean", mean},
      },
      CommGroup::kPp);
}

/// In that of replicas, which divide the optimizer's state.
std::vector<Meeting> meetings_of_replicas() {
  return with_own_collectives(
      {
          {"call 2 of step function \"train\"", [](const Rank& rank) { rank.train(); }},
          {"optimizer.step", [](const Rank& rank) { rank.optimizer.step(); }},
          {"ema.averaged", [](const Rank& rank) { const auto averaged = rank.average.averaged(); }},
      },
      CommGroup::kRdp);
}

/// In that of replicas that may run out of batches. `at_end` says whether the one that is in the
/// join has none.
std::vector<Meeting> meetings_of_joins(bool at_end) {
  const auto join = [at_end](const Rank& rank) {
    const auto joined = rank.model->join();
    if (!at_end) rank.train();
  };
  return with_own_collectives(
      {
          {"DistributedModel::join", join},
          {"call 2 of step function \"train\"", [](const Rank& rank) { rank.train(); }},
      },
      CommGroup::kRdp);
}

/// In that of the ranks that have batches of their own.
std::vector<Meeting> meetings_of_batches() {
  return with_own_collectives(
      {{"smp::count_tokens", [](const Rank&) { return count_tokens(torch::ones({1})); }}},
      CommGroup::kDp);
}

Config pipeline_job() { return Config().partitions(2).recovery("restart").preempt_seconds(100); }
Config replica_job() { return Config().ddp(true).shard_optimizer_state(true); }

class CallMismatch : public SavedRunTest {
 protected:
  /// The errors of two ranks that make these calls.
  std::array<std::string, 2> errors_of(const Config& config, const Meeting& zero,
                                       const Meeting& one) const {
    std::array<std::string, 2> texts;
    const auto x = torch::ones({4, MlpImpl::kWidth});
    try {
      run_as_threads(2, Config(config).microbatches(2).timeout_seconds(60), [&] {
        Mlp net(2);
        DistributedModel<Mlp> model(net);
        DistributedOptimizer<torch::optim::AdamW> optimizer(model->parameters(), 1e-2);
        Ema average(model);
        auto step_function = step(
            [&](torch::Tensor input) {
              auto loss = model(input).sum();
              model->backward(loss);
              return loss;
            },
            StepOptions().name("train"));
        const std::function<void()> train = [&] { step_function(x); };
        train();
        average.update();
        try {
          (rank() == 0 ? zero : one).call({model, optimizer, average, train, path()});
        } catch (const CommError& error) {
          texts[static_cast<size_t>(rank())] = error.what();
          throw;
        }
      });
    } catch (const Error&) {  // that of one of them
    }
    return texts;
  }

  void expect_all_pairs_named(const std::vector<Meeting>& meetings,
                              const Config& config = pipeline_job()) const {
    const RecoveryInMemory memory;
    for (size_t a = 0; a < meetings.size(); ++a) {
      for (size_t b = a + 1; b < meetings.size(); ++b) {
        const Meeting &zero = meetings[a], &one = meetings[b];
        const bool both_own = !zero.collective.empty() && !one.collective.empty();
        const std::string expected =
            both_own ? c10::str("rank 0 called ", zero.collective, ", rank 1 called ",
                                one.collective, ".")
                     : c10::str("rank 0 is in ", zero.name, ", rank 1 is in ", one.name, ".");
        for (const std::string& text : errors_of(config, zero, one)) {
          EXPECT_THAT(text, HasSubstr(expected));
        }
      }
    }
  }
};

TEST_F(CallMismatch, OfAllPairsThatMeetInAModel) { expect_all_pairs_named(meetings_of_model()); }

TEST_F(CallMismatch, OfAllPairsThatMeetInTheWorld) { expect_all_pairs_named(meetings_of_world()); }

TEST_F(CallMismatch, OfAllPairsThatMeetInAPipeline) {
  expect_all_pairs_named(meetings_of_pipeline());
}

TEST_F(CallMismatch, OfAllPairsThatMeetAmongReplicas) {
  expect_all_pairs_named(meetings_of_replicas(), replica_job());
  expect_all_pairs_named(meetings_of_batches(), replica_job());
}

TEST_F(CallMismatch, OfJoins) {
  for (const bool at_end : {false, true}) {
    expect_all_pairs_named(meetings_of_joins(at_end), Config().ddp(true));
  }
}

/// The group of a `DistributedDataParallel` is its own, so that only its calls meet there.
TEST(CallMismatchOfDataParallel, AJoinThatOneRankLacks) {
  using Model = DistributedDataParallel<Mlp>;
  for (const int joining : {0, 1}) {
    for (const int batches : {0, 1}) {
      std::array<std::string, 2> texts;
      const auto text = error_of_run<CommError>(2, Config().ddp(true).timeout_seconds(60), [&] {
        Model model{Mlp(2)};
        const auto train = [&] { model(torch::ones({4, MlpImpl::kWidth})).sum().backward(); };
        try {
          if (rank() == joining) {
            const auto joined = model.join();
            for (int i = 0; i < batches; ++i) train();
          } else {
            train();
          }
        } catch (const CommError& error) {
          texts[static_cast<size_t>(rank())] = error.what();
          throw;
        }
      });
      EXPECT_NE(text, "");
      for (const std::string& each : texts) {
        EXPECT_THAT(each,
                    HasSubstr(c10::str("rank ", joining, " is in DistributedDataParallel::join")));
      }
    }
  }
}

}  // namespace
}  // namespace smp::testing
