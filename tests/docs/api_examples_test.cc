// SPDX-License-Identifier: Apache-2.0
// The code of docs/api.md and docs/memory.md, compiled and run: api_page_test and
// memory_page_test check that every block of those pages is found here.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <mutex>
#include <nlohmann/json.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <tuple>

#include "smp/optim/adadelta.h"
#include "smp/smp.h"

namespace {

struct NetImpl : torch::nn::Module {
  NetImpl() {
    fc1 = register_module("fc1", torch::nn::Linear(8, 16));
    drop = register_module("drop", torch::nn::Dropout(0.5));
    fc2 = register_module("fc2", torch::nn::Linear(16, 3));
  }
  torch::Tensor forward(torch::Tensor x) { return fc2(drop(torch::relu(fc1(x)))); }

  torch::nn::Linear fc1{nullptr}, fc2{nullptr};
  torch::nn::Dropout drop{nullptr};
};
TORCH_MODULE(Net);

/// Sends each row to one of two layers, which a step cannot capture.
struct ExpertsImpl : torch::nn::Module {
  ExpertsImpl() {
    for (int i = 0; i < 2; ++i) {
      experts.push_back(register_module("expert" + std::to_string(i), torch::nn::Linear(8, 8)));
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    auto out = torch::zeros_like(x);
    for (int64_t i = 0; i < 2; ++i) {
      const auto rows = torch::nonzero((x.sum(1) > 0) == (i == 0)).flatten();
      if (rows.numel() == 0) continue;
      out.index_add_(0, rows, experts[i](x.index_select(0, rows)));
    }
    return out;
  }

  std::vector<torch::nn::Linear> experts;
};
TORCH_MODULE(Experts);

struct RoutedImpl : torch::nn::Module {
  RoutedImpl() {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})));
    experts = register_module("experts", Experts());
    head = register_module("head", torch::nn::Linear(8, 3));
  }

  torch::Tensor forward(torch::Tensor x) {
    x = x + smp::leaf(experts)(norm(x));  // instead of experts(norm(x))
    return head(x);
  }

  torch::nn::LayerNorm norm{nullptr};
  Experts experts{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Routed);

struct Batch {
  torch::Tensor x, y;
  double weight = 1;
  SMP_FIELDS(x, y, weight)
};

/// A user's type that is no tensor: every microbatch gets its share of the weights.
struct SampleWeights {
  std::vector<float> weights;

  SampleWeights smp_slice(int64_t num_microbatches, int64_t microbatch, int64_t /*axis*/) const {
    const auto count = static_cast<int64_t>(weights.size()) / num_microbatches;
    const auto first = weights.begin() + microbatch * count;
    return {std::vector<float>(first, first + count)};
  }
};

struct TwoHalvesImpl : torch::nn::Module {
  TwoHalvesImpl() {
    {
      const auto scope = smp::partition(0);
      features = register_module("features", torch::nn::Linear(4, 8));
    }
    const auto scope = smp::partition(1);
    classifier = register_module("classifier", torch::nn::Linear(8, 3));
  }

  torch::Tensor forward(torch::Tensor x) {
    x = torch::relu(features(x));
    const auto scope = smp::partition(1);
    return classifier(torch::layer_norm(x, {8}));
  }

  torch::nn::Linear features{nullptr}, classifier{nullptr};
};
TORCH_MODULE(TwoHalves);

/// Layers too large to be made at once under smp::model_creation.
struct LargeImpl : torch::nn::Module {
  LargeImpl() {
    for (int i = 0; i < 4; ++i) {
      layers->push_back(torch::nn::Linear(128, 128));
      layers->push_back(torch::nn::Tanh());
    }
    register_module("layers", layers);
  }
  torch::Tensor forward(torch::Tensor x) { return layers->forward(x); }

  torch::nn::Sequential layers;
};
TORCH_MODULE(Large);

/// A user's type that ranks send each other.
struct Progress {
  int64_t epoch = 0;
  torch::Tensor best;

