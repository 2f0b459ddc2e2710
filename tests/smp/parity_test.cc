#include <gtest/gtest.h>

#include <map>
#include <mutex>

#include "smp/smp.h"
#include "tests/smp/models.h"

namespace smp::testing {
namespace {

using Tensors = std::vector<torch::Tensor>;
using Named = std::map<std::string, torch::Tensor>;

struct Layout {
  int stages;
  int replicas;
  int microbatches;  // of one replica
  std::string pipeline;
  bool fusion = false;  // gradient_accumulation_fusion
};

std::ostream& operator<<(std::ostream& out, const Layout& layout) {
  return out << layout.stages << " stages x " << layout.replicas << " replicas, "
             << layout.microbatches << " microbatches, " << layout.pipeline
             << (layout.fusion ? ", fused" : "");
}

/// What a run leaves behind, to be compared bit for bit.
struct Trace {
  std::vector<Tensors> losses;   // by step; by global microbatch
  std::vector<Named> gradients;  // by step
  Tensors evaluations;           // by step; of replica 0
  Named weights;
};

constexpr uint64_t kSeed = 11;
constexpr int kSteps = 3;

template <class Net>
std::vector<Tensors> make_batches(int64_t size) {
  torch::manual_seed(23);
  std::vector<Tensors> batches;
  for (int i = 0; i < kSteps; ++i) batches.push_back(Net::ContainedType::batch(size));
  return batches;
}

void expect_same(const Named& got, const Named& expected, const std::string& what) {
  ASSERT_EQ(got.size(), expected.size()) << what;
  for (const auto& [name, tensor] : expected) {
    ASSERT_EQ(got.count(name), 1u) << what << " " << name;
    EXPECT_TRUE(torch::equal(got.at(name), tensor))
        << what << " of " << name << ": largest difference "
        << (got.at(name) - tensor).abs().max().item<double>();
  }
}

void expect_same(const Trace& got, const Trace& expected) {
  for (int step = 0; step < kSteps; ++step) {
    ASSERT_EQ(got.losses[step].size(), expected.losses[step].size());
    for (size_t m = 0; m < expected.losses[step].size(); ++m) {
      EXPECT_TRUE(torch::equal(got.losses[step][m], expected.losses[step][m]))
          << "loss of step " << step << ", microbatch " << m << ": "
          << got.losses[step][m].item<double>() << " against "
          << expected.losses[step][m].item<double>();
    }
    expect_same(got.gradients[step], expected.gradients[step],
                "gradient in step " + std::to_string(step));
    EXPECT_TRUE(torch::equal(got.evaluations[step], expected.evaluations[step]))
        << "evaluation after step " << step;
  }
  expect_same(got.weights, expected.weights, "value");
}

/// Up to rounding, in float64. Somewhere it must have rounded differently, or nothing was fused.
void expect_close(const Trace& got, const Trace& expected) {
  const auto close = [](const torch::Tensor& a, const torch::Tensor& b) {
    return torch::allclose(a, b, /*rtol=*/1e-9, /*atol=*/1e-12);
  };
  bool differs = false;
  for (int step = 0; step < kSteps; ++step) {
    for (size_t m = 0; m < expected.losses[step].size(); ++m) {
      EXPECT_TRUE(close(got.losses[step][m], expected.losses[step][m])) << step << " " << m;
    }
    ASSERT_EQ(got.gradients[step].size(), expected.gradients[step].size());
    for (const auto& [name, gradient] : expected.gradients[step]) {
      EXPECT_TRUE(close(got.gradients[step].at(name), gradient)) << name << " in step " << step;
      differs |= !torch::equal(got.gradients[step].at(name), gradient);
    }
  }
  EXPECT_TRUE(differs);
}

/// Plain libtorch on one process: microbatches one after the other, gradients summed as
/// documented (microbatches in order in a shard, shards in order, divided once). Each replica has
/// buffers of its own.
template <class Net, class Optimizer, class Options>
Trace run_plain(const std::function<Net()>& make, const Options& options, const Layout& layout,
                const std::vector<Tensors>& batches) {
  torch::manual_seed(5);
  Net net = make();
  Tensors parameters;
  for (const auto& parameter : net->parameters()) {
    bool seen = false;
    for (const auto& other : parameters) seen |= other.is_same(parameter);
    if (!seen) parameters.push_back(parameter);
  }
  Optimizer optimizer(parameters, options);
  std::vector<Tensors> buffers(layout.replicas);
  for (auto& own : buffers) {
    for (const auto& buffer : net->buffers()) own.push_back(buffer.clone());
  }
  const auto use_buffers = [&](int replica) {
    torch::NoGradGuard no_grad;
    auto current = net->buffers();
    for (size_t i = 0; i < current.size(); ++i) current[i].copy_(buffers[replica][i]);
  };
  const auto keep_buffers = [&](int replica) {
    auto current = net->buffers();
    for (size_t i = 0; i < current.size(); ++i) buffers[replica][i] = current[i].clone();
  };
  Trace trace;
  for (int step = 0; step < kSteps; ++step) {
    const auto& batch = batches[step];
    const int64_t count = layout.replicas * layout.microbatches;
    const int64_t size = batch[0].size(0) / count;
    trace.losses.emplace_back();
    Tensors total(parameters.size());
    for (int replica = 0; replica < layout.replicas; ++replica) {
      use_buffers(replica);
      Tensors sum(parameters.size());
      for (int m = 0; m < layout.microbatches; ++m) {
        const int64_t global = replica * layout.microbatches + m;
        net->zero_grad();
        const KeyedRandom random(kSeed, 0, step, global);
        auto loss = net->loss(batch[0].narrow(0, global * size, size).clone(),
                              batch[1].narrow(0, global * size, size).clone());
        loss.backward();
        trace.losses[step].push_back(loss.detach());
        for (size_t i = 0; i < parameters.size(); ++i) {
          const auto gradient = parameters[i].grad();
          if (!gradient.defined()) continue;
          sum[i] = sum[i].defined() ? sum[i] + gradient : gradient.clone();
        }
      }
      keep_buffers(replica);
      for (size_t i = 0; i < parameters.size(); ++i) {
        if (sum[i].defined()) total[i] = total[i].defined() ? total[i] + sum[i] : sum[i];
      }
    }
    trace.gradients.emplace_back();
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (total[i].defined()) parameters[i].mutable_grad() = total[i] / count;
    }
    for (const auto& item : net->named_parameters()) {
      if (item.value().grad().defined()) {
        trace.gradients[step][item.key()] = item.value().grad().clone();
      }
    }
    optimizer.step();
    use_buffers(0);
    net->eval();
    torch::NoGradGuard no_grad;
    auto sum = torch::zeros({});
    for (int m = 0; m < layout.microbatches; ++m) {
      sum += net->loss(batch[0].narrow(0, m * size, size).clone(),
                       batch[1].narrow(0, m * size, size).clone());
    }
    trace.evaluations.push_back(sum / layout.microbatches);
    net->train();
  }
  use_buffers(0);
  for (const auto& item : net->named_parameters()) trace.weights[item.key()] = item.value().clone();
  for (const auto& item : net->named_buffers()) trace.weights[item.key()] = item.value().clone();
  return trace;
}

template <class Net, class Optimizer, class Options>
Trace run_distributed(const std::function<Net()>& make, const Options& options,
                      const Layout& layout, const std::vector<Tensors>& batches) {
  Trace trace;
  trace.losses.assign(kSteps, Tensors(layout.replicas * layout.microbatches));
  trace.gradients.resize(kSteps);
  trace.evaluations.resize(kSteps);
  std::mutex mutex;
  const auto config = Config()
                          .partitions(layout.stages)
                          .microbatches(layout.microbatches)
                          .pipeline(layout.pipeline)
                          .gradient_accumulation_fusion(layout.fusion)
                          .ddp(layout.replicas > 1)
                          .placement_strategy(layout.microbatches == 3 ? "spread" : "cluster")
                          .seed(kSeed)
                          .timeout_seconds(60);
  torch::manual_seed(5);
  std::vector<Net> nets;
  const int ranks = layout.stages * layout.replicas;
  // Rank 0's weights count; the others' are overwritten.
  for (int i = 0; i < ranks; ++i) nets.push_back(make());
  run_as_threads(ranks, config, [&] {
    DistributedModel<Net> model(nets[rank()]);
    DistributedOptimizer<Optimizer> optimizer(model->parameters(), options);
    auto net = model.get_module();
    const auto loss_of = [&](torch::Tensor x, torch::Tensor y) {
      (void)model;
      return net->loss(x, y);
    };
    auto train = step([&](torch::Tensor x, torch::Tensor y) {
      auto loss = loss_of(x, y);
      model->backward(loss);
      return loss;
    });
    auto evaluate = step([&](torch::Tensor x, torch::Tensor y) { return loss_of(x, y); });
    for (int i = 0; i < kSteps; ++i) {
      const int64_t size = batches[i][0].size(0) / layout.replicas;
      const auto x = batches[i][0].narrow(0, dp_rank() * size, size);
      const auto y = batches[i][1].narrow(0, dp_rank() * size, size);
      model->train();
      optimizer.zero_grad();
      const auto losses = train(x, y);
      std::map<const void*, torch::Tensor> gradients;
      {
        const std::lock_guard<std::mutex> lock(mutex);
        for (int m = 0; m < layout.microbatches; ++m) {
          auto& place = trace.losses[i][dp_rank() * layout.microbatches + m];
          if (place.defined()) {
            EXPECT_TRUE(torch::equal(place, losses.outputs()[m]));
          }
          place = losses.outputs()[m];
        }
        for (const auto& item : model->local_named_parameters()) {
          if (!item.value().grad().defined()) continue;
          const auto gradient = item.value().grad().clone();
          auto& known = trace.gradients[i][item.key()];
          if (known.defined()) {
            EXPECT_TRUE(torch::equal(known, gradient)) << item.key();
          }
          known = gradient;
        }
      }
      optimizer.step();
      model->eval();
      const auto evaluation = evaluate(x, y).reduce_mean();
      const std::lock_guard<std::mutex> lock(mutex);
      if (dp_rank() == 0) trace.evaluations[i] = evaluation;
    }
    const auto state = model->state_dict();
    const std::lock_guard<std::mutex> lock(mutex);
    if (dp_rank() == 0) {
      for (const auto& item : state) trace.weights[item.key()] = item.value();
    }
  });
  return trace;
}

class Parity : public ::testing::TestWithParam<Layout> {
 protected:
  void SetUp() override { torch::set_num_threads(1); }

