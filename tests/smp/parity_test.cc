#include "tests/smp/parity.h"

#include "tests/smp/models.h"

namespace smp::testing {
namespace {

using parity::Layout;

class Parity : public ::testing::TestWithParam<Layout> {
 protected:
  void SetUp() override { torch::set_num_threads(1); }

  template <class Net, class Optimizer, class Options>
  void check(const std::function<Net()>& make, const Options& options) {
    parity::check<Net, Optimizer>(GetParam(), make, options);
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

/// Equal up to rounding, in float64. Somewhere they must have rounded differently, or nothing was
/// fused.
void expect_close(const parity::Trace& got, const parity::Trace& expected) {
  const auto close = [](const torch::Tensor& a, const torch::Tensor& b) {
    return torch::allclose(a, b, /*rtol=*/1e-9, /*atol=*/1e-12);
  };
  bool differs = false;
  for (size_t step = 0; step < expected.losses.size(); ++step) {
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
  const auto batches = parity::make_batches<TinyGpt>(layout);
  expect_close(parity::run_distributed<TinyGpt, torch::optim::SGD>(make, options, layout, batches),
               parity::run_plain<TinyGpt, torch::optim::SGD>(make, options, layout, batches));
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

INSTANTIATE_TEST_SUITE_P(Layouts, FusedParity,
                         ::testing::Values(Layout{1, 1, 3, "simple", true},
                                           Layout{2, 1, 4, "interleaved", true},
                                           Layout{2, 2, 4, "zb_h1", true},
                                           Layout{3, 1, 6, "zbv", true}));
INSTANTIATE_TEST_SUITE_P(Layouts, Parity, ::testing::ValuesIn(layouts()));

}  // namespace
}  // namespace smp::testing
