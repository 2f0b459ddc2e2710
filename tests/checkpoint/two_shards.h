// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "checkpoint/reader.h"
#include "checkpoint/writer.h"

/// A checkpoint of two ranks.
namespace smp::checkpoint {

/// Rank 0 holds an embedding tied to the decoder, rank 1 the rest. `value` fills the weights.
inline std::vector<Shard> two_shards(double value) {
  std::vector<Shard> shards(2);
  shards[0].model = {{"encoder.weight", at::full({2, 3}, value), {"decoder.weight"}}};
  shards[0].optimizer = {
      {"param_groups",
       {{{"type", "AdamOptions"}, {"options", {{"lr", 0.1}}}, {"params", {"encoder.weight"}}}}},
      {"state", {{"encoder.weight", {{"shape", {2, 3}}, {"scalars", {{"step", 3}}}}}}},
      {"loss_scale", 1024}};
  shards[0].optimizer_tensors["encoder.weight/exp_avg"] = at::full({2, 3}, value / 2);
  shards[1] = {
      {{"head.bias", at::full({4}, value), {}}, {"norm.count", at::tensor(int64_t{7}), {}}},
      shards[0].optimizer,
      {{"head.bias/exp_avg", at::full({4}, value / 4)}}};
  shards[1].optimizer["param_groups"][0]["params"] = {"head.bias"};
  shards[1].optimizer["state"] = {{"head.bias", {{"shape", {4}}, {"scalars", {{"step", 3}}}}}};
  return shards;
}

inline RunState run_state(int64_t step) {
  RunState run;
  run.step = step;
  run.gradient_shards = 2;
  run.random = {std::numeric_limits<uint64_t>::max(), {{"evaluate", 20}, {"train", 10}}};
  run.user_content = {{"epoch", 5}, {"note", "fine"}};
  run.extra = {{"scheduler", {{"epoch", 3}}}};
  return run;
}

inline std::vector<std::string> write_shards(const Writer& writer,
                                             const std::vector<Shard>& shards) {
  std::vector<std::string> parts;
  for (size_t i = 0; i < shards.size(); ++i) {
    parts.push_back(writer.write_shard(i, shards.size(), shards[i]));
  }
  return parts;
}

inline void save(const std::string& path, double value) {
  const Writer writer(path);
  writer.begin();
  writer.commit(write_shards(writer, two_shards(value)), run_state(100));
}

/// The value that the checkpoint's weights were filled with.
inline double loaded_value(const std::string& path) {
  Reader reader(path);
  EXPECT_TRUE(at::equal(reader.read_model("head.bias"),
                        reader.read_model("encoder.weight").flatten().slice(0, 0, 4)));
  return reader.read_model("head.bias")[0].item<double>();
}

}  // namespace smp::checkpoint
