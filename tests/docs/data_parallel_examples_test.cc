// SPDX-License-Identifier: Apache-2.0
// The code of docs/data_parallel.md, compiled and run: data_parallel_page_test checks that every
// block of the page is found here.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "smp/ddp.h"
#include "smp/smp.h"

namespace {

struct NetImpl : torch::nn::Module {
  NetImpl() { fc = register_module("fc", torch::nn::Linear(4, 3)); }
  torch::Tensor forward(torch::Tensor x) { return torch::log_softmax(fc(x), 1); }
  torch::nn::Linear fc{nullptr};
};
TORCH_MODULE(Net);

/// 22 samples of four numbers and their class.
struct Samples : torch::data::datasets::Dataset<Samples> {
  torch::data::Example<> get(size_t index) override {
    return {torch::full({4}, 0.1 * static_cast<double>(index)),
            torch::tensor(static_cast<int64_t>(index % 3))};
  }
  std::optional<size_t> size() const override { return 22; }
};

void run(const std::function<void()>& program) {
  torch::set_num_threads(1);
  smp::run_as_threads(2, smp::Config().ddp(true), program);
}

TEST(DataParallelPage, Training) {
  run([] {
    const int epochs = 2;
    const auto samples = Samples().map(torch::data::transforms::Stack<>());
    Net net;
    smp::DistributedDataParallel<Net> model(net);
    torch::optim::SGD optimizer(model->parameters(), 0.1);

    // Each rank its own share, of the same size; another order in each epoch.
    torch::data::samplers::DistributedRandomSampler sampler(
        samples.size().value(), smp::size(), smp::rank(), /*allow_duplicates=*/false);
    for (int epoch = 0; epoch < epochs; ++epoch) {
      sampler.set_epoch(epoch);
      auto loader = torch::data::make_data_loader(
          samples, sampler, torch::data::DataLoaderOptions(4).drop_last(true));
      for (auto& batch : *loader) {
        optimizer.zero_grad();
        torch::nll_loss(model(batch.data), batch.target).backward();
        optimizer.step();
      }
    }

    auto x = torch::ones({2, 4});
    auto y = torch::tensor({0, 1});
    std::vector<torch::Tensor> microbatches{x, x, x};
    // Gradients add up; the last pass reduces the sum.
    optimizer.zero_grad();
    {
      const auto guard = model.no_sync();
      for (size_t i = 0; i + 1 < microbatches.size(); ++i) {
        torch::nll_loss(model(microbatches[i]), y).backward();
      }
    }
    torch::nll_loss(model(microbatches.back()), y).backward();
    optimizer.step();
    EXPECT_TRUE(net->fc->weight.grad().defined());

    // Rank 0 tests, the others go on and wait where they need it again.
    if (smp::rank() == 0) {
      const torch::NoGradGuard no_grad;
      model->eval();
      std::cout << torch::nll_loss(model(x), y).item<double>() << "\n";
      model->train();
    }
  });
}

TEST(DataParallelPage, Join) {
  run([] {
    Net net;
    smp::DistributedDataParallel<Net> model(net);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    struct Batch {
      torch::Tensor data, target;
    };
    const std::vector<Batch> batches(1 + smp::rank(), {torch::ones({2, 4}), torch::tensor({0, 1})});
    {
      const auto guard = model.join();
      for (auto& batch : batches) {
        optimizer.zero_grad();
        torch::nll_loss(model(batch.data), batch.target).backward();
        optimizer.step();
      }
    }
    // Rank 0 has taken the weights of rank 1, which was last.
    const auto weights = net->fc->weight.detach().clone();
    const auto all = smp::group(smp::CommGroup::kWorld).all_gather(weights);
    EXPECT_TRUE(torch::equal(all[0], all[1]));
  });
}

TEST(DataParallelPage, JoinOfSteps) {
  run([] {
    Net net;
    smp::DistributedModel<Net> model(net);
    smp::DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), 0.1);
    auto train = smp::step(
        [&](torch::Tensor x, torch::Tensor y) { model->backward(torch::nll_loss(model(x), y)); });
    const std::vector<std::pair<torch::Tensor, torch::Tensor>> batches(
        1 + smp::rank(), {torch::ones({2, 4}), torch::tensor({0, 1})});
    {
      const auto guard = model->join();
      for (const auto& [x, y] : batches) {
        optimizer.zero_grad();
        train(x, y);
        optimizer.step();
      }
    }
    const auto weights = net->fc->weight.detach().clone();
    const auto all = smp::group(smp::CommGroup::kWorld).all_gather(weights);
    EXPECT_TRUE(torch::equal(all[0], all[1]));
  });
}

std::pair<torch::Tensor, torch::Tensor> pair_of(int64_t count, double phase) {
  const auto anchors = torch::sin(torch::arange(4 * count, torch::kDouble) + phase).view({-1, 4});
  return {anchors, torch::cos(3 * anchors)};
}

Net net_in_double() {
  Net net;
  net->to(torch::kDouble);
  for (auto& parameter : net->parameters()) {
    const auto numbers = torch::arange(parameter.numel(), torch::kDouble);
    parameter.set_data((numbers / 7 - 0.5).view(parameter.sizes()));
  }
  return net;
}

