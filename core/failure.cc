// SPDX-License-Identifier: Apache-2.0
#include "core/failure.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <system_error>
#include <utility>

#include "core/env.h"

namespace smp::core {
namespace {

namespace fs = std::filesystem;

constexpr std::array<std::pair<const char*, Failure::Kind>, 4> kKinds = {{
    {"own", Failure::Kind::kOwn},
    {"heard", Failure::Kind::kHeard},
    {"timed_out", Failure::Kind::kTimedOut},
    {"peer_ended", Failure::Kind::kPeerEnded},
}};

// A record is a line with its number, the kind, the missing ranks and the cause, if one is known,
// then the message to the end of the file.
constexpr const char* kCause = "cause";

constexpr const char* kOrder = "order";

std::optional<Failure> read_failure(const fs::path& file) {
  const auto rank = c10::tryToNumber<int64_t>(file.filename().string());
  std::ifstream in(file);
  std::string line;
  if (!rank || !std::getline(in, line)) return std::nullopt;
  std::istringstream words(line);
  std::string kind;
  Failure failure;
  failure.rank = static_cast<int>(*rank);
  words >> failure.order >> kind;
  const auto* const known = std::find_if(kKinds.begin(), kKinds.end(),
                                         [&](const auto& one) { return one.first == kind; });
  if (!words || known == kKinds.end()) return std::nullopt;
  failure.kind = known->second;
  for (int missing = 0; words >> missing;) failure.missing.push_back(missing);
  words.clear();
  StallCause cause;
  if (words >> kind >> cause.rank && kind == kCause && std::getline(words >> std::ws, cause.how)) {
    failure.cause = cause;
  }
  failure.message.assign(std::istreambuf_iterator<char>(in), {});
  return failure;
}

// Numbers the failures of a job: the process that makes a file first has its number, which is so
// for all hosts that share the folder. Numbers are taken without gaps, so the first ones need no
// try.
int64_t take_number(const fs::path& directory) {
  int64_t number = 0;
  std::error_code ignored;  // a folder that is gone: then no number counts
  for (const auto& entry : fs::directory_iterator(directory, ignored)) {
    number += entry.path().stem() == kOrder ? 1 : 0;
  }
  for (;; ++number) {
    const fs::path file = directory / (kOrder + ("." + std::to_string(number)));
    const int fd = ::open(file.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    const bool is_taken = fd < 0 && errno == EEXIST;
    if (fd >= 0) ::close(fd);
    if (!is_taken) return number;
  }
}

void write_failure(const fs::path& directory, const Failure& failure) {
  // Ranks in several containers may have one process id.
  const fs::path temporary =
      directory / ("." + std::to_string(failure.rank) + "." + std::to_string(::getpid()));
  std::ofstream out(temporary);
  out << failure.order << ' ' << kKinds[static_cast<size_t>(failure.kind)].first;
  for (const int rank : failure.missing) out << ' ' << rank;
  if (failure.cause)
    out << ' ' << kCause << ' ' << failure.cause->rank << ' ' << failure.cause->how;
  out << '\n' << failure.message;
  out.close();
  if (out) fs::rename(temporary, directory / std::to_string(failure.rank));
}

Failure failure_of(int rank, const std::exception& error) {
  Failure failure;
  failure.rank = rank;
  failure.message = message_of(error);
  if (const auto* const wait = dynamic_cast<const FailedWait*>(&error)) {
    failure.kind = wait->kind();
    failure.missing = wait->missing();
    failure.cause = wait->cause();
  }
  return failure;
}

// The failure that this process has left.
struct Record {
  std::mutex mutex;
  std::optional<std::string> message;
  std::optional<Failure> wait;  // noted, not written
};

Record& own_record() {
  static Record* const record = new Record();  // for handlers that run after static objects
  return *record;
}

void record(Failure failure) {
  const auto directory = env(kFailureDirVariable);
  if (!directory) return;
  Record& own = own_record();
  const std::lock_guard<std::mutex> lock(own.mutex);
  if (own.message) return;
  failure.order = take_number(*directory);
  write_failure(*directory, failure);
  std::error_code error;
  if (fs::exists(fs::path(*directory) / std::to_string(failure.rank), error)) {
    own.message = failure.message;
  }
}

// The process is already failing for a reason of its own, which must not be replaced.
template <class Call>
void without_errors(const Call& call) noexcept {
  try {
    call();
  } catch (...) {
  }
}

}  // namespace

std::string message_of(const std::exception& error) {
  const auto* const libtorch = dynamic_cast<const c10::Error*>(&error);
  return libtorch != nullptr && env("SMP_BACKTRACE") != "1" ? libtorch->what_without_backtrace()
                                                            : error.what();
}

void record_failure(int rank, const std::exception& error) noexcept {
  without_errors([&] { record(failure_of(rank, error)); });
}

void record_failure(int rank, const std::string& message, Failure::Kind kind) noexcept {
  without_errors([&] {
    Failure failure;
    failure.rank = rank;
    failure.kind = kind;
    failure.message = message;
    record(std::move(failure));
  });
}

void note_failed_wait(int rank, const std::exception& error) noexcept {
  without_errors([&] {
    Record& own = own_record();
    const std::lock_guard<std::mutex> lock(own.mutex);
    if (!own.wait) own.wait = failure_of(rank, error);
  });
}

std::optional<std::string> record_failed_wait() noexcept {
  std::optional<std::string> message;
  without_errors([&] {
    std::optional<Failure> wait;
    {
      Record& own = own_record();
      const std::lock_guard<std::mutex> lock(own.mutex);
      wait = own.wait;
    }
    if (!wait) return;
    record(*wait);
    message = wait->message;
  });
  return message;
}

bool is_recorded(const std::string& message) {
  Record& own = own_record();
  const std::lock_guard<std::mutex> lock(own.mutex);
  return own.message == message;
}

std::vector<Failure> read_failures(const std::string& directory) {
  std::vector<Failure> failures;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(directory, error)) {
    if (auto failure = read_failure(entry.path())) failures.push_back(std::move(*failure));
  }
  std::sort(failures.begin(), failures.end(), [](const Failure& a, const Failure& b) {
    return std::pair(a.order, a.rank) < std::pair(b.order, b.rank);
  });
  return failures;
}

}  // namespace smp::core
