// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tools/train/options.h"

namespace smp::tools::train {

/// The samples of a file: tensors by name, whose first dimension counts them. The file is mapped
/// into memory, which the ranks of a host share.
class Samples {
 public:
  /// Reads a file: of safetensors the tensors called `names`; of tokens and idx "input" and
  /// "target". `labels` is the second file of idx. Throws `CheckpointError` for a file that cannot
  /// be read, and `UsageError` where a name is not in it or tensors differ in the number of
  /// samples.
  Samples(const DataOptions& options, const std::string& path, const std::string& labels,
          const std::vector<std::string>& names);

  int64_t size() const { return size_; }

  /// The rows of a tensor at `indices`, int64, as the model takes them: tokens, labels of idx, and
  /// unsigned numbers of 16 and 32 bits as int64, images of idx as float32 from 0 to 1.
  at::Tensor rows(const std::string& name, const at::Tensor& indices) const;

 private:
  void add(const std::string& name, const at::Tensor& tensor);
  void add_tensors(const std::vector<std::string>& names);
  void add_tokens();
  void add_images(const std::string& labels);

  const DataOptions options_;
  const std::string path_;
  std::map<std::string, at::Tensor> tensors_;
  int64_t size_ = 0;
};

}  // namespace smp::tools::train
