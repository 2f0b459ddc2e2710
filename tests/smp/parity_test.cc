// SPDX-License-Identifier: Apache-2.0
#include "tests/smp/parity.h"

#include "tests/covering_array.h"
#include "tests/smp/models.h"
#include "tests/smp/operator_count.h"

namespace smp::testing {
namespace {

using parity::Layout;

/// A model with its optimizer, trained over ranks of a layout.
struct Training {
  friend std::ostream& operator<<(std::ostream& out, const Training& one) {
    return out << one.name << ", " << one.layout;
  }
  std::string name;
  Layout layout;
};

class Parity : public ::testing::TestWithParam<Training> {
 protected:
  void SetUp() override { torch::set_num_threads(1); }
};

TEST_P(Parity, WithOneProcess) {
  const auto& [name, layout] = GetParam();
  const torch::optim::AdamOptions adam(1e-2);
  const auto sgd = torch::optim::SGDOptions(0.1).momentum(0.9);
  const std::function<TinyConvNet()> conv_net = [] { return TinyConvNet(); };
  const auto gpt = [](bool tied) {
    return std::function<TinyGpt()>([tied] { return TinyGpt(tied); });
  };
  if (name == "Gpt") {
    parity::check<TinyGpt, torch::optim::Adam>(layout, gpt(false), adam);
  } else if (name == "TiedGpt") {
    parity::check<TinyGpt, torch::optim::SGD>(layout, gpt(true), sgd);
  } else if (name == "ConvNet") {
    parity::check<TinyConvNet, torch::optim::SGD>(layout, conv_net, sgd);
  } else {
    ASSERT_EQ(name, "ConvNetWithAdam");
    parity::check<TinyConvNet, torch::optim::Adam>(layout, conv_net, adam);
  }
}

/// All parameters as views of one tensor, as programs do that reduce gradients themselves.
TinyGpt flat_gpt() {
  TinyGpt net(false);
  const auto parameters = net->parameters();
  int64_t total = 0;
  for (const auto& parameter : parameters) total += parameter.numel();
  torch::Tensor flat = torch::empty({total});
  int64_t offset = 0;
  for (auto parameter : parameters) {
    const auto place = flat.narrow(0, offset, parameter.numel()).view_as(parameter);
    place.copy_(parameter.detach());
    parameter.set_data(place);
    offset += parameter.numel();
  }
  return net;
}

TEST(ParametersOnOneStorage, TrainAsOneProcess) {
  torch::set_num_threads(1);
  for (const int stages : {1, 2, 3}) {
    const Layout layout{stages, 2, 2, "interleaved"};
    SCOPED_TRACE(::testing::Message() << layout);
    parity::check<TinyGpt, torch::optim::Adam>(layout, std::function<TinyGpt()>(flat_gpt),
                                               torch::optim::AdamOptions(1e-2));
  }
}

/// Gradients added up inside matrix products.
class FusedParity : public ::testing::TestWithParam<Layout> {
 protected:
  void SetUp() override { torch::set_num_threads(1); }
};

TEST_P(FusedParity, TiedGpt) {
  const std::function<TinyGpt()> make = [] {
    TinyGpt net(true);
    net->to(torch::kDouble);
    return net;
  };
  auto tested =
      parity::training<TinyGpt, torch::optim::SGD>(GetParam(), make, torch::optim::SGDOptions(0.1));
  tested.config.gradient_accumulation_fusion(true);
  const auto plain = tested.run_plain();
  // Whether fused products round differently depends on the CPU's kernels.
  const OperatorCount fused("aten::addmm_");
  expect_close(tested.run_on_ranks(), plain);
  EXPECT_GT(fused.value(), 0);
}

std::vector<Layout> layouts() {
  std::vector<Layout> result;
  for (int stages : {1, 2, 3, 4}) {
    for (int replicas : {1, 2}) {
      for (int microbatches : {1, 3, 8}) {
        for (const char* pipeline : {"simple", "interleaved"}) {
          Layout layout{stages, replicas, microbatches, pipeline};
          result.push_back(layout);
          if (stages == 1 || replicas == 1) continue;  // there is one placement only
          layout.placement = "spread";
          result.push_back(layout);
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

/// Trainings of all models over all layouts.
std::vector<Training> trainings() {
  std::vector<Training> product;
  for (const char* name : {"Gpt", "TiedGpt", "ConvNet", "ConvNetWithAdam"}) {
    for (const Layout& layout : layouts()) product.push_back({name, layout});
  }
  return cases_of(product, [](const Training& one) {
    return Factors{one.name,
                   std::to_string(one.layout.stages),
                   std::to_string(one.layout.replicas),
                   std::to_string(one.layout.microbatches),
                   one.layout.pipeline,
                   one.layout.placement};
  });
}

INSTANTIATE_TEST_SUITE_P(Layouts, FusedParity,
                         ::testing::Values(Layout{1, 1, 3, "simple"},
                                           Layout{2, 1, 4, "interleaved"}, Layout{2, 2, 4, "zb_h1"},
                                           Layout{3, 1, 6, "zbv"}));
INSTANTIATE_TEST_SUITE_P(Trainings, Parity, ::testing::ValuesIn(trainings()));

}  // namespace
}  // namespace smp::testing
