// SPDX-License-Identifier: Apache-2.0
#include "tests/device/models_suite.h"

#include <ATen/Context.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <ostream>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "examples/gpt/gpt_model.h"
#include "smp/smp.h"
#include "tests/device/finding.h"
#include "tests/device/parity_suite.h"
#include "tests/smp/oracle.h"
#include "tests/smp/plain_scaler.h"
#include "tests/smp/precision.h"

namespace smp::testing {
namespace {

enum class Network { kGpt, kGptWithDropout, kImages };

enum class Precision {
  kFloat,
  kAutocast,  ///< parameters of float32, computes in bfloat16 as libtorch's autocast says
  kFp16,      ///< parameters of float16, masters of float32, a dynamic loss scale
};

/// Something else that a run does.
enum class Extra {
  kNone,
  kGraphs,    ///< launches its computations as graphs from the second step on
  kAgain,     ///< runs its blocks again in the backward pass
  kRegraphs,  ///< both
  kPlaced,    ///< is built on the CPU, and moved by the first step, as its inputs are by each
};

struct Case {
  Network network;
  Precision precision;
  int stages;
  int microbatches;  // microbatches of one replica
  std::string pipeline;
  Extra extra = Extra::kNone;
  int replicas = 1;

  int all_microbatches() const { return replicas * microbatches; }
};

std::string name_of(const Case& tested) {
  constexpr const char* kNetworks[] = {"GPT", "GPT with dropout", "images"};
  constexpr const char* kPrecisions[] = {"float32", "bf16 autocast", "fp16"};
  constexpr const char* kExtras[] = {"", ", graphs", ", again", ", again in graphs", ", placed"};
  return c10::str(kNetworks[static_cast<int>(tested.network)], " ",
                  kPrecisions[static_cast<int>(tested.precision)], ", ", tested.stages, " x ",
                  tested.microbatches, " ", tested.pipeline,
                  kExtras[static_cast<int>(tested.extra)],
                  tested.replicas > 1 ? c10::str(", ", tested.replicas, " replicas") : "");
}

std::ostream& operator<<(std::ostream& out, const Case& tested) { return out << name_of(tested); }

/// A name for GoogleTest: letters, digits and underscores.
std::string test_name(const ::testing::TestParamInfo<Case>& info) {
  std::string name;
  for (const char c : name_of(info.param)) {
    if (std::isalnum(static_cast<unsigned char>(c)) != 0) {
      name += c;
    } else if (name.back() != '_') {
      name += '_';
    }
  }
  return name;
}

constexpr int kSteps = 3;
constexpr int64_t kRows = 2;  // rows of a microbatch

/// Convolutions with batch norm, on the whole side and on half of it. The ways back are those that
/// have deterministic kernels on CUDA.
struct ImagesImpl : torch::nn::Module {
  explicit ImagesImpl(int64_t channels) {
    const auto conv = [](int64_t in, int64_t out) {
      return torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, 3).padding(1));
    };
    enter = register_module("enter", conv(kColours, channels));
    norm1 = register_module("norm1", torch::nn::BatchNorm2d(channels));
    middle = register_module("middle", conv(channels, 2 * channels));
    norm2 = register_module("norm2", torch::nn::BatchNorm2d(2 * channels));
    widen = register_module(
        "widen", torch::nn::ConvTranspose2d(
                     torch::nn::ConvTranspose2dOptions(2 * channels, channels, 2).stride(2)));
    leave = register_module("leave", conv(4 * channels, kColours));
  }

  torch::Tensor forward(const torch::Tensor& x) {
    const auto full = torch::relu(norm1(enter(x)));
    const auto half = torch::relu(norm2(middle(torch::max_pool2d(full, 2))));
    const auto nearest = torch::upsample_nearest2d(half, full.sizes().slice(2));
    return leave(torch::cat({full, nearest, widen(half)}, 1));
  }

  static constexpr int64_t kColours = 3;
  torch::nn::Conv2d enter{nullptr}, middle{nullptr}, leave{nullptr};
  torch::nn::BatchNorm2d norm1{nullptr}, norm2{nullptr};
  torch::nn::ConvTranspose2d widen{nullptr};
};
TORCH_MODULE(Images);

