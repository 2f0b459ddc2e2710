// SPDX-License-Identifier: Apache-2.0
// Arithmetic on sizes, as Python does it, and programs' statements about sizes: no operator is
// called, so none is captured.
#include <c10/core/Scalar.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/text.h"
#include "exported/action.h"

namespace smp::exported {
namespace {

using Values = std::vector<c10::IValue>;
using Compute = std::function<c10::IValue(const Values&)>;

[[noreturn]] void refuse_numbers(const std::string& what) {
  core::fail<UsageError>("arithmetic on sizes in an exported program: ", what,
                         ". Pass inputs of sizes like those that the program was exported with");
}

bool is_integral(const c10::IValue& value) { return value.isInt() || value.isBool(); }

int64_t integer(const c10::IValue& value) {
  if (value.isBool()) return value.toBool() ? 1 : 0;
  if (!value.isInt()) refuse_numbers("expected an integer");
  return value.toInt();
}

double real(const c10::IValue& value) {
  if (value.isDouble()) return value.toDouble();
  return static_cast<double>(integer(value));
}

bool boolean(const c10::IValue& value) {
  return value.isDouble() ? value.toDouble() != 0 : integer(value) != 0;
}

int64_t checked(bool overflows, int64_t value) {
  if (overflows) refuse_numbers("a result has more than 64 bits");
  return value;
}

int64_t add(int64_t a, int64_t b) {
  int64_t sum = 0;
  const bool overflows = __builtin_add_overflow(a, b, &sum);
  return checked(overflows, sum);
}
int64_t subtract(int64_t a, int64_t b) {
  int64_t difference = 0;
  const bool overflows = __builtin_sub_overflow(a, b, &difference);
  return checked(overflows, difference);
}
int64_t multiply(int64_t a, int64_t b) {
  int64_t product = 0;
  const bool overflows = __builtin_mul_overflow(a, b, &product);
  return checked(overflows, product);
}

void check_divisor(bool is_zero) {
  if (is_zero) refuse_numbers("a division by zero");
}

/// Rounds down, as Python does.
int64_t floor_divide(int64_t a, int64_t b) {
  check_divisor(b == 0);
  if (b == -1) return subtract(0, a);
  return a / b - ((a % b != 0 && (a < 0) != (b < 0)) ? 1 : 0);
}
int64_t modulo(int64_t a, int64_t b) {
  check_divisor(b == 0);
  if (b == -1) return 0;
  const int64_t rest = a % b;
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

/// Python's rest of a division: it has the sign of the divisor, a zero too.
double modulo(double a, double b) {
  check_divisor(b == 0);
  const double rest = std::fmod(a, b);
  if (rest == 0) return std::copysign(0.0, b);
  return (rest < 0) != (b < 0) ? rest + b : rest;
}

/// Python's rule, rounding included: 1.0 // 0.1 is 9.0, though 1.0 / 0.1 is 10.0.
double floor_divide(double a, double b) {
  check_divisor(b == 0);
  const double rest = std::fmod(a, b);
  double quotient = (a - rest) / b;
  if (rest != 0 && (rest < 0) != (b < 0)) quotient -= 1;
  if (quotient == 0) return std::copysign(0.0, a / b);
  const double floor = std::floor(quotient);
  return quotient - floor > 0.5 ? floor + 1 : floor;
}

int64_t power(int64_t base, int64_t exponent) {
  int64_t result = 1;
  for (; exponent > 0; exponent /= 2) {
    if (exponent % 2 == 1) result = multiply(result, base);
    if (exponent > 1) base = multiply(base, base);
  }
  return result;
}

int64_t truncated(double value) {
  constexpr double kLimit = 9223372036854775808.0;  // 2^63
  if (!(value > -kLimit && value < kLimit)) refuse_numbers("a number that is no integer");
  return static_cast<int64_t>(std::trunc(value));
}

template <class OnIntegers, class OnReals>
Compute arithmetic(OnIntegers on_integers, OnReals on_reals) {
  return [=](const Values& v) -> c10::IValue {
    if (is_integral(v[0]) && is_integral(v[1])) return on_integers(integer(v[0]), integer(v[1]));
    return on_reals(real(v[0]), real(v[1]));
  };
}

/// Both ways compare, with integers where both are, which doubles cannot tell apart above 2^53.
template <class Compare>
Compute comparison(Compare compare) {
  return arithmetic([=](int64_t a, int64_t b) { return c10::IValue(compare(a, b)); },
                    [=](double a, double b) { return c10::IValue(compare(a, b)); });
}

Compute bitwise(int64_t (*compute)(int64_t, int64_t)) {
  return [=](const Values& v) -> c10::IValue {
    const int64_t result = compute(integer(v[0]), integer(v[1]));
    if (v[0].isBool() && v[1].isBool()) return result != 0;
    return result;
  };
}

c10::IValue raise(const Values& v) {
  if (is_integral(v[0]) && is_integral(v[1]) && integer(v[1]) >= 0) {
    return power(integer(v[0]), integer(v[1]));
  }
  const double base = real(v[0]);
  const double exponent = real(v[1]);
  check_divisor(base == 0 && exponent < 0);
  if (base < 0 && std::isfinite(exponent) && exponent != std::floor(exponent)) {
    refuse_numbers("a power that is no real number");
  }
  return std::pow(base, exponent);
}

c10::IValue shift_left(const Values& v) {
  const int64_t count = integer(v[1]);
  if (count < 0 || count > 62) refuse_numbers("a shift by " + std::to_string(count));
  return multiply(integer(v[0]), int64_t{1} << count);
}

c10::IValue shift_right(const Values& v) {
  const int64_t count = integer(v[1]);
  if (count < 0) refuse_numbers("a shift by " + std::to_string(count));
  return floor_divide(integer(v[0]), int64_t{1} << std::min<int64_t>(count, 62));
}

c10::IValue negative(const Values& v) {
  if (is_integral(v[0])) return subtract(0, integer(v[0]));
  return -real(v[0]);
}

c10::IValue truncate(const Values& v) {
  return is_integral(v[0]) ? integer(v[0]) : truncated(real(v[0]));
}

c10::IValue root(const Values& v) {
  if (real(v[0]) < 0) refuse_numbers("the square root of a negative number");
  return std::sqrt(real(v[0]));
}

c10::IValue negated(const Values& v) { return !boolean(v[0]); }
c10::IValue chosen(const Values& v) { return boolean(v[0]) ? v[1] : v[2]; }

at::Tensor tensor(const c10::IValue& value) {
  if (!value.isTensor()) refuse_numbers("expected a tensor");
  return value.toTensor();
}

/// The size or stride along an axis, which may count from the end.
template <class Sizes>
Compute along_axis(Sizes sizes) {
  return [=](const Values& v) -> c10::IValue {
    const at::Tensor of = tensor(v[0]);
    const int64_t axis = integer(v[1]) + (integer(v[1]) < 0 ? of.dim() : 0);
    if (axis < 0 || axis >= of.dim()) refuse_numbers("no axis " + std::to_string(axis));
    return sizes(of)[axis];
  };
}

c10::IValue checked_range(const Values& v) {
  const int64_t value = integer(v[0]);
  const bool fits =
      (v[1].isNone() || value >= integer(v[1])) && (v[2].isNone() || value <= integer(v[2]));
  if (!fits) refuse_numbers("the size " + std::to_string(value) + " is out of its range");
  return {};
}

c10::IValue asserted(const Values& v) {
  if (!boolean(v[0])) {
    refuse_numbers("the model asserts that " +
                   (v[1].isString() ? core::printable(v[1].toStringRef(), 200) : "a size fits"));
  }
  return {};
}

/// The computation of a target, its number of arguments, and whether it returns anything.
struct Target {
  std::vector<std::string> arguments;
  bool returns;
  Compute compute;
};

using Targets = std::unordered_map<std::string, Target>;

void add_arithmetic(Targets& targets) {
  const auto binary = [&](const char* name, Compute compute) {
    targets[name] = {{"a", "b"}, true, std::move(compute)};
  };
  const auto unary = [&](const char* name, Compute compute) {
    targets[name] = {{"a"}, true, std::move(compute)};
  };
  binary("_operator.add", arithmetic(add, [](double a, double b) { return a + b; }));
  binary("_operator.sub", arithmetic(subtract, [](double a, double b) { return a - b; }));
  binary("_operator.mul", arithmetic(multiply, [](double a, double b) { return a * b; }));
  binary("_operator.floordiv", arithmetic([](int64_t a, int64_t b) { return floor_divide(a, b); },
                                          [](double a, double b) { return floor_divide(a, b); }));
  binary("_operator.mod", arithmetic([](int64_t a, int64_t b) { return modulo(a, b); },
                                     [](double a, double b) { return modulo(a, b); }));
  binary("_operator.truediv", [](const Values& v) -> c10::IValue {
    check_divisor(real(v[1]) == 0);
    return real(v[0]) / real(v[1]);
  });
  binary("_operator.pow", raise);
  binary("_operator.eq", comparison([](auto a, auto b) { return a == b; }));
  binary("_operator.ne", comparison([](auto a, auto b) { return a != b; }));
  binary("_operator.le", comparison([](auto a, auto b) { return a <= b; }));
  binary("_operator.ge", comparison([](auto a, auto b) { return a >= b; }));
  binary("_operator.lt", comparison([](auto a, auto b) { return a < b; }));
  binary("_operator.gt", comparison([](auto a, auto b) { return a > b; }));
  binary("_operator.and_", bitwise([](int64_t a, int64_t b) { return a & b; }));
  binary("_operator.or_", bitwise([](int64_t a, int64_t b) { return a | b; }));
  binary("_operator.lshift", shift_left);
  binary("_operator.rshift", shift_right);
  binary("torch.sym_max", arithmetic([](int64_t a, int64_t b) { return std::max(a, b); },
                                     [](double a, double b) { return std::max(a, b); }));
  binary("torch.sym_min", arithmetic([](int64_t a, int64_t b) { return std::min(a, b); },
                                     [](double a, double b) { return std::min(a, b); }));
  unary("_operator.neg", negative);
  unary("_operator.pos", [](const Values& v) { return v[0]; });
  unary("torch.sym_not", negated);
  unary("torch.sym_int", truncate);
  unary("math.trunc", truncate);
  unary("torch.sym_float", [](const Values& v) { return c10::IValue(real(v[0])); });
  unary("torch._sym_sqrt", root);
  targets["torch.sym_ite"] = {{"b", "t", "f"}, true, chosen};
}

void add_questions(Targets& targets) {
  const std::string aten = "torch.ops.aten.";
  targets[aten + "sym_size.int"] = {
      {"self", "dim"}, true, along_axis([](const at::Tensor& t) { return t.sizes(); })};
  targets[aten + "sym_stride.int"] = {
      {"self", "dim"}, true, along_axis([](const at::Tensor& t) { return t.strides(); })};
  targets[aten + "sym_numel.default"] = {
      {"self"}, true, [](const Values& v) { return c10::IValue(tensor(v[0]).numel()); }};
  targets[aten + "sym_storage_offset.default"] = {
      {"self"}, true, [](const Values& v) { return c10::IValue(tensor(v[0]).storage_offset()); }};
  targets[aten + "_assert_scalar.default"] = {{"self", "assert_msg"}, false, asserted};
  for (const char* name : {"sym_constrain_range.default", "sym_constrain_range_for_size.default"}) {
    targets[aten + name] = {{"size", "min", "max"}, false, checked_range};
  }
  // Types follow from those of the inputs, which are checked, and devices are the rank's.
  targets[aten + "_assert_tensor_metadata.default"] = {
      {}, false, [](const Values&) { return c10::IValue(); }};
}

const Targets& targets() {
  static const Targets table = [] {
    Targets targets;
    add_arithmetic(targets);
    add_questions(targets);
    return targets;
  }();
  return table;
}

}  // namespace

Action number_action(const std::string& file, const Node& node, const Function&) {
  const auto found = targets().find(node.target);
  if (found == targets().end()) return nullptr;
  const Target& target = found->second;
  std::vector<Argument> arguments(target.arguments.size());  // none where it is not given
  for (size_t i = 0; i < node.arguments.size(); ++i) {
    size_t place = i;
    for (size_t k = 0; k < target.arguments.size(); ++k) {
      if (target.arguments[k] == node.arguments[i].name) place = k;
    }
    if (place < arguments.size()) arguments[place] = node.arguments[i].value;
  }
  for (const Argument& argument : arguments) {
    if (argument.kind == Argument::Kind::kFunction || argument.kind == Argument::Kind::kList) {
      refuse(file, node, "takes no such argument",
             "The file is damaged: write it again by torch.export.save");
    }
  }
  return [&target, arguments = std::move(arguments)](const Frame& frame) -> Values {
    Values values;
    for (const Argument& argument : arguments) values.push_back(value_of(argument, frame));
    c10::IValue result = target.compute(values);
    if (!target.returns) return {};
    return {std::move(result)};
  };
}

}  // namespace smp::exported
