// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/safetensors.h"

#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "tests/checkpoint/test_util.h"

namespace smp::checkpoint {
namespace {

using ::testing::HasSubstr;

/// A safetensors file as the format's documentation describes it.
std::string file_bytes(const std::string& header, const std::string& data) {
  const uint64_t size = header.size();
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &size, 8);
  return bytes + header + data;
}

/// Not all types have `equal`.
at::Tensor bytes_of(const at::Tensor& tensor) {
  const at::Tensor plain = tensor.detach().resolve_conj().resolve_neg();
  return plain.contiguous().reshape({-1}).view(at::kByte);
}

class SafetensorsTest : public FolderTest {
 protected:
  std::string error_of(const std::string& bytes) {
    spill(path("bad"), bytes);
    return checkpoint_error([&] { SafetensorsReader reader(path("bad")); });
  }
  std::string error_of(const std::string& header, const std::string& data) {
    return error_of(file_bytes(header, data));
  }
};

TEST_F(SafetensorsTest, WritesTheDocumentedBytes) {
  const at::Tensor small = at::tensor({1, 2, 255}, at::kByte);
  const at::Tensor large = at::tensor({-2}, at::kShort);
  const SafetensorsSummary summary =
      write_safetensors(path("f"), {{"small", small}, {"large", large}});
  // Larger elements first, spaces up to a multiple of 8.
  std::string header = R"({"__metadata__":{"format":"pt"},)"
                       R"("large":{"dtype":"I16","shape":[1],"data_offsets":[0,2]},)"
                       R"("small":{"dtype":"U8","shape":[3],"data_offsets":[2,5]}})";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  EXPECT_EQ(slurp(path("f")), file_bytes(header, "\xfe\xff\x01\x02\xff"));
  EXPECT_EQ(summary.file_size, 8 + header.size() + 5);
  EXPECT_FALSE(std::filesystem::exists(path("f.tmp")));
}

TEST_F(SafetensorsTest, HashesAreXxh64) {
  // Published test vectors of XXH64 with seed 0: no bytes, and "abc".
  const SafetensorsSummary summary = write_safetensors(
      path("f"), {{"abc", at::tensor({'a', 'b', 'c'}, at::kByte)}, {"empty", at::empty({0})}});
  EXPECT_EQ(summary.hashes, (std::vector<uint64_t>{0x44BC2CF5AD770999, 0xEF46DB3751D8E999}));
}

TEST_F(SafetensorsTest, RoundTripsEveryDtypeAndLayout) {
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const at::ScalarType dtype :
       {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kShort,
        at::kChar, at::kByte, at::kBool, at::kUInt16, at::kUInt32, at::kUInt64, at::kComplexFloat,
        at::kFloat8_e4m3fn, at::kFloat8_e5m2}) {
    tensors.emplace_back(at::toString(dtype), at::arange(6).reshape({2, 3}).to(dtype));
  }
  tensors.emplace_back("scalar", at::scalar_tensor(2.5));
  tensors.emplace_back("empty", at::empty({2, 0, 3}));
  tensors.emplace_back("transposed", at::arange(6).reshape({2, 3}).t());
  tensors.emplace_back("slice", at::arange(10).slice(0, 3, 9, 2));
  tensors.emplace_back("quote\"\n", at::ones({1}));
  tensors.emplace_back("leaf", at::ones({2}).requires_grad_());
  const at::Tensor numbers = at::complex(at::arange(3.0), at::ones({3}));
  tensors.emplace_back("conjugate", numbers.conj());  // lies in memory as another number
  tensors.emplace_back("negative", at::imag(numbers.conj()));
  write_safetensors(path("f"), tensors);

  const SafetensorsReader reader(path("f"));
  EXPECT_EQ(reader.entries().size(), tensors.size());
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor read = reader.read(name);
    EXPECT_EQ(spec_of(read), spec_of(tensor)) << name;
    EXPECT_TRUE(at::equal(bytes_of(read), bytes_of(tensor))) << name;
    EXPECT_EQ(reader.entries().at(name).offset % tensor.element_size(), 0u) << name;
  }
  EXPECT_THAT(checkpoint_error([&] { reader.read("absent"); }),
              HasSubstr("f\" holds no tensor \"absent\". Check the name against its header."));
}

