// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/util/SmallVector.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace smp::graph {

/// The facts of an operator that its schema does not say.
enum class OperatorTrait : uint8_t {
  kReadsMetadata,        ///< its host result follows from shapes and types alone
  kUpdatesStatistics,    ///< updates its running statistics (`is_running_statistic`)
  kReplacesStorage,      ///< gives a tensor another storage under the feet of its other users
  kLeavesUninitialised,  ///< leaves its result's content undefined
  kCutsHistory,          ///< makes a view that autograd does not follow
  kLaysOutByDevice,  ///< made of others, by which its results have other strides on the CPU than
                     ///< on the meta device
};

/// Whether an operator ("aten::detach"; all overloads are alike) has a trait. There is one table of
/// the traits of operators; rules that are functions are with their users.
bool has_trait(const std::string& name, OperatorTrait trait);

/// True if some result is no tensor: a number, a bool, a shape.
bool returns_host_value(const c10::FunctionSchema& schema);

/// True if the schema has an argument that may hold tensors. Others are factories, whose numbers
/// pick the shape of the result (`arange(end)`).
bool has_tensor_argument(const c10::FunctionSchema& schema);

/// True for factories that are not random: a step function gets their results themselves, since
/// host code may be about to fill them (`torch::tensor(vector)`, an accessor).
bool host_may_write(const c10::OperatorHandle& op);

/// Whether autocast of a kind of device has something to say about an operator, or about one that
/// it is made of.
bool concerns_autocast(const c10::OperatorHandle& op, at::DeviceType type);

/// A type, or that of which it is the optional one.
c10::TypePtr without_optional(const c10::TypePtr& type);

/// The position of an argument that counts elements from the start of a tensor's storage
/// (`as_strided`), or -1.
int storage_offset_argument(const c10::FunctionSchema& schema);

/// True for a normalisation's running statistics, which it updates if it trains.
bool is_running_statistic(const c10::FunctionSchema& schema, size_t index);

/// The position of a normalisation's argument that says whether it trains; nothing if it always
/// does.
std::optional<size_t> training_argument(const c10::FunctionSchema& schema);

/// The positions of the arguments that a call writes. `constant(index)` is an argument that holds
/// no tensor.
template <class ConstantAt>
c10::SmallVector<size_t, 2> written_arguments(const c10::FunctionSchema& schema,
                                              const ConstantAt& constant) {
  const auto trains = [&] {
    const std::optional<size_t> training = training_argument(schema);
    return !training || (constant(*training).isBool() && constant(*training).toBool());
  };
  c10::SmallVector<size_t, 2> written;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    const bool declared = alias != nullptr && alias->isWrite();
    if (declared || (is_running_statistic(schema, i) && trains())) written.push_back(i);
  }
  return written;
}

}  // namespace smp::graph
