// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <map>
#include <string>
#include <vector>

/// Models with routing, sharing, mixed types and writes in place, written in plain libtorch without
/// any knowledge of smp.
namespace stranger {

inline torch::nn::Sequential mlp(int64_t in, int64_t hidden, int64_t out) {
  return torch::nn::Sequential(torch::nn::Linear(in, hidden), torch::nn::ReLU(),
                               torch::nn::Linear(hidden, out));
}

/// Shazeer et al. 2017 with dense dispatch: every expert sees every token, and the gates of those
/// that a token did not choose are zero. The auxiliary loss balances the load.
struct MixtureImpl : torch::nn::Module {
  MixtureImpl(int64_t width, int64_t count, int64_t chosen) : chosen(chosen) {
    router = register_module("router",
                             torch::nn::Linear(torch::nn::LinearOptions(width, count).bias(false)));
    for (int64_t i = 0; i < count; ++i) {
      experts.push_back(
          register_module("expert" + std::to_string(i), mlp(width, 2 * width, width)));
    }
  }

  std::pair<torch::Tensor, torch::Tensor> forward(torch::Tensor x) {
    const auto probabilities = torch::softmax(router(x), -1);
    auto [weights, indices] = probabilities.topk(chosen, -1);
    weights = weights / weights.sum(-1, true);
    const auto gates = torch::zeros_like(probabilities).scatter(-1, indices, weights);
    auto out = torch::zeros_like(x);
    for (size_t i = 0; i < experts.size(); ++i) {
      out += gates.slice(-1, i, i + 1) * experts[i]->forward(x);
    }
    const auto load = gates.gt(0).to(x.dtype()).mean(0);
    return {out, (load * probabilities.mean(0)).sum() * double(experts.size())};
  }

  int64_t chosen;
  torch::nn::Linear router{nullptr};
  std::vector<torch::nn::Sequential> experts;
};
TORCH_MODULE(Mixture);

struct MixtureModelImpl : torch::nn::Module {
  MixtureModelImpl() {
    embed = register_module("embed", torch::nn::Embedding(11, 8));
    for (int i = 0; i < 2; ++i) {
      norms.push_back(register_module("norm" + std::to_string(i),
                                      torch::nn::LayerNorm(torch::nn::LayerNormOptions({8}))));
      mixtures.push_back(register_module("mixture" + std::to_string(i), Mixture(8, 4, 2)));
    }
    head = register_module("head", torch::nn::Linear(8, 11));
  }

  std::pair<torch::Tensor, torch::Tensor> forward(torch::Tensor ids) {
    auto x = embed(ids).flatten(0, 1);
    auto balance = torch::zeros({});
    for (size_t i = 0; i < mixtures.size(); ++i) {
      auto [y, extra] = mixtures[i](norms[i](x));
      x = x + y;
      balance = balance + extra;
    }
    return {head(x), balance};
  }

  torch::nn::Embedding embed{nullptr};
  std::vector<torch::nn::LayerNorm> norms;
  std::vector<Mixture> mixtures;
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(MixtureModel);

/// Graph convolution (Kipf and Welling 2016) with mean aggregation, then graph attention
/// (Velickovic et al. 2017), on edge lists.
struct GraphNetworkImpl : torch::nn::Module {
  explicit GraphNetworkImpl(int64_t classes) {
    self = register_module("self", torch::nn::Linear(5, kWidth));
    neighbour = register_module("neighbour",
                                torch::nn::Linear(torch::nn::LinearOptions(5, kWidth).bias(false)));
    attend = register_module(
        "attend", torch::nn::Linear(torch::nn::LinearOptions(kWidth, kWidth).bias(false)));
    score_from = register_parameter("score_from", torch::randn({kWidth, 1}) * 0.3);
    score_to = register_parameter("score_to", torch::randn({kWidth, 1}) * 0.3);
    head = register_module("head", torch::nn::Linear(kWidth, classes));
  }

