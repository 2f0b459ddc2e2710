// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"

namespace smp::dp {

/// Compares lists of (name, description) over the ranks. Throws `UsageError` on all of them where
/// they differ, with the first difference and the ranks. Collective.
void check_same_on_all_ranks(comm::Communicator& group,
                             const std::vector<std::pair<std::string, std::string>>& lines);

/// "Float [3, 3] with strides [3, 1]".
std::string describe_tensor(const at::Tensor& tensor);

/// Gives tensors of the same shapes and dtypes the values of one rank. They travel as one message,
/// packed in memory that is kept.
class TensorBroadcast {
 public:
  /// `tensors` are all on the CPU or on the group's device.
  TensorBroadcast(std::vector<at::Tensor> tensors, comm::CommunicatorPtr group);

  /// Collective.
  void run(int root);

  bool is_empty() const { return tensors_.empty(); }

 private:
  const std::vector<at::Tensor> tensors_;
  const comm::CommunicatorPtr group_;
  at::Tensor message_;              // bytes
  std::vector<at::Tensor> places_;  // part of the message of each tensor
};

/// The same once, in chunks, so that no second copy of a large model is made.
void broadcast_in_chunks(std::vector<at::Tensor> tensors, const comm::CommunicatorPtr& group,
                         int root);

}  // namespace smp::dp