void expect_gradients(Net net, const Net& expected) {
  for (size_t i = 0; i < net->parameters().size(); ++i) {
    const auto got = net->parameters()[i].grad();
    EXPECT_TRUE(torch::allclose(got, expected->parameters()[i].grad(), 1e-12, 1e-12)) << got;
  }
}

/// The oracle is one process with the whole batch.
TEST(DataParallelPage, NegativesOfOtherReplicas) {
  const double temperature = 0.1;
  const auto whole = pair_of(6, 0.5);
  Net plain = net_in_double();
  const auto scores = plain->forward(whole.first).matmul(plain->forward(whole.second).t());
  torch::nn::functional::cross_entropy(scores / temperature, torch::arange(6)).backward();
  run([&] {
    Net net = net_in_double();
    smp::DistributedDataParallel<Net> model(net);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    const std::vector<std::pair<torch::Tensor, torch::Tensor>> pairs{
        {smp::shard(whole.first), smp::shard(whole.second)}};
    const smp::Group replicas = smp::CommGroup::kWorld;
    for (const auto& [anchors, positives] : pairs) {
      optimizer.zero_grad();
      const auto embedded = model(torch::cat({anchors, positives})).chunk(2);
      // The positives of all replicas, in their order: each is a negative of the others' anchors.
      const auto all = replicas.all_gather(embedded[1]).flatten(0, 1);
      const auto scores = embedded[0].matmul(all.t()) / temperature;
      const auto first = replicas.rank() * scores.size(0);
      const auto own = torch::arange(first, first + scores.size(0));
      torch::nn::functional::cross_entropy(scores, own).backward();
      optimizer.step();
    }
    expect_gradients(net, plain);
  });
}

/// The oracle is the mean over the tokens of the whole batch.
TEST(DataParallelPage, LossesOverTokens) {
  namespace F = torch::nn::functional;
  const auto whole = pair_of(8, 0.25).first;
  const auto targets = torch::tensor({0, 1, -100, -100, 2, 0, 1, -100});
  Net plain = net_in_double();
  const auto mean = F::nll_loss(plain->forward(whole), targets);
  mean.backward();
  smp::run_as_threads(2, smp::Config().ddp(true).microbatches(2), [&] {
    Net net = net_in_double();
    smp::DistributedModel<Net> model(net);
    auto train = smp::step([&](torch::Tensor x, torch::Tensor y, torch::Tensor tokens) {
      auto sum = F::nll_loss(model(x), y, F::NLLLossFuncOptions().reduction(torch::kSum));
      auto loss = smp::mean_over_tokens(sum, tokens);
      model->backward(loss);
      return loss;
    });
    smp::DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), 0.1);
    const auto x = smp::shard(whole), y = smp::shard(targets);
    const auto tokens = smp::count_tokens(y.ne(-100));  // tokens of all replicas' batches
    optimizer.zero_grad();
    const auto losses = train(x, y, smp::whole(tokens));  // every microbatch gets the number
    optimizer.step();
    const auto loss = losses.reduce_mean(smp::CommGroup::kDp);  // the mean over all tokens
    EXPECT_TRUE(torch::allclose(loss, mean, 1e-12));
    expect_gradients(net, plain);
  });
  smp::run_as_threads(2, smp::Config().ddp(true), [&] {
    Net net = net_in_double();
    smp::DistributedDataParallel<Net> model(net);
    const auto x = smp::shard(whole), y = smp::shard(targets);
    const auto sum = F::nll_loss(model(x), y, F::NLLLossFuncOptions().reduction(torch::kSum));
    smp::mean_over_tokens(sum, smp::count_tokens(y.ne(-100))).backward();
    expect_gradients(net, plain);
  });
}

TEST(DataParallelPage, Hooks) {
  run([] {
    Net net;
    smp::DistributedDataParallel<Net> model(net);
    model.register_comm_hook([](const smp::GradBucket& bucket) {
      // The largest of all ranks' gradients instead of their mean.
      return bucket.group.async().all_reduce(bucket.buffer, smp::ReduceOp::kMax);
    });
    torch::nll_loss(model(torch::ones({2, 4})), torch::tensor({0, 1})).backward();
    EXPECT_TRUE(net->fc->weight.grad().defined());
  });
  run([] {
    Net net;
    smp::DistributedDataParallel<Net> model(net);
    model.register_comm_hook(smp::fp16_compress_hook);
    torch::nll_loss(model(torch::ones({2, 4})), torch::tensor({0, 1})).backward();
    EXPECT_TRUE(net->fc->weight.grad().defined());
  });
}

/// Shares are disjoint and of the same size; with duplicates every sample is in one.
TEST(DataParallelPage, Samplers) {
  for (const bool duplicates : {false, true}) {
    std::vector<int> seen(22, 0);
    for (size_t rank = 0; rank < 4; ++rank) {
      torch::data::samplers::DistributedRandomSampler sampler(22, 4, rank, duplicates);
      sampler.set_epoch(3);
      sampler.reset();
      const auto indices = sampler.next(22).value();
      EXPECT_EQ(indices.size(), duplicates ? 6u : 5u);
      for (size_t index : indices) ++seen[index];
    }
    EXPECT_EQ(std::count(seen.begin(), seen.end(), 0), duplicates ? 0 : 2);
    EXPECT_EQ(std::count(seen.begin(), seen.end(), 2), duplicates ? 2 : 0);
  }
}

}  // namespace