// Little-endian; a complex number is its real part, then its imaginary one.
TEST_F(SafetensorsTest, TypesHaveTheBytesOfTheFormat) {
  struct Case {
    std::string dtype;
    at::Tensor tensor;
    std::string bytes;
  };
  const auto floats = [](std::vector<float> values) { return at::tensor(values); };
  const std::vector<Case> cases = {
      {"U16", at::tensor({1, 65535}, at::kInt).to(at::kUInt16), {"\x01\x00\xff\xff", 4}},
      {"U32",
       at::tensor({int64_t{258}, int64_t{4294967295}}, at::kLong).to(at::kUInt32),
       {"\x02\x01\x00\x00\xff\xff\xff\xff", 8}},
      {"U64", at::tensor({int64_t{-1}}, at::kLong).view(at::kUInt64), std::string(8, '\xff')},
      {"F8_E4M3", floats({1, -1, 448, 0.0625}).to(at::kFloat8_e4m3fn), "\x38\xb8\x7e\x18"},
      {"F8_E5M2", floats({1, -2, 57344, 0.25}).to(at::kFloat8_e5m2), "\x3c\xc0\x7b\x34"},
      {"C64", at::complex(floats({1.5}), floats({-2})), {"\x00\x00\xc0\x3f\x00\x00\x00\xc0", 8}},
  };
  for (const auto& [dtype, tensor, bytes] : cases) {
    SCOPED_TRACE(dtype);
    std::string header = R"({"__metadata__":{"format":"pt"},"t":{"dtype":")" + dtype +
                         R"(","shape":[)" + std::to_string(tensor.numel()) +
                         R"(],"data_offsets":[0,)" + std::to_string(bytes.size()) + "]}}";
    header.resize((header.size() + 7) / 8 * 8, ' ');
    write_safetensors(path("written"), {{"t", tensor}});
    EXPECT_EQ(slurp(path("written")), file_bytes(header, bytes));
    spill(path("read"), file_bytes(header, bytes));
    const at::Tensor read = SafetensorsReader(path("read")).read("t");
    EXPECT_EQ(spec_of(read), spec_of(tensor));
    EXPECT_TRUE(at::equal(bytes_of(read), bytes_of(tensor)));
  }
}

TEST_F(SafetensorsTest, KeepsNanPayloadBits) {
  const at::Tensor bits = at::tensor({0x7fc00001, 0x7f800001, int(0x80000000)}, at::kInt);
  write_safetensors(path("f"), {{"nan", bits.view(at::kFloat)}});
  EXPECT_TRUE(at::equal(SafetensorsReader(path("f")).read("nan").view(at::kInt), bits));
}

TEST_F(SafetensorsTest, ReadsAFileOfAnotherWriter) {
  const std::string header = R"({"b":{"shape":[2],"data_offsets":[1,3],"dtype":"I8"},)"
                             R"("a":{"dtype":"BOOL","shape":[],"data_offsets":[0,1]}})";
  spill(path("f"), file_bytes(header, "\x01\x05\xff"));
  const SafetensorsReader reader(path("f"));
  EXPECT_TRUE(at::equal(reader.read("b"), at::tensor({5, -1}, at::kChar)));
  EXPECT_TRUE(at::equal(reader.read("a"), at::scalar_tensor(true, at::kBool)));
}

