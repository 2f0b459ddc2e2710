// SPDX-License-Identifier: Apache-2.0
#include "examples/mnist/idx_data.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randperm.h>
#include <c10/util/Exception.h>
#include <zlib.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <memory>

namespace mnist {
namespace {

constexpr double kMean = 0.1307, kDeviation = 0.3081;
constexpr int64_t kSide = 28;
/// The largest piece that zlib reads in one call.
constexpr int64_t kPiece = int64_t{1} << 24;
/// How much is read before the file has shown that there is more.
constexpr int64_t kFirstPiece = int64_t{1} << 20;

/// A plain or gzipped file that is read from front to back (zlib passes plain files through).
class Reader {
 public:
  explicit Reader(const std::string& file)
      : file_(file), stream_(gzopen(file.c_str(), "rb"), &gzclose) {
    TORCH_CHECK_VALUE(stream_ != nullptr, "idx file \"", file, "\": cannot open it. Check --data.");
  }

  /// Reads up to `size` bytes and returns how many there were.
  int64_t read_some(void* data, int64_t size) {
    int64_t done = 0;
    while (done < size) {
      const auto piece = static_cast<unsigned>(std::min(size - done, kPiece));
      const int got = gzread(stream_.get(), static_cast<char*>(data) + done, piece);
      // A truncated gzip stream ends with an error and a plain file without; both are short reads.
      if (got <= 0) break;
      done += got;
    }
    return done;
  }

  void read(void* data, int64_t size, const char* what) {
    const int64_t got = read_some(data, size);
    check(got == size, size, what, got);
  }

  void check(bool ok, int64_t expected, const char* what, int64_t got) const {
    TORCH_CHECK_VALUE(ok, "idx file \"", file_, "\": expected ", expected, " bytes of ", what,
                      ", got ", got, ". The file is truncated or damaged: fetch it again.");
  }

  uint32_t read_big_endian(const char* what) {
    unsigned char bytes[4];
    read(bytes, sizeof bytes, what);
    return uint32_t{bytes[0]} << 24 | uint32_t{bytes[1]} << 16 | uint32_t{bytes[2]} << 8 | bytes[3];
  }

