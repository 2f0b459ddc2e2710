#include "dp/gradient_shards.h"

#include "smp/core/error.h"

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

}  // namespace smp::dp
