// SPDX-License-Identifier: Apache-2.0
// Captured values lie as those of the step: on shapes, each operator of the samples gives the
// sizes, strides and types that the CPU's kernel gives, however its arguments lie.

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "graph/content.h"
#include "graph/operator_traits.h"
#include "graph/shapes.h"
#include "tests/ops/sample.h"

namespace smp::op_samples {
namespace {

using graph::TensorMeta;
using torch::jit::Stack;

// ---------------------------------------------------------------------------------------------
// How a leaf may lie

using Arrange = at::Tensor (*)(const at::Tensor&);

/// The same tensor with its dimensions in this order in memory.
at::Tensor in_order(const at::Tensor& tensor, const std::vector<int64_t>& order) {
  std::vector<int64_t> back(order.size());
  for (size_t i = 0; i < order.size(); ++i) back[order[i]] = static_cast<int64_t>(i);
  return tensor.permute(order).contiguous().permute(back);
}

at::Tensor as_it_is(const at::Tensor& tensor) { return tensor; }

at::Tensor transposed(const at::Tensor& tensor) {
  if (tensor.dim() < 2) return tensor;
  std::vector<int64_t> order(tensor.dim());
  std::iota(order.rbegin(), order.rend(), 0);
  return in_order(tensor, order);
}

at::Tensor channels_last(const at::Tensor& tensor) {
  if (tensor.dim() < 3) return tensor;
  std::vector<int64_t> order(tensor.dim());
  std::iota(order.begin(), order.end(), 0);
  std::rotate(order.begin() + 1, order.begin() + 2, order.end());
  return in_order(tensor, order);
}

/// The layout of attention's heads: the dimensions before the last two the other way round.
at::Tensor swapped(const at::Tensor& tensor) {
  if (tensor.dim() < 3) return tensor;
  std::vector<int64_t> order(tensor.dim());
  std::iota(order.begin(), order.end(), 0);
  std::swap(order[tensor.dim() - 2], order[tensor.dim() - 3]);
  return in_order(tensor, order);
}

at::Tensor expanded(const at::Tensor& tensor) {
  if (tensor.dim() == 0 || tensor.size(0) < 2) return tensor;
  return tensor.narrow(0, 0, 1).clone().expand(tensor.sizes());
}

/// Every second element of each dimension.
at::Tensor sliced(const at::Tensor& tensor) {
  at::Tensor wide = tensor;
  for (int64_t d = 0; d < tensor.dim(); ++d) wide = wide.repeat_interleave(2, d);
  for (int64_t d = 0; d < tensor.dim(); ++d) wide = wide.slice(d, 0, wide.size(d), 2);
  return wide;
}

const std::vector<std::pair<const char*, Arrange>> kArrangements = {
    {"as it is", as_it_is}, {"transposed", transposed}, {"channels last", channels_last},
    {"swapped", swapped},   {"expanded", expanded},     {"sliced", sliced}};

/// The leaves of a sample, of which `which` (-1: each) lies in another way.
Tensors arranged(const Sample& sample, Arrange arrange, int which, bool gradients) {
  Tensors inputs;
  for (size_t i = 0; i < sample.leaves.size(); ++i) {
    const at::NoGradGuard no_grad;
    const at::Tensor leaf = sample.leaves[i].detach().clone(at::MemoryFormat::Preserve);
    const bool other = which < 0 || which == static_cast<int>(i);
    at::Tensor input = (other ? arrange(leaf) : leaf).detach();
    if (gradients && sample.leaves[i].requires_grad()) graph::give_placeholder_history(input);
    inputs.push_back(std::move(input));
  }
  return inputs;
}

// ---------------------------------------------------------------------------------------------
// A call on data and on shapes

/// Applies `change` to each tensor of a value.
template <class Change>
c10::IValue changed(const c10::IValue& value, const Change& change) {
  if (value.isTensor()) return value.toTensor().defined() ? change(value.toTensor()) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(change(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor && tensor->defined() ? std::optional(change(*tensor)) : std::nullopt);
    }
    return list;
  }
  if (value.isDevice()) return c10::Device(at::kMeta);
  return value;
}

/// Sizes, strides and types. Without elements strides mean nothing.
std::string text_of(const Stack& stack) {
  std::string text;
  const auto add = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) {
      text += "undefined; ";
      return;
    }
    const auto meta = TensorMeta::of(tensor);
    text += c10::str(meta.dtype, " ", c10::IntArrayRef(meta.sizes));
    if (meta.numel() > 0) text += c10::str(" strides ", c10::IntArrayRef(meta.strides));
    text += "; ";
  };
  for (const c10::IValue& value : stack) {
    if (value.isTensor()) add(value.toTensor());
    if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) add(tensor);
    }
  }
  return text;
}