 private:
  std::string file_;
  std::unique_ptr<gzFile_s, int (*)(gzFile)> stream_;
};

/// Reads bytes into memory that grows with the file's content, whatever its header claims.
at::Tensor read_data(Reader& reader, int64_t count) {
  at::Tensor data = at::empty({0}, at::kByte);
  for (int64_t done = 0; done < count;) {
    const int64_t piece = std::min(count - done, std::max(done, kFirstPiece));
    data.resize_({done + piece});
    const int64_t got = reader.read_some(data.mutable_data_ptr<uint8_t>() + done, piece);
    reader.check(got == piece, count, "data", done + got);
    done += got;
  }
  return data;
}

/// The product of the sizes. Empty dimensions do not make the others any better.
int64_t count_bytes(const std::string& file, const std::vector<int64_t>& sizes) {
  int64_t count = 1;
  for (const int64_t size : sizes) {
    TORCH_CHECK_VALUE(size == 0 || count <= std::numeric_limits<int64_t>::max() / size,
                      "idx file \"", file, "\": expected sizes of a tensor, got ",
                      at::IntArrayRef(sizes), ". The file is damaged: fetch it again.");
    count *= std::max<int64_t>(size, 1);
  }
  return std::find(sizes.begin(), sizes.end(), 0) == sizes.end() ? count : 0;
}

std::string find(const std::string& folder, const std::string& name) {
  const std::string path = folder + "/" + name;
  if (std::filesystem::exists(path)) return path;
  return std::filesystem::exists(path + ".gz") ? path + ".gz" : "";
}

std::string require(const std::string& folder, const std::string& name) {
  const std::string file = find(folder, name);
  TORCH_CHECK_VALUE(
      !file.empty(), "MNIST: expected the file ", name, " or ", name, ".gz in \"", folder,
      "\", found neither. Get the four idx files of the MNIST database, for example with "
      "torchvision: datasets.MNIST(FOLDER, download=True) puts them into FOLDER/MNIST/raw; "
      "then pass --data FOLDER/MNIST/raw.");
  return file;
}

/// Reads `prefix`-images and `prefix`-labels of `folder` and checks that they belong together.
Digits load_digits(const std::string& folder, const std::string& prefix) {
  const std::string image_file = require(folder, prefix + "-images-idx3-ubyte");
  const std::string label_file = require(folder, prefix + "-labels-idx1-ubyte");
  const auto images = read_idx(image_file), labels = read_idx(label_file);
  TORCH_CHECK_VALUE(images.dim() == 3 && images.size(1) == kSide && images.size(2) == kSide,
                    "idx file \"", image_file, "\": expected images of shape [count, 28, 28], got ",
                    images.sizes(), ". It is no file of MNIST images.");
  TORCH_CHECK_VALUE(labels.dim() == 1 && labels.size(0) == images.size(0), "idx file \"",
                    label_file, "\": expected the ", images.size(0), " labels of \"", image_file,
                    "\", got shape ", labels.sizes(), ". Fetch both files from one place.");
  return {((images.to(at::kFloat) / 255 - kMean) / kDeviation).unsqueeze(1), labels.to(at::kLong)};
}

}  // namespace

at::Tensor read_idx(const std::string& file) {
  Reader reader(file);
  const uint32_t magic = reader.read_big_endian("magic number");
  const uint32_t dimensions = magic & 0xff;
  // The third byte is the element type, 0x08 for unsigned bytes; the first two are zero.
  TORCH_CHECK_VALUE(magic >> 8 == 0x08 && dimensions >= 1 && dimensions <= 4, "idx file \"", file,
                    "\": expected magic number 0x000008NN (unsigned bytes, NN from 1 to 4 "
                    "dimensions), got ",
                    c10::str("0x", std::hex, magic), ". It is no idx file of bytes.");
  std::vector<int64_t> sizes;
  for (uint32_t i = 0; i < dimensions; ++i) sizes.push_back(reader.read_big_endian("sizes"));
  const auto tensor = read_data(reader, count_bytes(file, sizes)).view(sizes);
  char extra = 0;
  TORCH_CHECK_VALUE(reader.read_some(&extra, 1) == 0, "idx file \"", file, "\": expected ",
                    tensor.numel(), " bytes of data for shape ", tensor.sizes(),
                    ", got more. The file is damaged: fetch it again.");
  return tensor;
}

Digits Digits::select(const at::Tensor& indices) const {
  return {images.index_select(0, indices), labels.index_select(0, indices)};
}

DataSet load_mnist(const std::string& folder) {
  const bool small = find(folder, "train-images-idx3-ubyte").empty() &&
                     !find(folder, "t10k-images-idx3-ubyte").empty();
  if (!small) {
    const Digits training = load_digits(folder, "train");
    return {training, load_digits(folder, "t10k"), "the training and test files of " + folder};
  }
  const Digits all = load_digits(folder, "t10k");
  const int64_t split = all.size() * 9 / 10, rest = all.size() - split;
  return {{all.images.narrow(0, 0, split), all.labels.narrow(0, 0, split)},
          {all.images.narrow(0, split, rest), all.labels.narrow(0, split, rest)},
          c10::str("only the t10k files of ", folder, ": their first ", split,
                   " digits for training, the last ", rest, " for testing")};
}

EpochSampler::EpochSampler(int64_t count, int64_t batch_size, uint64_t seed)
    : count_(count), batch_size_(batch_size), seed_(seed) {
  TORCH_CHECK_VALUE(count >= batch_size, "MNIST: expected at least ", batch_size,
                    " digits for a batch, got ", count, ". Choose a smaller --batch-size.");
}

std::vector<at::Tensor> EpochSampler::batches(int64_t epoch) const {
  auto generator = at::detail::createCPUGenerator(seed_ + static_cast<uint64_t>(epoch));
  auto batches = at::randperm(count_, generator, at::kLong).split(batch_size_);
  if (batches.back().numel() < batch_size_) batches.pop_back();
  return batches;
}

}  // namespace mnist