  template <class Archive>
  void serialize(Archive& archive) {
    archive(epoch, best);
  }
};

class ApiExamples : public testing::Test {
 protected:
  ApiExamples() {
    at::set_num_threads(1);
    torch::manual_seed(3);
    x_ = torch::randn({8, 8});
    y_ = torch::randint(3, {8});
    folder_ = std::filesystem::path(testing::TempDir()) / "api_examples_checkpoint";
  }
  ~ApiExamples() override { std::filesystem::remove_all(folder_); }

  /// Two stages, two microbatches.
  void run(const std::function<void()>& program) {
    smp::run_as_threads(2, smp::Config().partitions(2).microbatches(2).seed(7), program);
  }

  torch::Tensor x_, y_;
  std::string folder_;
};

TEST_F(ApiExamples, WhereThingsGo) {
  run([] {
    TwoHalves net;
    smp::set_partition(net->classifier, 1);
    smp::DistributedModel<TwoHalves> model(net);
    smp::step([&](torch::Tensor x) { return model(x); })(torch::ones({4, 4}));
    const smp::Placement placement = smp::get_partition(net->classifier->weight);
    std::cout << placement.name << ": partition " << placement.partition << ", "
              << placement.reason;
    EXPECT_EQ(placement.partition, 1);
    EXPECT_EQ(smp::get_partition(net->features->bias).partition, 0);
  });
}

TEST_F(ApiExamples, TrainAndEvaluate) {
  const torch::Tensor x = x_, y = y_;
  run([&] {
    Net net;
    smp::DistributedModel<Net> model(net);
    smp::DistributedOptimizer<torch::optim::AdamW> optimizer(model->parameters(),
                                                             torch::optim::AdamWOptions(1e-3));

    auto train = smp::step([&](torch::Tensor x, torch::Tensor y) {
      auto logits = model(x);
      auto loss = torch::cross_entropy_loss(logits, y);
      model->backward(loss);
      return std::make_tuple(loss, logits.argmax(1));
    });

    optimizer.zero_grad();
    auto [loss, predictions] = train(x, y);
    optimizer.step();
    const double mean = loss.reduce_mean().item<double>();
    const torch::Tensor labels = predictions.concat();
    EXPECT_EQ(mean, (loss.outputs()[0] + loss.outputs()[1]).div(2).item<double>());
    EXPECT_EQ(labels.sizes(), y.sizes());

    auto evaluate =
        smp::step([&](torch::Tensor x, torch::Tensor y) { return model(x).argmax(1).eq(y).sum(); });

    model->eval();
    const auto correct = evaluate(x, y).reduce_sum().item<int64_t>();
    model->train();

    Net whole;
    const auto state = model->state_dict();
    {
      torch::NoGradGuard no_grad;
      for (auto& item : whole->named_parameters()) item.value().copy_(state[item.key()]);
    }
    whole->eval();
    EXPECT_EQ(correct, whole(x).argmax(1).eq(y).sum().item<int64_t>());
    EXPECT_TRUE(model->partitioned());
    EXPECT_LT(model->local_parameters().size(), model->parameters().size());
    EXPECT_EQ(model->partition_report().find("Partition assignments: 2 stages"), 0u);
  });
}

TEST_F(ApiExamples, ModelsThatDoNotFit) {
  torch::manual_seed(1);
  const Large plain;
  std::mutex one_at_a_time;  // rank threads share the generator
  run([&] {
    std::unique_lock<std::mutex> lock(one_at_a_time);
    torch::manual_seed(1);
    Large net{nullptr};
    {
      const auto scope = smp::model_creation();
      net = Large();
    }
    torch::optim::Adam optimizer(net->parameters());
    smp::DistributedModel<Large> model(net);
    lock.unlock();
    for (const auto& item : net->named_parameters()) {
      const bool small = item.value().dim() == 1;
      EXPECT_EQ(item.value().storage().nbytes(), small ? item.value().nbytes() : 0) << item.key();
    }
    smp::step([&](torch::Tensor x) { return model(x); })(torch::ones({4, 128}));
    size_t made = 0;
    for (const auto& item : model->local_named_parameters()) {
      made += item.value().dim() == 2;
      EXPECT_TRUE(torch::equal(item.value(), plain->named_parameters()[item.key()])) << item.key();
    }
    EXPECT_GT(made, 0u);
    EXPECT_LT(made, 4u);
  });
}

