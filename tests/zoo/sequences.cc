// SPDX-License-Identifier: Apache-2.0
#include "tests/zoo/harness.h"
#include "tests/zoo/models_sequence.h"

namespace smp::zoo {
namespace {

using torch::Tensor;

/// Language modelling, then greedy generation in evaluation.
/// By hand: embedding and head, which may be tied, on the first rank, around the blocks.
void train_gpt(Run& run, bool tied) {
  using stranger::GptImpl;
  stranger::Gpt net(tied);
  run.pin(net, 0);
  for (int i = 0; i < static_cast<int>(net->blocks->size()); ++i) {
    run.pin(net->blocks->ptr(i), i + 1);
  }
  auto model = run.model(net);
  auto optimizer = run.optimizer<torch::optim::AdamW>(model, torch::optim::AdamWOptions(1e-2));
  auto train = run.step([&](Tensor ids) {
    const auto logits = model(ids.slice(1, 0, -1));
    const auto targets = ids.slice(1, 1).reshape(-1);
    auto loss = torch::cross_entropy_loss(logits.flatten(0, 1), targets);
    model.backward(loss);
    return loss;
  });
  auto generate =
      run.step([&](Tensor ids) { return model.net()->generate(ids.slice(1, 0, 3), 3); });
  train_and_evaluate(model, optimizer, train, generate, [&] {
    return std::make_tuple(run.randint(0, GptImpl::kVocabulary, {6, GptImpl::kLength + 1}));
  });
}

void train_gpt_tied(Run& run) { train_gpt(run, true); }
void train_gpt_untied(Run& run) { train_gpt(run, false); }

/// Sentences of several lengths, padded.
void train_translator(Run& run) {
  using stranger::TranslatorImpl;
  auto model = run.model(stranger::Translator());
  auto optimizer = run.optimizer<torch::optim::Adam>(model, torch::optim::AdamOptions(1e-2));
  const auto loss_of = [&](Tensor from, Tensor to) {
    const auto logits = model(from, to.slice(1, 0, -1));
    namespace F = torch::nn::functional;
    return F::cross_entropy(logits.flatten(0, 1), to.slice(1, 1).reshape(-1),
                            F::CrossEntropyFuncOptions().ignore_index(TranslatorImpl::kPadding));
  };
  auto train = run.step([&](Tensor from, Tensor to) {
    auto loss = loss_of(from, to);
    model.backward(loss);
    return loss;
  });
  auto evaluate = run.step([&](Tensor from, Tensor to) {
    torch::NoGradGuard no_grad;
    return std::make_pair(loss_of(from, to), model(from, to.slice(1, 0, 2)).argmax(-1));
  });
  const auto sentences = [&](int64_t length) {
    const auto ids = run.randint(1, TranslatorImpl::kVocabulary, {6, length});
    const auto end = run.randint(3, length + 1, {6, 1});
    return ids.masked_fill(torch::arange(length).unsqueeze(0) >= end, TranslatorImpl::kPadding);
  };
  train_and_evaluate(model, optimizer, train, evaluate,
                     [&] { return std::make_tuple(sentences(6), sentences(5)); });
}

/// Truncated backpropagation through time: the result of one step is given to the next one.
void train_lstm(Run& run) {
  using stranger::LstmModelImpl;
  auto model = run.model(stranger::LstmModel());
  auto optimizer = run.optimizer<torch::optim::SGD>(model, torch::optim::SGDOptions(0.5));
  const auto state_axis = StepOptions().input_split_axes({{2, 1}});
  auto train = run.step(
      [&](Tensor ids, Tensor targets, LstmModelImpl::State state) {
        auto [logits, next] = model(ids, state);
        auto loss = torch::cross_entropy_loss(logits.flatten(0, 1), targets.flatten());
        model.backward(loss);
        return std::make_tuple(loss, next);
      },
      state_axis);
  auto evaluate = run.step(
      [&](Tensor ids, Tensor targets, LstmModelImpl::State state) {
        torch::NoGradGuard no_grad;
        const auto [logits, next] = model(ids, state);
        return std::make_tuple(torch::cross_entropy_loss(logits.flatten(0, 1), targets.flatten()),
                               next);
      },
      state_axis);
  LstmModelImpl::State state{torch::zeros({2, 6, LstmModelImpl::kHidden}),
                             torch::zeros({2, 6, LstmModelImpl::kHidden})};
  const auto carry = [&](const auto& next) {
    state = {torch::cat(std::get<0>(next).outputs(), 1),
             torch::cat(std::get<1>(next).outputs(), 1)};
  };
  for (int i = 0; i < 3; ++i) {
    const auto ids = run.randint(0, LstmModelImpl::kVocabulary, {6, 6});
    const auto x = ids.slice(1, 0, 5).contiguous(), y = ids.slice(1, 1).contiguous();
    model.train();
    optimizer.zero_grad();
    carry(std::get<1>(train(x, y, state)));
    optimizer.step();
    model.eval();
    carry(std::get<1>(evaluate(x, y, state)));
  }
}

/// The decoder's hidden state goes from step to step; the last sentence is longer.
void train_gru(Run& run) {
  using stranger::GruModelImpl;
  auto model = run.model(stranger::GruModel());
  auto optimizer = run.optimizer<torch::optim::Adam>(model, torch::optim::AdamOptions(1e-2));
  auto train = run.step([&](Tensor from, Tensor to, Tensor hidden) {
    auto [logits, next] = model(from, to.slice(1, 0, -1), hidden);
    auto loss = torch::cross_entropy_loss(logits.transpose(1, 2), to.slice(1, 1));
    model.backward(loss);
    return std::make_pair(loss, next);
  });
  auto evaluate = run.step([&](Tensor from, Tensor to, Tensor hidden) {
    torch::NoGradGuard no_grad;
    auto [logits, next] = model(from, to, hidden);
    return std::make_pair(logits, next);
  });
  auto hidden = torch::zeros({6, GruModelImpl::kHidden});
  for (int64_t length : {4, 4, 5, 4}) {
    const auto from = run.randint(0, GruModelImpl::kVocabulary, {6, 4});
    const auto to = run.randint(0, GruModelImpl::kVocabulary, {6, length});
    model.train();
    optimizer.zero_grad();
    hidden = train(from, to, hidden).second.concat();
    optimizer.step();
    model.eval();
    hidden = evaluate(from, to, hidden).second.concat();
  }
}

void train_wavenet(Run& run) {
  auto model = run.model(stranger::WaveNet());
  auto optimizer = run.optimizer<torch::optim::Adagrad>(model, torch::optim::AdagradOptions(0.05));
  auto train = run.step([&](Tensor x, Tensor y) {
    auto loss = torch::cross_entropy_loss(model(x), y);
    model.backward(loss);
    return loss;
  });
  auto evaluate = run.step([&](Tensor x, Tensor y) { return model(x).argmax(1).eq(y); });
  train_and_evaluate(model, optimizer, train, evaluate, [&] {
    return std::make_tuple(run.randn({6, 1, 12}), run.randint(0, 8, {6, 12}));
  });
}

void train_rotary(Run& run) {
  auto model = run.model(stranger::Rotary());
  auto optimizer = run.optimizer<torch::optim::Adam>(model, torch::optim::AdamOptions(1e-2));
  auto train = run.step([&](Tensor ids, Tensor next) {
    auto loss = torch::cross_entropy_loss(model(ids).transpose(1, 2), next);
    model.backward(loss);
    return loss;
  });
  auto evaluate = run.step([&](Tensor ids, Tensor next) {
    torch::NoGradGuard no_grad;
    return std::make_pair(model(ids), next);
  });
  size_t calls = 0;
  const std::vector<int64_t> lengths{4, 4, 6, 5, 6, 7, 4, 7};
  const auto batch = [&] {
    const int64_t length = lengths[calls++ % lengths.size()];
    const auto text = run.randint(0, stranger::RotaryImpl::kVocabulary, {6, length + 1});
    return std::make_tuple(text.slice(1, 0, length), text.slice(1, 1));
  };
  train_and_evaluate(model, optimizer, train, evaluate, batch);
  train_and_evaluate(model, optimizer, train, evaluate, batch);
}

/// Positions past a sentence's valid length count neither in attention nor in the loss.
void train_bert(Run& run) {
  using stranger::BertImpl;
  auto model = run.model(stranger::Bert());
  auto optimizer = run.optimizer<torch::optim::Adam>(model, torch::optim::AdamOptions(1e-2));
  auto train = run.step([&](Tensor ids, Tensor sentence, Tensor lens, Tensor words) {
    const auto logits = model(ids, sentence, lens).transpose(1, 2);
    const auto counts = stranger::sequence_mask(torch::ones(words.sizes()), lens, 0);
    const auto losses = torch::cross_entropy_loss(logits, words, {}, at::Reduction::None);
    auto loss = (losses * counts).mean(1).sum();
    model.backward(loss);
    return loss;
  });
  auto evaluate = run.step([&](Tensor ids, Tensor sentence, Tensor lens, Tensor words) {
    return model(ids, sentence, lens).argmax(-1).eq(words);
  });
  train_and_evaluate(model, optimizer, train, evaluate, [&] {
    const auto ids = run.randint(0, BertImpl::kVocabulary, {6, BertImpl::kLength});
    return std::make_tuple(ids, run.randint(0, 2, {6, BertImpl::kLength}),
                           run.randint(1, BertImpl::kLength + 1, {6}),
                           run.randint(0, BertImpl::kVocabulary, {6, BertImpl::kLength}));
  });
}

}  // namespace

std::vector<Program> sequences() {
  return {{"GptTied", train_gpt_tied},
          {"Gpt", train_gpt_untied},
          {"Translator", train_translator},
          {"Lstm", train_lstm},
          {"Gru", train_gru},
          {"WaveNet", train_wavenet},
          {"Rotary", train_rotary},
          {"Bert", train_bert},
          {"GptTiedByHand", train_gpt_tied, true}};
}

}  // namespace smp::zoo
