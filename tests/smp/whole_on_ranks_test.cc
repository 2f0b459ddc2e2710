// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/threads/run_ranks.h"
#include "dp/sharded_parameters.h"
#include "graph/absent.h"
#include "nn/parameter_sharding.h"
#include "optim/grad_norm.h"
#include "runtime/model.h"
#include "runtime/parameters/dividing.h"
#include "runtime/parameters/foreign.h"
#include "runtime/parameters/whole.h"
#include "runtime/save/loading.h"
#include "runtime/session/session.h"
#include "runtime/update/clip_grad.h"
#include "runtime/update/divided_states.h"
#include "runtime/update/grad_norm.h"

// Tensors that one rank of a pipeline owns, whose parts tensor-parallel ranks have, in shards on
// replicas: put together, held against the wholes from which each rank has cut.
namespace smp::runtime {
namespace {

/// A tensor of a model, and how it is to lie.
struct Tensor {
  std::string name;
  torch::Tensor whole;
  std::optional<nn::ParameterSplit> split;  // for the ranks of a tensor-parallel group
  bool in_shards = false;
  int owner = 0;  // modulo the ranks of the pipeline
};

torch::Tensor numbers(torch::IntArrayRef sizes, at::ScalarType dtype = at::kDouble) {
  return torch::arange(c10::multiply_integers(sizes)).view(sizes).to(dtype) / 7;
}

std::vector<Tensor> tensors(int tp) {
  const auto split = [tp](std::vector<int64_t> sizes, int64_t dim, int64_t blocks) {
    return tp == 1 ? std::nullopt
                   : std::optional(nn::ParameterSplit{std::move(sizes), dim, blocks, tp});
  };
  return {{"rows", numbers({48, 12}), split({48, 12}, 0, 1), true, 0},
          {"columns", numbers({10, 48}, at::kFloat), split({10, 48}, 1, 4), true, 1},
          {"short", numbers({6}), split({6}, 0, 1), true, 1},
          {"whole", numbers({150}), {}, true, 0},
          {"turned", numbers({16, 24}).t(), {}, true, 1},
          {"in parts alone", numbers({12, 2}), split({12, 2}, 0, 2), false, 1},
          {"on its owner", numbers({3}, at::kFloat), {}, false, 1},
          {"on the first", numbers({2, 2}), {}, false, 0}};
}

struct Layout {
  int pp, tp, replicas;
  std::string placement = "cluster";
};

const std::vector<Layout>& layouts() {
  static const std::vector<Layout> all{{2, 1, 1}, {1, 2, 2}, {2, 1, 2},        {2, 2, 1},
                                       {2, 2, 2}, {2, 2, 3}, {3, 2, 2, "TPD"}, {2, 3, 2, "PDT"}};
  return all;
}

/// Makes a model of the tensors. Its own pieces have none, since it trains none.
std::shared_ptr<Model> make_model(const std::shared_ptr<Runtime>& runtime,
                                  const std::vector<Tensor>& all) {
  const auto module = std::make_shared<torch::nn::Module>();
  for (const auto& tensor : all) {
    module->register_parameter(tensor.name, tensor.whole.clone(), /*requires_grad=*/false);
  }
  const auto model = std::make_shared<Model>(module, ModelOptions(), runtime);
  runtime->add_model(model);
  return model;
}

/// Calls `body` on ranks, with the runtime of each and the tensors.
template <class Body>
void on_ranks(const Layout& layout, const Body& body) {
  const int ranks = layout.pp * layout.tp * layout.replicas;
  SCOPED_TRACE(c10::str(layout.pp, " x ", layout.tp, " x ", layout.replicas, layout.placement));
  const auto config = Config()
                          .partitions(layout.pp)
                          .tensor_parallel_degree(layout.tp)
                          .ddp(true)
                          .shard_optimizer_state(true)
                          .placement_strategy(layout.placement);
  comm::run_ranks(ranks, [&](const comm::CommunicatorPtr& world) {
    const auto runtime = start_runtime(config, world, std::vector<std::string>(ranks, "host"));
    const ThreadRuntime of_thread(runtime);
    const auto all = tensors(layout.tp);
    const auto model = make_model(runtime, all);
    runtime->first_step.plan = std::make_shared<partitioner::Plan>();
    ParameterTable& table = runtime->table();
    const auto shards = std::make_shared<dp::ShardedParameters>(runtime->replicas());
    for (const auto& [name, whole, split, in_shards, owner] : all) {
      const auto& entry = table.at(name);
      if (split) divide_parameter(*runtime, entry, *split);
      table.set_owner(name, runtime->topology().axis(CommGroup::kPp), owner % layout.pp, "");
      if (!runtime->owns(entry)) {
        graph::release_as_absent(entry.tensor, absence_of(entry));
      } else if (in_shards && layout.replicas > 1) {
        shards->add(entry.tensor, name);
      }
    }
    table.set_pieces(shards, runtime->topology().pieces());
    body(*runtime, all);
  });
}

/// Cuts this rank's share from a tensor that lies like one of the model's; undefined: nothing.
torch::Tensor own_of(const Runtime& runtime, const Tensor& tensor, const torch::Tensor& whole) {
  const auto& entry = runtime.table().at(tensor.name);
  if (!runtime.owns(entry)) return {};
  const auto own = entry.sharding.cut(whole, runtime.rank());
  return own.numel() > 0 ? own : torch::Tensor();
}

TEST(WholeOnRanks, SaysHowItLies) {
  for (const Layout& layout : layouts()) {
    on_ranks(layout, [&](const Runtime& runtime, const auto& all) {
      const core::Axis divides = runtime.topology().axis(CommGroup::kTp);
      for (const Tensor& tensor : all) {
        const auto& entry = runtime.table().at(tensor.name);
        const int owner = tensor.owner % layout.pp;
        EXPECT_EQ(entry.owner(), owner) << tensor.name;
        EXPECT_EQ(runtime.owns(entry), runtime.rank_in(CommGroup::kPp) == owner) << tensor.name;
        ASSERT_EQ(entry.is_divided(), tensor.split.has_value()) << tensor.name;
        if (tensor.split) {
          EXPECT_EQ(nn::split_of(entry.sharding, divides).to_string(), tensor.split->to_string());
        }
        const bool in_pieces = tensor.in_shards && layout.replicas > 1 && runtime.owns(entry);
        EXPECT_EQ(entry.piece.has_value(), in_pieces) << tensor.name;
        const auto& cuts = entry.sharding.cuts;
        EXPECT_EQ(cuts.size(), 1 + (tensor.split ? 1 : 0) + (in_pieces ? 1 : 0)) << tensor.name;
        EXPECT_EQ(entry.within_owner().cuts, (std::vector(cuts.begin() + 1, cuts.end())));
      }
    });
  }
}

TEST(WholeOnRanks, IsOnAllOrOnTheFirst) {
  for (const Layout& layout : layouts()) {
    on_ranks(layout, [](const Runtime& runtime, const auto& all) {
      for (const Tensor& tensor : all) {
        const auto& entry = runtime.table().at(tensor.name);
        EXPECT_TRUE(torch::equal(whole_copy(runtime, entry, /*to_first=*/false), tensor.whole))
            << tensor.name;
        const auto first = whole_copy(runtime, entry, /*to_first=*/true);
        ASSERT_EQ(first.defined(), runtime.rank_in(CommGroup::kMp) == 0) << tensor.name;
        EXPECT_TRUE(!first.defined() || torch::equal(first, tensor.whole)) << tensor.name;
        const bool may_alias = runtime.owns(entry) && first.defined() && !entry.shard();
        EXPECT_FALSE(may_alias && first.is_alias_of(entry.tensor)) << tensor.name;
      }
    });
  }
}

/// A save has each tensor once, by turns on all ranks that have some of it.
TEST(WholeOnRanks, IsOnOneByTurns) {
  for (const Layout& layout : layouts()) {
    const int turns = layout.tp * layout.replicas;
    std::map<std::string, std::vector<int>> given;  // ranks by name, one a turn
    std::mutex mutex;
    on_ranks(layout, [&](const Runtime& runtime, const auto& all) {
      for (const Tensor& tensor : all) {
        for (int turn = 0; turn < turns; ++turn) {
          const auto whole = whole_on_one(runtime, runtime.table().at(tensor.name), turn,
                                          /*replica=*/turn / layout.tp);
          if (!whole.defined()) continue;
          EXPECT_TRUE(torch::equal(whole, tensor.whole)) << tensor.name;
          const std::lock_guard lock(mutex);
          given[tensor.name].push_back(runtime.rank());
        }
      }
    });
    for (const auto& [name, whole, split, in_shards, owner] : tensors(layout.tp)) {
      auto& ranks = given[name];
      EXPECT_EQ(ranks.size(), static_cast<size_t>(turns)) << name;
      std::sort(ranks.begin(), ranks.end());
      ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
      EXPECT_EQ(ranks.size(), static_cast<size_t>((split ? layout.tp : 1) * layout.replicas))
          << name;
    }
  }
}

TEST(WholeOnRanks, HasTheNormsOfOneProcess) {
  for (const Layout& layout : layouts()) {
    on_ranks(layout, [](const Runtime& runtime, const auto& all) {
      for (const double type : {1., 2., HUGE_VAL}) {
        std::vector<Held> held;
        for (const Tensor& tensor : all) {
          const auto& entry = runtime.table().at(tensor.name);
          held.push_back({&entry, entry.within_owner(), own_of(runtime, tensor, tensor.whole),
                          tensor.whole.scalar_type(), runtime.owns(entry)});
        }
        const auto norms = share_norms(norms_of_wholes(runtime, held, type), *runtime.world());
        for (size_t i = 0; i < all.size(); ++i) {
          EXPECT_EQ(norms[i], optim::gradient_norm(all[i].whole, type).template item<double>())
              << all[i].name << " of order " << type;
        }
      }
    });
  }
}

TEST(WholeOnRanks, HasLoadedValues) {
  for (const Layout& layout : layouts()) {
    on_ranks(layout, [](const Runtime& runtime, const auto& all) {
      const torch::NoGradGuard no_grad;
      for (const Tensor& tensor : all) {
        const auto& entry = runtime.table().at(tensor.name);
        const torch::Tensor loaded = tensor.whole * 3 + 1;
        assign(entry, runtime.rank(), [loaded] { return loaded; });
        EXPECT_TRUE(torch::equal(whole_copy(runtime, entry, /*to_first=*/false), loaded))
            << tensor.name;
      }
    });
  }
}

/// The gradients of shards are those of pieces.
TEST(WholeOnRanks, IsClippedAsInOneProcess) {
  for (const Layout& layout : layouts()) {
    on_ranks(layout, [](const Runtime& runtime, const auto& all) {
      std::vector<torch::Tensor> expected, parameters;
      for (const Tensor& tensor : all) {
        const auto& entry = runtime.table().at(tensor.name);
        parameters.push_back(entry.tensor);
        expected.push_back(tensor.whole.clone());
        expected.back().mutable_grad() = tensor.whole + 0.5;
        if (!runtime.owns(entry)) continue;
        const auto own = own_of(runtime, tensor, tensor.whole + 0.5);
        if (entry.piece) {
          entry.piece->pieces->add_gradient(entry.piece->index, own.defined() ? own.clone() : own);
        } else {
          entry.tensor.mutable_grad() = own.clone();
        }
      }
      const double norm = torch::nn::utils::clip_grad_norm_(expected, 3.);
      EXPECT_EQ(grad_norm(parameters).item<double>(), norm);
      EXPECT_EQ(clip_grad_norm_(parameters, 3.), norm);
      for (size_t i = 0; i < all.size(); ++i) {
        const auto& entry = runtime.table().at(all[i].name);
        const auto own = own_of(runtime, all[i], expected[i].grad());
        if (own.defined()) EXPECT_TRUE(torch::equal(entry.updated().grad(), own)) << all[i].name;
      }
    });
  }
}

/// States of wholes are cut on each rank, and put together as a save does it: over replicas, then
/// over tensor-parallel ranks.
TEST(WholeOnRanks, HasStatesThatAreCutAndJoined) {
  for (const Layout& layout : layouts()) {
    std::map<std::string, OptimizerState::Param> joined;
    std::mutex mutex;
    on_ranks(layout, [&](const Runtime& runtime, const auto& all) {
      OptimizerState state;
      state.groups.emplace_back();
      for (const Tensor& tensor : all) {
        const auto& entry = runtime.table().at(tensor.name);
        if (!runtime.owns(entry)) continue;
        state.params[tensor.name] = {tensor.whole.sizes().vec(),
                                     {{"average", tensor.whole * 2}, {"steps", torch::tensor(3)}},
                                     R"({"step":3})"};
      }
      cut_states(runtime, {}, state);
      for (const Tensor& tensor : all) {
        const auto own = own_of(runtime, tensor, tensor.whole * 2);
        ASSERT_EQ(state.params.count(tensor.name) > 0, own.defined()) << tensor.name;
        if (!own.defined()) continue;
        EXPECT_TRUE(torch::equal(state.params[tensor.name].tensors["average"], own));
      }
      join_states(runtime, {}, runtime.topology().pieces(), state);
      join_states(runtime, {}, runtime.topology().axis(CommGroup::kTp), state);
      const std::lock_guard lock(mutex);
      for (auto& [name, param] : state.params) {
        EXPECT_TRUE(joined.emplace(name, param).second) << name << " on two ranks";
      }
    });
    for (const Tensor& tensor : tensors(layout.tp)) {
      const auto& param = joined[tensor.name];
      EXPECT_EQ(at::IntArrayRef(param.shape), tensor.whole.sizes()) << tensor.name;
      ASSERT_EQ(param.tensors.size(), 2u) << tensor.name;
      EXPECT_TRUE(torch::equal(param.tensors.at("average"), tensor.whole * 2)) << tensor.name;
      EXPECT_TRUE(torch::equal(param.tensors.at("steps"), torch::tensor(3))) << tensor.name;
      EXPECT_EQ(param.scalars, R"({"step":3})") << tensor.name;
    }
  }
}

}  // namespace
}  // namespace smp::runtime
