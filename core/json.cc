// SPDX-License-Identifier: Apache-2.0
#include "core/json.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <set>
#include <vector>

#include "core/check.h"
#include "core/descriptor.h"
#include "core/text.h"

namespace smp::core {
namespace {

using nlohmann::json;

// Functions that recur over a value could not bear any depth.
constexpr size_t kMaxDepth = 256;

// Looks at the events of a parser. One that builds a tree and has a callback goes through all
// members of an object, or elements of an array, again for each structure in it.
class Inspection final : public nlohmann::json_sax<json> {
 public:
  explicit Inspection(const std::string& text) { json::sax_parse(text, this); }

  bool is_malformed() const { return is_malformed_; }
  bool is_too_deep() const { return is_too_deep_; }
  /// The path of the first key that an object has twice; empty: none.
  const std::string& repeated() const { return repeated_; }

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(int64_t) override { return true; }
  bool number_unsigned(uint64_t) override { return true; }
  bool number_float(double, const std::string&) override { return true; }
  bool string(std::string&) override { return true; }
  bool binary(json::binary_t&) override { return true; }
  bool start_object(size_t) override {
    open_.emplace_back();
    is_too_deep_ = open_.size() > kMaxDepth;
    return !is_too_deep_;
  }
  // The parser of a tree would silently keep the last of two values.
  bool key(std::string& name) override {
    Structure& object = open_.back();
    object.key = name;
    if (!object.seen.insert(name).second && repeated_.empty()) repeated_ = path();
    return true;
  }
  bool end_object() override {
    open_.pop_back();
    return true;
  }
  bool start_array(size_t size) override { return start_object(size); }
  bool end_array() override { return end_object(); }
  bool parse_error(size_t, const std::string&, const json::exception&) override {
    is_malformed_ = true;
    return false;
  }

 private:
  struct Structure {
    std::set<std::string> seen;  // keys; arrays have none
    std::string key;
  };

  std::string path() const {
    std::string text;
    for (const Structure& structure : open_) {
      if (!structure.seen.empty()) text += (text.empty() ? "" : ".") + structure.key;
    }
    return text;
  }

  std::vector<Structure> open_;
  bool is_malformed_ = false, is_too_deep_ = false;
  std::string repeated_;
};

// "line 3, column 5" of the byte (1-based) at which the parser stopped.
std::string position(const std::string& text, size_t byte) {
  const std::string before = text.substr(0, byte > 0 ? byte - 1 : 0);
  const auto line = 1 + std::count(before.begin(), before.end(), '\n');
  const size_t line_start = before.rfind('\n') + 1;  // npos + 1 is 0: the first line
  return c10::str("line ", line, ", column ", before.size() - line_start + 1);
}

// nlohmann's messages start with a tag and its own position; the reason is after that.
std::string reason(const json::exception& error) {
  const std::string what = error.what();
  const size_t at = what.find(": ");
  return at == std::string::npos ? what : what.substr(at + 2);
}

// The contents of a regular file of at most `most` bytes; else the error, in `problem`.
std::string read_regular(const std::string& path, uint64_t most, std::string& problem) {
  // Without O_NONBLOCK opening a pipe would wait for its writer.
  const Descriptor file(open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  struct stat status = {};
  if (!file || fstat(file.get(), &status) != 0) {
    problem = std::strerror(errno);
    return "";
  }
  const auto size = static_cast<uint64_t>(status.st_size);
  if (S_ISDIR(status.st_mode)) {
    problem = "it is a folder";
  } else if (!S_ISREG(status.st_mode)) {
    problem = "it is no regular file";
  } else if (size > most) {
    problem = c10::str("it has ", size, " bytes, and may have ", most);
  }
  if (!problem.empty()) return "";
  std::string text(size, '\0');
  const ssize_t got = read_fully(file.get(), text.data(), text.size(), 0);
  if (got < 0) problem = std::strerror(errno);
  text.resize(static_cast<size_t>(std::max<ssize_t>(got, 0)));
  return text;
}

void check_read(const std::string& path, const std::string& what, const std::string& problem) {
  SMP_CHECK_WITH(ConfigError, problem.empty(), printable(path), ": cannot read ", what, ": ",
                 problem, ". Give the path of a JSON file.");
}

// Whether the pipe may be read, or nothing more will come, before `deadline`.
bool wait_for_writer(int pipe, std::chrono::steady_clock::time_point deadline) {
  for (;;) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    pollfd waiting{pipe, POLLIN, 0};
    const int ready = poll(&waiting, 1, static_cast<int>(std::max<int64_t>(left.count(), 0)));
    if (ready >= 0 || errno != EINTR) return ready > 0;
  }
}

// Reads a pipe until its writers have closed it; the error is in `problem`.
std::string read_to_the_end(int pipe, std::chrono::milliseconds patience, uint64_t most,
                            std::string& problem) {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  std::string text;
  std::array<char, 1 << 16> piece;
  bool has_writer = false;
  while (text.size() <= most) {
    const ssize_t got = read(pipe, piece.data(), piece.size());
    if (got > 0) {
      text.append(piece.data(), static_cast<size_t>(got));
      continue;
    }
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno != EAGAIN) {
      problem = std::strerror(errno);
      return "";
    }
    // A pipe without a writer yet reads like one that is closed.
    const bool is_closed = got == 0 && (has_writer || !text.empty());
    if (is_closed) return text;
    if (!wait_for_writer(pipe, deadline)) {
      problem = c10::str("it is a pipe that was not written and closed within ",
                         std::chrono::duration<double>(patience).count(), " s");
      return "";
    }
    has_writer = true;
  }
  problem = c10::str("it has more than ", most, " bytes");
  return "";
}

}  // namespace

