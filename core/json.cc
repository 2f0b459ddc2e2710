// SPDX-License-Identifier: Apache-2.0
#include "core/json.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>
#include <vector>

#include "core/check.h"
#include "core/text.h"

namespace smp::core {
namespace {

using nlohmann::json;

// Functions that recur over a value could not bear any depth.
constexpr int kMaxDepth = 256;

// Follows the objects that are open while the parser runs, to see keys that occur twice; the
// parser itself silently keeps the last.
class DuplicateKeys {
 public:
  void operator()(json::parse_event_t event, const json& parsed) {
    if (event == json::parse_event_t::object_start) {
      open_.emplace_back();
    } else if (event == json::parse_event_t::object_end) {
      open_.pop_back();
    } else if (event == json::parse_event_t::key) {
      Object& object = open_.back();
      object.current = parsed.get<std::string>();
      if (!object.seen.insert(object.current).second && first_.empty()) first_ = path();
    }
  }

  /// The path of the first key that occurred twice, or empty.
  const std::string& first() const { return first_; }

 private:
  struct Object {
    std::set<std::string> seen;
    std::string current;
  };

  std::string path() const {
    std::string text;
    for (const Object& object : open_) text += (text.empty() ? "" : ".") + object.current;
    return text;
  }

  std::vector<Object> open_;
  std::string first_;
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

// Closes a file at the end of the block.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  int get() const { return fd_; }

 private:
  const int fd_;
};

// The contents of a regular file of at most `most` bytes; else what is wrong, in `problem`.
std::string read_regular(const std::string& path, uint64_t most, std::string& problem) {
  // Without O_NONBLOCK opening a pipe would wait for its writer.
  const Descriptor file(open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  struct stat status = {};
  if (file.get() < 0 || fstat(file.get(), &status) != 0) {
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
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t got = read(file.get(), text.data() + done, text.size() - done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) problem = std::strerror(errno);
    if (got <= 0) break;
    done += static_cast<size_t>(got);
  }
  text.resize(done);
  return text;
}

}  // namespace

json parse_json(const std::string& text, const std::string& source_name) {
  DuplicateKeys duplicates;
  int deepest = 0;
  const auto watch = [&](int depth, json::parse_event_t event, json& parsed) {
    deepest = std::max(deepest, depth);
    duplicates(event, parsed);
    return true;
  };
  json parsed;
  try {
    parsed = json::parse(text, watch);
  } catch (const json::parse_error& error) {
    SMP_CHECK_WITH(ConfigError, false, source_name, ": malformed JSON at ",
                   position(text, error.byte), ": ", printable(reason(error), 200),
                   ". Correct the text at that position.");
  } catch (const json::out_of_range& error) {
    core::fail<ConfigError>(source_name,
                            ": a number is too large for JSON: ", printable(reason(error), 100),
                            ". Write a smaller one.");
  }
  SMP_CHECK_WITH(ConfigError, deepest <= kMaxDepth, source_name, ": expected JSON of at most ",
                 kMaxDepth, " levels, got ", deepest, ". Write values without so many brackets.");
  SMP_CHECK_WITH(ConfigError, duplicates.first().empty(), source_name, ": \"", printable(duplicates.first(), 100),
                 "\": expected each key once, got it twice in one object. Remove one of the two.");
  return parsed;
}

std::string read_file(const std::string& path, const std::string& what, uint64_t most) {
  std::string problem;
  const std::string text = read_regular(path, most, problem);
  SMP_CHECK_WITH(ConfigError, problem.empty(), printable(path), ": cannot read ", what, ": ",
                 problem, ". Give the path of a JSON file.");
  return text;
}

}  // namespace smp::core
