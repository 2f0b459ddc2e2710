// SPDX-License-Identifier: Apache-2.0
#include "graph/hash_log.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <iomanip>
#include <optional>
#include <sstream>
#include <system_error>
#include <utility>

#include "core/check.h"
#include "core/text.h"
#include "graph/visit.h"

namespace smp::graph {
namespace {

namespace fs = std::filesystem;

constexpr const char* kTitle = "smp hashes 1: rank ";
constexpr size_t kLongestRow = 4000;  // bytes; a row of the log is a line

std::string path_of(const std::string& folder, int rank) {
  return (fs::path(folder) / c10::str("rank_", rank, ".hashes")).string();
}

std::string hex(uint64_t number) {
  std::ostringstream out;
  out << std::hex << std::setfill('0') << std::setw(16) << number;
  return out.str();
}

/// The parts of a line between `separator`s.
std::vector<std::string> parts_of(const std::string& line, char separator) {
  std::vector<std::string> parts;
  std::istringstream in(line);
  for (std::string part; std::getline(in, part, separator);) parts.push_back(part);
  return parts;
}

std::string row_text(const Graph& graph, const Operator& op) {
  std::string text = op.name();
  if (!op.scope.empty()) text += ", in module \"" + op.scope + "\"";
  const char* separator = ": ";
  for_each_result(op, [&](ValueId id) {
    text += separator + graph.values[id].meta.to_string();
    separator = ", ";
  });
  return core::printable(text, kLongestRow);
}

}  // namespace

HashRows::HashRows(const Graph& graph) {
  // A gradient is complete when the backward of the first reader is done.
  std::map<ValueId, int> first_reader;
  for (size_t i = 0; i < graph.operators.size(); ++i) {
    texts.push_back(row_text(graph, graph.operators[i]));
    for_each_argument(graph.operators[i], [&](ValueId id) {
      if (graph.values[id].kind != ValueKind::kParameter) return;
      first_reader.emplace(id, static_cast<int>(i));
    });
  }
  std::vector<std::pair<int, ValueId>> parameters;
  for (const auto& [id, reader] : first_reader) parameters.emplace_back(-reader, id);
  std::sort(parameters.begin(), parameters.end());
  for (const auto& [reader, id] : parameters) {
    const Value& value = graph.values[id];
    of_parameter[value.name] = static_cast<int>(texts.size());
    texts.push_back(core::printable(
        c10::str("gradient of \"", value.name, "\": ", value.meta.to_string()), kLongestRow));
  }
}

HashLogWriter::HashLogWriter(const std::string& folder, int rank, int ranks)
    : path_(path_of(folder, rank)) {
  std::error_code ignored;  // the file cannot be opened then
  fs::create_directories(folder, ignored);
  out_.open(path_, std::ios::trunc);
  out_ << kTitle << rank << " of " << ranks << "\n";
  flush();
}

void HashLogWriter::flush() {
  SMP_CHECK(out_.flush().good(), "the hashes of this rank cannot be written to \"", path_,
            "\". Give \"record_hashes\" a folder that can be written, with room on its disk");
}

void HashLogWriter::add_graph(uint64_t fingerprint, const HashRows& rows) {
  known_.insert(fingerprint);
  out_ << "graph " << hex(fingerprint) << ": " << rows.texts.size() << " rows\n";
  for (const std::string& text : rows.texts) out_ << text << "\n";
}

void HashLogWriter::begin_step(const HashedStep& step) {
  out_ << "step " << step.call << " of graph " << hex(step.graph) << ": "
       << core::printable(step.function) << "\n";
}

void HashLogWriter::begin_microbatch(uint64_t microbatch) {
  end_row();
  out_ << "microbatch " << microbatch << "\n";
}

void HashLogWriter::add(int row, size_t number, uint64_t hash) {
  if (row != row_) {
    end_row();
    out_ << row;
    row_ = row;
  }
  for (; next_ < number; ++next_) out_ << " -";
  out_ << " " << hex(hash);
  ++next_;
}

void HashLogWriter::end_row() {
  if (row_ >= 0) out_ << "\n";
  row_ = -1;
  next_ = 0;
}

void HashLogWriter::end_step() {
  end_row();
  out_ << "end\n";
  flush();
}

/// A file of a log, line by line.
class HashLogReader::File {
 public:
  explicit File(std::string path) : path_(std::move(path)), buffer_(kLongestLine) {
    std::error_code ignored;
    if (fs::is_regular_file(path_, ignored)) in_.open(path_);  // a pipe would wait
    SMP_CHECK(in_.is_open(), "\"", core::printable(path_),
              "\" cannot be read. Give the folder that \"record_hashes\" named, with the files of "
              "all ranks");
  }

