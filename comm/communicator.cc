// SPDX-License-Identifier: Apache-2.0
#include "comm/communicator.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace smp::comm {
namespace {

at::Tensor bytes_tensor(int64_t bytes) { return at::empty({bytes}, at::TensorOptions(at::kByte)); }

at::Tensor to_tensor(const std::string& bytes, int64_t room) {
  at::Tensor tensor = bytes_tensor(room);
  if (!bytes.empty()) {
    std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
  }
  return tensor;
}

}  // namespace

std::vector<std::string> all_gather_bytes(Communicator& group, const std::string& bytes) {
  const int size = group.size();
  const at::Tensor lengths = at::empty({size}, at::TensorOptions(at::kLong));
  const at::Tensor length = at::empty({1}, at::TensorOptions(at::kLong));
  *length.mutable_data_ptr<int64_t>() = static_cast<int64_t>(bytes.size());
  group.all_gather(lengths, length);
  const int64_t* begin = lengths.const_data_ptr<int64_t>();
  const int64_t room = *std::max_element(begin, begin + size);

  const at::Tensor all = bytes_tensor(room * size);
  group.all_gather(all, to_tensor(bytes, room));  // padded to the longest
  const char* data = static_cast<const char*>(all.const_data_ptr());
  std::vector<std::string> result;
  for (int rank = 0; rank < size; ++rank) {
    result.emplace_back(data + rank * room, begin[rank]);
  }
  return result;
}

std::string broadcast_bytes(Communicator& group, const std::string& bytes, int root) {
  const at::Tensor length = at::empty({1}, at::TensorOptions(at::kLong));
  *length.mutable_data_ptr<int64_t>() = static_cast<int64_t>(bytes.size());
  group.broadcast(length, root);
  const int64_t room = *length.const_data_ptr<int64_t>();
  const at::Tensor data = group.rank() == root ? to_tensor(bytes, room) : bytes_tensor(room);
  group.broadcast(data, root);
  return std::string(static_cast<const char*>(data.const_data_ptr()), room);
}

}  // namespace smp::comm
