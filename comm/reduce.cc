// SPDX-License-Identifier: Apache-2.0
#include "comm/reduce.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "comm/vectorize.h"
#include "core/check.h"

namespace smp::comm {
namespace {

// Accumulators of one block stay in the first-level cache while all parts are added to them.
constexpr size_t kBlock = 1024;

template <class T>
constexpr bool kIsReducedFloat = std::is_same_v<T, c10::Half> || std::is_same_v<T, c10::BFloat16>;

template <class T>
constexpr bool kIsFloat = std::is_floating_point_v<T> || kIsReducedFloat<T>;

template <class T>
using Accumulator = std::conditional_t<kIsReducedFloat<T>, float, T>;

// Integers wrap, so they are calculated with as unsigned numbers (overflow of signed ones, and of
// products of promoted short ones, is undefined).
template <class T>
using Wrapping = std::conditional_t<sizeof(T) <= 4, uint32_t, uint64_t>;

template <class T>
bool is_nan(T value) {
  return value != value;
}

struct Sum {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<Wrapping<T>>(a) + static_cast<Wrapping<T>>(b));
    } else {
      return a + b;
    }
  }
};

struct Product {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<Wrapping<T>>(a) * static_cast<Wrapping<T>>(b));
    } else {
      return a * b;
    }
  }
};

struct Min {
  template <class T>
  static T apply(T a, T b) {
    return is_nan(a) || a < b ? a : b;
  }
};

struct Max {
  template <class T>
  static T apply(T a, T b) {
    return is_nan(a) || a > b ? a : b;
  }
};

struct BitAnd {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a & b);
  }
};

struct BitOr {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a | b);
  }
};

struct BitXor {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};

struct Average : Sum {};

// The request for all elements. `accumulators` null: the parts are all there is, and go to
// `outputs`; otherwise they are combined into the accumulators.
struct Request {
  const std::vector<void*>* outputs;
  const std::vector<const void*>* parts;
  void* accumulators;
  bool continues;
  size_t elements;
  int divisor;
};

#define SMP_ALWAYS_INLINE inline __attribute__((always_inline))

// out[i] = a[i] op b[i]. `out` may be one of the operands, but is never shifted against one.
template <class Op, class A, class Out, class Left, class Right>
SMP_ALWAYS_INLINE void combine(Out* out, const Left* left, const Right* right, size_t count) {
  SMP_VECTORIZE
  for (size_t i = 0; i < count; ++i) {
    out[i] = static_cast<Out>(Op::apply(static_cast<A>(left[i]), static_cast<A>(right[i])));
  }
}

// Does the same as combine, for the last of all parts.
template <class Op, class A, class Out, class Left, class Right>
SMP_ALWAYS_INLINE void combine_last(Out* out, const Left* left, const Right* right, size_t count,
                                    int divisor) {
  if constexpr (std::is_same_v<Op, Average>) {
    const A by = static_cast<A>(divisor);
    SMP_VECTORIZE
    for (size_t i = 0; i < count; ++i) {
      out[i] = static_cast<Out>(Op::apply(static_cast<A>(left[i]), static_cast<A>(right[i])) / by);
    }
  } else {
    combine<Op, A>(out, left, right, count);
  }
}

template <class Op, class A, class Out, class In>
SMP_ALWAYS_INLINE void convert(Out* out, const In* in, size_t count, int divisor) {
  const A by = static_cast<A>(divisor);
  SMP_VECTORIZE
  for (size_t i = 0; i < count; ++i) {
    if constexpr (std::is_same_v<Op, Average>) {
      out[i] = static_cast<Out>(static_cast<A>(in[i]) / by);
    } else {
      out[i] = static_cast<Out>(static_cast<A>(in[i]));
    }
  }
}

template <class Op, class T>
SMP_ALWAYS_INLINE void reduce_block(T* out, const std::vector<const void*>& parts, size_t begin,
                                    size_t count, int divisor) {
  using A = Accumulator<T>;
  const auto part = [&](size_t i) { return static_cast<const T*>(parts[i]) + begin; };
  const size_t last = parts.size() - 1;
  if (last == 0) {
    convert<Op, A>(out, part(0), count, divisor);
  } else if (last == 1) {
    combine_last<Op, A>(out, part(0), part(1), count, divisor);
  } else {
    A block[kBlock];
    combine<Op, A>(block, part(0), part(1), count);
    for (size_t i = 2; i < last; ++i) {
      combine<Op, A>(block, block, part(i), count);
    }
    combine_last<Op, A>(out, block, part(last), count, divisor);
  }
}

