// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <fstream>
#include <sstream>
#include <thread>

#include "tests/ops/report.h"

namespace smp::op_samples {
namespace {

std::string text_of(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

void expect_none(const Report& report, Kind kind) {
  for (const Result& result : report.of(kind)) {
    ADD_FAILURE() << result.name << ": " << result.verdict.text;
  }
}

TEST(OperatorSamples, GiveTheBitsOfPlainLibtorchOrARemedy) {
  const Report report = run_folder("tests/ops/samples");
  expect_none(report, Kind::kWrong);
  expect_none(report, Kind::kUnlikePython);
  // So that a change that refuses everything, or samples that nothing can run, do not pass.
  EXPECT_GE(report.of(Kind::kEqual).size(), 1000u);
  EXPECT_LE(report.of(Kind::kRefused).size(), 15u);
  EXPECT_LE(report.of(Kind::kPlainRefuses).size(), 5u);
  EXPECT_EQ(page(report), text_of("docs/operators.md"))
      << "out of date: bazel run //tests/ops:table > docs/operators.md";
}

const std::thread::id kMainThread = std::this_thread::get_id();

/// Adds one on the threads of ranks.
at::Tensor off_by_one(const at::Tensor& x) {
  return x + (std::this_thread::get_id() == kMainThread ? 0 : 1);
}

at::Tensor needs_main_thread(const at::Tensor& x) {
  TORCH_CHECK(std::this_thread::get_id() == kMainThread, "not here");
  return x.clone();
}

TORCH_LIBRARY(op_samples_test, library) {
  library.def("off_by_one(Tensor x) -> Tensor", off_by_one);
  library.def("needs_main_thread(Tensor x) -> Tensor", needs_main_thread);
}

Sample sample_of(const char* op) {
  Sample sample;
  sample.leaves = {at::ones({3}).requires_grad_()};
  sample.calls = {{c10::Dispatcher::singleton().findSchemaOrThrow(op, ""), {{{"tensor", 0}}}, {}}};
  sample.outputs = {1};
  sample.expected_outputs = {at::ones({3})};
  sample.expected_gradients = {at::tensor({1.0F, 8.0F, 2.0F}) / 16};
  return sample;
}

TEST(OperatorSamples, OtherBitsAndOtherErrorsAreWrong) {
  EXPECT_EQ(check(sample_of("aten::clone")).kind, Kind::kEqual);
  const Verdict other = check(sample_of("op_samples_test::off_by_one"));
  EXPECT_EQ(other.kind, Kind::kWrong);
  EXPECT_EQ(other.text.find("one rank: output 0 of microbatch 0 in call 0 is\n"), 0u) << other.text;
  const Verdict thrown = check(sample_of("op_samples_test::needs_main_thread"));
  EXPECT_EQ(thrown.kind, Kind::kWrong);
  EXPECT_EQ(thrown.text, "one rank: no refusal: step function \"step 0\": not here");
}

TEST(OperatorSamples, WhatPythonGaveIsCompared) {
  Sample sample = sample_of("aten::clone");
  sample.expected_outputs[0] += 1;
  EXPECT_EQ(check(sample).kind, Kind::kUnlikePython);
  EXPECT_EQ(check(sample).text, "output 0");
  sample = sample_of("aten::clone");
  sample.expected_gradients[0] += 1;
  EXPECT_EQ(check(sample).text, "the gradient of leaf 0");
}

TEST(OperatorSamples, ReasonsOfRefusalsNameNoOperator) {
  EXPECT_EQ(reason_of("step function \"step 0\", in or after module \"a.b\": the result shape of "
                      "operator aten::nonzero depends on data. Use another."),
            "the result shape of the operator depends on data");
}

}  // namespace
}  // namespace smp::op_samples
