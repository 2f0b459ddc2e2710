// SPDX-License-Identifier: Apache-2.0
#include "exported/zip_directory.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

#include "checkpoint/file.h"
#include "core/check.h"
#include "core/text.h"

namespace smp::exported {
namespace {

// Signatures and lengths of the format's parts, without those of variable length.
constexpr uint64_t kEntry = 0x02014b50, kEntryBytes = 46;
constexpr uint64_t kEnd = 0x06054b50, kEndBytes = 22;
constexpr uint64_t kEnd64 = 0x06064b50, kEnd64Bytes = 56;
constexpr uint64_t kLocator64 = 0x07064b50, kLocator64Bytes = 20;
constexpr uint64_t kMaxComment = 0xffff;
constexpr uint64_t kIn64Bits = 0xffffffff;  // the value is in the entry's extra fields
constexpr uint64_t kExtra64 = 1;

/// Numbers in a part of a file.
class Bytes {
 public:
  /// Throws `CheckpointError` for bytes that are not within the file.
  Bytes(const checkpoint::FileReader& file, uint64_t offset, uint64_t size) {
    if (offset > file.size() || size > file.size() - offset) {
      core::fail<CheckpointError>("cannot read exported program \"", core::printable(file.path()),
                                  "\": its directory lies outside of it. Expected an archive that "
                                  "torch.export.save of torch 2.9 or later has written: write it "
                                  "again, or copy it again");
    }
    bytes_.resize(size);
    file.read(offset, bytes_.data(), size);
  }

  uint64_t size() const { return bytes_.size(); }
  /// The unsigned number of `length` bytes; nothing where they are not all there.
  std::optional<uint64_t> number(uint64_t offset, uint64_t length) const {
    if (offset > size() || length > size() - offset) return std::nullopt;
    uint64_t value = 0;
    for (uint64_t i = length; i-- > 0;) {
      value = value << 8 | static_cast<unsigned char>(bytes_[offset + i]);
    }
    return value;
  }
  std::string text(uint64_t offset, uint64_t length) const {
    return offset > size() ? "" : bytes_.substr(offset, length);
  }

 private:
  std::string bytes_;
};

struct Directory {
  uint64_t offset, size, entries;
};

/// Finds the directory as libtorch's reader does: by the last end that the file has.
std::optional<Directory> find_directory(const checkpoint::FileReader& file) {
  const uint64_t most = std::min(file.size(), kMaxComment + kEndBytes + kLocator64Bytes);
  const uint64_t begin = file.size() - most;
  const Bytes tail(file, begin, most);
  if (most < kEndBytes) return std::nullopt;
  uint64_t end = most - kEndBytes;
  while (end > 0 && tail.number(end, 4) != kEnd) --end;
  if (tail.number(end, 4) != kEnd) return std::nullopt;
  const auto read = [&](uint64_t offset, uint64_t length) {
    return tail.number(end + offset, length).value();
  };
  Directory directory{read(16, 4), read(12, 4), read(10, 2)};
  uint64_t behind = begin + end;  // which begins right after the directory
  if (end >= kLocator64Bytes && tail.number(end - kLocator64Bytes, 4) == kLocator64) {
    behind = tail.number(end - kLocator64Bytes + 8, 8).value();
    const Bytes end64(file, behind, kEnd64Bytes);
    const bool fits =
        end64.number(0, 4) == kEnd64 && behind + kEnd64Bytes == begin + end - kLocator64Bytes;
    if (!fits) return std::nullopt;
    directory = {end64.number(48, 8).value(), end64.number(40, 8).value(),
                 end64.number(32, 8).value()};
  }
  const bool fits = directory.offset <= behind && directory.size == behind - directory.offset;
  return fits ? std::optional(directory) : std::nullopt;
}

struct Entry {
  std::string name;
  uint64_t size;
  bool is_stored;  ///< without compression
  uint64_t next;   ///< where the next one begins
};

/// The sizes of an entry whose own fields are too small for them: the first extra field of that
/// kind has them, the record's own before the stored one.
std::optional<uint64_t> extra_size(const Bytes& bytes, uint64_t begin, uint64_t end,
                                   uint64_t place) {
  for (uint64_t at = begin; at + 4 <= end;) {
    const auto kind = bytes.number(at, 2), length = bytes.number(at + 2, 2);
    if (!kind || !length) return std::nullopt;
    if (*kind == kExtra64) {
      return place + 8 <= *length ? bytes.number(at + 4 + place, 8) : std::nullopt;
    }
    at += 4 + *length;
  }
  return std::nullopt;
}

std::optional<Entry> read_entry(const Bytes& bytes, uint64_t at) {
  if (bytes.number(at, 4) != kEntry || bytes.size() - at < kEntryBytes) return std::nullopt;
  const auto read = [&](uint64_t offset, uint64_t length) {
    return bytes.number(at + offset, length).value();
  };
  const uint64_t method = read(10, 2);
  const uint64_t name = at + kEntryBytes, extra = name + read(28, 2), end = extra + read(30, 2);
  std::optional<uint64_t> stored = read(20, 4), size = read(24, 4);
  const bool is_large = size == kIn64Bits;
  if (stored == kIn64Bits) stored = extra_size(bytes, extra, end, is_large ? 8 : 0);
  if (is_large) size = extra_size(bytes, extra, end, 0);
  if (!stored || !size) return std::nullopt;
  return Entry{bytes.text(name, read(28, 2)), *size, method == 0 && *stored == *size,
               end + read(32, 2)};
}

}  // namespace

void check_zip_directory(const std::string& path) {
  const checkpoint::FileReader file(path);
  const auto expect = [&](bool fits) {
    SMP_CHECK_WITH(CheckpointError, fits, "cannot read exported program \"", core::printable(path),
                   "\": it has no directory of records at its end. Expected an archive that "
                   "torch.export.save of torch 2.9 or later has written: write it again, or copy "
                   "it again");
  };
  const auto directory = find_directory(file);
  expect(directory.has_value());
  const Bytes bytes(file, directory->offset, directory->size);
  uint64_t at = 0, total = 0;
  for (uint64_t i = 0; i < directory->entries; ++i) {
    const auto entry = read_entry(bytes, at);
    expect(entry.has_value());
    SMP_CHECK_WITH(CheckpointError, entry->is_stored, "exported program \"", core::printable(path),
                   "\": its record \"", core::printable(entry->name, 100),
                   "\" is compressed, and torch.export.save compresses none. Write it again by "
                   "that");
    const bool overflows = __builtin_add_overflow(total, entry->size, &total);
    SMP_CHECK_WITH(CheckpointError, !overflows && total <= file.size(), "exported program \"",
                   core::printable(path), "\": with its record \"",
                   core::printable(entry->name, 100),
                   "\" it has more bytes in records than in the file, ", file.size(),
                   ". The file is damaged: write it again by torch.export.save");
    at = entry->next;
  }
  expect(at == bytes.size());
}

}  // namespace smp::exported