/// Any of the networks.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(Network network) {
    const ModelSizes size = sizes();
    if (network == Network::kImages) {
      images = register_module("images", Images(size.channels));
    } else {
      text = register_module("text",
                             gpt::GPT(gpt::GPTOptions()
                                          .layers(size.layers)
                                          .width(size.width)
                                          .heads(size.heads)
                                          .sequence(size.length)
                                          .dropout(network == Network::kGptWithDropout ? 0.1 : 0)));
    }
  }

  torch::Tensor forward(const torch::Tensor& x) { return text ? text(x) : images(x); }

  torch::Tensor loss(const torch::Tensor& output, const torch::Tensor& target) const {
    return text ? gpt::next_byte_loss(output, target) : torch::mse_loss(output, target);
  }

  gpt::GPT text{nullptr};
  Images images{nullptr};
};
TORCH_MODULE(Net);

Net make_net(Network network) {
  torch::manual_seed(5);
  return Net(network);
}

using Batch = std::pair<torch::Tensor, torch::Tensor>;

std::vector<Batch> make_batches(Network network, int microbatches) {
  torch::manual_seed(7);
  const ModelSizes size = sizes();
  const int64_t rows = kRows * microbatches;
  std::vector<Batch> batches;
  for (int i = 0; i < kSteps; ++i) {
    if (network == Network::kImages) {
      const std::vector<int64_t> shape{rows, ImagesImpl::kColours, size.side, size.side};
      const auto x = torch::randn(shape);
      batches.emplace_back(x, torch::randn(shape));
    } else {
      const auto bytes = torch::randint(gpt::kVocabulary, {rows, size.length + 1});
      batches.emplace_back(bytes.narrow(1, 0, size.length).contiguous(),
                           bytes.narrow(1, 1, size.length).contiguous());
    }
  }
  return batches;
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(Network network,
                                                        const Tensors& parameters) {
  if (network == Network::kImages) {
    return std::make_unique<torch::optim::SGD>(parameters,
                                               torch::optim::SGDOptions(0.05).momentum(0.9));
  }
  return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(1e-3));
}

/// One with which the first step overflows and is skipped, and the others do not and are not.
LossScaleOptions loss_scale() {
  return dynamic(DynamicLossArgs().init_scale(1 << 30).scale_factor(1 << 20));
}

/// The loss of a module, or of the `DistributedModel` around it.
template <class Model>
torch::Tensor loss_of(Model& model, const Net& net, const Batch& batch, Precision precision) {
  std::optional<amp::Autocast> autocast;
  if (precision == Precision::kAutocast) {
    autocast.emplace(torch::kBFloat16, test_device(0).type());
  }
  return net->loss(model(batch.first), batch.second);
}

struct Trained {
  std::vector<Tensors> losses;  // losses by step, by microbatch
  Named weights;
};

/// One process. With fp16, parameters of float16 that follow masters of float32.
class PlainTraining {
 public:
  explicit PlainTraining(Case tested)
      : tested_(std::move(tested)), net_(make_net(tested_.network)) {
    move(*net_, test_device(0));
    if (is_half()) net_->to(torch::kHalf);
    parameters_ = masters_ = unique_parameters(*net_);
    if (is_half()) {
      for (auto& master : masters_) master = master.detach().to(torch::kFloat).requires_grad_();
    }
    optimizer_ = make_optimizer(tested_.network, masters_);
  }

  /// Trains step `number`. Returns the losses.
  Tensors step(int number, const Batch& batch) {
    Tensors losses;
    optimizer_->zero_grad();
    plain_microbatches(masters_, tested_.replicas, tested_.microbatches, [&](int m) {
      const KeyedRandom random(kSeed, "step 0", number, m);
      const auto of_microbatch = [&](const torch::Tensor& tensor) {
        return part(tensor, tested_.all_microbatches(), m).to(test_device(0));
      };
      const Batch own(of_microbatch(batch.first), of_microbatch(batch.second));
      const auto model = [&](const torch::Tensor& x) {
        const auto output = net_(x);
        return is_half() ? output.to(torch::kFloat) : output;
      };
      const auto loss = loss_of(model, net_, own, tested_.precision);
      losses.push_back(loss.detach().cpu());
      (is_half() ? loss * torch::full({}, scaler_.scale) : loss).backward();
      if (is_half()) give_gradients_to_masters();
    });
    update();
    return losses;
  }

  Named weights() const {
    Named result = state_of(*net_);
    for (auto& [name, tensor] : result) tensor = tensor.cpu();
    return result;
  }

 private:
  bool is_half() const { return tested_.precision == Precision::kFp16; }

