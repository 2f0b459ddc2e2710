#include "dp/gradient_shards.h"

#include <ATen/ops/zeros.h>

#include "core/check.h"

namespace smp::dp {

int local_gradient_shards(int gradient_shards, int microbatches, int replicas) {
  SMP_CHECK_WITH(ConfigError, gradient_shards > 0 && gradient_shards % replicas == 0,
                 "config key \"gradient_shards\": expected a multiple of the number of replicas (",
                 replicas, "), got ", gradient_shards,
                 ". Leave it at 0 to use the number of replicas");
  const int shards = gradient_shards / replicas;
  SMP_CHECK_WITH(ConfigError, microbatches % shards == 0,
                 "config key \"microbatches\": expected a multiple of the gradient shards of a "
                 "replica (",
                 shards, "), got ", microbatches,
                 ". Change \"microbatches\" or \"gradient_shards\"");
  return shards;
}

void check_dense(const at::Tensor& gradient, const std::string& name) {
  SMP_CHECK_WITH(UsageError, gradient.layout() == at::kStrided, "parameter \"", name,
                 "\" has a sparse gradient, which cannot be reduced. Build its embedding with "
                 "sparse(false)");
}

at::Tensor used_by_any(const std::vector<std::vector<bool>>& used) {
  const at::Tensor result = at::zeros({static_cast<int64_t>(used.front().size())}, at::kByte);
  auto* any = result.mutable_data_ptr<uint8_t>();
  for (const auto& shard : used) {
    for (size_t i = 0; i < shard.size(); ++i) any[i] |= static_cast<uint8_t>(shard[i]);
  }
  return result;
}

}  // namespace smp::dp