TEST_F(SafetensorsTest, RefusesToWriteWhatTheFormatLacks) {
  const auto error = [&](const std::vector<std::pair<std::string, at::Tensor>>& tensors) {
    return checkpoint_error([&] { write_safetensors(path("f"), tensors); });
  };
  EXPECT_THAT(
      error({{"net.rotation", at::zeros({1}, at::kComplexDouble)}}),
      HasSubstr("f\": tensor \"net.rotation\": checkpoints cannot hold dtype ComplexDouble; "
                "expected one of F32 F64 F16 BF16 F8_E4M3 F8_E5M2 C64 I64 I32 I16 I8 U64 U32 "
                "U16 U8 BOOL. Convert the tensor with to(dtype), or view it as another "
                "dtype."));
  EXPECT_THAT(error({{"a", at::ones({1})}, {"a", at::ones({1})}}),
              HasSubstr("tensor name \"a\" is used twice or reserved"));
  EXPECT_THAT(error({{"s", at::ones({1}).to_sparse()}}),
              HasSubstr("tensor \"s\" is undefined or not dense"));
  EXPECT_THAT(error({{"\xff", at::ones({1})}}), HasSubstr("a tensor name is not UTF-8"));
  // Readers would refuse the file.
  EXPECT_THAT(error({{std::string(kLongestName + 1, 'n'), at::ones({1})}}),
              HasSubstr("expected tensor names of at most 65536 bytes, got \"nnn"));
  std::vector<std::pair<std::string, at::Tensor>> many;
  for (int i = 0; i < 1600; ++i) {
    many.emplace_back(std::to_string(i) + std::string(kLongestName - 10, 'n'), at::ones({1}));
  }
  EXPECT_THAT(error(many),
              HasSubstr("bytes, and a safetensors header at most 100000000. Use shorter names, or "
                        "write fewer tensors to a file."));
  EXPECT_FALSE(std::filesystem::exists(path("f")));
  EXPECT_FALSE(std::filesystem::exists(path("f.tmp")));
  EXPECT_THAT(checkpoint_error([&] { write_safetensors(path("no/f"), {}); }),
              HasSubstr("no/f.tmp\": No such file or directory."));
}

TEST_F(SafetensorsTest, RefusesShapesThatNoTensorHas) {
  const auto error = [&](const std::string& shape) {
    return error_of(R"({"a":{"dtype":"U8","shape":)" + shape + R"(,"data_offsets":[0,1]}})", "x");
  };
  EXPECT_THAT(error("{\"a\": 1}"), HasSubstr("shape {\"a\":1} has an element that is not"));
  EXPECT_THAT(error("[9223372036854775807, 2]"), HasSubstr("is not that of a tensor."));
  std::string ones = "1";
  for (int i = 0; i < 64; ++i) ones += ",1";
  EXPECT_THAT(error("[" + ones + "]"),
              HasSubstr("tensor \"a\": expected a shape of at most 64 dimensions, got 65."));
}

TEST_F(SafetensorsTest, NamesAreShownOnOneLine) {
  EXPECT_THAT(error_of(R"({"a\n[smp] forged\u001b[2J": 5})", ""),
              HasSubstr("tensor \"a\\n[smp] forged\\x1b[2J\": "));
  EXPECT_THAT(error_of("{\"" + std::string(1 << 20, 'n') +
                           R"(":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
                       "x"),
              HasSubstr("nnn... (1048576 bytes)\": expected a name of at most 65536 bytes."));
}

TEST_F(SafetensorsTest, RefusesFilesCutAnywhere) {
  write_safetensors(path("f"), {{"a", at::ones({3})}, {"b", at::ones({2}, at::kLong)}});
  const std::string bytes = slurp(path("f"));
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_THAT(error_of(bytes.substr(0, size)), HasSubstr("bad\" is")) << size;
  }
  EXPECT_THAT(error_of(bytes.substr(0, 5)),
              HasSubstr("is not a safetensors file: expected at least 8 bytes, got 5."));
  EXPECT_THAT(error_of(bytes.substr(0, bytes.size() - 1)),
              HasSubstr("is truncated: tensor \"a\" ends at byte " + std::to_string(bytes.size()) +
                        ", got a file of " + std::to_string(bytes.size() - 1) + " bytes."));
  EXPECT_THAT(error_of(bytes + "x"), HasSubstr("has bytes after its last tensor"));
}

TEST_F(SafetensorsTest, RefusesWhatIsNoFile) {
  EXPECT_THAT(checkpoint_error([&] { SafetensorsReader reader(path("")); }),
              HasSubstr("cannot read \"" + path("") + "\": expected a regular file."));
}