template <class Op, class T>
SMP_ALWAYS_INLINE void reduce_all(const Request& request) {
  for (size_t begin = 0; begin < request.elements; begin += kBlock) {
    const size_t count = std::min(kBlock, request.elements - begin);
    T* const first = static_cast<T*>(request.outputs->front()) + begin;
    reduce_block<Op, T>(first, *request.parts, begin, count, request.divisor);
    for (size_t i = 1; i < request.outputs->size(); ++i) {
      std::memcpy(static_cast<T*>((*request.outputs)[i]) + begin, first, count * sizeof(T));
    }
  }
}

template <class Op, class T>
SMP_ALWAYS_INLINE void accumulate_all(const Request& request) {
  using A = Accumulator<T>;
  for (size_t begin = 0; begin < request.elements; begin += kBlock) {
    const size_t count = std::min(kBlock, request.elements - begin);
    A* const block = static_cast<A*>(request.accumulators) + begin;
    for (size_t i = 0; i < request.parts->size(); ++i) {
      const T* const part = static_cast<const T*>((*request.parts)[i]) + begin;
      if (i == 0 && !request.continues) {
        convert<Sum, A>(block, part, count, 1);
      } else {
        combine<Op, A>(block, block, part, count);
      }
    }
  }
}

template <class Op, class T>
SMP_ALWAYS_INLINE void run(const Request& request) {
  if (request.accumulators == nullptr) {
    reduce_all<Op, T>(request);
  } else {
    accumulate_all<Op, T>(request);
  }
}

using Kernel = void (*)(const Request&);

template <class Op, class T>
void run_plain(const Request& request) {
  run<Op, T>(request);
}

// The same with longer vectors, which changes no bits: no operation is fused with another.
#if defined(__x86_64__)
template <class Op, class T>
__attribute__((target("avx2"))) void run_avx2(const Request& request) {
  run<Op, T>(request);
}

const bool has_avx2 = __builtin_cpu_supports("avx2") != 0;
#endif

template <class Op, class T>
Kernel kernel() {
#if defined(__x86_64__)
  if (has_avx2) {
    return run_avx2<Op, T>;
  }
#endif
  return run_plain<Op, T>;
}

template <class Op, class T>
constexpr bool is_defined() {
  constexpr bool bitwise =
      std::is_same_v<Op, BitAnd> || std::is_same_v<Op, BitOr> || std::is_same_v<Op, BitXor>;
  if constexpr (std::is_same_v<T, bool>) {
    return !std::is_same_v<Op, Average>;
  } else if constexpr (kIsFloat<T>) {
    return !bitwise;
  } else {
    return !std::is_same_v<Op, Average>;
  }
}

// Sums and products of truth values are such again, as elsewhere in libtorch.
template <class Op>
using OfBool = std::conditional_t<std::is_same_v<Op, Sum>, BitOr,
                                  std::conditional_t<std::is_same_v<Op, Product>, BitAnd, Op>>;

// Null where the operation does not exist for the type.
template <class Op, class T>
Kernel kernel_if_defined() {
  if constexpr (is_defined<Op, T>() && std::is_same_v<T, bool>) {
    return kernel<OfBool<Op>, uint8_t>();
  } else if constexpr (is_defined<Op, T>()) {
    return kernel<Op, T>();
  } else {
    return nullptr;
  }
}

// A complex number is two of type `T`, which are added and divided by a real number on their own.
template <class Op, class T>
void run_pairs(const Request& request) {
  Request of_parts = request;
  of_parts.elements *= 2;
  kernel<Op, T>()(of_parts);
}

template <class Op, class T>
Kernel kernel_of_complex() {
  if constexpr (std::is_same_v<Op, Sum> || std::is_same_v<Op, Average>) {
    return run_pairs<Op, T>;
  } else {
    return nullptr;
  }
}