  void give_gradients_to_masters() {
    for (size_t i = 0; i < masters_.size(); ++i) {
      auto& gradient = parameters_[i].mutable_grad();
      masters_[i].mutable_grad() = gradient.to(torch::kFloat);
      gradient.reset();
    }
  }

  void update() {
    if (!is_half()) {
      optimizer_->step();
      return;
    }
    Tensors gradients;
    for (const auto& master : masters_) gradients.push_back(master.grad());
    const bool overflow = !precision::all_finite(gradients);
    if (!overflow) {
      precision::scale_all(gradients, static_cast<float>(1 / scaler_.scale));
      optimizer_->step();
      const torch::NoGradGuard no_grad;
      for (size_t i = 0; i < masters_.size(); ++i) parameters_[i].copy_(masters_[i]);
    }
    scaler_.update(overflow);
  }

  const Case tested_;
  Net net_;
  Tensors parameters_, masters_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  PlainScaler scaler_{loss_scale()};
};

Trained run_plain(const Case& tested) {
  PlainTraining training(tested);
  Trained run;
  for (const Batch& batch : make_batches(tested.network, tested.all_microbatches())) {
    run.losses.push_back(training.step(static_cast<int>(run.losses.size()), batch));
  }
  run.weights = training.weights();
  return run;
}

Config config_of(const Case& tested) {
  const bool graphs = tested.extra == Extra::kGraphs || tested.extra == Extra::kRegraphs;
  return Config()
      .partitions(tested.stages)
      .microbatches(tested.microbatches)
      .pipeline(tested.pipeline)
      .ddp(tested.replicas > 1)
      .fp16(tested.precision == Precision::kFp16)
      .cuda_graphs(graphs ? "on" : "off")
      .seed(kSeed)
      .timeout_seconds(60);
}

/// Has the blocks of a GPT run again.
void checkpoint_blocks(const Net& net) {
  for (const auto& module : net->modules()) {
    if (const auto* block = module->as<gpt::BlockImpl>()) set_activation_checkpointing(*block);
  }
}

Trained run_distributed(const Case& tested) {
  const auto batches = make_batches(tested.network, tested.all_microbatches());
  const int ranks = tested.stages * tested.replicas;
  std::vector<Net> nets;  // rank threads share the default generator
  for (int i = 0; i < ranks; ++i) nets.push_back(make_net(tested.network));
  Trained run;
  run.losses.assign(kSteps, Tensors(tested.all_microbatches()));
  std::mutex mutex;
  run_as_threads(ranks, config_of(tested), [&] {
    const at::Device device = test_device(rank());
    const bool placed = tested.extra == Extra::kPlaced;
    Net net = nets[rank()];
    if (placed) {
      set_device(device.index());
    } else {
      move(*net, device);
    }
    DistributedModel<Net> model(net);
    const auto plain = make_optimizer(tested.network, model->parameters());
    auto optimizer = distributed(*plain);
    if (tested.precision == Precision::kFp16) optimizer.scale_loss(loss_scale());
    if (tested.extra == Extra::kAgain || tested.extra == Extra::kRegraphs) checkpoint_blocks(net);
    auto train = smp::step([&](torch::Tensor x, torch::Tensor y) {
      auto loss = loss_of(model, net, {x, y}, tested.precision);
      model->backward(loss);
      return loss;
    });
    for (int i = 0; i < kSteps; ++i) {
      optimizer.zero_grad();
      const auto given = [&](const torch::Tensor& tensor) {
        return part(tensor, dp_size(), dp_rank()).to(placed ? at::Device(at::kCPU) : device);
      };
      const auto losses = train(given(batches[i].first), given(batches[i].second));
      optimizer.step();
      const std::lock_guard<std::mutex> lock(mutex);
      for (int m = 0; m < tested.microbatches; ++m) {
        EXPECT_EQ(losses.outputs()[m].device(), device);
        run.losses[i][dp_rank() * tested.microbatches + m] = losses.outputs()[m].cpu();
      }
    }
    const auto state = to_map(model->state_dict());
    const std::lock_guard<std::mutex> lock(mutex);
    if (dp_rank() == 0) run.weights = state;
  });
  return run;
}

torch::Tensor bytes_of(const torch::Tensor& tensor) {
  return tensor.contiguous().view({-1}).view(torch::kByte);
}