TEST_F(ApiExamples, StepOptions) {
  const torch::Tensor batch = x_.t().contiguous(), scale = torch::full({8}, 2.0);
  run([&] {
    Net net;
    smp::DistributedModel<Net> model(net);
    model->eval();
    auto logits = smp::step(
        [&](torch::Tensor columns, torch::Tensor scale) { return model(columns.t() * scale); },
        smp::StepOptions()
            .name("logits")
            .microbatches(4)             // instead of the configuration's
            .input_split_axes({{0, 1}})  // argument 0 is cut along axis 1
            .non_split_inputs({1}));     // argument 1 goes whole to every microbatch
    EXPECT_EQ(logits(batch, scale).outputs().size(), 4u);
    EXPECT_EQ(logits(batch, scale).concat().size(0), 8);
  });
}

TEST_F(ApiExamples, Arguments) {
  const torch::Tensor x = x_, y = y_;
  run([&] {
    Net net;
    smp::DistributedModel<Net> model(net);
    model->eval();
    auto fields = smp::step([&](const Batch& batch, torch::Tensor offset) {
      auto loss = torch::cross_entropy_loss(model(batch.x) + offset, batch.y) * batch.weight;
      model->backward(loss);
      return loss;
    });
    const auto offset = torch::zeros({3});
    fields(Batch{x, y}, smp::whole(offset));
    auto examples = smp::step([&](torch::data::Example<> batch) {
      auto loss = torch::cross_entropy_loss(model(batch.data), batch.target);
      model->backward(loss);
      return loss;
    });
    examples(torch::data::Example<>(x, y));
    EXPECT_TRUE(torch::equal(fields(Batch{x, y}, smp::whole(offset)).stack(),
                             examples(torch::data::Example<>(x, y)).stack()));
  });
}

TEST_F(ApiExamples, ObjectsAndNumbers) {
  const torch::Tensor x = x_;
  run([&] {
    Net net;
    smp::DistributedModel<Net> model(net);
    auto weighted = smp::step([&](torch::Tensor x, const SampleWeights& sample) {
      auto loss = (model(x).sum(1) * torch::tensor(sample.weights)).sum();
      model->backward(loss);
      return std::make_tuple(torch::tensor(sample.weights).sum() + 0 * loss, sample.weights[0]);
    });
    const SampleWeights sample{{1, 2, 3, 4, 5, 6, 7, 8}};
    auto [sums, firsts] = weighted(x, sample);  // a StepOutput and a std::vector<float>
    EXPECT_EQ(sums.stack()[0].item<float>(), 10);
    EXPECT_EQ(sums.stack()[1].item<float>(), 26);
    EXPECT_EQ(firsts, (std::vector<float>{1, 5}));
  });
}

TEST_F(ApiExamples, LeafModules) {
  const torch::Tensor x = x_;
  torch::manual_seed(3);
  Routed plain;
  run([&] {
    Routed net;
    {
      const torch::NoGradGuard no_grad;
      for (auto& item : net->named_parameters()) {
        item.value().copy_(plain->named_parameters()[item.key()]);
      }
    }
    smp::DistributedModel<Routed> model(net);
    auto predict = smp::step([&](torch::Tensor x) { return model(x); });
    const auto outputs = predict(x).outputs();
    for (int64_t m = 0; m < 2; ++m) {
      EXPECT_TRUE(torch::equal(outputs[m], plain(x.narrow(0, 4 * m, 4).clone())));
    }
  });
}

