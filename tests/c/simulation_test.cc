// SPDX-License-Identifier: Apache-2.0
// The programs of examples/c and examples/fortran, whose weights are those of one plain process.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "smp/exported.h"
#include "smp/save_load.h"
#include "tests/command.h"
#include "tests/temp_folder.h"

namespace smp::testing {
namespace {

constexpr int kSteps = 12, kCells = 16, kMicrobatches = 2;

/// Rows of three numbers, and of two that follow from them.
struct Samples {
  explicit Samples(int step) : x(torch::zeros({kCells, 3})), y(torch::zeros({kCells, 2})) {
    auto x_of = x.accessor<float, 2>(), y_of = y.accessor<float, 2>();
    for (int cell = 0; cell < kCells; ++cell) {
      for (int i = 0; i < 3; ++i) {
        x_of[cell][i] = static_cast<float>((5 * cell + 7 * step + 11 * i) % 32 - 16) / 16;
      }
      y_of[cell][0] = x_of[cell][0] * x_of[cell][1] - x_of[cell][2];
      y_of[cell][1] = x_of[cell][0] + x_of[cell][1] * x_of[cell][2] / 2;
    }
  }

  torch::Tensor x, y;
};

/// The programs' training in plain libtorch: the mean over two microbatches, in every second step
/// of a gradient in place of a loss.
ExportedModule train_plainly() {
  torch::set_num_threads(1);
  auto model = load_exported("tests/c/train.pt2");
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.01));
  const int64_t rows = kCells / kMicrobatches;
  for (int step = 0; step < kSteps; ++step) {
    const Samples samples(step);
    optimizer.zero_grad();
    for (int m = 0; m < kMicrobatches; ++m) {
      const auto x = samples.x.narrow(0, m * rows, rows).clone();
      const auto y = samples.y.narrow(0, m * rows, rows).clone();
      const auto output = model(x).toTensor();
      if (step % 2 == 0) {
        torch::mse_loss(output, y).backward();
      } else {
        output.backward((output.detach() - y) / static_cast<double>(rows));
      }
    }
    for (auto& parameter : model->parameters()) parameter.mutable_grad().div_(kMicrobatches);
    optimizer.step();
  }
  return model;
}

void check_program(const std::string& program) {
  const TempFolder folder;
  const Outcome outcome = run_command("tests/mpi_test.sh 4 200 " + program + " tests/c/train.pt2 " +
                                      folder.path() + " 2>&1");
  ASSERT_EQ(outcome.status, 0) << outcome.output;
  EXPECT_NE(outcome.output.find("simulated 12 steps, energy 72.991211"), std::string::npos)
      << outcome.output;
  EXPECT_NE(outcome.output.find("trained on 2 ranks"), std::string::npos) << outcome.output;
  auto trained = load_exported("tests/c/train.pt2");
  load_into_module(folder.file("trained"), *trained);
  const auto plain = train_plainly();
  const auto wanted = plain->named_parameters();
  for (const auto& parameter : trained->named_parameters()) {
    EXPECT_TRUE(torch::equal(parameter.value(), wanted[parameter.key()])) << parameter.key();
  }
}

TEST(Simulation, InC) { check_program("examples/c/simulation"); }

TEST(Simulation, InFortran) { check_program("examples/fortran/simulation"); }

}  // namespace
}  // namespace smp::testing
