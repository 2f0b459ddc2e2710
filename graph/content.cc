#include "graph/content.h"

#include <ATen/core/grad_mode.h>
#include <xxhash.h>

#include <cstring>

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

void mark_uninitialised(const at::Tensor& tensor) {
  constexpr int kPattern = 0xA5;
  if (!tensor.is_cpu() || tensor.numel() == 0) return;
  std::memset(tensor.mutable_data_ptr(), kPattern, tensor.storage().nbytes());
}

}  // namespace smp::graph
