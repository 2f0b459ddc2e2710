// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/Type.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "smp/export.h"

/// C++ values as bytes, for ranks that run the same program: the types that smp/objects.h names.
/// Every object begins with the name of its type, which the reader compares with the type that it
/// expects. Internal.
namespace smp::detail {

template <class T, class = void>
struct Codec;

/// Takes values and keeps their bytes.
class SMP_API Writer {
 public:
  template <class... T>
  void operator()(const T&... values) {
    (Codec<T>::write(*this, values), ...);
  }
  void raw(const void* data, size_t bytes) { bytes_.append(static_cast<const char*>(data), bytes); }
  void count(size_t number) {
    const uint64_t fixed = number;
    raw(&fixed, sizeof fixed);
  }
  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

/// Gives values back in the order in which they were written. Throws a `CommError` when the bytes
/// end early.
class SMP_API Reader {
 public:
  /// `bytes` outlive the reader.
  explicit Reader(const std::string& bytes) : next_(bytes.data()), left_(bytes.size()) {}

  template <class... T>
  void operator()(T&... values) {
    (Codec<T>::read(*this, values), ...);
  }
  /// `data` may be null where there are no bytes, which memcpy does not allow.
  void raw(void* data, size_t bytes) { std::copy_n(take(bytes), bytes, static_cast<char*>(data)); }
  /// The next bytes where they lie.
  const char* take(size_t bytes);
  /// A number of elements of at least `bytes_each` bytes each.
  size_t count(size_t bytes_each);
  size_t left() const { return left_; }

 private:
  const char* next_;
  size_t left_;
};

template <class T, class = void>
struct HasMember : std::false_type {};
template <class T>
struct HasMember<T, std::void_t<decltype(std::declval<T&>().serialize(std::declval<Writer&>()))>>
    : std::true_type {};

template <class T, class = void>
struct HasFunction : std::false_type {};
template <class T>
struct HasFunction<T, std::void_t<decltype(serialize(std::declval<Writer&>(), std::declval<T&>()))>>
    : std::true_type {};

template <class T, class = void>
struct VersionOf : std::integral_constant<int, 1> {};
template <class T>
struct VersionOf<T, std::void_t<decltype(T::kVersion)>>
    : std::integral_constant<int, static_cast<int>(T::kVersion)> {};

template <class... T>
std::string names() {
  std::string all;
  ((all += (all.empty() ? "" : ", ") + Codec<T>::name()), ...);
  return all;
}

/// User types.
template <class T, class>
struct Codec {
  static_assert(
      HasMember<T>::value || HasFunction<T>::value,
      "objects of this type cannot be sent or saved: give it a member `template <class Archive> "
      "void serialize(Archive& archive)` that names its fields: archive(a, b, c);");

  static std::string name() {
    const int version = VersionOf<T>::value;
    const std::string type = c10::demangle(typeid(T).name());
    return version == 1 ? type : type + " version " + std::to_string(version);
  }
  // One function names the fields for both directions; a writer changes none.
  static void write(Writer& writer, const T& value) { fields(writer, const_cast<T&>(value)); }
  static void read(Reader& reader, T& value) { fields(reader, value); }

 private:
  template <class Archive>
  static void fields(Archive& archive, T& value) {
    if constexpr (HasMember<T>::value) {
      value.serialize(archive);
    } else {
      serialize(archive, value);
    }
  }
};

template <class T>
struct Codec<T, std::enable_if_t<std::is_arithmetic_v<T>>> {
  static std::string name() {
    if constexpr (std::is_same_v<T, bool>) return "bool";
    return (std::is_floating_point_v<T> ? "float"
            : std::is_signed_v<T>       ? "int"
                                        : "uint") +
           std::to_string(8 * sizeof(T));
  }
  static void write(Writer& writer, T value) { writer.raw(&value, sizeof value); }
  static void read(Reader& reader, T& value) { reader.raw(&value, sizeof value); }
};

template <class T>
struct Codec<T, std::enable_if_t<std::is_enum_v<T>>> {
  using Number = std::underlying_type_t<T>;
  static std::string name() { return c10::demangle(typeid(T).name()); }
  static void write(Writer& writer, T value) { writer(static_cast<Number>(value)); }
  static void read(Reader& reader, T& value) {
    Number number;
    reader(number);
    value = static_cast<T>(number);
  }
};

template <>
struct Codec<std::string> {
  static std::string name() { return "string"; }
  static void write(Writer& writer, const std::string& value) {
    writer.count(value.size());
    writer.raw(value.data(), value.size());
  }
  static void read(Reader& reader, std::string& value) {
    const size_t bytes = reader.count(1);
    value.assign(reader.take(bytes), bytes);
  }
};

/// Dense tensors on any device; they arrive on the CPU, contiguous, and require gradients as
/// before.
template <>
struct Codec<at::Tensor> {
  static std::string name() { return "Tensor"; }
  static void write(Writer& writer, const at::Tensor& value);
  static void read(Reader& reader, at::Tensor& value);
};

/// Values that libtorch can pickle. Tensors in it arrive where they were.
template <>
struct Codec<c10::IValue> {
  static std::string name() { return "IValue"; }
  static void write(Writer& writer, const c10::IValue& value);
  static void read(Reader& reader, c10::IValue& value);
};

/// Containers that take new elements at their end.
template <class Container, class Element>
struct ContainerCodec {
  static void write(Writer& writer, const Container& values) {
    writer.count(values.size());
    for (const auto& value : values) {
      if constexpr (std::is_same_v<Element, typename Container::value_type>) {
        writer(static_cast<const Element&>(value));
      } else {
        writer(value.first, value.second);  // an entry of a map
      }
    }
  }
  static void read(Reader& reader, Container& values) {
    values.clear();
    for (size_t left = reader.count(1); left > 0; --left) {
      Element value;
      reader(value);
      values.insert(values.end(), std::move(value));
    }
  }
};

template <class T, class A>
struct Codec<std::vector<T, A>> {
  static std::string name() { return "vector<" + Codec<T>::name() + ">"; }
  static void write(Writer& writer, const std::vector<T, A>& values) {
    if constexpr (kIsPlain) {
      writer.count(values.size());
      writer.raw(values.data(), values.size() * sizeof(T));
    } else {
      ContainerCodec<std::vector<T, A>, T>::write(writer, values);
    }
  }
  static void read(Reader& reader, std::vector<T, A>& values) {
    if constexpr (kIsPlain) {
      values.resize(reader.count(sizeof(T)));
      reader.raw(values.data(), values.size() * sizeof(T));
    } else {
      ContainerCodec<std::vector<T, A>, T>::read(reader, values);
    }
  }

