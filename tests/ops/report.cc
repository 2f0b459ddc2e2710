// SPDX-License-Identifier: Apache-2.0
#include "tests/ops/report.h"

#include <algorithm>
#include <filesystem>
#include <iostream>
#include <map>
#include <regex>
#include <set>
#include <sstream>

namespace smp::op_samples {
namespace {

constexpr const char* kIntroduction =
    R"(# Operators: libtorch's own samples

libtorch tests its operators and modules on samples of arguments, the OpInfo and ModuleInfo databases of `torch/testing/_internal`. [tests/ops](../tests/ops) runs the smallest sample of each through smp: a step function calls the operators on parameters, and a weighted sum of their results is the loss. It runs in plain libtorch, on one rank, and on two with the operators on the second; two microbatches, two steps. Outputs and gradients must be equal to the bit. Operators that work in place have samples of their own, and random ones draw from the streams of [capture.md](capture.md#random-numbers). [development.md](development.md#operators) says how to run all samples.

Made by `bazel run //tests/ops:table > docs/operators.md`.

)";

using Names = std::set<std::string>;

std::vector<std::string> files_of(const std::string& folder) {
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const bool samples = entry.path().filename().string().rfind("samples", 0) == 0;
    if (samples && entry.path().extension() == ".json") files.push_back(entry.path().string());
  }
  std::sort(files.begin(), files.end());
  return files;
}

Names subjects_of(const std::vector<Result>& results) {
  Names names;
  for (const Result& result : results) names.insert(result.subject);
  return names;
}

std::string first_sentence(const std::string& text) {
  return text.substr(0, std::min(text.find(". "), text.find('\n')));
}

std::string joined(const Names& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "`" : ", `") + name + "`";
  return text;
}

/// Rows of samples that share a reason, the most frequent first.
class Reasons {
 public:
  void add(const std::string& reason, const std::string& subject, int samples) {
    Row& row = rows_[reason];
    row.subjects.insert(subject);
    row.samples += samples;
  }

  void print(std::ostream& out) const {
    if (rows_.empty()) out << "None.\n";
    if (rows_.empty()) return;
    std::vector<std::pair<std::string, Row>> sorted(rows_.begin(), rows_.end());
    std::stable_sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) {
      return a.second.samples > b.second.samples;
    });
    out << "| Reason | Samples | Of |\n|---|--:|---|\n";
    for (const auto& [reason, row] : sorted) {
      out << "| " << reason << " | " << row.samples << " | " << joined(row.subjects) << " |\n";
    }
  }

 private:
  struct Row {
    Names subjects;
    int samples = 0;
  };
  std::map<std::string, Row> rows_;
};

void print_reasons(const std::vector<Result>& results, std::ostream& out) {
  Reasons reasons;
  for (const Result& result : results) {
    reasons.add(reason_of(result.verdict.text), result.subject, 1);
  }
  reasons.print(out);
}

void print_count(const Report& report, Kind kind, const char* what, std::ostream& out) {
  const std::vector<Result> results = report.of(kind);
  out << "| " << what << " | " << results.size() << " | " << subjects_of(results).size() << " |\n";
}

}  // namespace

std::vector<Result> Report::of(Kind kind) const {
  std::vector<Result> found;
  for (const Result& result : results) {
    if (result.verdict.kind == kind) found.push_back(result);
  }
  return found;
}

Report run_folder(const std::string& folder) {
  Report report;
  for (const std::string& file : files_of(folder)) {
    for (const Sample& sample : read_samples(file)) {
      std::cerr << sample.name << std::endl;
      report.results.push_back({sample.name, sample.subject(), check(sample)});
    }
  }
  report.skipped = read_skipped(folder + "/skipped.json");
  return report;
}

std::string reason_of(const std::string& text) {
  static const std::regex step("^step function \"[^\"]*\"(, in or after module \"[^\"]*\")?: ");
  static const std::regex name("(operator )?(aten|smp)::[A-Za-z0-9_.]+");
  std::string reason = first_sentence(std::regex_replace(text, step, ""));
  reason = std::regex_replace(reason, name, "the operator");
  std::replace(reason.begin(), reason.end(), '|', '/');
  return reason;
}

std::string page(const Report& report) {
  std::ostringstream out;
  out << kIntroduction << "| Ended | Samples | Operators and modules |\n|---|--:|--:|\n";
  print_count(report, Kind::kEqual, "equal", out);
  print_count(report, Kind::kRefused, "refused, with a remedy", out);
  print_count(report, Kind::kWrong, "wrong", out);
  print_count(report, Kind::kPlainRefuses, "plain libtorch refuses", out);
  print_count(report, Kind::kUnlikePython, "plain libtorch differs from Python", out);
  out << "\n## Refused\n";
  print_reasons(report.of(Kind::kRefused), out);
  out << "\n## Wrong\n";
  print_reasons(report.of(Kind::kWrong), out);
  out << "\n## Not compared\nPlain libtorch refuses:\n\n";
  print_reasons(report.of(Kind::kPlainRefuses), out);
  out << "\nThe script could not write, or did not; of most operators there are others:\n\n";
  Reasons skipped;
  for (const Skipped& entry : report.skipped) {
    skipped.add(first_sentence(entry.reason), entry.name.substr(0, entry.name.rfind(' ')),
                entry.samples);
  }
  skipped.print(out);
  return out.str();
}

}  // namespace smp::op_samples
