// SPDX-License-Identifier: Apache-2.0
#include "optim/list_program.h"

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_addcdiv.h>
#include <ATen/ops/_foreach_addcmul.h>
#include <ATen/ops/_foreach_div.h>
#include <ATen/ops/_foreach_maximum.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_sqrt.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "core/tensor_lists.h"

namespace smp::optim {
namespace {

/// Elements that the functions over lists are given at once, if they are of several tensors. A
/// kernel of theirs takes no more (320 blocks of 65,536 elements each), so that more would have as
/// many, and take more memory for intermediate results.
constexpr int64_t kMostElements = 320 * 65536;

/// Counts as libtorch's operators in place do. Autograd sees by it that a tensor that it has saved
/// is another by now.
void count_change(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

}  // namespace

ListProgram::List ListProgram::make(Kind kind, size_t like) {
  const size_t index = variables_.size();
  const std::string name = kind == Kind::kComputed ? "y" + std::to_string(index)
                                                   : "x[" + std::to_string(places_.size()) + "]";
  if (kind != Kind::kComputed) places_.push_back(index);
  variables_.push_back({kind, name, like, {}});
  return {index};
}

ListProgram::List ListProgram::take(Tensors tensors) {
  text_.read |= uint32_t{1} << places_.size();
  const List list = make(Kind::kTaken, variables_.size());
  variables_[list.index].tensors = std::move(tensors);
  return list;
}

void ListProgram::set(List to, const std::string& function, const std::vector<List>& operands,
                      std::optional<double> number) {
  const Variable& variable = variables_[to.index];
  const auto place = std::find(places_.begin(), places_.end(), to.index);
  if (place != places_.end()) text_.written |= uint32_t{1} << (place - places_.begin());
  const bool is_new = variable.kind == Kind::kComputed && operands.front().index != to.index;
  text_.body += (is_new ? "  Number " : "  ") + variable.name + " = " + function + "(";
  for (const List& operand : operands) {
    text_.body += (&operand == operands.data() ? "" : ", ") + variables_[operand.index].name;
  }
  if (number) {
    text_.body += ", s(" + std::to_string(numbers_.size()) + ")";
    numbers_.push_back(*number);
  }
  text_.body += ");\n";
}

void ListProgram::mul_(List x, double number) {
  set(x, "mul", {x}, number);
  functions_.emplace_back([=](Values& v) { at::_foreach_mul_(v[x.index], number); });
}

/// libtorch's kernels for GPUs multiply by the reciprocal, too.
void ListProgram::div_(List x, double number) {
  set(x, "mul", {x}, 1 / number);
  functions_.emplace_back([=](Values& v) { at::_foreach_div_(v[x.index], number); });
}

void ListProgram::add_(List x, double number) {
  set(x, "add", {x}, number);
  functions_.emplace_back([=](Values& v) { at::_foreach_add_(v[x.index], number); });
}

void ListProgram::add_(List x, List y, double alpha) {
  set(x, "add", {x, y}, alpha);
  functions_.emplace_back([=](Values& v) { at::_foreach_add_(v[x.index], v[y.index], alpha); });
}

void ListProgram::addcmul_(List x, List y, List z, double value) {
  set(x, "addcmul", {x, y, z}, value);
  functions_.emplace_back(
      [=](Values& v) { at::_foreach_addcmul_(v[x.index], v[y.index], v[z.index], value); });
}

void ListProgram::addcdiv_(List x, List y, List z, double value) {
  set(x, "addcdiv", {x, y, z}, value);
  functions_.emplace_back(
      [=](Values& v) { at::_foreach_addcdiv_(v[x.index], v[y.index], v[z.index], value); });
}

void ListProgram::maximum_(List x, List y) {
  set(x, "maximum", {x, y});
  functions_.emplace_back([=](Values& v) { at::_foreach_maximum_(v[x.index], v[y.index]); });
}

void ListProgram::sqrt_(List x) {
  set(x, "sqrt", {x});
  functions_.emplace_back([=](Values& v) { at::_foreach_sqrt_(v[x.index]); });
}

ListProgram::List ListProgram::add(List x, List y, double alpha) {
  const List to = make(Kind::kComputed, x);
  set(to, "add", {x, y}, alpha);
  functions_.emplace_back(
      [=](Values& v) { v[to.index] = at::_foreach_add(v[x.index], v[y.index], alpha); });
  return to;
}

ListProgram::List ListProgram::addcmul(List x, List y, List z, double value) {
  const List to = make(Kind::kComputed, x);
  set(to, "addcmul", {x, y, z}, value);
  functions_.emplace_back([=](Values& v) {
    v[to.index] = at::_foreach_addcmul(v[x.index], v[y.index], v[z.index], value);
  });
  return to;
}

ListProgram::List ListProgram::sqrt(List x) {
  const List to = make(Kind::kComputed, x);
  set(to, "sqrt", {x});
  functions_.emplace_back([=](Values& v) { v[to.index] = at::_foreach_sqrt(v[x.index]); });
  return to;
}

ListProgram::List ListProgram::copy(List x) {
  const List to = make(Kind::kCopied, x);
  set(to, "copy", {x});
  functions_.emplace_back([=](Values& v) {
    for (const at::Tensor& tensor : v[x.index]) {
      v[to.index].push_back(at::clone(tensor).detach());
    }
  });
  return to;
}

void ListProgram::run() {
  if (!run_kernel()) run_functions();
}

/// Returns false, and nothing is done, where there is no kernel for these tensors.
bool ListProgram::run_kernel() {
  const Tensors& first = variables_.front().tensors;
  if (first.empty() || places_.size() > kKernelLists || numbers_.size() > kKernelNumbers) {
    return false;
  }
  std::vector<Tensors> lists;
  for (const Variable& variable : variables_) {
    if (variable.kind == Kind::kTaken) lists.push_back(variable.tensors);
  }
  if (!core::fit_one_kernel(lists)) return false;
  const ListKernel kernel = find_list_kernel(text_, first.front());
  if (!kernel) return false;
  lists.clear();
  for (const size_t place : places_) {
    Variable& variable = variables_[place];
    if (variable.kind == Kind::kCopied) {
      for (const at::Tensor& tensor : variables_[variable.like].tensors) {
        variable.tensors.push_back(at::empty_like(tensor));
      }
    } else if (text_.written >> lists.size() & 1) {
      for (const at::Tensor& tensor : variable.tensors) count_change(tensor);
    }
    lists.push_back(variable.tensors);
  }
  kernel(lists, numbers_);
  return true;
}

void ListProgram::run_functions() {
  const Tensors& first = variables_.front().tensors;
  for (size_t begin = 0; begin < first.size();) {
    int64_t elements = first[begin].numel();
    size_t end = begin + 1;
    while (end < first.size() && elements + first[end].numel() <= kMostElements) {
      elements += first[end++].numel();
    }
    run_functions(begin, end);
    begin = end;
  }
}

void ListProgram::run_functions(size_t begin, size_t end) {
  Values values(variables_.size());
  for (size_t i = 0; i < variables_.size(); ++i) {
    if (variables_[i].kind != Kind::kTaken) continue;
    const auto all = variables_[i].tensors.begin();
    values[i].assign(all + static_cast<std::ptrdiff_t>(begin),
                     all + static_cast<std::ptrdiff_t>(end));
  }
  for (const auto& function : functions_) function(values);
  for (size_t i = 0; i < variables_.size(); ++i) {
    if (variables_[i].kind != Kind::kCopied) continue;
    Tensors& kept = variables_[i].tensors;
    kept.insert(kept.end(), values[i].begin(), values[i].end());
  }
}

}  // namespace smp::optim