TEST_F(SafetensorsTest, FileThatShrinksWhileItIsRead) {
  write_safetensors(path("f"), {{"a", at::ones({3})}});
  const SafetensorsReader reader(path("f"));
  const uint64_t begin = reader.entries().at("a").offset;
  std::filesystem::resize_file(path("f"), begin + 5);
  EXPECT_THAT(checkpoint_error([&] { reader.read("a"); }),
              HasSubstr("is truncated: expected 12 bytes at offset " + std::to_string(begin) +
                        ", got 5. Use another checkpoint."));
}

TEST_F(SafetensorsTest, RefusesMalformedHeaders) {
  const auto entry = [](const std::string& fields) { return "{\"a\":{" + fields + "}}"; };
  const std::string good = R"("dtype":"U8","shape":[2],)";
  EXPECT_THAT(
      error_of(std::string(7, '\xff') + "\x7f{}"),
      HasSubstr("expected a header of at most 2 bytes, got a length of 9223372036854775807"));
  EXPECT_THAT(error_of("{\"a\":", ""), HasSubstr("expected a JSON object in bytes 8 to 13"));
  EXPECT_THAT(error_of("[1]", ""), HasSubstr("expected a JSON object"));
  EXPECT_THAT(error_of(std::string(50000, '['), ""), HasSubstr("expected a JSON object"));
  EXPECT_THAT(error_of("{\"a\":3}", ""), HasSubstr("tensor \"a\": "));
  EXPECT_THAT(error_of(entry(R"("dtype":"U8","shape":[2])"), "xx"), HasSubstr("data_offsets"));
  EXPECT_THAT(error_of(entry(R"("dtype":"F4","shape":[2],"data_offsets":[0,2])"), "xx"),
              HasSubstr("bad\" has a malformed header: tensor \"a\": unknown dtype \"F4\""));
  EXPECT_THAT(error_of(entry(R"("dtype":"U8","shape":[-2],"data_offsets":[0,2])"), "xx"),
              HasSubstr("not a non-negative integer"));
  EXPECT_THAT(error_of(entry(good + R"("data_offsets":[0,3])"), "xxx"),
              HasSubstr("data_offsets: expected 2 bytes for U8 [2], got [0,3]."));
  EXPECT_THAT(error_of(entry(good + R"("data_offsets":[2,0])"), "xx"),
              HasSubstr("data_offsets: expected 2 bytes for U8 [2], got [2,0]."));
  EXPECT_THAT(error_of(entry(good + R"("data_offsets":[2])"), "xx"),
              HasSubstr("tensor \"a\": data_offsets: expected [begin, end], got [2]."));
  EXPECT_THAT(error_of(entry(good + R"("data_offsets":[1,3])"), "xxx"),
              HasSubstr("tensor \"a\" leaves a hole before it"));
  EXPECT_THAT(
      error_of(entry(good + R"("data_offsets":[18446744073709551613,18446744073709551615])"), "xx"),
      HasSubstr("malformed header: tensor \"a\""));
  EXPECT_THAT(error_of(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
                       R"("b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
                       "xxx"),
              HasSubstr("tensor \"b\" overlaps another"));
}

TEST_F(SafetensorsTest, SizesThatOverflowAreNotAllocated) {
  const std::string huge = R"({"a":{"dtype":"F64","shape":[4294967296,4294967296,2],)";
  EXPECT_THAT(error_of(huge + R"("data_offsets":[0,0]}})", ""),
              HasSubstr("is not that of a tensor"));
  const std::string empty = R"({"a":{"dtype":"F64","shape":[0,4294967296,4294967296],)";
  EXPECT_THAT(error_of(empty + R"("data_offsets":[0,0]}})", ""),
              HasSubstr("is not that of a tensor"));
  const std::string large = R"({"a":{"dtype":"U8","shape":[1099511627776],)";
  EXPECT_THAT(error_of(large + R"("data_offsets":[0,1099511627776]}})", "x"),
              HasSubstr("is truncated: tensor \"a\" ends at byte"));
}

}  // namespace
}  // namespace smp::checkpoint