  bool next() {
    ++line_;
    in_.getline(buffer_.data(), static_cast<std::streamsize>(buffer_.size()));
    const auto count = static_cast<size_t>(in_.gcount());
    if (in_.fail() && count == 0) return false;
    text_.assign(buffer_.data(), in_.good() ? count - 1 : count);  // without the line's end
    if (in_.fail()) reject(c10::str("a line of less than ", buffer_.size(), " bytes"));
    return true;
  }
  const std::string& text() const { return text_; }
  Place place(int rank) { return {rank, in_.tellg(), line_}; }
  void go_to(const Place& place) {
    in_.seekg(place.offset);
    line_ = place.line;
  }
  /// The rest of the line if it begins so.
  std::optional<std::string> after(const std::string& beginning) const {
    if (text_.compare(0, beginning.size(), beginning) != 0) return std::nullopt;
    return text_.substr(beginning.size());
  }
  /// The number that is the whole text.
  template <class T>
  T number(const std::string& text, int base = 10) const {
    T number = 0;
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, number, base);
    if (error == std::errc() && stop == end) return number;
    reject("a number in place of \"" + core::printable(text, 100) + "\"");
  }
  [[noreturn]] void reject(const std::string& expected) const {
    core::fail<Error>("\"", core::printable(path_), "\", line ", line_, ": expected ", expected,
                      ", got \"", core::printable(text_, 100),
                      "\". The file is no log of hashes, or is damaged");
  }

 private:
  static constexpr size_t kLongestLine = size_t{256} << 10;

  std::string path_;
  std::ifstream in_;
  std::vector<char> buffer_;
  std::string text_;
  int64_t line_ = 0;
};

HashLogReader::HashLogReader(std::string folder) : folder_(std::move(folder)) {
  int rank = 0;
  do {
    scan(rank);
  } while (++rank < ranks_);
}

/// Finds the steps in the file of a rank.
void HashLogReader::scan(int rank) {
  File file(path_of(folder_, rank));
  file.next();
  const auto title = file.after(c10::str(kTitle, rank, " of "));
  if (!title) file.reject(c10::str("\"", kTitle, rank, " of ...\""));
  const int ranks = file.number<int>(*title);
  SMP_CHECK(rank == 0 || ranks == ranks_, "\"", folder_,
            "\" has files of several runs: rank_0 is one of ", ranks_, " ranks, rank_", rank,
            " one of ", ranks, ". Give \"record_hashes\" an empty folder for each run");
  ranks_ = ranks;
  std::optional<std::pair<HashedStep, Place>> begun;
  while (file.next()) {
    if (const auto graph = file.after("graph ")) {
      const auto parts = parts_of(*graph, ' ');
      if (parts.size() != 3 || parts[0].size() != 17) file.reject("\"graph FINGERPRINT: N rows\"");
      auto& rows = rows_[file.number<uint64_t>(parts[0].substr(0, 16), 16)];
      rows.clear();
      for (auto left = file.number<uint32_t>(parts[1]); left > 0; --left) {
        if (!file.next()) file.reject("a row of the graph");
        rows.push_back(core::printable(file.text(), kLongestRow));
      }
    } else if (const auto step = file.after("step ")) {
      const auto parts = parts_of(*step, ' ');
      if (parts.size() < 4 || parts[3].size() != 17) {
        file.reject("\"step CALL of graph FINGERPRINT: NAME\"");
      }
      HashedStep found;
      found.call = file.number<uint64_t>(parts[0]);
      found.graph = file.number<uint64_t>(parts[3].substr(0, 16), 16);
      found.function = core::printable(step->substr(std::min(step->size(), step->find(": ") + 2)));
      if (rows_.count(found.graph) == 0) file.reject("a step of a graph that came before");
      begun.emplace(found, file.place(rank));
    } else if (file.text() == "end" && begun) {
      // One that a rank has begun only is where the run was ended.
      auto& places = places_[begun->first];
      if (places.empty()) steps_.push_back(begun->first);
      places.push_back(begun->second);
      begun.reset();
    } else if (!begun) {
      file.reject("a graph or a step");
    }
  }
}

HashLogReader::Step HashLogReader::read(const HashedStep& step) {
  Step result;
  const auto rows = static_cast<int>(rows_.at(step.graph).size());
  for (const Place& place : places_.at(step)) {
    File file(path_of(folder_, place.rank));
    file.go_to(place);
    std::optional<uint64_t> microbatch;
    while (file.next() && file.text() != "end") {
      if (const auto number = file.after("microbatch ")) {
        microbatch = file.number<uint64_t>(*number);
        continue;
      }
      const auto parts = parts_of(file.text(), ' ');
      if (!microbatch || parts.size() < 2) file.reject("a microbatch or a row");
      const int row = file.number<int>(parts[0]);
      if (row < 0 || row >= rows) file.reject(c10::str("a row from 0 to ", rows - 1));
      RowHashes hashes;
      for (size_t i = 1; i < parts.size(); ++i) {
        hashes.push_back(parts[i] == "-" ? 0 : file.number<uint64_t>(parts[i], 16));
      }
      result[{*microbatch, row}].emplace(place.rank, std::move(hashes));
    }
  }
  return result;
}

}  // namespace smp::graph
