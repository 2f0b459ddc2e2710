// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>

#include "tests/error_of.h"
#include "tests/graph/harness.h"

namespace smp::graph::testing {

#define EXPECT_CONTAINS(text, part) \
  EXPECT_NE((text).find(part), std::string::npos) << "the text was: " << (text)

/// Captures functions that are to be refused, with a small net.
class Refusal : public ::testing::Test {
 protected:
  Refusal() { table_ = table_of(*net_); }

  /// The error of capturing `body`, which is the same with data and on shapes.
  std::string text(const std::function<void(torch::Tensor)>& body) {
    const auto function = [&](const Tensors& in) -> Tensors {
      body(in[0]);
      return {};
    };
    const Tensors inputs{torch::randn({4, 4})};
    const std::string with_data = refusal(table_, inputs, function);
    EXPECT_EQ(refusal(table_, inputs, function, false), with_data);
    return with_data;
  }

  void expect_captured(const std::function<void(torch::Tensor)>& body) {
    for (const bool execute : {true, false}) {
      const auto function = [&](const Tensors& in) -> Tensors {
        body(in[0]);
        return {};
      };
      EXPECT_NO_THROW(trace(table_, {torch::randn({4, 4})}, function, execute));
    }
  }

  /// The error of reading data where there is none.
  std::string error_of(const std::function<void(torch::Tensor)>& body, bool execute = true) {
    const auto function = [&](const Tensors& in) -> Tensors {
      body(in[0]);
      return {};
    };
    return smp::testing::error_of<c10::Error>([&] {
      trace(table_, {torch::randn({4, 4})}, function, execute);
    });
  }

  struct NetImpl : torch::nn::Module {
    torch::nn::Linear fc{nullptr};
    NetImpl() { fc = register_module("fc", torch::nn::Linear(4, 4)); }
    torch::Tensor forward(torch::Tensor x) { return fc(x); }
  };
  TORCH_MODULE(Net);

  Net net_;
  TensorTable table_;
};

}  // namespace smp::graph::testing
