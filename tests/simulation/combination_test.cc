// SPDX-License-Identifier: Apache-2.0
// Features that are right alone may be wrong together. A seed draws the settings that decide the
// numbers of a training (precision, loss scale, optimizer, clipping, sums over several steps,
// several backwards, tied weights, layers divided among ranks) and two layouts for it (stages,
// replicas, schedule, sharding, checkpointing and offloading of activations, hooks, buckets,
// guard). The training begins in the first layout, and goes on from a checkpoint in the second. Its
// losses and the tensors of its last checkpoint, the optimizer's among them, have the bits of a
// training on one rank, or on as many as divide a layer.
//
// Seeds from SMP_COMBINATION_SEED on (default 1), SMP_COMBINATION_COUNT of them (default 8).

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "checkpoint/reader.h"
#include "pipeline/generators.h"
#include "smp/optim/lamb.h"
#include "smp/smp.h"
#include "tests/chaos/chaos.h"
#include "tests/smp/models.h"
#include "tests/smp/oracle.h"
#include "tests/temp_folder.h"

namespace smp::testing {
namespace {

using Random = std::mt19937_64;

constexpr int kSteps = 4, kChange = 2;  // steps of the optimizer; the layout changes after so many
constexpr int kMicrobatches = 8;        // microbatches of all replicas

int below(Random& random, int limit) {
  return static_cast<int>(random() % static_cast<uint64_t>(limit));
}
bool coin(Random& random) { return below(random, 2) == 0; }

/// The settings that decide the numbers.
struct Numbers {
  std::string precision, optimizer;
  int shards = 1;
  int passes = 1;  ///< steps for one of the optimizer
  int parts = 1;   ///< parts of a layer
  double first_scale = 1;
  bool tied, two_losses, clips, scales, fuses, groups, freezes, casts, evaluates, schedules;

  explicit Numbers(Random& random) {
    precision = std::array{"float", "float", "bf16", "fp16"}[below(random, 4)];
    optimizer = std::array{"sgd", "adamw", "adagrad", "lamb"}[below(random, 4)];
    shards = std::array{4, 8}[below(random, 2)];
    passes = below(random, 4) == 0 ? 2 : 1;
    parts = below(random, 4) == 0 ? 2 : 1;
    tied = coin(random);
    two_losses = below(random, 4) == 0;
    clips = below(random, 3) == 0;
    scales = precision == "fp16" || below(random, 6) == 0;
    fuses = below(random, 6) == 0;
    groups = below(random, 3) == 0;
    freezes = below(random, 4) == 0;
    casts = precision == "float" && below(random, 4) == 0;
    evaluates = below(random, 3) == 0;
    schedules = below(random, 3) == 0;
    first_scale = std::array{4096., 1048576., 4294967296.}[below(random, 3)];  // some overflow
  }

  std::string to_text() const {
    return c10::str(precision, ", ", optimizer, ", ", shards, " shards, ", passes, " passes, ",
                    parts, " parts", tied ? ", tied" : "", two_losses ? ", two losses" : "",
                    clips ? ", clipped" : "", scales ? ", scaled" : "", fuses ? ", fused" : "",
                    groups ? ", two groups" : "", freezes ? ", frozen" : "",
                    casts ? ", autocast" : "", evaluates ? ", evaluated" : "",
                    schedules ? ", scheduled" : "");
  }
};

/// The settings that must not decide them.
struct Layout {
  int stages = 1, replicas = 1;
  std::string pipeline = "simple";
  std::string guard = "every_step";
  bool shards_state = false, shards_parameters = false;
  bool checkpoints = false, offloads = false;
  bool hook = false, views = false, overlaps = true;
  bool first_inputs = false, replays = false;
  std::string placement = "cluster";
  double bucket_mb = 0;

