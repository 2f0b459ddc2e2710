// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <chrono>

#include "smp/ddp.h"
#include "smp/distributed_model.h"
#include "tests/dp/models.h"
#include "tests/dp/replicas.h"

namespace smp::dp {
namespace {

using namespace testing;
using smp::testing::expect_has;

/// The first error of some rank thread.
std::string error_of_ranks(int ranks, const std::function<void(comm::CommunicatorPtr)>& body) {
  return smp::testing::error_of<std::exception>([&] { comm::run_ranks(ranks, body); });
}

TEST(DistributedDataParallelErrors, OtherModels) {
  std::vector<Mlp> modules{Mlp(), Mlp(), Mlp()};
  modules[2]->second->weight = modules[2]->second->register_parameter("more", torch::zeros({3}));
  const auto text = error_of_ranks(3, [&](const comm::CommunicatorPtr& world) {
    DistributedDataParallel<Mlp> model(modules[world->rank()],
                                       DDPOptions().process_group(group_of(world)));
  });
  expect_has(text,
             "rank 2 wrapped another model or gave other options than rank 0. First "
             "difference: option bucket_cap_mb = 25 on rank 0, parameter second.more = Float "
             "[3] with strides [1] on rank 2");
  const auto other = error_of_ranks(2, [&](const comm::CommunicatorPtr& world) {
    DistributedDataParallel<Mlp> model(
        modules[world->rank()],
        DDPOptions().process_group(group_of(world)).bucket_cap_mb(world->rank() + 1));
  });
  expect_has(other, "option bucket_cap_mb = 1 on rank 0, option bucket_cap_mb = 2 on rank 1");
}

TEST(DistributedDataParallelErrors, ParametersWithoutAGradient) {
  const auto text = error_of_ranks(1, [&](const comm::CommunicatorPtr& world) {
    DistributedDataParallel<Branches> model(Branches(),
                                            DDPOptions().process_group(group_of(world)));
    const auto batch = make_batch(Training(), 0, 0, 0);
    kBranchOfRank(model, batch);
    kBranchOfRank(model, batch);
  });
  expect_has(text,
             "the backward pass before this forward pass gave no gradient to 6 of 12 "
             "parameters: branch1.weight, branch1.bias, branch2.weight, branch2.bias, "
             "branch3.weight, branch3.bias, so that their buckets were not reduced");
}

TEST(DistributedDataParallelErrors, GradientsTwice) {
  const auto text = error_of_ranks(1, [&](const comm::CommunicatorPtr& world) {
    DistributedDataParallel<Rerunning> model(Rerunning(),
                                             DDPOptions().process_group(group_of(world)));
    kOnePass(model, make_batch(Training(), 0, 0, 0));
  });
  expect_has(text, "parameter \"twice.");
  expect_has(text, "got a gradient twice in one reduction");
}

TEST(DistributedDataParallelErrors, SparseGradients) {
  struct Sparse : torch::nn::Module {
    Sparse() {
      table = register_module(
          "table", torch::nn::Embedding(torch::nn::EmbeddingOptions(10, 3).sparse(true)));
    }
    torch::Tensor forward(torch::Tensor x) { return table(x); }
    torch::nn::Embedding table{nullptr};
  };
  const auto text = error_of_ranks(1, [&](const comm::CommunicatorPtr& world) {
    DistributedDataParallel<std::shared_ptr<Sparse>> model(
        std::make_shared<Sparse>(), DDPOptions().process_group(group_of(world)));
    model(torch::tensor({1, 2})).sum().backward();
  });
  expect_has(text, "parameter \"table.weight\" got a sparse gradient, which cannot be reduced");
}

TEST(DistributedDataParallelErrors, GradientsOfGradients) {
  const auto text = error_of_ranks(1, [&](const comm::CommunicatorPtr& world) {
    DistributedDataParallel<Mlp> model(Mlp(), DDPOptions().process_group(group_of(world)));
    const auto batch = make_batch(Training(), 0, 0, 0);
    torch::mse_loss(model(batch.x), batch.y).backward({}, {}, /*create_graph=*/true);
  });
  expect_has(text, "backward(create_graph = true) reached parameter \"");
}

TEST(DistributedDataParallelErrors, Misuse) {
  using Model = DistributedDataParallel<Mlp>;
  const auto text = [&](const std::function<void(comm::CommunicatorPtr)>& body) {
    return error_of_ranks(1, body);
  };
  expect_has(smp::testing::error_of<std::exception>([] { Model model{Mlp()}; }),
             "smp is not initialised; call smp::init");
  expect_has(text([](const auto& world) {
               Model model(nullptr, DDPOptions().process_group(group_of(world)));
             }),
             "DistributedDataParallel was given an empty module holder");
  expect_has(text([](const auto& world) {
               Mlp frozen;
               for (auto& parameter : frozen->parameters()) parameter.set_requires_grad(false);
               Model model(frozen, DDPOptions().process_group(group_of(world)));
             }),
             "without a parameter that requires a gradient, so there is nothing to reduce");
  expect_has(text([](const auto& world) {
               Model model(Mlp(), DDPOptions().process_group(group_of(world)).bucket_cap_mb(0));
             }),
             "expected a positive bucket_cap_mb and first_bucket_cap_mb, got 0 and 1");
  expect_has(text([](const auto& world) {
               Model model(Mlp(),
                           DDPOptions().process_group(group_of(world)).backward_passes_per_step(0));
             }),
             "expected backward_passes_per_step of 1 or more, got 0");
  expect_has(text([](const auto& world) {
               Mlp meta;
               meta->register_parameter("more", torch::empty({3}, torch::kMeta));
               Model model(meta, DDPOptions().process_group(group_of(world)));
             }),
             "expected all parameters of a replica on one device, got meta and cpu");
}

TEST(DistributedDataParallelErrors, ModulesOfADistributedModel) {
  const auto text = smp::testing::error_of<std::exception>([] {
    run_as_threads(1, Config(), [] {
      Mlp net;
      const DistributedModel<Mlp> model(net);
      DistributedDataParallel<Mlp> replica(net);
    });
  });
  expect_has(text,
             "was given a module that a DistributedModel holds, which reduces gradients over its "
             "replicas itself. Use one or the other");
}

/// One rank has a batch less; the other waits in vain and says for which. Without buffers that is
/// rank 0; with them, rank 1 waits for those of rank 0.
TEST(DistributedDataParallelErrors, AnotherNumberOfBatches) {
  std::vector<std::shared_ptr<ConvBlock>> modules{std::make_shared<ConvBlock>(),
                                                  std::make_shared<ConvBlock>()};
  for (const bool buffers : {true, false}) {
    const int shorter = buffers ? 0 : 1;
    Training training;
    training.x_shape = {4, 2, 4, 4};
    const auto text = error_of_ranks(2, [&](const comm::CommunicatorPtr& world) {
      constexpr int kCommon = 2;
      DistributedDataParallel<std::shared_ptr<ConvBlock>> model(
          modules[world->rank()],
          small_buckets().process_group(group_of(world)).broadcast_buffers(buffers));
      comm::CommunicatorPtr replicas;  // those of the model alone
      model.register_comm_hook([&](const GradBucket& bucket) {
        replicas = bucket.group.core().communicator();
        return all_reduce_hook(bucket);
      });
      const int batches = world->rank() == shorter ? kCommon : kCommon + 1;
      for (int step = 0; step < batches; ++step) {
        // The other never comes, so that a short wait is as good as a long one.
        if (step == kCommon) replicas->set_timeout(std::chrono::milliseconds(200));
        kPassOfPointer(model, make_batch(training, world->rank(), step, 0));
      }
      world->barrier();
    });
    expect_has(text, c10::str("it waits for rank ", shorter));
    if (buffers) {
      expect_has(text, "gave rank 0's buffers to all before a forward pass. If the ranks");
    } else {
      expect_has(text, "while DistributedDataParallel reduced bucket 1 of 5: out.bias. If the");
    }
  }
}

}  // namespace
}  // namespace smp::dp
