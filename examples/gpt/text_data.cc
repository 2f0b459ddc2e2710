// SPDX-License-Identifier: Apache-2.0
#include "examples/gpt/text_data.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>

namespace gpt {
namespace {

std::string read_file(const std::string& file) {
  TORCH_CHECK_VALUE(std::filesystem::is_regular_file(file),
                    "text data: expected a text file, got \"", file,
                    "\", which does not exist or is no regular file. Check --data.");
  std::ifstream stream(file, std::ios::binary);
  TORCH_CHECK_VALUE(stream.good(), "text data: cannot read \"", file,
                    "\". Check its permissions, or name another file with --data.");
  std::string text((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());
  TORCH_CHECK_VALUE(!text.empty(), "text data: expected text in \"", file,
                    "\", got an empty file. Leave it out of --data.");
  return text;
}

/// One round of SplitMix64: turns a counter into bits that pass for random.
uint64_t mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15ULL;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
  return value ^ (value >> 31);
}

/// The windows of `text` that begin at `starts`, each with the bytes one further on.
Batch windows(const std::string& text, const std::vector<int64_t>& starts, int64_t sequence) {
  const auto rows = static_cast<int64_t>(starts.size());
  Batch batch{at::empty({rows, sequence}, at::kLong), at::empty({rows, sequence}, at::kLong)};
  auto* x = batch.x.mutable_data_ptr<int64_t>();
  auto* y = batch.y.mutable_data_ptr<int64_t>();
  for (const int64_t start : starts) {
    for (int64_t i = start; i < start + sequence; ++i) {
      *x++ = static_cast<unsigned char>(text[i]);
      *y++ = static_cast<unsigned char>(text[i + 1]);
    }
  }
  return batch;
}

/// The last byte at which a window can begin.
int64_t last_start(const std::string& text, const std::string& name, const char* part,
                   int64_t sequence) {
  const auto last = static_cast<int64_t>(text.size()) - sequence - 1;
  TORCH_CHECK_VALUE(last >= 0, "text data: expected at least ", sequence + 1, " bytes of ", part,
                    " text in ", name, " for sequences of ", sequence, " bytes, got ", text.size(),
                    ". Use a larger text (--data) or a shorter --sequence.");
  return last;
}

}  // namespace

at::Tensor to_tensor(const std::string& bytes) {
  auto tensor = at::empty({static_cast<int64_t>(bytes.size())}, at::kLong);
  std::transform(bytes.begin(), bytes.end(), tensor.mutable_data_ptr<int64_t>(),
                 [](unsigned char byte) { return static_cast<int64_t>(byte); });
  return tensor;
}

TextData::TextData(const std::string& text, const std::string& name) : name_(name) {
  const auto size = static_cast<int64_t>(text.size());
  TORCH_CHECK_VALUE(size >= kBlock * kHeldOutEvery, "text data: expected at least ",
                    kBlock * kHeldOutEvery, " bytes in ", name, ", got ", size,
                    ", too few to hold out a block. Name more files with --data.");
  for (int64_t block = 0; block * kBlock < size; ++block) {
    const bool held_out = block % kHeldOutEvery == kHeldOutEvery - 1;
    (held_out ? held_out_ : training_).append(text, block * kBlock, kBlock);
  }
}

TextData TextData::from_files(const std::vector<std::string>& files) {
  TORCH_CHECK_VALUE(!files.empty(), "text data: expected at least one file, got none. Use --data.");
  std::string text;
  for (const std::string& file : files) text += read_file(file);
  return TextData(text, "\"" + c10::Join("\", \"", files) + "\"");
}

TextData TextData::from_folder(const std::string& folder) {
  TORCH_CHECK_VALUE(std::filesystem::is_directory(folder),
                    "text data: expected a folder of texts, ", "got \"", folder,
                    "\", which does not exist. Name files with --data.");
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.is_regular_file() && !entry.is_symlink()) files.push_back(entry.path().string());
  }
  std::sort(files.begin(), files.end());
  TORCH_CHECK_VALUE(!files.empty(), "text data: expected text files in \"", folder,
                    "\", got none. Name files with --data.");
  return from_files(files);
}

Batch TextData::batch(uint64_t seed, int64_t step, int64_t rows, int64_t sequence) const {
  const auto choices =
      static_cast<uint64_t>(last_start(training_, name_, "training", sequence)) + 1;
  std::vector<int64_t> starts;
  for (int64_t row = 0; row < rows; ++row) {
    const uint64_t bits =
        mix(mix(mix(seed) + static_cast<uint64_t>(step)) + static_cast<uint64_t>(row));
    starts.push_back(static_cast<int64_t>(bits % choices));
  }
  return windows(training_, starts, sequence);
}

std::vector<Batch> TextData::held_out_batches(int64_t rows, int64_t sequence) const {
  const int64_t last = last_start(held_out_, name_, "held-out", sequence);
  const int64_t needed = (last + sequence) / sequence + 1;
  const int64_t batches = (needed + rows - 1) / rows;
  const int64_t count = batches * rows;
  std::vector<Batch> result;
  for (int64_t first = 0; first < count; first += rows) {
    std::vector<int64_t> starts;
    for (int64_t window = first; window < first + rows; ++window) {
      starts.push_back(count == 1 ? 0 : window * last / (count - 1));
    }
    result.push_back(windows(held_out_, starts, sequence));
  }
  return result;
}

}  // namespace gpt