/// A line if the two differ in a bit.
std::string difference(const std::string& name, const torch::Tensor& got,
                       const torch::Tensor& expected) {
  if (!got.defined()) return c10::str("  ", name, ": none\n");
  if (got.scalar_type() != expected.scalar_type() || got.sizes() != expected.sizes()) {
    return c10::str("  ", name, ": ", got.scalar_type(), " ", got.sizes(), ", expected ",
                    expected.scalar_type(), " ", expected.sizes(), "\n");
  }
  if (torch::equal(bytes_of(got), bytes_of(expected))) return "";
  const auto distance = (got.to(torch::kDouble) - expected.to(torch::kDouble)).abs();
  return c10::str("  ", name, ": ", distance.gt(0).sum().item<int64_t>(), " of ", got.numel(),
                  " elements, by up to ", distance.max().item<double>(), "\n");
}

/// A line for each loss and weight that is not the same to the bit.
std::string differences(const Trained& got, const Trained& expected) {
  std::string lines;
  for (size_t i = 0; i < expected.losses.size(); ++i) {
    for (size_t m = 0; m < expected.losses[i].size(); ++m) {
      lines += difference(c10::str("loss of step ", i, ", microbatch ", m), got.losses[i][m],
                          expected.losses[i][m]);
    }
  }
  if (got.weights.size() != expected.weights.size()) {
    lines +=
        c10::str("  ", got.weights.size(), " weights, expected ", expected.weights.size(), "\n");
  }
  for (const auto& [name, weight] : expected.weights) {
    const auto found = got.weights.find(name);
    lines += difference(name, found == got.weights.end() ? torch::Tensor() : found->second, weight);
  }
  return lines;
}

/// Numbers that equal each other although they are NaN show nothing.
void expect_finite(const Trained& run) {
  for (const Tensors& losses : run.losses) {
    for (const auto& loss : losses) EXPECT_TRUE(torch::isfinite(loss).all().item<bool>()) << loss;
  }
  for (const auto& [name, weight] : run.weights) {
    EXPECT_TRUE(torch::isfinite(weight).all().item<bool>()) << name;
  }
}

/// Chooses for libtorch's operators, until it ends, whether they may take kernels that give other
/// bits each time. Where an operator has no others, on is an error.
class DeterministicAlgorithms {
 public:
  explicit DeterministicAlgorithms(bool on)
      : was_on_(at::globalContext().deterministicAlgorithms()),
        cudnn_was_on_(at::globalContext().deterministicCuDNN()) {
    set(on, on);
  }
  ~DeterministicAlgorithms() { set(was_on_, cudnn_was_on_); }
  DeterministicAlgorithms(const DeterministicAlgorithms&) = delete;
  DeterministicAlgorithms& operator=(const DeterministicAlgorithms&) = delete;

 private:
  static void set(bool on, bool cudnn_on) {
    at::globalContext().setDeterministicAlgorithms(on, /*warn_only=*/false);
    at::globalContext().setDeterministicCuDNN(cudnn_on);
  }

  const bool was_on_, cudnn_was_on_;
};

/// The result of `run_plain` with deterministic algorithms; layouts share it.
const Trained& deterministic_plain(const Case& tested) {
  static std::map<std::tuple<Network, Precision, int, int>, Trained> runs;
  const std::tuple key(tested.network, tested.precision, tested.microbatches, tested.replicas);
  const auto found = runs.find(key);
  return found != runs.end() ? found->second : runs.emplace(key, run_plain(tested)).first->second;
}

const char* same_twice(const Trained& first, const Trained& second) {
  return differences(first, second).empty() ? "the same bits twice" : "other bits each time";
}

class ModelParity : public ::testing::TestWithParam<Case> {};

TEST_P(ModelParity, EqualsPlainLibtorch) {
  torch::set_num_threads(1);
  const DeterministicAlgorithms deterministic(true);
  const Case& tested = GetParam();
  const Trained& plain = deterministic_plain(tested);
  expect_finite(plain);
  const Trained ranks = run_distributed(tested);
  const std::string lines = differences(ranks, plain);
  if (lines.empty()) return;
  ADD_FAILURE() << "not the bits of plain libtorch:\n"
                << lines << "plain libtorch gives " << same_twice(run_plain(tested), plain)
                << ", the ranks give " << same_twice(run_distributed(tested), ranks);
}

class ModelParityByDefault : public ::testing::TestWithParam<Case> {};