TEST_F(ApiExamples, ExistingOptimizerAndCheckpoint) {
  const torch::Tensor x = x_, y = y_;
  const std::string folder = folder_;
  Net plain;
  torch::OrderedDict<std::string, torch::Tensor> saved;
  run([&] {
    Net net;
    smp::optim::Adadelta adadelta(net->parameters(), smp::optim::AdadeltaOptions(1.0));
    smp::DistributedModel<Net> model(net);
    auto optimizer = smp::distributed(adadelta);
    torch::optim::StepLR scheduler(adadelta, /*step_size=*/1, /*gamma=*/0.7);

    auto train = smp::step([&](torch::Tensor x, torch::Tensor y) {
      auto loss = torch::cross_entropy_loss(model(x), y);
      model->backward(loss);
      return loss;
    });
    train(x, y);
    optimizer.step();
    scheduler.step();

    smp::save(folder, model, optimizer, nlohmann::json{{"epoch", 3}}.dump());

    const smp::LoadedRun run = smp::load(folder, model, optimizer);
    const int64_t epoch = nlohmann::json::parse(run.user_content)["epoch"];
    EXPECT_EQ(epoch, 3);
    EXPECT_EQ(run.step, 1);
    const auto state = model->state_dict();
    if (smp::rank() == 0) saved = state;
  });
  smp::load_into_module(folder, *plain);
  for (const auto& item : plain->named_parameters()) {
    EXPECT_TRUE(torch::equal(item.value(), saved[item.key()])) << item.key();
  }
}

TEST_F(ApiExamples, GroupsAndHooks) {
  const torch::Tensor x = x_;
  run([&] {
    Net net;
    smp::DistributedModel<Net> model(net);
    bool called = false;
    auto handle = model->register_post_partition_hook([&] { called = true; });
    smp::step([&](torch::Tensor x) { return model(x); })(x);
    handle.remove();
    EXPECT_TRUE(called);

    const smp::Group pipeline = smp::group(smp::CommGroup::kPp);
    EXPECT_EQ(pipeline.ranks(), (std::vector<int>{0, 1}));
    const auto sum = pipeline.all_reduce(torch::full({1}, pipeline.rank() + 1));
    EXPECT_EQ(sum.item<int64_t>(), 3);  // 1 + 2
  });
}

TEST_F(ApiExamples, ObjectsBetweenRanks) {
  smp::run_as_threads(4, smp::Config().partitions(2).ddp(true), [] {
    const std::map<std::string, double> scores{{"loss", 0.5 * smp::dp_rank()}};
    const auto all = smp::allgather(scores, smp::CommGroup::kDp);  // each replica's, in order
    EXPECT_EQ(all.at(1).at("loss"), 0.5);
    if (smp::rank() == 0) {
      smp::send(std::string("done"), 1, smp::CommGroup::kWorld);
    } else if (smp::rank() == 1) {
      EXPECT_EQ(smp::recv_from<std::string>(0, smp::CommGroup::kWorld), "done");
    }

    const Progress progress{smp::rank(), torch::ones({2})};
    EXPECT_EQ(smp::broadcast(progress, smp::CommGroup::kWorld, 3).epoch, 3);
  });
}

TEST_F(ApiExamples, KeyedRandom) {
  const torch::Tensor x = x_;
  run([&] {
    Net net;
    smp::DistributedModel<Net> model(net);
    auto forward = smp::step([&](torch::Tensor x) { return model(x); });
    const torch::Tensor second_half = forward(x).outputs()[1];
    const auto state = model->state_dict();

    Net plain;
    {
      torch::NoGradGuard no_grad;
      for (auto& item : plain->named_parameters()) item.value().copy_(state[item.key()]);
    }
    torch::Tensor expected;
    {
      const smp::KeyedRandom random(/*seed=*/7, /*step_function=*/"step 0", /*call=*/0,
                                    /*microbatch=*/1);
      expected = plain(x.narrow(0, 4, 4).clone());
    }
    EXPECT_TRUE(torch::equal(second_half, expected));
  });
}

}  // namespace
