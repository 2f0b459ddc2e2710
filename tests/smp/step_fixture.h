// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>

#include "tests/smp/api.h"

/// A small net, on one rank or on two stages, for tests of step functions.
namespace smp::testing {

inline const torch::optim::SGDOptions kSgd = torch::optim::SGDOptions(0.2).momentum(0.9);

class StepTest : public ApiTest {
 protected:
  /// Calls `program` with a model on one rank and then on both of two stages.
  void on_stages(const std::function<void(DistributedModel<Mlp>&)>& program) {
    for (int count : {1, 2}) {
      SCOPED_TRACE(std::to_string(count) + " stages");
      run_as_threads(count, stages(count), [&] {
        DistributedModel<Mlp> model(make_net());
        program(model);
      });
    }
  }

  /// The outputs of the plain net for `x`, microbatch by microbatch.
  Tensors plain(const torch::Tensor& x, int64_t count = 2) const {
    Mlp net = prototype_;
    torch::NoGradGuard no_grad;
    Tensors outputs;
    for (int m = 0; m < count; ++m) outputs.push_back(net(part(x, count, m)));
    return outputs;
  }
};

}  // namespace smp::testing