  /// Nodes [graphs, n, 5] and edges [graphs, 2, e] from and to nodes of the same graph.
  torch::Tensor forward(torch::Tensor nodes, torch::Tensor edges) {
    const auto graphs = nodes.size(0), count = nodes.size(1);
    const auto offset = torch::arange(graphs, torch::kLong).mul_(count).view({-1, 1, 1});
    const auto flat = (edges + offset).transpose(0, 1).reshape({2, -1});
    const auto from = flat[0], to = flat[1];
    auto x = nodes.reshape({graphs * count, -1});

    const auto ones = torch::ones({from.size(0)});
    const auto degree = torch::zeros({x.size(0)}).scatter_add(0, to, ones).clamp_min(1);
    const auto gathered = torch::zeros_like(x).index_add(0, to, x.index_select(0, from));
    x = torch::relu(self(x) + neighbour(gathered / degree.unsqueeze(1)));

    const auto h = attend(x);
    const auto from_score = torch::mm(h, score_from).squeeze(1),
               to_score = torch::mm(h, score_to).squeeze(1);
    const auto score =
        torch::leaky_relu(from_score.index({from}) + to_score.index({to}), 0.2).exp();
    auto total = torch::full({x.size(0)}, 1e-6);
    total.index_add_(0, to, score);
    const auto weights = score / total.index({to});
    auto out = torch::zeros_like(h);
    out.index_add_(0, to, h.index({from}) * weights.unsqueeze(1));
    x = torch::elu(out + x);

    const auto owner = torch::arange(graphs, torch::kLong).repeat_interleave(count);
    const auto pooled = torch::zeros({graphs, kWidth}).index_add_(0, owner, x);
    return head(pooled);
  }

  static constexpr int64_t kWidth = 6;
  torch::nn::Linear self{nullptr}, neighbour{nullptr}, attend{nullptr}, head{nullptr};
  torch::Tensor score_from, score_to;
};
TORCH_MODULE(GraphNetwork);

/// A table and a text: int64 ids, float64 features, a bool mask; the result is a dictionary.
struct MultiInputImpl : torch::nn::Module {
  using Dict = std::map<std::string, torch::Tensor>;

  MultiInputImpl() {
    words = register_module(
        "words", torch::nn::Embedding(torch::nn::EmbeddingOptions(15, 8).padding_idx(0)));
    attention = register_module("attention", torch::nn::Linear(8, 1));
    features = register_module("features", mlp(4, 8, 8));
    both = register_module("both", torch::nn::Bilinear(8, 8, 8));
    kind = register_module("kind", torch::nn::Linear(8, 3));
    price = register_module("price", torch::nn::Linear(8, 1));
  }

  Dict forward(Dict inputs) {
    const auto mask = inputs.at("mask");
    const auto x = words(inputs.at("ids"));
    const auto scores = attention(x).squeeze(-1).masked_fill(~mask, -1e9);
    const auto weights = torch::softmax(scores, 1);
    const auto text = torch::matmul(weights.unsqueeze(1), x).squeeze(1);
    const auto table = features->forward(inputs.at("features").to(torch::kFloat));
    const auto joined = torch::tanh(both(text, table));
    return {{"kind", kind(joined)},
            {"price", price(joined).squeeze(1)},
            {"weights", weights},
            {"length", mask.sum(1)}};
  }

  torch::nn::Embedding words{nullptr};
  torch::nn::Linear attention{nullptr}, kind{nullptr}, price{nullptr};
  torch::nn::Sequential features{nullptr};
  torch::nn::Bilinear both{nullptr};
};
TORCH_MODULE(MultiInput);

/// Layers from a list; how many run is an argument.
struct AnyDepthImpl : torch::nn::Module {
  explicit AnyDepthImpl(int64_t most) {
    in = register_module("in", torch::nn::Linear(4, 8));
    for (int64_t i = 0; i < most; ++i) layers->push_back(torch::nn::Linear(8, 8));
    register_module("layers", layers);
    head = register_module("head", torch::nn::Linear(8, 2));
  }

