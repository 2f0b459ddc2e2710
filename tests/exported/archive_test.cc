// SPDX-License-Identifier: Apache-2.0
// Records and directories of archives: an error each for forms foreign to torch.export.save.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>

#include "exported/zip_directory.h"
#include "smp/error.h"
#include "smp/exported.h"
#include "tests/error_of.h"
#include "tests/exported/archives.h"

namespace smp::testing {
namespace {

class ExportedArchive : public ::testing::Test {
 protected:
  /// The error of loading these bytes.
  std::string refused_bytes(const std::string& bytes) {
    const std::string path = folder_.write("bytes.pt2", bytes);
    return error_of<CheckpointError>([&] { load_exported(path); });
  }

  TempFolder folder_;
};

TEST_F(ExportedArchive, OtherByteOrder) {
  Records records = records_of(archive("small"));
  records["byteorder"] = "big";
  expect_has(refused_bytes(archive_of(records)), {"has the byte order of another machine"});
}

/// Libtorch reads some when it opens an archive: they are refused before.
TEST_F(ExportedArchive, CompressedRecords) {
  for (const char* name : {"models/model.json", ".data/version"}) {
    std::string bytes;
    caffe2::serialize::PyTorchStreamWriter writer([&](const void* data, size_t size) {
      bytes.append(static_cast<const char*>(data), size);
      return size;
    });
    const std::string large = "3" + std::string(1 << 20, ' ');
    writer.writeRecord(name, large.data(), large.size(), /*compress=*/true);
    writer.writeEndOfFile();
    expect_has(refused_bytes(bytes), {std::string("its record \"archive/") + name +
                                      "\" is compressed, and torch.export.save compresses none"});
  }
}

/// Sets a number in the directory's entry of a record.
void set_in_directory(std::string& bytes, const std::string& record, size_t offset,
                      uint32_t number) {
  const std::string name = "archive/" + record;
  const size_t entry = bytes.rfind(name) - 46;
  ASSERT_EQ(bytes.substr(entry, 4), "PK\1\2");
  std::memcpy(bytes.data() + entry + offset, &number, sizeof(number));
}

TEST_F(ExportedArchive, RecordsThatLieOverEachOther) {
  std::string bytes = archive_of(records_of(archive("small")));
  for (const char* record : {"data/weights/weight_0", "data/weights/weight_1"}) {
    for (size_t offset : {20, 24}) {  // the stored size and the record's own
      set_in_directory(bytes, record, offset, static_cast<uint32_t>(bytes.size() / 2));
    }
  }
  expect_has(refused_bytes(bytes), {"it has more bytes in records than in the file, ",
                                    "The file is damaged: write it again"});
}

TEST_F(ExportedArchive, DirectoriesThatAreDamaged) {
  const std::string bytes = archive_of(records_of(archive("small")));
  const auto damaged = [&](const std::string& signature, size_t offset) {
    std::string changed = bytes;
    SCOPED_TRACE(signature + std::to_string(offset));
    changed[bytes.rfind(signature) + offset] ^= 1;
    return refused_bytes(changed);
  };
  const std::string elsewhere = "it has no directory of records at its end. Expected an archive";
  expect_has(damaged("PK\1\2", 0), {elsewhere});   // an entry's signature
  expect_has(damaged("PK\1\2", 28), {elsewhere});  // the length of its name
  for (size_t offset : {0, 32, 40, 48}) {          // signature, entries, size, place
    expect_has(damaged("PK\6\6", offset), {elsewhere});
  }
  expect_has(damaged("PK\6\7", 8), {elsewhere});  // where the end is
  expect_has(damaged("PK\6\7", 14), {"its directory lies outside of it"});
}

/// Sizes of more than 32 bits stand in an extra field. The file has a hole, and so takes no room.
TEST_F(ExportedArchive, DirectoriesOfLargeFiles) {
  const uint64_t room = uint64_t{5} << 30;
  const auto number = [](uint64_t value, size_t length) {
    return std::string(reinterpret_cast<const char*>(&value), length);
  };
  const auto write = [&](uint64_t size) {
    const std::string most = number(UINT32_MAX, 4);
    const std::string extra = number(7, 2) + number(1, 2) + "x" + number(1, 2) + number(16, 2) +
                              number(size, 8) + number(size, 8);
    const std::string entry = "PK\1\2" + std::string(16, 0) + most + most + number(1, 2) +
                              number(extra.size(), 2) + std::string(14, 0) + "a" + extra;
    const std::string end = "PK\6\6" + number(44, 8) + std::string(20, 0) + number(1, 8) +
                            number(entry.size(), 8) + number(room, 8) + "PK\6\7" + number(0, 4) +
                            number(room + entry.size(), 8) + number(1, 4) + "PK\5\6" +
                            number(0, 4) + number(UINT32_MAX, 4) + most + most + number(0, 2);
    const std::string path = folder_.write("large.pt2", "");
    std::filesystem::resize_file(path, room);
    std::ofstream(path, std::ios::binary | std::ios::app) << entry << end;
    return path;
  };
  exported::check_zip_directory(write(room));
  const std::string path = write(room + 500);
  expect_has(error_of<CheckpointError>([&] { exported::check_zip_directory(path); }),
             {"with its record \"a\" it has more bytes in records than in the file, 5368709"});
}

}  // namespace
}  // namespace smp::testing
