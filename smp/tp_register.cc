// SPDX-License-Identifier: Apache-2.0
#include "smp/tp_register.h"

#include <utility>

#include "core/check.h"
#include "nn/rewrite/rule.h"

namespace smp {
namespace {

using nn::rewrite::Call;
using nn::rewrite::Treatment;

/// Throws `UsageError` unless the rule says how all tensors lie.
Treatment checked(const Call& call, TpTreatment given) {
  SMP_CHECK_WITH(UsageError,
                 given.arguments.size() == call.tensors().size() &&
                     given.results.size() == call.results().size(),
                 "the rule registered for operator ", call.base_name(), " says how ",
                 given.arguments.size(), " arguments and ", given.results.size(),
                 " results lie. Expected ", call.tensors().size(), " and ", call.results().size(),
                 ": one layout for each tensor");
  Treatment treatment;
  treatment.arguments = std::move(given.arguments);
  treatment.results = std::move(given.results);
  for (auto& [name, value] : given.constants) {
    const int position = call.argument(name.c_str());
    SMP_CHECK_WITH(UsageError, position >= 0, "the rule registered for operator ", call.base_name(),
                   " names an argument \"", name,
                   "\", which the operator does not have. Name one of its schema");
    treatment.constants.emplace_back(position, std::move(value));
  }
  return treatment;
}

}  // namespace

const std::string& TpCall::name() const { return call_.base_name(); }
int TpCall::ranks() const { return call_.ranks(); }
int TpCall::num_tensors() const { return static_cast<int>(call_.tensors().size()); }
int TpCall::num_results() const { return static_cast<int>(call_.results().size()); }
c10::IntArrayRef TpCall::sizes(int tensor) const { return call_.meta(tensor).sizes; }
c10::IntArrayRef TpCall::result_sizes(int result) const { return call_.result_meta(result).sizes; }
const nn::Layout& TpCall::layout(int tensor) const { return call_.layout(tensor); }
int TpCall::position(const char* argument) const { return call_.position(argument); }
c10::IValue TpCall::constant(const char* argument) const { return call_.constant(argument); }

class TpRule::Impl {
 public:
  explicit Impl(nn::rewrite::Rule decide) : rule(std::move(decide)) {}
  const nn::rewrite::Rule rule;
};

TpRule::TpRule(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}

TpRule::TpRule(Decide decide)
    : TpRule(std::make_shared<const Impl>(
          [decide = std::move(decide)](const Call& call) -> std::optional<Treatment> {
            std::optional<TpTreatment> treatment = decide(TpCall(call));
            if (!treatment) return std::nullopt;
            return checked(call, *std::move(treatment));
          })) {}

TpRule TpRule::elementwise() {
  return TpRule(std::make_shared<const Impl>(nn::rewrite::elementwise));
}

TpRule TpRule::along_last(int count) {
  return TpRule(std::make_shared<const Impl>(
      [count](const Call& call) { return nn::rewrite::along_last(call, count); }));
}

TpRule TpRule::along_dims(std::string argument) {
  return TpRule(std::make_shared<const Impl>([argument = std::move(argument)](const Call& call) {
    return nn::rewrite::along_dims(call, argument.c_str());
  }));
}

void tp_register(const std::string& operator_name, const TpRule& rule) {
  nn::rewrite::register_rule(operator_name, rule.impl_->rule);
}

}  // namespace smp