bool is_laid_out(const Stack& stack) {
  return std::all_of(stack.begin(), stack.end(), [](const c10::IValue& value) {
    return !value.isTensor() || !value.toTensor().defined() ||
           value.toTensor().layout() == at::kStrided;
  });
}

/// Calls whose results have these sizes for these data only are refused.
bool has_sizes_of_data(const c10::OperatorHandle& op, const Stack& arguments) {
  const std::string name = c10::str(op.operator_name());
  if (name.rfind("aten::repeat_interleave", 0) == 0) return arguments.back().isNone();
  return op.hasTag(at::Tag::dynamic_output_shape) || name == "aten::nonzero_numpy" ||
         name == "aten::tensor_split.tensor_indices_or_sections";
}

bool is_captured_on_shapes(const c10::OperatorHandle& op, const Stack& arguments) {
  return !has_sizes_of_data(op, arguments) && !graph::host_may_write(op) &&
         !graph::returns_host_value(op.schema());
}

/// The differences that were found, by operator.
class Comparison {
 public:
  void run(const Sample& sample, const Tensors& inputs, const std::string& how) {
    const auto compare = [&](const Call& call, Stack& stack) {
      Stack shapes;
      for (const c10::IValue& value : stack) {
        shapes.push_back(changed(value, [](const at::Tensor& tensor) {
          const at::Tensor shape = graph::make_shape_tensor(TensorMeta::of(tensor));
          graph::stay_wrapped_number(tensor, shape);
          return shape;
        }));
      }
      const std::string given = text_of(stack);
      call.op.callBoxed(stack);
      if (!is_captured_on_shapes(call.op, shapes) || !is_laid_out(stack)) return;
      ++compared_;
      const std::string expected = text_of(stack), got = on_shapes(call, shapes);
      if (got == expected) return;
      const std::string name = c10::str(call.op.operator_name());
      ++failures_[name];
      if (texts_[name].empty()) {
        texts_[name] = c10::str(sample.name, ", ", how, ", of ", given, "\n  makes ", expected,
                                "\n  on shapes ", got);
      }
    };
    try {
      execute(sample, inputs, compare);
    } catch (const c10::Error&) {  // the CPU does not take leaves that lie so
    } catch (const std::exception&) {
    }
  }

  int compared() const { return compared_; }
  const std::map<std::string, std::string>& texts() const { return texts_; }
  const std::map<std::string, int>& failures() const { return failures_; }

 private:
  static std::string on_shapes(const Call& call, Stack& shapes) {
    try {
      graph::call_on_shapes(call.op, shapes);
      return text_of(shapes);
    } catch (const c10::Error& error) {
      return std::string("error: ") + error.what_without_backtrace();
    }
  }

  int compared_ = 0;
  std::map<std::string, int> failures_;
  std::map<std::string, std::string> texts_;
};

/// Those of the repository, or of the folder that SMP_OPERATOR_SAMPLES names.
std::vector<std::string> files_of_samples() {
  const char* folder = std::getenv("SMP_OPERATOR_SAMPLES");
  std::vector<std::string> files;
  for (const auto& entry :
       std::filesystem::directory_iterator(folder != nullptr ? folder : "tests/ops/samples")) {
    const std::string path = entry.path().string();
    const bool holds_samples = entry.path().filename() != "skipped.json";
    if (entry.path().extension() == ".json" && holds_samples) files.push_back(path);
  }
  std::sort(files.begin(), files.end());
  return files;
}

void run_all(const Sample& sample, Comparison& comparison) {
  const int leaves = static_cast<int>(sample.leaves.size());
  for (const auto& [name, arrange] : kArrangements) {
    for (int which = -1; which < (leaves > 1 ? leaves : 0); ++which) {
      for (const bool gradients : {false, true}) {
        const std::string how = c10::str(name, which < 0 ? "" : c10::str(" leaf ", which),
                                         gradients ? ", with gradients" : "");
        comparison.run(sample, arranged(sample, arrange, which, gradients), how);
      }
    }
  }
}

TEST(Strides, OnShapesAreThoseOfTheCpu) {
  at::set_num_threads(1);
  Comparison comparison;
  for (const std::string& file : files_of_samples()) {
    for (const Sample& sample : read_samples(file)) run_all(sample, comparison);
  }
  for (const auto& [name, text] : comparison.texts()) {
    ADD_FAILURE() << name << ", " << comparison.failures().at(name) << " times: " << text;
  }
  EXPECT_GT(comparison.compared(), 10000);
}

}  // namespace
}  // namespace smp::op_samples
