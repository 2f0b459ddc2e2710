// SPDX-License-Identifier: Apache-2.0
// Writes a checkpoint of known numbers to a folder, for python_test.py.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include "checkpoint/writer.h"

int main(int argc, char** argv) {
  if (argc != 2) return 1;
  const smp::checkpoint::Writer writer(argv[1]);
  writer.begin();
  smp::checkpoint::Shard shard;
  shard.model = {
      {"matrix", at::arange(6, at::kFloat).reshape({2, 3}), {"tied"}},
      {"transposed", at::arange(6, at::kDouble).reshape({2, 3}).t(), {}},
      {"half", at::arange(4, at::kFloat).to(at::kBFloat16) / 2, {}},
      {"count", at::scalar_tensor(-7, at::kLong), {}},
      {"mask", at::tensor({1, 0, 1}, at::kByte).to(at::kBool), {}},
      {"empty", at::empty({0, 3}), {}},
      {"rotation", at::complex(at::arange(2, at::kFloat), at::full({2}, 3.0f)), {}},
  };
  shard.optimizer = {{"param_groups", nlohmann::json::array()},
                     {"state", {{"matrix", {{"shape", {2, 3}}, {"scalars", {{"step", 3}}}}}}}};
  shard.optimizer_tensors["matrix/exp_avg"] = at::full({2, 3}, 0.25);
  writer.commit({writer.write_shard(0, 1, shard)}, {});
  return 0;
}