  Layout() = default;
  Layout(Random& random, const Numbers& numbers) {
    using Size = std::pair<int, int>;
    const auto [s, r] = numbers.parts > 1
                            ? std::array{Size{1, 2}, Size{2, 1}, Size{1, 1}}[below(random, 3)]
                            : std::array{Size{2, 1}, Size{3, 1}, Size{4, 1},
                                         Size{1, 2}, Size{2, 2}, Size{1, 4}}[below(random, 6)];
    stages = s;
    replicas = r;
    std::vector<std::string> pipelines;
    for (const auto& kind : pipeline::schedule_kinds()) {
      if (kind.trains) pipelines.push_back(kind.name);
    }
    pipeline = pipelines[static_cast<size_t>(below(random, static_cast<int>(pipelines.size())))];
    guard = std::array{"every_step", "first_step", "every_microbatch"}[below(random, 3)];
    checkpoints = below(random, 3) == 0;
    offloads = checkpoints && coin(random);
    bucket_mb = coin(random) ? 0.002 : 0;
    first_inputs = below(random, 4) == 0;
    replays = !numbers.fuses && below(random, 4) == 0;
    placement = std::array{"cluster", "spread", "DPT", "TPD"}[below(random, 4)];
    if (replicas == 1) return;
    const int sharding = below(random, 4);
    shards_state = sharding == 0;
    shards_parameters = sharding == 1 && !numbers.fuses;
    hook = sharding > 1 && numbers.shards == replicas && coin(random);
    views = coin(random);
    overlaps = coin(random);
  }