  torch::Tensor forward(torch::Tensor x, size_t depth) {
    x = torch::tanh(in(x));
    for (size_t i = 0; i < depth; ++i) {
      x = x + torch::tanh(layers[i]->as<torch::nn::Linear>()->forward(x));
    }
    return head(x);
  }

  torch::nn::Linear in{nullptr}, head{nullptr};
  torch::nn::ModuleList layers;
};
TORCH_MODULE(AnyDepth);

/// Blocks in bfloat16 between layers in float32.
struct MixedTypesImpl : torch::nn::Module {
  MixedTypesImpl() {
    in = register_module("in", torch::nn::Linear(6, 8));
    for (int i = 0; i < 3; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), mlp(8, 16, 8)));
      norms.push_back(register_module("norm" + std::to_string(i),
                                      torch::nn::LayerNorm(torch::nn::LayerNormOptions({8}))));
      blocks.back()->to(torch::kBFloat16);
    }
    head = register_module("head", torch::nn::Linear(8, 3));
  }

  torch::Tensor forward(torch::Tensor x) {
    x = in(x);
    for (size_t i = 0; i < blocks.size(); ++i) {
      const auto y = blocks[i]->forward(norms[i](x).to(torch::kBFloat16));
      x = x + y.to(torch::kFloat);
    }
    return head(x);
  }

  torch::nn::Linear in{nullptr}, head{nullptr};
  std::vector<torch::nn::Sequential> blocks;
  std::vector<torch::nn::LayerNorm> norms;
};
TORCH_MODULE(MixedTypes);

/// The counterpart of Python's `with torch.autocast("cpu")`.
class Autocast {
 public:
  Autocast() : before_(at::autocast::is_autocast_enabled(at::kCPU)) {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::increment_nesting();
  }
  ~Autocast() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, before_);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  bool before_;
};

/// Convolutions and matrix products under autocast; the norm and the head are outside of it.
struct AutocastModelImpl : torch::nn::Module {
  AutocastModelImpl() {
    conv1 = register_module("conv1", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 4, 3)));
    conv2 = register_module("conv2", torch::nn::Conv2d(torch::nn::Conv2dOptions(4, 4, 3)));
    fc1 = register_module("fc1", torch::nn::Linear(16, 12));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({12})));
    fc2 = register_module("fc2", torch::nn::Linear(12, 5));
  }

  torch::Tensor forward(torch::Tensor x) {
    {
      const Autocast autocast;
      x = torch::relu(conv1(x));
      x = torch::relu(conv2(x));
      x = fc1(torch::max_pool2d(x, 2).flatten(1));
    }
    x = norm(x.to(torch::kFloat));
    return fc2(torch::relu(x));
  }

  torch::nn::Conv2d conv1{nullptr}, conv2{nullptr};
  torch::nn::Linear fc1{nullptr}, fc2{nullptr};
  torch::nn::LayerNorm norm{nullptr};
};
TORCH_MODULE(AutocastModel);

/// One encoder for three images: its weights are read three times.
struct SiameseImpl : torch::nn::Module {
  SiameseImpl() {
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 4, 3)));
    hidden = register_module("hidden", torch::nn::Linear(36, 10));
    out = register_module("out", torch::nn::Linear(10, 4));
  }

  torch::Tensor forward(torch::Tensor x) {
    x = torch::max_pool2d(torch::relu(conv(x)), 2).flatten(1);
    return torch::nn::functional::normalize(out(torch::relu(hidden(x))));
  }

  torch::nn::Conv2d conv{nullptr};
  torch::nn::Linear hidden{nullptr}, out{nullptr};
};
TORCH_MODULE(Siamese);