  template <class Net, class Optimizer, class Options>
  void check(const std::function<Net()>& make, const Options& options) {
    const Layout& layout = GetParam();
    const auto batches = make_batches<Net>(2 * layout.replicas * layout.microbatches);
    const auto plain = run_plain<Net, Optimizer>(make, options, layout, batches);
    const auto distributed = run_distributed<Net, Optimizer>(make, options, layout, batches);
    expect_same(distributed, plain);
  }
};

TEST_P(Parity, Gpt) {
  check<TinyGpt, torch::optim::Adam>([] { return TinyGpt(false); },
                                     torch::optim::AdamOptions(1e-2));
}

TEST_P(Parity, TiedGpt) {
  check<TinyGpt, torch::optim::SGD>([] { return TinyGpt(true); },
                                    torch::optim::SGDOptions(0.1).momentum(0.9));
}

TEST_P(Parity, ConvNet) {
  check<TinyConvNet, torch::optim::SGD>([] { return TinyConvNet(); },
                                        torch::optim::SGDOptions(0.1).momentum(0.9));
}

TEST_P(Parity, ConvNetWithAdam) {
  check<TinyConvNet, torch::optim::Adam>([] { return TinyConvNet(); },
                                         torch::optim::AdamOptions(1e-2));
}

std::vector<Layout> layouts() {
  std::vector<Layout> result;
  for (int stages : {1, 2, 3, 4}) {
    for (int replicas : {1, 2}) {
      for (int microbatches : {1, 3, 8}) {
        for (const char* pipeline : {"simple", "interleaved"}) {
          result.push_back({stages, replicas, microbatches, pipeline});
        }
      }
    }
  }
  for (const char* pipeline : {"1f1b", "eager_1f1b", "interleaved_1f1b", "breadth_first", "zb_h1",
                               "zb_h2", "zbv", "dualpipe_v", "list", "auto"}) {
    for (int stages : {2, 3}) {
      for (int microbatches : {stages, 3 * stages}) {
        result.push_back({stages, 1, microbatches, pipeline});
      }
    }
    result.push_back({2, 2, 4, pipeline});
  }
  return result;
}

/// Gradients added up inside matrix products.
using FusedParity = Parity;

TEST_P(FusedParity, TiedGpt) {
  const std::function<TinyGpt()> make = [] {
    TinyGpt net(true);
    net->to(torch::kDouble);
    return net;
  };
  const torch::optim::SGDOptions options(0.1);
  const Layout& layout = GetParam();
  const auto batches = make_batches<TinyGpt>(2 * layout.replicas * layout.microbatches);
  expect_close(run_distributed<TinyGpt, torch::optim::SGD>(make, options, layout, batches),
               run_plain<TinyGpt, torch::optim::SGD>(make, options, layout, batches));
}

INSTANTIATE_TEST_SUITE_P(Layouts, FusedParity,
                         ::testing::Values(Layout{1, 1, 3, "simple", true},
                                           Layout{2, 1, 4, "interleaved", true},
                                           Layout{2, 2, 4, "zb_h1", true},
                                           Layout{3, 1, 6, "zbv", true}));
INSTANTIATE_TEST_SUITE_P(Layouts, Parity, ::testing::ValuesIn(layouts()));

}  // namespace
}  // namespace smp::testing