/// The machine decides whether plain libtorch equals itself; where it does, ranks must equal it.
TEST_P(ModelParityByDefault, EqualsPlainLibtorchThatEqualsItself) {
  torch::set_num_threads(1);
  const DeterministicAlgorithms deterministic(false);
  const Case& tested = GetParam();
  const Trained plain = run_plain(tested);
  const auto repeats = [&] { return differences(run_plain(tested), plain).empty(); };
  const bool repeats_once = repeats();
  const std::string lines = differences(run_distributed(tested), plain);
  const std::string name = name_of(tested) + ", without deterministic algorithms, ";
  print_finding(name + "plain twice", repeats_once ? "equal" : "differ", "bits");
  print_finding(name + "ranks and plain", lines.empty() ? "equal" : "differ", "bits");
  if (lines.empty() || !repeats_once) return;
  // Equal once may be chance.
  const bool repeats_always = repeats() && repeats() && repeats();
  EXPECT_FALSE(repeats_always) << "not the bits of plain libtorch, which are the same five times:\n"
                               << lines;
}

/// Without those that the device cannot compute.
std::vector<Case> possible(std::vector<Case> cases) {
  const ModelSizes size = sizes();
  const auto is_impossible = [&](const Case& tested) {
    return (tested.precision == Precision::kAutocast && !size.casts) ||
           (tested.network == Network::kImages && !size.convolves);
  };
  cases.erase(std::remove_if(cases.begin(), cases.end(), is_impossible), cases.end());
  return cases;
}

std::vector<Case> deterministic_cases() {
  constexpr auto kGpt = Network::kGpt, kDrop = Network::kGptWithDropout, kImages = Network::kImages;
  constexpr auto kFloat = Precision::kFloat, kCast = Precision::kAutocast, kHalf = Precision::kFp16;
  return possible({
      {kGpt, kFloat, 1, 1, "interleaved"},
      {kGpt, kFloat, 2, 4, "1f1b"},
      {kDrop, kFloat, 1, 3, "interleaved"},
      {kDrop, kFloat, 2, 4, "zb_h1"},
      {kDrop, kFloat, 1, 3, "interleaved", Extra::kGraphs},
      {kDrop, kFloat, 2, 4, "zb_h1", Extra::kGraphs},
      {kDrop, kFloat, 2, 4, "1f1b", Extra::kAgain},
      {kGpt, kCast, 1, 1, "interleaved"},
      {kGpt, kCast, 2, 4, "1f1b"},
      {kDrop, kCast, 1, 3, "interleaved"},
      {kDrop, kCast, 2, 4, "zb_h1"},
      {kDrop, kCast, 1, 3, "interleaved", Extra::kGraphs},
      {kDrop, kCast, 2, 4, "1f1b", Extra::kGraphs},
      {kDrop, kCast, 1, 3, "interleaved", Extra::kAgain},
      {kDrop, kCast, 2, 4, "1f1b", Extra::kRegraphs},
      {kDrop, kCast, 2, 4, "1f1b", Extra::kPlaced},
      {kDrop, kCast, 1, 2, "interleaved", Extra::kNone, /*replicas=*/2},
      {kDrop, kCast, 1, 2, "interleaved", Extra::kGraphs, /*replicas=*/2},
      {kDrop, kCast, 2, 3, "1f1b", Extra::kRegraphs, /*replicas=*/2},
      {kDrop, kHalf, 1, 3, "interleaved"},
      {kDrop, kHalf, 2, 4, "1f1b"},
      {kDrop, kHalf, 2, 4, "zb_h1", Extra::kGraphs},
      {kImages, kFloat, 1, 3, "interleaved"},
      {kImages, kFloat, 2, 4, "1f1b", Extra::kGraphs},
      {kImages, kCast, 1, 3, "interleaved", Extra::kGraphs},
      {kImages, kCast, 2, 4, "zb_h1"},
      {kImages, kCast, 2, 4, "1f1b", Extra::kPlaced},
  });
}

std::vector<Case> default_cases() {
  std::vector<Case> cases;
  for (const Network network : {Network::kGptWithDropout, Network::kImages}) {
    for (const Precision precision : {Precision::kFloat, Precision::kAutocast}) {
      cases.push_back({network, precision, 1, 1, "interleaved"});
      cases.push_back({network, precision, 1, 3, "interleaved"});
      cases.push_back({network, precision, 2, 4, "1f1b"});
    }
  }
  return possible(cases);
}

INSTANTIATE_TEST_SUITE_P(Models, ModelParity, ::testing::ValuesIn(deterministic_cases()),
                         test_name);
INSTANTIATE_TEST_SUITE_P(Models, ModelParityByDefault, ::testing::ValuesIn(default_cases()),
                         test_name);

}  // namespace
}  // namespace smp::testing
