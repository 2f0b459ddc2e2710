// SPDX-License-Identifier: Apache-2.0
#include "comm/objects.h"

#include <ATen/ops/empty.h>

#include <cstring>

namespace smp::comm {
namespace {

// Nothing else of ours uses tags this high; c10d's process groups have groups of their own.
constexpr Tag kObjectTag = kMaxTag;

// Says that an object has been taken.
at::Tensor receipt() { return at::empty({0}, at::TensorOptions(at::kByte)); }

at::Tensor copy_of(const void* data, size_t bytes) {
  const at::Tensor tensor = at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions(at::kByte));
  if (bytes > 0) {
    std::memcpy(tensor.mutable_data_ptr(), data, bytes);
  }
  return tensor;
}

}  // namespace

void send_bytes(Communicator& group, const std::string& bytes,
                const std::vector<int>& destinations) {
  const int64_t length = static_cast<int64_t>(bytes.size());
  const at::Tensor head = copy_of(&length, sizeof length);
  const at::Tensor body = copy_of(bytes.data(), bytes.size());
  std::vector<WorkPtr> works;
  for (const int destination : destinations) {
    works.push_back(group.isend(head, destination, kObjectTag));
    works.push_back(group.isend(body, destination, kObjectTag));
    if (destination != group.rank()) {
      works.push_back(group.irecv(receipt(), destination, kObjectTag - 1));
    }
  }
  for (const WorkPtr& work : works) {
    work->wait();
  }
}

std::string recv_bytes(Communicator& group, int source) {
  int64_t length = 0;
  const at::Tensor head = copy_of(&length, sizeof length);
  group.recv(head, source, kObjectTag);
  std::memcpy(&length, head.const_data_ptr(), sizeof length);
  std::string bytes(length, '\0');
  const at::Tensor body = copy_of(bytes.data(), bytes.size());
  group.recv(body, source, kObjectTag);
  if (source != group.rank()) {
    group.send(receipt(), source, kObjectTag - 1);
  }
  std::memcpy(bytes.data(), body.const_data_ptr(), bytes.size());
  return bytes;
}

}  // namespace smp::comm
