// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "optim/cuda/list_kernel.h"

namespace smp::optim {

/// Operations on lists of tensors of one device, which are noted one after the other and then done:
/// on a GPU in one kernel (`optim/cuda/list_kernel.h`), elsewhere by libtorch's functions over
/// lists, whose names they have. Both round the result of each operation to the tensors' dtype, and
/// have the bits of libtorch's operators on each tensor.
class ListProgram {
 public:
  using Tensors = std::vector<at::Tensor>;

  /// Tensors that were taken, or results computed from them.
  struct List {
    size_t index;
  };

  /// Takes tensors. All lists are as long as each other, and of the same shapes.
  List take(Tensors tensors);

  void mul_(List x, double number);
  void div_(List x, double number);
  void add_(List x, double number);
  void add_(List x, List y, double alpha);
  void addcmul_(List x, List y, List z, double value);
  void addcdiv_(List x, List y, List z, double value);
  void maximum_(List x, List y);
  void sqrt_(List x);

  List add(List x, List y, double alpha);
  List addcmul(List x, List y, List z, double value);
  List sqrt(List x);
  /// Tensors that stay, see `tensors`.
  List copy(List x);

  /// Does all of it, once, on the device's current stream.
  void run();

  /// After `run`: the tensors of a copy, or those that were taken.
  const Tensors& tensors(List list) const { return variables_.at(list.index).tensors; }

 private:
  using Values = std::vector<Tensors>;  // the list of each variable

  enum class Kind { kTaken, kComputed, kCopied };

  struct Variable {
    Kind kind;
    std::string name;  // in the kernel
    size_t like;       // the list that was taken and has its layout
    Tensors tensors;   // not of intermediate results
  };

  List make(Kind kind, size_t like);
  List make(Kind kind, List like) { return make(kind, variables_[like.index].like); }
  /// Notes that the kernel sets a list to a function of others.
  void set(List to, const std::string& function, const std::vector<List>& operands,
           std::optional<double> number = {});

  bool run_kernel();
  void run_functions();
  /// Does it for the tensors from one index to before another.
  void run_functions(size_t begin, size_t end);

  std::vector<Variable> variables_;
  std::vector<size_t> places_;  // places of the kernel's lists among the variables
  ListKernelText text_;
  std::vector<double> numbers_;
  std::vector<std::function<void(Values&)>> functions_;
};

}  // namespace smp::optim
