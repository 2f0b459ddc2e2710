// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "tests/covering_array.h"
#include "tests/zoo/zoo.h"

/// The test of a family: INSTANTIATE_TEST_SUITE_P(Family, Parity, layouts_of(family()), case_name).
namespace smp::zoo {

inline std::ostream& operator<<(std::ostream& out, const Program& program) {
  return out << program.name;
}

inline std::ostream& operator<<(std::ostream& out, const Layout& layout) {
  return out << layout.stages << " stages, " << layout.pipeline;
}

using Case = std::tuple<Program, Layout>;

class Parity : public ::testing::TestWithParam<Case> {};

/// Runs the program over ranks and compares with plain libtorch in one process, bit for bit.
inline void expect_parity(const Program& program, const Layout& layout) {
  // One plain run does for all layouts.
  static std::map<std::string, std::shared_ptr<const Trace>> plain;
  auto& expected = plain[program.name];
  if (expected == nullptr) expected = run_plain(program);
  std::string text;
  for (const auto& line : differences(*run_over_ranks(program, layout, *expected), *expected)) {
    text += line + "\n";
  }
  EXPECT_EQ(text, "");
}

TEST_P(Parity, WithOneProcess) { expect_parity(std::get<0>(GetParam()), std::get<1>(GetParam())); }

/// Layouts of every program with 1 to 4 stages in both pipelines: all pairs.
inline auto layouts_of(const std::vector<Program>& programs) {
  std::vector<Case> product;
  for (const Program& program : programs) {
    for (int stages = 1; stages <= 4; ++stages) {
      for (const char* pipeline : {"simple", "interleaved"}) {
        product.push_back({program, Layout{stages, pipeline}});
      }
    }
  }
  return ::testing::ValuesIn(smp::testing::cases_of(product, [](const Case& one) {
    const auto& [program, layout] = one;
    return smp::testing::Factors{program.name, std::to_string(layout.stages), layout.pipeline};
  }));
}

/// "ResNet_4_interleaved".
inline std::string case_name(const ::testing::TestParamInfo<Case>& info) {
  const auto& [program, layout] = info.param;
  return program.name + "_" + std::to_string(layout.stages) + "_" + layout.pipeline;
}

}  // namespace smp::zoo
