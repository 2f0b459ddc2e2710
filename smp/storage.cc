#include "smp/storage.h"

#include <ATen/ops/empty_strided.h>

namespace smp {

bool has_data(const at::Tensor& tensor) {
  return tensor.numel() == 0 || tensor.storage().nbytes() > 0;
}

void release_data(const at::Tensor& tensor) {
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, tensor.device()));
  storage->set_nbytes(static_cast<size_t>(0));
}

void allocate_data(const at::Tensor& tensor) {
  if (has_data(tensor)) return;
  const at::Tensor fresh = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options());
  c10::StorageImpl* from = fresh.storage().unsafeGetStorageImpl();
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  storage->set_nbytes(from->nbytes());
  storage->set_data_ptr_noswap(std::move(from->_mutable_data_ptr_no_checks()));
  from->set_nbytes(static_cast<size_t>(0));
}

}  // namespace smp
