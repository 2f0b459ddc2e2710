// SPDX-License-Identifier: Apache-2.0
#include "graph/storage.h"

#include <utility>

namespace smp::graph {
namespace {

// libtorch can make a storage throw when its data is accessed, but offers no way back. Naming a
// private member in an explicit instantiation is legal C++, and the only way to have both: an error
// instead of a null pointer in a kernel, and tensors that come to life in the hands of all their
// holders.
bool& throws_on_access(c10::StorageImpl& storage);

template <bool c10::StorageImpl::*flag>
struct ThrowingFlag {
  friend bool& throws_on_access(c10::StorageImpl& storage) { return storage.*flag; }
};

template struct ThrowingFlag<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

}  // namespace

void take_data(c10::StorageImpl& storage, c10::DataPtr mark, const std::string& message) {
  throws_on_access(storage) = false;
  storage.set_data_ptr_noswap(std::move(mark));
  storage.set_nbytes(static_cast<size_t>(0));
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(message);
}

void give_data(c10::StorageImpl& storage, c10::StorageImpl& from) {
  throws_on_access(storage) = false;
  storage.set_nbytes(from.nbytes());
  storage.set_data_ptr_noswap(std::move(from._mutable_data_ptr_no_checks()));
  from.set_nbytes(static_cast<size_t>(0));
}

}  // namespace smp::graph
