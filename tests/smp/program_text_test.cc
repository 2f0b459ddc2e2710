// SPDX-License-Identifier: Apache-2.0
// The text of a rank about its work in a step.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <mutex>
#include <string>

#include "smp/smp.h"

namespace smp::testing {
namespace {

/// A first layer whose weight the second part reads, too, and a buffer that counts.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    first = register_module("first", torch::nn::Linear(2, 2));
    second = register_module("second", torch::nn::Linear(2, 3));
    seen = register_buffer("seen", torch::zeros({1}));
    set_partition(*first, 0);
    set_partition(*second, 1);
  }

  torch::Tensor forward(torch::Tensor x) {
    auto y = first(x);
    seen += 1;
    const auto scope = partition(1);
    return second(y).sum() + first->weight.sum();
  }

  torch::nn::Linear first{nullptr}, second{nullptr};
  torch::Tensor seen;
};
TORCH_MODULE(Net);

TEST(ProgramText, HasStagesAndActions) {
  torch::set_num_threads(1);
  std::map<int, std::string> texts;
  std::mutex mutex;
  run_as_threads(2, Config().partitions(2).microbatches(2).pipeline("1f1b"), [&] {
    Net net;
    DistributedModel<Net> model(net);
    auto train = step([&](torch::Tensor x) {
      auto loss = net(x);
      model->backward(loss);
      return loss;
    });
    EXPECT_EQ(train.program(), "");
    train(torch::ones({4, 2}));
    const std::lock_guard<std::mutex> lock(mutex);
    texts[rank()] = train.program();
  });
  EXPECT_EQ(texts[0], R"(1f1b, 2 stages, 2 microbatches
stage 0: 3 operators, forward and backward
  input 0     %0 f32[2, 2]
  parameter   first.weight f32[2, 2], gradient to its sum
  parameter   first.bias f32[2], gradient to its sum
  buffer      seen f32[1]
  to 1        %4 f32[2, 2], gradient comes back
  to 1        first.weight f32[2, 2], the gradient of its use there comes back
actions
  0SEND_COPY>1, 16 bytes
  0F0
  0SEND_F0>1, 192 bytes
  0F1
  0SEND_F1>1, 192 bytes
  0RECV_B0<1, 320 bytes
  0B0
  0RECV_B1<1, 320 bytes
  0B1
  0REDUCE
  1OUTPUTS, 192 bytes
)");
  EXPECT_EQ(texts[1], R"(1f1b, 2 stages, 2 microbatches
stage 1: 5 operators, forward and backward
  parameter   first.weight f32[2, 2], of another stage, gradient to its owner
  parameter   second.weight f32[3, 2], gradient to its sum
  parameter   second.bias f32[3], gradient to its sum
  from 0      %4 f32[2, 2], gradient back
  backward of %13 f32[]
  output 0    %13 f32[]
actions
  1RECV_COPY<0, 16 bytes
  1RECV_F0<0, 192 bytes
  1F0
  1B0
  1SEND_B0>0, 320 bytes
  1RECV_F1<0, 192 bytes
  1F1
  1B1
  1SEND_B1>0, 320 bytes
  1REDUCE
  1OUTPUTS, 192 bytes
)");
}

/// A buffer that both stages read.
struct TwiceScaledImpl : torch::nn::Module {
  TwiceScaledImpl() {
    first = register_module("first", torch::nn::Linear(2, 2));
    second = register_module("second", torch::nn::Linear(2, 2));
    scale = register_buffer("scale", torch::ones({2}));
    set_partition(*first, 0);
    set_partition(*second, 1);
  }

  torch::Tensor forward(const torch::Tensor& x) {
    const auto y = first(x) * scale;
    const auto scope = partition(1);
    return (second(y) * scale).sum();
  }

  torch::nn::Linear first{nullptr}, second{nullptr};
  torch::Tensor scale;
};
TORCH_MODULE(TwiceScaled);

std::string line_of(const std::string& text, const std::string& action) {
  const size_t begin = text.find("  " + action);
  return begin == std::string::npos ? "" : text.substr(begin, text.find('\n', begin) - begin);
}

TEST(ProgramText, CountsABufferOnceSomeStepWritesIt) {
  torch::set_num_threads(1);
  std::map<int, std::string> before, after;
  std::mutex mutex;
  run_as_threads(2, Config().partitions(2).microbatches(2).pipeline("1f1b"), [&] {
    TwiceScaled net;
    DistributedModel<TwiceScaled> model(net);
    auto train = step([&](torch::Tensor x) {
      auto loss = net(x);
      model->backward(loss);
      return loss;
    });
    auto write = step([&](torch::Tensor x) {
      net->scale += 1;
      return (net->first(x) * net->scale).sum();
    });
    train(torch::ones({4, 2}));
    const std::string text = train.program();
    write(torch::ones({4, 2}));
    const std::lock_guard<std::mutex> lock(mutex);
    before[rank()] = text;
    after[rank()] = train.program();
  });
  EXPECT_EQ(line_of(before[0], "0SEND_COPY"), "  0SEND_COPY>1");
  EXPECT_EQ(line_of(before[1], "1RECV_COPY"), "  1RECV_COPY<0");
  EXPECT_EQ(line_of(after[0], "0SEND_COPY"), "  0SEND_COPY>1, 8 bytes");
  EXPECT_EQ(line_of(after[1], "1RECV_COPY"), "  1RECV_COPY<0, 8 bytes");
}

}  // namespace
}  // namespace smp::testing
