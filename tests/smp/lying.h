// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <string>

#include "dp/parameter_pieces.h"
#include "graph/absent.h"
#include "runtime/parameters/whole.h"
#include "runtime/runtime.h"
#include "smp/smp.h"

namespace smp::testing {

/// Compares this rank's parts of the only model's parameters with the table's word on how they lie:
/// sizes, names and bits, given the wholes.
inline void expect_lies_as_said(const std::map<std::string, torch::Tensor>& wholes) {
  const torch::NoGradGuard no_grad;
  const auto& runtime = runtime::Runtime::get();
  for (const auto& pieces : runtime::pieces_of(runtime)) pieces->bind();
  size_t compared = 0;
  for (const auto& entry : runtime.table().entries()) {
    if (!entry.is_parameter()) continue;
    if (!runtime.owns(entry)) {
      EXPECT_TRUE(graph::is_absent(entry.tensor)) << entry.name;
      continue;
    }
    const auto own = entry.sharding.cut(wholes.at(entry.name), rank());
    const auto sizes = entry.sharding.sizes_of(rank());
    EXPECT_EQ(own.sizes(), at::IntArrayRef(sizes)) << entry.name;
    EXPECT_EQ(entry.tensor.sizes(), at::IntArrayRef(entry.part().sizes_of(rank()))) << entry.name;
    const at::Tensor& updated = entry.updated();
    EXPECT_EQ(updated.defined(), own.numel() > 0) << entry.name;
    if (updated.defined()) {
      EXPECT_TRUE(torch::equal(updated.cpu(), own)) << entry.name;
    }
    EXPECT_EQ(entry.name_on(rank()).empty(), !updated.defined()) << entry.name;
    if (entry.piece && updated.defined()) {
      const auto& pieces = *entry.piece->pieces;
      const auto [begin, end] = pieces.owned(entry.piece->index, pieces.group()->rank());
      EXPECT_EQ(entry.name_on(rank()), c10::str(entry.name, "[", begin, ":", end, "]"));
    }
    for (const auto& cut : entry.sharding.cuts) {
      const auto group = runtime.along(cut.over);
      EXPECT_EQ(group->size(), cut.over.size) << entry.name;
      EXPECT_EQ(group->rank(), cut.over.index_of(rank())) << entry.name;
    }
    ++compared;
  }
  // A rank of a pipeline may own none.
  EXPECT_TRUE(compared > 0 || runtime.topology().pp_size() > 1);
}

}  // namespace smp::testing