json parse_json(const std::string& text, const std::string& name) {
  const std::string source_name = printable(name);
  const Inspection inspection(text);
  SMP_CHECK_WITH(ConfigError, !inspection.is_too_deep(), source_name, ": expected JSON of at most ",
                 kMaxDepth, " levels, got more. Write values without so many brackets.");
  json parsed;
  try {
    parsed = json::parse(text);
  } catch (const json::parse_error& error) {
    SMP_CHECK_WITH(ConfigError, false, source_name, ": malformed JSON at ",
                   position(text, error.byte), ": ", printable(reason(error), 200),
                   ". Correct the text at that position.");
  } catch (const json::out_of_range& error) {
    core::fail<ConfigError>(source_name,
                            ": a number is too large for JSON: ", printable(reason(error), 100),
                            ". Write a smaller one.");
  }
  SMP_CHECK_WITH(ConfigError, inspection.repeated().empty(), source_name, ": \"",
                 printable(inspection.repeated(), 100),
                 "\": expected each key once, got it twice in one object. Remove one of the two.");
  return parsed;
}

json parse_untrusted(const std::string& text) {
  const Inspection inspection(text);
  const bool is_sound = !inspection.is_malformed() && !inspection.is_too_deep();
  if (!is_sound || !inspection.repeated().empty()) return json(json::value_t::discarded);
  return json::parse(text, nullptr, /*allow_exceptions=*/false);
}

std::string read_file(const std::string& path, const std::string& what, uint64_t most) {
  std::string problem;
  const std::string text = read_regular(path, most, problem);
  check_read(path, what, problem);
  return text;
}

std::string read_pipe(const std::string& path, const std::string& what,
                      std::chrono::milliseconds patience, uint64_t most) {
  // Without O_NONBLOCK opening a pipe would wait for its writer.
  const Descriptor pipe(open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  std::string problem, text;
  if (!pipe) {
    problem = std::strerror(errno);
  } else {
    text = read_to_the_end(pipe.get(), patience, most, problem);
  }
  check_read(path, what, problem);
  return text;
}

void write_file(const std::string& path, const std::string& text, const std::string& failure,
                const std::string& remedy) {
  std::ofstream out(path, std::ios::binary);
  out << text << std::flush;
  SMP_CHECK_WITH(ConfigError, out.good(), printable(path), ": ", failure, ": ",
                 std::strerror(errno), ". ", remedy, ".");
}

}  // namespace smp::core
