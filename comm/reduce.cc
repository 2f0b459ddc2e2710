#include "comm/reduce.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "smp/core/error.h"

namespace smp::comm {
namespace {

// Accumulators of one block stay in the first-level cache while all parts are added to them.
constexpr size_t kBlock = 1024;

template <class T>
constexpr bool kIsReducedFloat = std::is_same_v<T, c10::Half> || std::is_same_v<T, c10::BFloat16>;

// What the elements of T are accumulated in. Integers wrap, so they are added as unsigned numbers
// (overflow of signed ones is undefined); their order is that of T, see Min and Max.
template <class T>
using Accumulator = std::conditional_t<kIsReducedFloat<T>, float, T>;

struct Sum {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
    } else {
      return a + b;
    }
  }
};

template <class T>
bool is_nan(T value) {
  return value != value;
}

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

template <class Op, class T>
void reduce_typed(void* output, const std::vector<const void*>& parts, size_t elements) {
  using A = Accumulator<T>;
  A block[kBlock];
  for (size_t begin = 0; begin < elements; begin += kBlock) {
    const size_t count = std::min(kBlock, elements - begin);
    const T* first = static_cast<const T*>(parts[0]) + begin;
    std::copy(first, first + count, block);
    for (size_t part = 1; part < parts.size(); ++part) {
      const T* values = static_cast<const T*>(parts[part]) + begin;
      for (size_t i = 0; i < count; ++i) {
        block[i] = Op::apply(block[i], static_cast<A>(values[i]));
      }
    }
    std::copy(block, block + count, static_cast<T*>(output) + begin);
  }
}

using Kernel = void (*)(void*, const std::vector<const void*>&, size_t);

// Null where the operation does not exist for the type.
template <class Op>
Kernel kernel_for(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Float:
      return reduce_typed<Op, float>;
    case c10::ScalarType::Double:
      return reduce_typed<Op, double>;
    case c10::ScalarType::Half:
      return reduce_typed<Op, c10::Half>;
    case c10::ScalarType::BFloat16:
      return reduce_typed<Op, c10::BFloat16>;
    case c10::ScalarType::Long:
      return reduce_typed<Op, int64_t>;
    case c10::ScalarType::Int:
      return reduce_typed<Op, int32_t>;
    case c10::ScalarType::Short:
      return reduce_typed<Op, int16_t>;
    case c10::ScalarType::Char:
      return reduce_typed<Op, int8_t>;
    case c10::ScalarType::Byte:
      return reduce_typed<Op, uint8_t>;
    case c10::ScalarType::Bool:
      return std::is_same_v<Op, Sum> ? nullptr : reduce_typed<Op, uint8_t>;
    default:
      return nullptr;
  }
}

Kernel find_kernel(c10::ScalarType dtype, ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return kernel_for<Sum>(dtype);
    case ReduceOp::kMin:
      return kernel_for<Min>(dtype);
    case ReduceOp::kMax:
      return kernel_for<Max>(dtype);
  }
  return nullptr;
}

const char* to_string(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kMin:
      return "min";
    case ReduceOp::kMax:
      return "max";
  }
  return "unknown";
}

}  // namespace

bool can_reduce(c10::ScalarType dtype, ReduceOp op) { return find_kernel(dtype, op) != nullptr; }

void check_can_reduce(const std::string& group, c10::ScalarType dtype, ReduceOp op) {
  SMP_CHECK_WITH(UsageError, can_reduce(dtype, op), "all_reduce on group '", group,
                 "': ", to_string(op), " is not defined for ", dtype,
                 ". Convert the tensor to a floating point or integer type first.");
}

void reduce_in_order(void* output, const std::vector<const void*>& parts, size_t elements,
                     c10::ScalarType dtype, ReduceOp op) {
  const Kernel kernel = find_kernel(dtype, op);
  SMP_INTERNAL_ASSERT(kernel != nullptr && !parts.empty(), "reduce of ", dtype);
  kernel(output, parts, elements);
}

}  // namespace smp::comm