  std::string to_text() const {
    return c10::str(stages, " stages x ", replicas, " replicas, ", pipeline, ", guard ", guard,
                    shards_state ? ", sharded state" : "",
                    shards_parameters ? ", sharded parameters" : "",
                    checkpoints ? ", checkpointed" : "", offloads ? ", offloaded" : "",
                    hook ? ", hook" : "", views ? ", views" : "", overlaps ? "" : ", no overlap",
                    bucket_mb > 0 ? ", small buckets" : "", first_inputs ? ", first inputs" : "",
                    replays ? ", replayed" : "", ", ", placement);
  }
};

Config config_of(const Numbers& numbers, const Layout& layout) {
  return Config()
      .partitions(layout.stages)
      .microbatches(kMicrobatches / layout.replicas)
      .ddp(layout.replicas > 1 || numbers.parts > 1)
      .tensor_parallel_degree(numbers.parts)
      .prescaled_batch(true)  // ranks that divide a layer are given one batch
      .gradient_shards(numbers.shards)
      .seed(11)
      .pipeline(layout.pipeline)
      .guard(layout.guard)
      .bf16(numbers.precision == "bf16")
      .fp16(numbers.precision == "fp16")
      .gradient_accumulation_fusion(numbers.fuses)
      .shard_optimizer_state(layout.shards_state)
      .sharded_data_parallel_degree(layout.shards_parameters ? layout.replicas : 1)
      .sdp_param_persistence_threshold(64)
      .sdp_gradient_clipping(1e30)
      .offload_activations(layout.offloads)
      .input_source(layout.first_inputs ? "first" : "all")
      .replay_check(layout.replays ? 1 : 0)
      .placement_strategy(layout.placement)
      .timeout_seconds(120);
}

ModelOptions options_of(const Numbers& numbers, const Layout& layout) {
  return ModelOptions()
      .backward_passes_per_step(numbers.passes)
      .bucket_cap_mb(layout.bucket_mb)
      .gradient_as_bucket_view(layout.views)
      .overlapping_allreduce(layout.overlaps);
}

/// One for each rank, made before any rank draws from the generator that threads share.
std::vector<TinyGpt> make_nets(const Numbers& numbers, int ranks) {
  std::vector<TinyGpt> nets;
  for (int i = 0; i < ranks; ++i) {
    torch::manual_seed(1);
    nets.emplace_back(numbers.tied, /*layers=*/2);
  }
  return nets;
}

std::vector<torch::Tensor> batch_of(int number) {
  const auto draw = [generator = at::detail::createCPUGenerator(100 + number)] {
    return torch::randint(0, TinyGptImpl::kVocabulary, {kMicrobatches, TinyGptImpl::kLength},
                          generator);
  };
  const auto ids = draw();
  return {ids, draw()};
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(
    const std::string& name, const std::vector<torch::optim::OptimizerParamGroup>& groups) {
  using namespace torch::optim;
  if (name == "sgd") return std::make_unique<SGD>(groups, SGDOptions(1e-2).momentum(0.9));
  if (name == "adagrad") return std::make_unique<Adagrad>(groups, AdagradOptions(1e-2));
  if (name == "lamb") return std::make_unique<optim::Lamb>(groups, optim::LambOptions(1e-2));
  return std::make_unique<AdamW>(groups, AdamWOptions(1e-2).weight_decay(0.1));
}

/// Losses by step and microbatch of all replicas.
using Losses = std::map<std::pair<int, int>, float>;

/// The training of one rank.
class Training {
 public:
  Training(const Numbers& numbers, const Layout& layout, TinyGpt& net, Losses& losses)
      : numbers_(numbers), layout_(layout), net_(net), losses_(losses) {}

  /// Takes the optimizer's steps `first` to `last` - 1, from one checkpoint, unless it is empty, to
  /// another.
  void run(int first, int last, const std::string& from, const std::string& to) {
    TinyGpt& net = net_;
    if (layout_.checkpoints) {
      for (int i = 0; i < 2; ++i) {
        set_activation_checkpointing(net->up[i]);
        set_activation_checkpointing(net->attention_in[i]);
      }
    }
    DistributedModel<TinyGpt> model(net, options_of(numbers_, layout_));
    if (layout_.hook) model->register_comm_hook(all_reduce_hook);
    if (numbers_.parts > 1) set_tensor_parallelism(net);
    if (numbers_.freezes) {
      net->positions->weight.set_requires_grad(false);
      net->up[0]->bias.set_requires_grad(false);
    }
    const auto plain = optimizer_of(*net);
    auto optimizer = distributed(*plain);
    std::optional<torch::optim::StepLR> schedule;
    std::vector<RemovableHandle> handles;
    if (numbers_.schedules) {
      schedule.emplace(*plain, /*step_size=*/1, /*gamma=*/0.7);
      handles.push_back(register_scheduler("rate", *schedule));
    }
    if (numbers_.scales) {
      LossScaleOptions scale;
      scale.dynamic_loss_scale(true).dynamic_loss_args(
          DynamicLossArgs().init_scale(numbers_.first_scale).scale_window(2));
      optimizer.scale_loss(scale);
    }
    if (!from.empty()) load(from, model, optimizer);
    const auto forward = [&](const torch::Tensor& x) {
      const amp::Autocast cast(torch::kBFloat16, torch::kCPU, numbers_.casts);
      return net->forward(x).to(torch::kFloat);
    };
    auto evaluate = step(
        [&](torch::Tensor x, torch::Tensor y) { return TinyGptImpl::criterion(forward(x), y); });
    auto train = step([&](torch::Tensor x, torch::Tensor y) {
      auto loss = TinyGptImpl::criterion(forward(x), y);
      model->backward(loss);
      if (numbers_.two_losses) model->backward(forward(y).square().mean());
      return loss;
    });
    for (int i = first; i < last; ++i) {
      optimizer.zero_grad();
      for (int pass = 0; pass < numbers_.passes; ++pass) {
        const int number = i * numbers_.passes + pass;
        const auto batch = batch_of(number);
        note(number, train(shard(batch[0]), shard(batch[1])));
      }
      if (numbers_.clips) clip(model, optimizer);
      optimizer.step();
      if (schedule) schedule->step();
      if (!numbers_.evaluates) continue;
      const auto batch = batch_of(1000 + i);
      model->eval();
      note(1000 + i, evaluate(shard(batch[0]), shard(batch[1])));
      model->train();
    }
    save(to, model, optimizer);
  }

 private:
  std::unique_ptr<torch::optim::Optimizer> optimizer_of(const TinyGptImpl& net) const {
    std::vector<torch::Tensor> matrices, others;
    for (const auto& parameter : unique_parameters(net)) {
      (parameter.dim() > 1 ? matrices : others).push_back(parameter);
    }
    if (!numbers_.groups) {
      matrices.insert(matrices.end(), others.begin(), others.end());
      return make_optimizer(numbers_.optimizer, {torch::optim::OptimizerParamGroup(matrices)});
    }
    auto optimizer = make_optimizer(
        numbers_.optimizer,
        {torch::optim::OptimizerParamGroup(matrices), torch::optim::OptimizerParamGroup(others)});
    optimizer->param_groups()[1].options().set_lr(3e-2);
    return optimizer;
  }

  template <class Model, class Optimizer>
  void clip(const Model& model, Optimizer& optimizer) const {
    constexpr double kMaxNorm = 0.5;
    if (numbers_.precision == "float" && !numbers_.scales) {
      clip_grad_norm_(model, kMaxNorm);
    } else {
      optimizer.clip_master_grads(kMaxNorm);
    }
  }

  template <class Output>
  void note(int number, const Output& output) {
    static std::mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    const auto& losses = output.outputs();
    const int first = rdp_rank() * static_cast<int>(losses.size());
    for (size_t m = 0; m < losses.size(); ++m) {
      losses_[{number, first + static_cast<int>(m)}] = losses[m].template item<float>();
    }
  }

  const Numbers& numbers_;
  const Layout& layout_;
  TinyGpt& net_;
  Losses& losses_;
};

using Hashes = std::map<std::string, uint64_t>;

struct Outcome {
  Losses losses;
  Hashes tensors;
};

Hashes hashes_of(const std::string& checkpoint) {
  Hashes hashes;
  const auto index = checkpoint::Reader(checkpoint).index();
  for (const auto& [name, entry] : index.model) hashes[name] = entry.hash;
  for (const auto& [name, entry] : index.optimizer_tensors) hashes["state of " + name] = entry.hash;
  return hashes;
}

void train(const Numbers& numbers, const Layout& layout, Losses& losses, int first, int last,
           const std::string& from, const std::string& to, std::optional<uint64_t> delays) {
  const int ranks = layout.stages * layout.replicas * numbers.parts;
  auto nets = make_nets(numbers, ranks);
  const auto program = [&] {
    Training(numbers, layout, nets[static_cast<size_t>(rank())], losses).run(first, last, from, to);
  };
  const Config config = config_of(numbers, layout);
  if (!delays) return run_as_threads(ranks, config, program);
  Chaos chaos;
  chaos.seed = *delays;
  run_in_chaos(ranks, config, chaos, program);
}

/// In one layout, without a change.
Outcome reference(const Numbers& numbers) {
  const TempFolder folder;
  Outcome outcome;
  train(numbers, Layout(), outcome.losses, 0, kSteps, "", folder.path() + "/end", {});
  outcome.tensors = hashes_of(folder.path() + "/end");
  return outcome;
}

std::string differences(const Outcome& got, const Outcome& expected) {
  std::string text;
  for (const auto& [where, loss] : expected.losses) {
    const auto found = got.losses.find(where);
    if (found != got.losses.end() && found->second == loss) continue;
    text += c10::str("\nthe loss of microbatch ", where.second, " in step ", where.first);
  }
  for (const auto& [name, hash] : expected.tensors) {
    const auto found = got.tensors.find(name);
    if (found == got.tensors.end() || found->second != hash) text += "\n" + name;
  }
  if (got.losses.size() != expected.losses.size()) text += "\nother losses";
  if (got.tensors.size() != expected.tensors.size()) text += "\nother tensors";
  return text;
}

TEST(Combination, HasTheBitsOfTheSimplestLayout) {
  at::set_num_threads(1);
  const int64_t first = number_in("SMP_COMBINATION_SEED", 1);
  const int64_t count = number_in("SMP_COMBINATION_COUNT", 8);
  for (int64_t seed = first; seed < first + count; ++seed) {
    Random random(static_cast<uint64_t>(seed));
    const Numbers numbers(random);
    const Layout before(random, numbers), after(random, numbers);
    SCOPED_TRACE(c10::str("SMP_COMBINATION_SEED=", seed, ": ", numbers.to_text(), "\n  ",
                          before.to_text(), "\n  ", after.to_text()));
    std::printf("%lld: %s\n  %s\n  %s\n", static_cast<long long>(seed), numbers.to_text().c_str(),
                before.to_text().c_str(), after.to_text().c_str());
    std::fflush(stdout);
    const TempFolder folder;
    const std::string half = folder.path() + "/half", end = folder.path() + "/end";
    Outcome got;
    try {
      train(numbers, before, got.losses, 0, kChange, "", half, random());
      train(numbers, after, got.losses, kChange, kSteps, half, end, random());
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
      continue;
    }
    got.tensors = hashes_of(end);
    EXPECT_EQ(differences(got, reference(numbers)), "");
  }
}

}  // namespace
}  // namespace smp::testing
