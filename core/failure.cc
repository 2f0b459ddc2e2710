// SPDX-License-Identifier: Apache-2.0
#include "core/failure.h"

#include <unistd.h>

#include <atomic>
#include <charconv>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "core/env.h"

namespace smp::core {
namespace {

namespace fs = std::filesystem;

template <class Number>
std::optional<Number> parse_number(const std::string& text) {
  Number number{};
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc{} || stop != end) return std::nullopt;
  return number;
}

// A record is the time on a line of its own, then the message to the end of the file.
std::optional<Failure> read_failure(const fs::path& file) {
  const auto rank = parse_number<int>(file.filename().string());
  std::ifstream in(file);
  std::string time_text;
  if (!rank || !std::getline(in, time_text)) return std::nullopt;
  const auto time_ns = parse_number<int64_t>(time_text);
  if (!time_ns) return std::nullopt;
  return Failure{*rank, *time_ns, std::string(std::istreambuf_iterator<char>(in), {})};
}

void write_failure(const fs::path& directory, int rank, const std::string& message) {
  using std::chrono::system_clock;
  const auto now =
      std::chrono::duration_cast<std::chrono::nanoseconds>(system_clock::now().time_since_epoch());
  const fs::path temporary = directory / ("." + std::to_string(::getpid()));
  std::ofstream out(temporary);
  out << now.count() << '\n' << message;
  out.close();
  if (out) fs::rename(temporary, directory / std::to_string(rank));
}

}  // namespace

void record_failure(int rank, const std::string& message) noexcept {
  static std::atomic_flag recorded = ATOMIC_FLAG_INIT;
  try {
    const auto directory = env(kFailureDirVariable);
    if (directory && !recorded.test_and_set()) write_failure(*directory, rank, message);
  } catch (...) {
    // The process is already failing for a reason of its own, which must not be replaced.
  }
}

std::optional<Failure> first_failure(const std::string& directory) {
  std::optional<Failure> first;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(directory, error)) {
    auto failure = read_failure(entry.path());
    if (failure && (!first || failure->time_ns < first->time_ns)) first = std::move(failure);
  }
  return first;
}

}  // namespace smp::core