template <class Op>
Kernel kernel_for(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Float:
      return kernel_if_defined<Op, float>();
    case c10::ScalarType::Double:
      return kernel_if_defined<Op, double>();
    case c10::ScalarType::Half:
      return kernel_if_defined<Op, c10::Half>();
    case c10::ScalarType::BFloat16:
      return kernel_if_defined<Op, c10::BFloat16>();
    case c10::ScalarType::Long:
      return kernel_if_defined<Op, int64_t>();
    case c10::ScalarType::Int:
      return kernel_if_defined<Op, int32_t>();
    case c10::ScalarType::Short:
      return kernel_if_defined<Op, int16_t>();
    case c10::ScalarType::Char:
      return kernel_if_defined<Op, int8_t>();
    case c10::ScalarType::Byte:
      return kernel_if_defined<Op, uint8_t>();
    case c10::ScalarType::Bool:
      return kernel_if_defined<Op, bool>();
    case c10::ScalarType::ComplexFloat:
      return kernel_of_complex<Op, float>();
    case c10::ScalarType::ComplexDouble:
      return kernel_of_complex<Op, double>();
    default:
      return nullptr;
  }
}

Kernel find_kernel(c10::ScalarType dtype, ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return kernel_for<Sum>(dtype);
    case ReduceOp::kAverage:
      return kernel_for<Average>(dtype);
    case ReduceOp::kMin:
      return kernel_for<Min>(dtype);
    case ReduceOp::kMax:
      return kernel_for<Max>(dtype);
    case ReduceOp::kProduct:
      return kernel_for<Product>(dtype);
    case ReduceOp::kBitAnd:
      return kernel_for<BitAnd>(dtype);
    case ReduceOp::kBitOr:
      return kernel_for<BitOr>(dtype);
    case ReduceOp::kBitXor:
      return kernel_for<BitXor>(dtype);
  }
  return nullptr;
}

bool is_reduced_float(c10::ScalarType dtype) {
  return dtype == c10::ScalarType::Half || dtype == c10::ScalarType::BFloat16;
}

template <class T>
void round_to(void* output, const void* accumulators, size_t elements, ReduceOp op, int divisor) {
  auto* const out = static_cast<T*>(output);
  const auto* const in = static_cast<const float*>(accumulators);
  if (op == ReduceOp::kAverage) {
    convert<Average, float>(out, in, elements, divisor);
  } else {
    convert<Sum, float>(out, in, elements, 1);
  }
}

const char* remedy(c10::ScalarType dtype, ReduceOp op) {
  if (c10::isComplexType(dtype)) {
    return ". Complex numbers can be summed and averaged; all_gather them for anything else.";
  }
  if (op == ReduceOp::kAverage) {
    return ". Sum and divide, or convert the tensor to a type that it is defined for first.";
  }
  return ". Convert the tensor to a type that it is defined for first.";
}

Kernel defined_kernel(c10::ScalarType dtype, ReduceOp op) {
  const Kernel kernel = find_kernel(dtype, op);
  SMP_INTERNAL_ASSERT(kernel != nullptr, "reduce of ", dtype);
  return kernel;
}

}  // namespace

bool can_reduce(c10::ScalarType dtype, ReduceOp op) { return find_kernel(dtype, op) != nullptr; }

void check_can_reduce(const std::string& group, const char* verb, c10::ScalarType dtype,
                      ReduceOp op) {
  SMP_CHECK_WITH(UsageError, can_reduce(dtype, op), verb, " on group '", group,
                 "': ", to_string(op), " is not defined for ", dtype, remedy(dtype, op));
}

void reduce_in_order(const std::vector<void*>& outputs, const std::vector<const void*>& parts,
                     size_t elements, c10::ScalarType dtype, ReduceOp op, int divisor) {
  defined_kernel(dtype, op)({&outputs, &parts, nullptr, false, elements, divisor});
}

size_t accumulator_bytes(c10::ScalarType dtype) {
  return is_reduced_float(dtype) ? sizeof(float) : c10::elementSize(dtype);
}

void accumulate_in_order(void* accumulators, bool continues, const std::vector<const void*>& parts,
                         size_t elements, c10::ScalarType dtype, ReduceOp op) {
  defined_kernel(dtype, op)({nullptr, &parts, accumulators, continues, elements, 1});
}

void finish_reduction(void* output, const void* accumulators, size_t elements,
                      c10::ScalarType dtype, ReduceOp op, int divisor) {
  if (dtype == c10::ScalarType::Half) {
    round_to<c10::Half>(output, accumulators, elements, op, divisor);
  } else if (dtype == c10::ScalarType::BFloat16) {
    round_to<c10::BFloat16>(output, accumulators, elements, op, divisor);
  } else {  // accumulated in its own type: one part, which an average divides
    reduce_in_order({output}, {accumulators}, elements, dtype, op, divisor);
  }
}

}  // namespace smp::comm