/// Results written into slices of one tensor, masks in place, views of views, and a running mean
/// that forward updates in training.
struct InPlaceImpl : torch::nn::Module {
  InPlaceImpl() {
    embed = register_module("embed", torch::nn::Linear(4, kWidth));
    for (int i = 0; i < 3; ++i) {
      layers.push_back(
          register_module("layer" + std::to_string(i), torch::nn::Linear(kWidth, kWidth)));
    }
    head = register_module("head", torch::nn::Linear(kWidth, 2));
    mean = register_buffer("mean", torch::zeros({kWidth}));
    calls = register_buffer("calls", torch::zeros({}, torch::kLong));
  }

  torch::Tensor forward(torch::Tensor x, torch::Tensor mask) {
    x = embed(x);
    if (is_training()) {
      torch::NoGradGuard no_grad;
      mean.mul_(0.9).add_(x.flatten(0, 1).mean(0), 0.1);
      calls += 1;
    }
    x = x - mean;
    x.masked_fill_(mask.unsqueeze(-1), 0);
    auto out = torch::empty({x.size(0), 3, x.size(1), kWidth});
    for (size_t i = 0; i < layers.size(); ++i) {
      x = torch::tanh(layers[i](x));
      out.select(1, i).copy_(x);
      out.select(1, i).slice(1, 0, 2).mul_(0.5);
    }
    auto flat = out.view({x.size(0), 3, -1});
    flat.narrow(2, 0, kWidth).add_(1);
    auto last = out.transpose(1, 2).flatten(2).view({x.size(0), x.size(1), 3, kWidth});
    last = last.sum(2).clamp_(-2, 2);
    return head(last.relu_());
  }

  static constexpr int64_t kWidth = 6;
  torch::nn::Linear embed{nullptr}, head{nullptr};
  std::vector<torch::nn::Linear> layers;
  torch::Tensor mean, calls;
};
TORCH_MODULE(InPlace);

/// Naumov et al. 2019, DLRM: embedding bags, a network for dense features, all pairwise products.
/// All tables but one have sparse gradients.
struct RecommenderImpl : torch::nn::Module {
  RecommenderImpl() {
    const auto bag = [](int64_t count, torch::nn::EmbeddingBagMode mode) {
      return torch::nn::EmbeddingBag(
          torch::nn::EmbeddingBagOptions(count, kWidth).mode(mode).sparse(true));
    };
    user = register_module("user", torch::nn::Embedding(12, kWidth));
    user_bias = register_module(
        "user_bias", torch::nn::Embedding(torch::nn::EmbeddingOptions(12, 1).sparse(true)));
    items = register_module("items", bag(20, torch::kSum));
    tags = register_module("tags", bag(9, torch::kMean));
    dense = register_module("dense", mlp(3, 8, kWidth));
    top = register_module("top", mlp(kWidth + 6, 8, 1));
  }

  /// Users [b], items [b, 3] with weights [b, 3], tags [b, 4], features [b, 3].
  torch::Tensor forward(torch::Tensor users, torch::Tensor ids, torch::Tensor weights,
                        torch::Tensor tag_ids, torch::Tensor numbers) {
    const auto bottom = torch::relu(dense->forward(numbers));
    const auto all = torch::stack(
        {bottom, user(users), items->forward(ids, {}, weights), tags->forward(tag_ids)}, 1);
    const auto products = torch::bmm(all, all.transpose(1, 2));
    const auto pairs = torch::tril_indices(4, 4, -1);
    const auto flat = products.index({torch::indexing::Slice(), pairs[0], pairs[1]});
    return (top->forward(torch::cat({bottom, flat}, 1)) + user_bias(users)).squeeze(1);
  }

  static constexpr int64_t kWidth = 4;
  torch::nn::Embedding user{nullptr}, user_bias{nullptr};
  torch::nn::EmbeddingBag items{nullptr}, tags{nullptr};
  torch::nn::Sequential dense{nullptr}, top{nullptr};
};
TORCH_MODULE(Recommender);

}  // namespace stranger
