// SPDX-License-Identifier: Apache-2.0
#include "graph/written_results.h"

#include <algorithm>

#include "graph/leaf.h"
#include "graph/stack_tensors.h"

namespace smp::graph {
namespace {

bool is_returned(const c10::AliasInfo& alias, const c10::FunctionSchema& schema) {
  const auto& returns = schema.returns();
  return std::any_of(returns.begin(), returns.end(), [&](const c10::Argument& result) {
    return result.alias_info() != nullptr &&
           result.alias_info()->beforeSets() == alias.beforeSets();
  });
}

bool is_written_result(const c10::Argument& argument, const c10::FunctionSchema& schema) {
  const auto* alias = argument.alias_info();
  return alias != nullptr && alias->isWrite() && !is_returned(*alias, schema);
}

}  // namespace

bool has_written_results(const c10::OperatorHandle& op) {
  const auto& arguments = op.schema().arguments();
  return !is_leaf(op) &&
         std::any_of(arguments.begin(), arguments.end(), [&](const c10::Argument& argument) {
           return is_written_result(argument, op.schema());
         });
}

std::vector<at::Tensor> written_results(const c10::OperatorHandle& op,
                                        const torch::jit::Stack& stack) {
  const auto& arguments = op.schema().arguments();
  const size_t first = stack.size() - arguments.size();
  torch::jit::Stack written;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (is_written_result(arguments[i], op.schema())) written.push_back(stack[first + i]);
  }
  return tensors_in(written, written.size());
}

}  // namespace smp::graph
