#include "graph/content.h"

#include <ATen/core/grad_mode.h>
#include <xxhash.h>

namespace smp::graph {

uint64_t hash_content(const at::Tensor& tensor, uint64_t seed) {
  at::NoGradGuard no_grad;
  const at::Tensor flat = tensor.detach().cpu().contiguous();
  return XXH64(flat.const_data_ptr(), flat.nbytes(), seed);
}

bool same_content(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() &&
         hash_content(a) == hash_content(b);
}

at::Tensor clone_content(const at::Tensor& tensor) {
  at::NoGradGuard no_grad;
  return tensor.detach().clone();
}

}  // namespace smp::graph