 private:
  static constexpr bool kIsPlain = std::is_arithmetic_v<T> && !std::is_same_v<T, bool>;
};

template <class T, class A>
struct Codec<std::deque<T, A>> : ContainerCodec<std::deque<T, A>, T> {
  static std::string name() { return "deque<" + Codec<T>::name() + ">"; }
};

template <class T, class A>
struct Codec<std::list<T, A>> : ContainerCodec<std::list<T, A>, T> {
  static std::string name() { return "list<" + Codec<T>::name() + ">"; }
};

template <class T, class... Rest>
struct Codec<std::set<T, Rest...>> : ContainerCodec<std::set<T, Rest...>, T> {
  static std::string name() { return "set<" + Codec<T>::name() + ">"; }
};

template <class T, class... Rest>
struct Codec<std::unordered_set<T, Rest...>> : ContainerCodec<std::unordered_set<T, Rest...>, T> {
  static std::string name() { return "unordered_set<" + Codec<T>::name() + ">"; }
};

template <class K, class V, class... Rest>
struct Codec<std::map<K, V, Rest...>> : ContainerCodec<std::map<K, V, Rest...>, std::pair<K, V>> {
  static std::string name() { return "map<" + names<K, V>() + ">"; }
};

template <class K, class V, class... Rest>
struct Codec<std::unordered_map<K, V, Rest...>>
    : ContainerCodec<std::unordered_map<K, V, Rest...>, std::pair<K, V>> {
  static std::string name() { return "unordered_map<" + names<K, V>() + ">"; }
};

template <class T, size_t N>
struct Codec<std::array<T, N>> {
  static std::string name() { return "array<" + Codec<T>::name() + ", " + std::to_string(N) + ">"; }
  static void write(Writer& writer, const std::array<T, N>& values) {
    for (const T& value : values) writer(value);
  }
  static void read(Reader& reader, std::array<T, N>& values) {
    for (T& value : values) reader(value);
  }
};

template <class A, class B>
struct Codec<std::pair<A, B>> {
  static std::string name() { return "pair<" + names<A, B>() + ">"; }
  static void write(Writer& writer, const std::pair<A, B>& value) {
    writer(value.first, value.second);
  }
  static void read(Reader& reader, std::pair<A, B>& value) { reader(value.first, value.second); }
};

template <class... T>
struct Codec<std::tuple<T...>> {
  static std::string name() { return "tuple<" + names<T...>() + ">"; }
  static void write(Writer& writer, const std::tuple<T...>& value) { std::apply(writer, value); }
  static void read(Reader& reader, std::tuple<T...>& value) { std::apply(reader, value); }
};

template <class T>
struct Codec<std::optional<T>> {
  static std::string name() { return "optional<" + Codec<T>::name() + ">"; }
  static void write(Writer& writer, const std::optional<T>& value) {
    writer(value.has_value());
    if (value) writer(*value);
  }
  static void read(Reader& reader, std::optional<T>& value) {
    bool has_value = false;
    reader(has_value);
    value.reset();
    if (has_value) reader(value.emplace());
  }
};

/// Throws a `CommError` unless the type that `reader` begins with is `expected`; `source` is where
/// it comes from ("rank 3"), for the text.
SMP_API void check_type(Reader& reader, const std::string& expected, const std::string& source);
/// Throws a `CommError` when bytes are left over.
SMP_API void check_end(const Reader& reader, const std::string& type, const std::string& source);

/// The object and its type.
template <class T>
std::string to_bytes(const T& object) {
  Writer writer;
  writer(Codec<T>::name(), object);
  return writer.take();
}

/// Reads the `T` that to_bytes packed at `source`; throws a `CommError` if it was another type.
template <class T>
T from_bytes(const std::string& bytes, const std::string& source) {
  Reader reader(bytes);
  check_type(reader, Codec<T>::name(), source);
  T object;
  reader(object);
  check_end(reader, Codec<T>::name(), source);
  return object;
}

}  // namespace smp::detail
