// SPDX-License-Identifier: Apache-2.0
#include "tests/zoo/harness.h"
#include "tests/zoo/models_irregular.h"

namespace smp::zoo {
namespace {

using torch::Tensor;

void train_mixture_of_experts(Run& run) {
  auto model = run.model(stranger::MixtureModel());
  auto optimizer = run.optimizer<torch::optim::Adam>(model, torch::optim::AdamOptions(1e-2));
  auto train = run.step([&](Tensor ids, Tensor targets) {
    auto [logits, balance] = model(ids);
    auto loss = torch::cross_entropy_loss(logits, targets.flatten()) + 0.01 * balance;
    model.backward(loss);
    return std::make_tuple(loss, balance);
  });
  auto evaluate = run.step([&](Tensor ids, Tensor targets) {
    const auto [logits, balance] = model(ids);
    return std::make_tuple(logits.argmax(1).eq(targets.flatten()).sum(), balance);
  });
  train_and_evaluate(model, optimizer, train, evaluate, [&] {
    return std::make_tuple(run.randint(0, 11, {6, 5}), run.randint(0, 11, {6, 5}));
  });
}

/// Nodes and integer edge lists; the number of edges changes once.
void train_graph_network(Run& run) {
  auto model = run.model(stranger::GraphNetwork(3));
  auto optimizer = run.optimizer<torch::optim::Adam>(model, torch::optim::AdamOptions(1e-2));
  auto train = run.step([&](Tensor nodes, Tensor edges, Tensor labels) {
    auto loss = torch::cross_entropy_loss(model(nodes, edges), labels);
    model.backward(loss);
    return loss;
  });
  auto evaluate = run.step([&](Tensor nodes, Tensor edges, Tensor labels) {
    torch::NoGradGuard no_grad;
    return std::make_pair(model(nodes, edges), labels);
  });
  int calls = 0;
  train_and_evaluate(model, optimizer, train, evaluate, [&] {
    const int64_t edges = calls++ == 2 ? 9 : 11;
    return std::make_tuple(run.randn({6, 7, 5}), run.randint(0, 7, {6, 2, edges}),
                           run.randint(0, 3, {6}));
  });
}

/// Dictionaries in and out.
void train_multi_input(Run& run) {
  using Dict = stranger::MultiInputImpl::Dict;
  auto model = run.model(stranger::MultiInput());
  auto optimizer = run.optimizer<torch::optim::Adam>(model, torch::optim::AdamOptions(1e-2));
  auto train = run.step([&](Dict inputs, std::pair<Tensor, Tensor> targets) {
    Dict outputs = model(inputs);
    auto loss = torch::cross_entropy_loss(outputs.at("kind"), targets.first) +
                torch::huber_loss(outputs.at("price"), targets.second);
    model.backward(loss);
    outputs["loss"] = loss;
    return outputs;
  });
  auto evaluate = run.step([&](Dict inputs, std::pair<Tensor, Tensor>) { return model(inputs); });
  train_and_evaluate(model, optimizer, train, evaluate, [&] {
    const auto length = run.randint(1, 6, {6, 1});
    Dict inputs{{"ids", run.randint(0, 15, {6, 5})},
                {"features", run.randn({6, 4}).to(torch::kDouble)},
                {"mask", torch::arange(5).unsqueeze(0) < length}};
    return std::make_tuple(inputs, std::make_pair(run.randint(0, 3, {6}), run.randn({6})));
  });
}

/// Every depth is a graph of its own; the first step trains all layers.
void train_any_depth(Run& run) {
  auto model = run.model(stranger::AnyDepth(5));
  auto optimizer = run.optimizer<torch::optim::SGD>(model, torch::optim::SGDOptions(0.1));
  auto train = run.step([&](Tensor x, Tensor y, size_t depth) {
    auto loss = torch::mse_loss(model(x, depth), y);
    model.backward(loss);
    return std::make_pair(loss, depth);
  });
  auto evaluate = run.step([&](Tensor x, Tensor y, size_t depth) {
    return torch::mse_loss(model(x, depth), y, at::Reduction::None);
  });
  size_t calls = 0;
  const std::vector<size_t> depths{5, 3, 2, 5, 0, 4, 3};
  const auto batch = [&] {
    const size_t depth = depths[calls++ % depths.size()];
    return std::make_tuple(run.randn({6, 4}), run.randn({6, 2}), depth);
  };
  train_and_evaluate(model, optimizer, train, evaluate, batch);
  train_and_evaluate(model, optimizer, train, evaluate, batch);
}

void train_mixed_types(Run& run) {
  auto model = run.model(stranger::MixedTypes());
  auto optimizer = run.optimizer<torch::optim::SGD>(model, torch::optim::SGDOptions(0.1));
  auto train = run.step([&](Tensor x, Tensor y) {
    auto loss = torch::cross_entropy_loss(model(x), y);
    model.backward(loss);
    return loss;
  });
  auto evaluate = run.step([&](Tensor x, Tensor) { return model(x).to(torch::kHalf); });
  train_and_evaluate(model, optimizer, train, evaluate, [&] {
    return std::make_tuple(run.randn({6, 6}), run.randint(0, 3, {6}));
  });
}

void train_autocast(Run& run) {
  auto model = run.model(stranger::AutocastModel());
  auto optimizer = run.optimizer<torch::optim::Adam>(model, torch::optim::AdamOptions(1e-2));
  auto train = run.step([&](Tensor x, Tensor y) {
    const auto logits = model(x);
    auto loss = torch::cross_entropy_loss(logits, y);
    model.backward(loss);
    return std::make_pair(loss, logits);
  });
  auto evaluate = run.step([&](Tensor x, Tensor) {
    torch::NoGradGuard no_grad;
    return model(x);
  });
  train_and_evaluate(model, optimizer, train, evaluate, [&] {
    return std::make_tuple(run.randn({6, 1, 8, 8}), run.randint(0, 5, {6}));
  });
}

/// Anchor, positive and negative through one encoder.
void train_siamese(Run& run) {
  auto model = run.model(stranger::Siamese());
  auto optimizer = run.optimizer<torch::optim::Adam>(model, torch::optim::AdamOptions(1e-2));
  auto train = run.step([&](Tensor anchor, std::vector<Tensor> others) {
    const auto a = model(anchor), p = model(others[0]), n = model(others[1]);
    auto loss = torch::triplet_margin_loss(a, p, n, 1.0);
    model.backward(loss);
    return std::make_tuple(loss, std::vector<Tensor>{a, p, n});
  });
  auto evaluate = run.step([&](Tensor anchor, std::vector<Tensor> others) {
    return torch::cosine_similarity(model(anchor), model(others[0]));
  });
  train_and_evaluate(model, optimizer, train, evaluate, [&] {
    const auto image = [&] { return run.randn({6, 1, 8, 8}); };
    const auto anchor = image();
    return std::make_tuple(anchor, std::vector<Tensor>{image(), image()});
  });
}

void train_in_place(Run& run) {
  auto model = run.model(stranger::InPlace());
  auto optimizer = run.optimizer<torch::optim::SGD>(model, torch::optim::SGDOptions(0.1));
  auto train = run.step([&](Tensor x, Tensor mask, Tensor y) {
    auto loss = torch::mse_loss(model(x, mask), y);
    model.backward(loss);
    // The buffers themselves: their content after this microbatch.
    return std::make_tuple(loss, model.net()->mean, model.net()->calls);
  });
  auto evaluate = run.step([&](Tensor x, Tensor mask, Tensor) { return model(x, mask); });
  train_and_evaluate(model, optimizer, train, evaluate, [&] {
    return std::make_tuple(run.randn({6, 5, 4}), run.rand({6, 5}) < 0.3, run.randn({6, 5, 2}));
  });
}

void train_recommender(Run& run) {
  auto model = run.model(stranger::Recommender());
  auto optimizer = run.optimizer<torch::optim::Adagrad>(model, torch::optim::AdagradOptions(0.05));
  auto train = run.step([&](std::vector<Tensor> x, Tensor clicked) {
    auto loss =
        torch::binary_cross_entropy_with_logits(model(x[0], x[1], x[2], x[3], x[4]), clicked);
    model.backward(loss);
    return loss;
  });
  auto evaluate = run.step([&](std::vector<Tensor> x, Tensor clicked) {
    const auto score = torch::sigmoid(model(x[0], x[1], x[2], x[3], x[4]));
    return std::make_pair(score, score.gt(0.5).eq(clicked.gt(0.5)));
  });
  train_and_evaluate(model, optimizer, train, evaluate, [&] {
    const std::vector<Tensor> x{run.randint(0, 12, {6}), run.randint(0, 20, {6, 3}),
                                run.rand({6, 3}), run.randint(0, 9, {6, 4}), run.randn({6, 3})};
    return std::make_tuple(x, run.randint(0, 2, {6}).to(torch::kFloat));
  });
}

}  // namespace

std::vector<Program> irregular() {
  return {{"MixtureOfExperts", train_mixture_of_experts},
          {"GraphNetwork", train_graph_network},
          {"MultiInput", train_multi_input},
          {"AnyDepth", train_any_depth},
          {"MixedTypes", train_mixed_types},
          {"Autocast", train_autocast},
          {"Siamese", train_siamese},
          {"InPlace", train_in_place},
          {"Recommender", train_recommender}};
}

}  // namespace smp::zoo
