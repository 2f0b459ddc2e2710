// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace smp::runtime {

/// A few elements of some gradients, which tell whether all of them were multiplied by one number
/// since they were looked at. Versions of tensors do not: writes through `data()` have another
/// counter. Internal.
class GradientProbes {
 public:
  /// Takes note of the gradients that `parameters` have now; those without one are passed over.
  void look(const std::vector<at::Tensor>& parameters);

  /// The number; 1 where they are as they were. None where they were not multiplied by one number,
  /// are gone, not finite, or all zero.
  std::optional<double> factor() const;

  /// The relative error that a factor may have.
  double tolerance() const { return tolerance_; }

 private:
  std::vector<at::Tensor> parameters_;
  at::Tensor elements_;
  double tolerance_ = 0;
};

}  // namespace smp::runtime
